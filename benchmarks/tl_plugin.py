"""No network, and a bridge on the engine: a plugin of pytest in `tl_tests.py`, imported by `tl_cells.py`.

Names of models that are opened mean checkpoints of its own, by the variable MIONNX_TL_MODELS, JSON. With
MIONNX_TL_ENGINE=onnx, `TransformerBridge.boot_transformers` gives `mionnx.transformer_lens.bridge`; passes of
its blocks in torch are counted, and written to MIONNX_TL_COUNTS.
"""

import json
import os
from pathlib import Path
from typing import Any

import transformers
from transformer_lens.model_bridge import TransformerBridge

MODELS: dict[str, str] = json.loads(os.environ["MIONNX_TL_MODELS"])
COUNTS = {"bridges": 0, "passes": 0, "torch": 0}
# Arguments of `boot_transformers` that make another model than that of the name.
OTHER = (
    "hf_model",
    "model_class",
    "hf_config_overrides",
    "device_map",
    "n_devices",
    "checkpoint_index",
    "checkpoint_value",
)


def _by_name(cls: Any) -> None:
    original = cls.from_pretrained.__func__

    def from_pretrained(kind: Any, name: Any, *args: Any, **options: Any) -> Any:
        return original(kind, MODELS.get(str(name), name), *args, **options)

    cls.from_pretrained = classmethod(from_pretrained)


for _name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoModel", "GPT2LMHeadModel", "GPT2Tokenizer"):
    _by_name(getattr(transformers, _name))


def _small() -> None:
    original = TransformerBridge.boot_transformers

    def boot(name: str, *args: Any, **options: Any) -> Any:
        return original(MODELS.get(str(name), name), *args, **options)

    TransformerBridge.boot_transformers = staticmethod(boot)


def _on_the_engine() -> None:
    from mionnx import MIModel
    from mionnx.transformer_lens import OnnxBridge, bridge

    original = TransformerBridge.boot_transformers
    opened: dict[str, MIModel] = {}

    def in_torch(*_: Any) -> None:
        COUNTS["torch"] += 1

    def boot(name: str, *args: Any, **options: Any) -> Any:
        if str(name) not in MODELS or any(options.get(other) is not None for other in OTHER):
            return original(name, *args, **options)
        folder = MODELS[str(name)]
        if folder not in opened:
            opened[folder] = MIModel.from_pretrained(folder, threads=1)
        COUNTS["bridges"] += 1
        made = bridge(opened[folder])
        for block in made.blocks:
            block.register_forward_pre_hook(in_torch)
        if (tokenizer := options.get("tokenizer")) is not None:
            made.tokenizer = tokenizer
        return made

    TransformerBridge.boot_transformers = staticmethod(boot)
    run = OnnxBridge.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        COUNTS["passes"] += 1
        return run(self, *args, **options)

    OnnxBridge.forward = forward


_small()
if os.environ.get("MIONNX_TL_ENGINE") == "onnx":
    _on_the_engine()


def pytest_unconfigure(config: Any) -> None:
    """Write what was counted."""
    Path(os.environ["MIONNX_TL_COUNTS"]).write_text(json.dumps(COUNTS))
