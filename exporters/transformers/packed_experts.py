"""Experts that a checkpoint holds as packed layers, one by one, and transformers as stacks of numbers.

Where a conversion does no more than stack the experts, and put gate and up one below the other, its result is a `Stack`
of the same integers.
"""

from dataclasses import replace

from transformers.core_model_loading import Concatenate, MergeModulelist

from exporters.packed.linear import Linear
from exporters.packed.stack import Stack
from exporters.transformers.checkpoint import Conversion, Mapped

STEPS = [(MergeModulelist, 0), (Concatenate, 1)]  # operations of a conversion and their axes, the second if need be


def keep_packed(mapped: Mapped) -> None:
    """Let the tensors that such conversions make be stacks of packed experts, in place."""
    for target, conversion in [*mapped.converted.items()]:
        stack = _stack(conversion)
        if stack is not None:
            first = conversion.sources[0]
            mapped.direct[target] = replace(first, name=target, shape=stack.shape, packed=stack)
            del mapped.converted[target]


def _stack(conversion: Conversion) -> Stack | None:
    """The stack that a conversion makes; None if it does more, or an expert is not packed."""
    rule, layers = conversion.converter, [source.packed for source in conversion.sources]
    steps = [(type(step), getattr(step, "dim", None)) for step in rule.operations]
    if steps != STEPS[: len(steps)] or len(steps) < len(rule.source_patterns) or len(rule.target_patterns) > 1:
        return None
    by_pattern: dict[str, list[Linear]] = {pattern: [] for pattern in rule.source_patterns}
    for pattern, layer in zip(conversion.patterns, layers, strict=True):
        if not isinstance(layer, Linear):
            return None
        by_pattern[pattern].append(layer)
    groups = [*by_pattern.values()]
    same = all(len({(one.inputs, one.outputs) for one in group}) == 1 for group in groups)
    if not same or len({(len(group), group[0].inputs) for group in groups}) > 1:
        return None
    return Stack(tuple(zip(*groups, strict=True)), turned=False)
