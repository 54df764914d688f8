"""The rotation of a GGUF file's queries and keys as transformers' `rope_parameters`."""

import math
from typing import Any

from exporters.gguf.dequantise import read_tensor
from exporters.gguf.facts import ModelFacts
from exporters.gguf.header import Header
from mionnx.errors import ExportError

EVERY, SHORT, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
LARGEST_FACTOR = 1e6
PARTIAL_ROTATION = ("phi3",)  # architectures whose transformers model heeds a partial_rotary_factor
FACTORS = (EVERY, SHORT, LONG_FACTORS)  # tensors that are no weights: what each frequency is divided by


def frequencies(header: Header) -> dict[str, list[float]]:
    """The divisors of the frequencies, by the names of their tensors."""
    return {name: read_tensor(header, header.tensors[name]).tolist() for name in FACTORS if name in header.tensors}


def rope(facts: ModelFacts, head_dim: int, context: int, factors: dict[str, list[float]]) -> dict[str, Any]:
    """The rotation of a file.

    Args:
        head_dim: the length of a query.
        context: the number of positions that the model is made for.

    Raises:
        ExportError: the file scales its rotation in an unknown way.
    """
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
    kind = facts.text("rope.scaling.type", "linear")
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
        "attention_factor": facts.maybe("rope.scaling.attn_factor", 1.0) * (1.0 + 0.1 * math.log(factor)),
        "beta_fast": facts.maybe("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.maybe("rope.scaling.yarn_beta_slow", 1.0),
    }


def _divided(facts: ModelFacts, context: int, factors: dict[str, list[float]]) -> dict[str, Any]:
    """Frequencies divided one by one: transformers' "longrope", Llama 3's scaling too."""
    one = factors.get(EVERY)
    if one is None and not {SHORT, LONG_FACTORS} <= factors.keys():
        raise ExportError(f"{facts.header.file} has one of {SHORT} and {LONG_FACTORS}: both are needed")
    original = context if one else facts.size("rope.scaling.original_context_length")
    return {
        "rope_type": "longrope",
        "short_factor": one or factors[SHORT],
        "long_factor": one or factors[LONG_FACTORS],
        "factor": context / original,
        "original_max_position_embeddings": original,
        "attention_factor": facts.maybe("rope.scaling.attn_factor", 1.0),
    }
