"""`HookedTransformerConfig` of TransformerLens, from the files in which it is kept; what mionnx has no place for."""

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exporters.config_sizes import check_sizes
from mionnx.errors import ExportError, ModelError, nearest
from mionnx.graph.folder_file import read_json

HOOKED_TRANSFORMER = "hooked_transformer"
CONFIG_JSON, PICKLED = "config.json", "_cfg.pkl"  # the second behind the stem of the weights' file, as InterpBench's
NORM_KINDS = {"LN": "layer", "LNPre": "layer", "RMS": "rms", "RMSPre": "rms"}  # with "Pre" the weights are 1 and 0
SOLU, SOLU_NORMED = "solu", "solu_ln"
ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "relu", "silu", SOLU, SOLU_NORMED)
REQUIRED_SIZES = ("n_layers", "d_model", "d_head", "n_ctx", "d_vocab")
LARGEST_CONFIG = 2**20  # bytes of a pickled config
NUMPY_NAMES = ("f4", "f8", "i4", "i8")  # numpy's, as which square roots are kept
DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, EOFError, pickle.UnpicklingError)
TORCH_NAMES = ("float64", "float32", "float16", "bfloat16")
# name -> the only value that is taken, TransformerLens' default.
TAKEN: dict[str, Any] = {
    "attention_dir": "causal",
    "attn_scores_soft_cap": -1.0,
    "clip_qkv": None,
    "gated_mlp": False,
    "num_experts": None,
    "output_logits_soft_cap": -1.0,
    "parallel_attn_mlp": False,
    "positional_embedding_type": "standard",
    "post_embedding_ln": False,
    "shortformer_pos": False,
    "use_local_attn": False,
    "use_logn_attn": False,
    "use_normalization_before_and_after": False,
    "use_qk_norm": False,
}


class _Bag:
    """An object of a pickled config: its attributes, and no code."""


