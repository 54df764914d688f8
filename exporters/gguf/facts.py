"""The metadata of a GGUF file's model, by llama.cpp's keys without the architecture's name, and its rotation."""

import math
import warnings
from typing import Any

import numpy as np

from exporters.config_sizes import is_between
from exporters.gguf.header import Header, read_tensor
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
    "ssm.dt_b_c_rms": (False,),
    "use_parallel_residual": (False,),
}
LARGEST = 2**31  # of a size
RANGES = {  # key -> above the first, up to the second: what some model has
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), (0.0, 1.0)),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), (0.0, 1e15)),
}
SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding")  # of a text's begin and end, a turn's, a message's end
EVERY, SHORT, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (EVERY, SHORT, LONG_FACTORS)  # tensors that are no weights: what each frequency is divided by
LARGEST_FACTOR = 1e6
PARTIAL_ROTATION = (
    "phi3",
    "qwen35",
    "qwen35moe",
    "qwen3next",
)  # architectures whose transformers model heeds a partial_rotary_factor
ASSUMED = {"llama": {"unknown": 0, "bos": 1, "eos": 2}}  # by the kind of vocabulary


class ModelFacts:
    """The metadata of one architecture; remembers what was read."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = str(header.metadata["general.architecture"])
        self._read: set[str] = set()

    def maybe(self, key: str, default: Any = None) -> Any:
        """A number, or the default; a list of one value a layer is that value."""
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
            raise self.wrong(key, value, requirement)
        return value

    def number(self, key: str) -> float:
        """A number above zero that the file has to state."""
        value = self.maybe(key)
        if value is None or not value > 0:
            raise self.wrong(key, value, "a positive number")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number above zero; the file has to state it where there is no default."""
        value = self.maybe(key, default)
        if value is None or not isinstance(value, int) or not 0 < value <= LARGEST:
            raise self.wrong(key, value, "a size" if value is None or value <= 0 else f"a size up to {LARGEST:,}")
        return value

    def count(self, key: str) -> int:
        """A whole number, 0 where the file states none."""
        value = self.maybe(key, 0)
        if not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise self.wrong(key, value, f"a number up to {LARGEST:,}")
        return value

    def flag(self, key: str) -> bool:
        """Whether the file says so; False where it says nothing."""
        self._read.add(key)
        value = self.header.metadata.get(f"{self.architecture}.{key}", False)
        if not isinstance(value, bool | np.bool_):
            raise self.wrong(key, value, "true or false")
        return bool(value)

    def of_some(self, key: str, chosen: list[bool], which: str, default: int | None = None) -> int:
        """A size of some layers: one number, or one a layer, the same in each that is chosen, 0 in others."""
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        if all(chosen) or not isinstance(value, np.ndarray):
            return self.size(key, default)
        counts = self.by_layer(key, len(chosen))
        most = max(counts)
        if not most or counts != [most * one for one in chosen]:
            raise self.wrong(key, counts, f"one number in each layer that {which}, 0 in others")
        return most

    def by_layer(self, key: str, layers: int) -> list[int]:
        """A whole number for each layer, which the file has to state."""
        self._read.add(key)
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        numbers = value.tolist() if isinstance(value, np.ndarray) else []
        further = self.header.metadata.get(f"{self.architecture}.nextn_predict_layers", 0)
        if len(numbers) == layers + further:  # layers that predict further tokens, which are left out
            numbers = numbers[:layers]
        if len(numbers) != layers or not all(isinstance(one, int) and 0 <= one <= LARGEST for one in numbers):
            raise self.wrong(key, value, f"{layers} numbers, one a layer")
        return numbers

    def wrong(self, key: str, value: Any, requirement: str) -> ExportError:
        stated = "it states none" if value is None else f"it states {value!r}"
        return ExportError(f"{self.header.file} has to state {self.architecture}.{key}, {requirement}; {stated}")

    def check_all_read(self) -> None:
        """Refuse a file with a key that changes the computation and was not read."""
        for key, neutral in COMPUTING.items():
            value = self.header.metadata.get(f"{self.architecture}.{key}")
            stated = value.tolist() if isinstance(value, np.ndarray) else [value]
            if value is not None and key not in self._read and not all(one in neutral for one in stated):
                raise ExportError(
                    f"{self.header.file} states {self.architecture}.{key} = {value!r}, which is not supported in the "
                    f"architecture {self.architecture}"
                )


