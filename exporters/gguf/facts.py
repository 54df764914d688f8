"""The metadata of a GGUF file's model, by llama.cpp's keys without the architecture's name."""

import math
import warnings
from typing import Any

import numpy as np

from exporters.config_sizes import is_between
from exporters.gguf.header import Header
from mionnx.errors import ExportError

# Keys that change what a model computes, with the values that change nothing.
COMPUTING: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (),
    "embedding_scale": (1.0,),
    "expert_count": (0,),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "use_parallel_residual": (False,),
}
LARGEST = 2**31  # of a size
RANGES = {  # key -> above the first, up to the second: what some model has
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), (0.0, 1.0)),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), (0.0, 1e15)),
}
SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding")  # of a text's begin and end, a turn's, a message's end
ASSUMED = {"llama": {"unknown": 0, "bos": 1, "eos": 2}}  # by the kind of vocabulary


class ModelFacts:
    """The metadata of one architecture; remembers what was read."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = str(header.metadata["general.architecture"])
        self._read: set[str] = set()

    def maybe(self, key: str, default: Any = None) -> Any:
        """A number, or the default; a list of one value a layer is that value.

        Raises:
            ExportError: the value differs between layers, or is no number.
        """
        self._read.add(key)
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray):
            different = sorted(set(value.tolist()))
            if len(different) != 1:
                raise ExportError(f"{self.header.file}: {key} differs between layers, {different}: not supported")
            return different[0]
        if value is None:
            return None
        above, most = RANGES.get(key, (-math.inf, math.inf))
        if not is_between(value, above, most) or not math.isfinite(value):
            requirement = "a number" if key not in RANGES else f"a number above {above:g}, up to {most:g}"
            raise self._wrong(key, value, requirement)
        return value

    def number(self, key: str) -> float:
        """A number above zero that the file has to state.

        Raises:
            ExportError: it is missing, or another one.
        """
        value = self.maybe(key)
        if value is None or not value > 0:
            raise self._wrong(key, value, "a positive number")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number above zero; the file has to state it where there is no default.

        Raises:
            ExportError: it is missing, or another one.
        """
        value = self.maybe(key, default)
        if value is None or not isinstance(value, int) or not 0 < value <= LARGEST:
            raise self._wrong(key, value, "a size" if value is None or value <= 0 else f"a size up to {LARGEST:,}")
        return value

    def text(self, key: str, default: str) -> str:
        """A text; the default where the file states none.

        Raises:
            ExportError: it is no text.
        """
        self._read.add(key)
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def _wrong(self, key: str, value: Any, requirement: str) -> ExportError:
        stated = "it states none" if value is None else f"it states {value!r}"
        return ExportError(f"{self.header.file} has to state {self.architecture}.{key}, {requirement}; {stated}")

    def check_all_read(self) -> None:
        """Refuse a file with a key that changes the computation and was not read.

        Raises:
            ExportError: names the key.
        """
        for key, neutral in COMPUTING.items():
            value = self.header.metadata.get(f"{self.architecture}.{key}")
            stated = value.tolist() if isinstance(value, np.ndarray) else [value]
            if value is not None and key not in self._read and not all(one in neutral for one in stated):
                raise ExportError(
                    f"{self.header.file} states {self.architecture}.{key} = {value!r}, which is not supported in the "
                    f"architecture {self.architecture}"
                )


def special_ids(header: Header) -> dict[str, int]:
    """The ids of special tokens, by llama.cpp's names for them.

    An id outside the vocabulary is left out with a warning: converters write -1 for a token that is not there.
    """
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    size = len(tokens) if isinstance(tokens, list) else 0
    assumed = ASSUMED.get(str(header.metadata.get("tokenizer.ggml.model")), {})
    ids = {}
    for name in SPECIAL:
        key = f"tokenizer.ggml.{name}_token_id"
        number = header.metadata.get(key, assumed.get(name))
        if isinstance(number, int) and 0 <= number < size:
            ids[name] = int(number)
        elif key in header.metadata:
            warnings.warn(f"{header.file}: {key} is {number!r}, and the vocabulary has {size} tokens", stacklevel=2)
    return ids
