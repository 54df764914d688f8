"""Files of lenses that others publish, read without torch.

| file | what it holds |
|---|---|
| Jacobian lens, `.pt` | `J` {layer: [d, d]}, `n_prompts`, `d_model`, `metadata`, of TransformerLens and jlens |
| checkpoint of a fit, `.pt` | `jacobian_sum` {layer: [d, d]}, to be divided by `n_done` |
| J++ lens, `.pt` | `parameters` {`jacobians`: {layer: [d, d]}}, `config` |
| tuned lens, folder | `config.json`, `params.pt` {`N.weight` [d, d], `N.bias` [d]}: x + A x + b, x the input of N |
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mionnx.errors import SpecFileError
from mionnx.graph.folder_file import read_json
from mionnx.machine.torch_file import read_torch

TUNED_CONFIG, TUNED_PARAMS = "config.json", "params.pt"
PARAMETER = re.compile(r"([0-9]{1,4})\.(weight|bias)")
PLAIN = (bool, int, float, str, type(None))


def read_lens(path: Path) -> dict[str, Any]:
    """The arguments of a `JacobianLens` that a file or folder of others holds."""
    if path.is_dir():
        return _tuned(path)
    payload = _mapping(read_torch(path, f"{path} is no lens"), path)
    if "J" in payload:
        metadata = _plain(payload.get("metadata") or {})
        provenance = payload.get("provenance")  # of converted J++ lenses
        return {
            "matrices": _mapping(payload["J"], path),
            "n_prompts": int(payload.get("n_prompts", 0)),
            "metadata": metadata | ({"provenance": _plain(provenance)} if isinstance(provenance, Mapping) else {}),
        }
    if "jacobian_sum" in payload:
        count = int(payload.get("n_done", payload.get("n_prompts", 0)))
        if count < 1:
            raise SpecFileError(f"{path} is a checkpoint of a fit without a prompt: n_done is {count}")
        sums = _mapping(payload["jacobian_sum"], path)
        named = {key: payload[key] for key in ("model_name", "corpus", "target_layer", "skip_first") if key in payload}
        return {
            "matrices": {layer: np.asarray(one, np.float64) / count for layer, one in sums.items()},
            "n_prompts": count,
            "metadata": _plain({**_mapping(payload.get("metadata") or {}, path), **named}),
        }
    if "jacobians" in (parameters := _mapping(payload.get("parameters") or {}, path)):
        config = _plain(_mapping(payload.get("config") or {}, path))
        return {
            "matrices": _mapping(parameters["jacobians"], path),
            "n_prompts": int(config.get("num_prompts_trained_on", 0)),
            "metadata": {**config, "estimator": "jpp_lens"},
        }
    raise SpecFileError(
        f"{path} is no lens: a file of torch with {', '.join(map(repr, [*payload][:6])) or 'nothing'}, and neither "
        "'J', 'jacobian_sum' nor 'parameters'"
    )


def _tuned(folder: Path) -> dict[str, Any]:
    config = read_json(folder / TUNED_CONFIG)
    if not isinstance(config, dict) or "d_model" not in config:
        raise SpecFileError(f"{folder / TUNED_CONFIG} is no configuration of a tuned lens")
    payload = _mapping(read_torch(folder / TUNED_PARAMS, f"{folder / TUNED_PARAMS} is no tuned lens"), folder)
    matrices, biases = dict[int, Any](), dict[int, Any]()
    for name, array in payload.items():
        match = PARAMETER.fullmatch(str(name))
        if match is None:
            raise SpecFileError(f"{folder / TUNED_PARAMS} has {name!r:.60}; a tuned lens has N.weight and N.bias")
        (matrices if match[2] == "weight" else biases)[int(match[1])] = np.asarray(array, np.float32)
    # the file has what is added to the stream
    complete = {layer: one + np.eye(len(one), dtype=np.float32) for layer, one in matrices.items()}
    metadata = {**_plain(config), "estimator": "tuned_lens"}
    return {"matrices": complete, "biases": biases, "reads": "resid_pre", "metadata": metadata}


def _mapping(value: Any, path: Path) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise SpecFileError(f"{path} holds a {type(value).__name__} where a lens has a dictionary")
    return dict(value)


def _plain(value: Any) -> Any:
    """Facts without their arrays."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if not isinstance(one, np.ndarray)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value if not isinstance(one, np.ndarray)]
    return value if isinstance(value, PLAIN) else str(value)