def special_ids(header: Header) -> dict[str, int]:
    """The ids of special tokens, by llama.cpp's names for them."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    size = len(tokens) if isinstance(tokens, list) else 0
    assumed = ASSUMED.get(str(header.metadata.get("tokenizer.ggml.model")), {})
    ids = {}
    for name in SPECIAL:
        key = f"tokenizer.ggml.{name}_token_id"
        number = header.metadata.get(key, assumed.get(name))
        if isinstance(number, int) and 0 <= number < size:
            ids[name] = int(number)
        elif key in header.metadata:  # converters write -1 for a token that is not there
            warnings.warn(f"{header.file}: {key} is {number!r}, and the vocabulary has {size} tokens", stacklevel=2)
    return ids


def rope(facts: ModelFacts, head_dim: int, context: int) -> dict[str, Any]:
    """The rotation of queries and keys as transformers' `rope_parameters`."""
    tensors = facts.header.tensors
    factors = {name: read_tensor(facts.header, tensors[name]).tolist() for name in FACTORS if name in tensors}
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.maybe("rope.freq_base", 10000.0)}
    width = facts.size("rope.dimension_count", head_dim)
    if width > head_dim or (width != head_dim and facts.architecture not in PARTIAL_ROTATION):
        raise ExportError(
            f"{facts.header.file}: {facts.architecture}.rope.dimension_count is {width}, and heads are {head_dim} long:"
            f" transformers turns all of a head in this architecture"
        )
    if width != head_dim:
        parameters["partial_rotary_factor"] = width / head_dim
    wrong = [name for name, values in factors.items() if len(values) != width // 2]
    if wrong:
        raise ExportError(
            f"{facts.header.file}: {wrong[0]} is {len(factors[wrong[0]])} long, half of {width} is needed"
        )
    scaled = _scaled(facts, context)
    if not factors:
        return parameters | scaled
    if scaled:
        raise ExportError(
            f"{facts.header.file} scales its rotation by {scaled['rope_type']} and by tensors: not supported"
        )
    return parameters | _divided(facts, context, factors)


def _scaled(facts: ModelFacts, context: int) -> dict[str, Any]:
    """Scaling by a rule; llama.cpp takes a factor without a name for "linear"."""
    kind = facts.header.metadata.get(f"{facts.architecture}.rope.scaling.type", "linear")
    if not isinstance(kind, str):
        raise facts.wrong("rope.scaling.type", kind, "a text")
    # scale_linear is the older key
    factor = facts.maybe("rope.scaling.factor") or facts.maybe("rope.scale_linear") or 1.0
    if not 0 < factor <= LARGEST_FACTOR:
        raise ExportError(f"{facts.header.file} scales its rotation by a factor of {factor:g}, which no model has")
    if kind in ("none", "longrope") or (kind == "linear" and factor == 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ExportError(f"{facts.header.file} scales its rotation by {kind!r}; linear, yarn and longrope are known")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": facts.size("rope.scaling.original_context_length", context),
        # YaRN's mscale, 0.1 ln(s) + 1 (Peng et al. 2023, arXiv:2309.00071), times what the file states
        "attention_factor": facts.maybe("rope.scaling.attn_factor", 1.0) * (1.0 + 0.1 * math.log(factor)),
        "beta_fast": facts.maybe("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.maybe("rope.scaling.yarn_beta_slow", 1.0),
    }


def _divided(facts: ModelFacts, context: int, factors: dict[str, list[float]]) -> dict[str, Any]:
    """Frequencies divided one by one: transformers' "longrope", Llama 3's scaling too."""
    one = factors.get(EVERY)
    if one is None and not {SHORT, LONG_FACTORS} <= factors.keys():
        raise ExportError(f"{facts.header.file} has one of {SHORT} and {LONG_FACTORS}: both are needed")
    # one list, as Llama 3's, holds for every length: it stands in both places
    original = context if one else facts.size("rope.scaling.original_context_length")
    return {
        "rope_type": "longrope",
        "short_factor": one or factors[SHORT],
        "long_factor": one or factors[LONG_FACTORS],
        "factor": context / original,
        "original_max_position_embeddings": original,
        "attention_factor": facts.maybe("rope.scaling.attn_factor", 1.0),
    }