class _Kind:
    """What stands for numpy's dtype; its state, the order of bytes among it, is what numpy writes for a number."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass


def _number(kind: _Kind, data: bytes) -> float:
    """What stands for the function by which numpy makes a number."""
    if not isinstance(kind, _Kind) or kind.name not in NUMPY_NAMES:
        raise pickle.UnpicklingError("it holds a number of no kind that a config has")
    return np.frombuffer(data, f"<{kind.name}")[0].item()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module.partition(".")[0] == "transformer_lens" and name.endswith("Config"):
            return _Bag
        if module == "torch" and name == "device":
            return lambda *arguments: ":".join(map(str, arguments))
        if module == "torch" and name in TORCH_NAMES:
            return name
        if (module, name) == ("numpy", "dtype"):
            return _Kind
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "scalar":
            return _number
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a config: nothing was run")


def config_beside(weights: Path) -> Path | None:
    """The config of a file of weights: pickled beside it, or `config.json` there or one folder above."""
    own = weights.with_name(f"{weights.stem}{PICKLED}")
    above = [weights.parent, weights.parent.parent] if weights.parent.name == "checkpoints" else [weights.parent]
    files = [own, *(folder / CONFIG_JSON for folder in above)]
    return next((file for file in files if file.is_file()), None)


def read_settings(weights: Path) -> dict[str, Any]:
    """The config of a file of weights, as a table with TransformerLens' own names.

    Raises:
        ExportError: there is none, or it is damaged, names something to run, or lacks a size.
    """
    file = config_beside(weights)
    if file is None:
        raise ExportError(
            f"{weights} holds weights of TransformerLens' HookedTransformer; its config is neither in "
            f"{weights.stem}{PICKLED} nor in {CONFIG_JSON} beside it: write model.cfg.to_dict() there as JSON"
        )
    table = _unpickled(file) if file.suffix == ".pkl" else _from_json(file)
    lacking = [name for name in REQUIRED_SIZES if type(table.get(name)) is not int or table[name] < 1]
    if lacking:
        raise ExportError(f"{file} is no config of a HookedTransformer: it lacks a number for {', '.join(lacking)}")
    return table


def _from_json(file: Path) -> dict[str, Any]:
    try:
        table = read_json(file)
    except ModelError as error:
        raise ExportError(str(error)) from error
    if not isinstance(table, dict):
        raise ExportError(f"{file} is damaged: it holds no table")
    return table


def _unpickled(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > LARGEST_CONFIG:
            raise ExportError(f"{file} is no config: it has {file.stat().st_size} bytes")
        with file.open("rb") as stream:
            value = _Reader(stream).load()
    except DAMAGED as error:
        raise ExportError(f"{file} is no config that is read: {error}") from error
    table = value if isinstance(value, dict) else vars(value) if isinstance(value, _Bag) else None
    if table is None:
        raise ExportError(f"{file} holds a {type(value).__name__}, and no config")
    return {str(key): one for key, one in table.items()}


def converted(table: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The config of `exporters.transformers.hooked_transformer` for one of TransformerLens.

    Raises:
        ExportError: the model has a part that is not exported, which is named.
    """
    _refuse(table, where)
    sizes = {name: table[name] for name in REQUIRED_SIZES}
    heads = table.get("n_heads", -1)
    kind = table.get("normalization_type", table.get("normalization", "LN"))
    own, logits = bool(table.get("use_attn_scale", True)), table.get("d_vocab_out", -1)
    scale = table.get("attn_scale", -1.0) if own else 1.0
    check_sizes({"vocab_size": None if logits == -1 else logits}, where)
    labels = [str(one) for one in range(logits)] if logits not in (-1, sizes["d_vocab"]) else []
    tags = {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}
    config = {
        "model_type": HOOKED_TRANSFORMER,
        "architectures": [f"HookedTransformer{'ForTokenClassification' if labels else 'ForCausalLM'}"],
        "n_layer": sizes["n_layers"],
        "n_embd": sizes["d_model"],
        "n_head": heads if heads > 0 else sizes["d_model"] // sizes["d_head"],
        "head_dim": sizes["d_head"],
        "n_positions": sizes["n_ctx"],
        "vocab_size": sizes["d_vocab"],
        "n_inner": table.get("d_mlp") or 4 * sizes["d_model"],
        "activation_function": table.get("act_fn") or "relu",
        "layer_norm_epsilon": float(table.get("eps", 1e-5)),
        "normalization": kind,
        "final_normalization": "RMS" if table.get("final_rms") and kind else kind,
        "attn_only": bool(table.get("attn_only", False)),
        "attn_scale": float(scale) if scale > 0 else None,
        "scale_attn_by_inverse_layer_idx": bool(table.get("scale_attn_by_inverse_layer_idx", False)),
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        **(tags if labels else {}),
    }
    check_sizes(config, where)
    return config


def _refuse(table: Mapping[str, Any], where: Path) -> None:
    for name, taken in TAKEN.items():
        value = table.get(name, taken)
        if value != taken and not (isinstance(taken, float) and (value is None or value <= 0)):
            raise ExportError(
                f"{where}: a HookedTransformer with {name}={value!r}: mionnx takes {taken!r}; of a model that "
                "transformers has, open that checkpoint"
            )
    heads, act = table.get("n_heads"), table.get("act_fn")
    kind = table.get("normalization_type", table.get("normalization", "LN"))
    refused = f"{where}: a HookedTransformer with "
    if table.get("n_key_value_heads") not in (None, heads):
        raise ExportError(f"{refused}n_key_value_heads={table['n_key_value_heads']}: mionnx takes {heads}, one a head")
    if kind not in (None, *NORM_KINDS):
        names = ", ".join(NORM_KINDS)
        raise ExportError(
            f"{refused}normalization_type={kind!r}, none of {names}, None{nearest(str(kind), NORM_KINDS)}"
        )
    if not table.get("attn_only") and act not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise ExportError(f"{refused}act_fn={act!r}, none of {names}{nearest(str(act), ACTIVATIONS)}")
