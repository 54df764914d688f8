"""The weights of a transformers model: every parameter fed, every checkpoint tensor read, or an error.

Checkpoint tensors are mapped to parameters by the rules of transformers itself.
"""

import re
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from exporters.checkpoint_tensors import StoredTensor, same_bytes
from exporters.packed.linear import Linear, Stack
from exporters.transformers.rearranged import ChannelProduct, rearranged_name
from exporters.weight_files import place, some
from mionnx.errors import ExportError
from mionnx.graph.blocks import GivenBlocks
from mionnx.machine.progress import Progress

# in a base model, beside its stream
BESIDE_STREAM = ("pooler.", "contact_head.", "entity_embeddings.", "lang_embeddings.")
OF_ENTITIES = (".w2e_query.", ".e2w_query.", ".e2e_query.")  # in attention, of queries to and from LUKE's entities
STEPS = [(MergeModulelist, 0), (Concatenate, 1)]  # operations of a conversion and their axes, the second if need be


@dataclass
class Mapped:
    """Checkpoint tensors by the parameters they become."""

    # Parameter name -> the tensor that is the parameter as it is.
    direct: dict[str, StoredTensor] = field(default_factory=dict)
    # conversions, each with the checkpoint tensors it reads.
    converted: dict[str, "Conversion"] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)  # checkpoint tensors that belong to no parameter of the model


def beside_stream(name: str, model: PreTrainedModel) -> bool:
    """Whether a weight of a base model is read by nothing that the stream goes through: a pooler's, for one."""
    return _beside(name.removeprefix(f"{model.base_model_prefix}."))


def _beside(inner: str) -> bool:
    return inner.startswith(BESIDE_STREAM) or any(part in inner for part in OF_ENTITIES)


def leave_heads(mapped: Mapped, parameters: list[ir.Value], model: PreTrainedModel) -> None:
    """Leave out tensors of heads that a model has not, and a pooler or buffers that nothing reads, in place."""
    base = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    tied, read = _aliases(model), {value.name for value in parameters}
    buffers = {name for name, _ in model.named_buffers()}

    def in_base(name: str) -> bool:
        inner = name.removeprefix(f"{base}.") if base else name
        outside = base != "" and inner == name
        return not outside and not _beside(inner) and name not in buffers

    unread = [name for name in mapped.direct if not in_base(name) and not tied.get(name, {name}) & read]
    for name in unread:
        del mapped.direct[name]
    prefix = f"{model.base_model_prefix}."
    own = {name.partition(".")[0] for name, _ in model.get_submodule(base).named_parameters()}
    mapped.unknown = [
        name
        for name in mapped.unknown
        if (inner := name.removeprefix(prefix)).partition(".")[0] in own and not _beside(inner)
    ]


@dataclass
class Conversion:
    """Checkpoint tensors that become parameters of another shape (experts stacked, say)."""

    target: str  # the first of these parameters
    converter: WeightConverter
    sources: list[StoredTensor] = field(default_factory=list)
    # For each tensor the one of the rule's source patterns that its name has.
    patterns: list[str] = field(default_factory=list)

    def run(self, model: PreTrainedModel) -> dict[str, Tensor]:
        converted = self.converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def map_tensors(tensors: list[StoredTensor], model: PreTrainedModel) -> Mapped:
    """Find each checkpoint tensor's parameter by transformers' own loading rules."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = model.state_dict()
    mapped, packed = Mapped(), {tensor.name.removesuffix(".weight") for tensor in tensors if tensor.packed is not None}
    for tensor in sorted(tensors, key=lambda tensor: _natural(tensor.name)):
        own = rearranged_name(tensor.name, model)
        target, pattern = rename_source_key(own, renamings, converters, model.base_model_prefix, names)
        if target not in names and tensor.name in names:
            target, pattern = tensor.name, None
        if target not in names:
            if not (tensor.name.removesuffix(".bias") in packed and not tensor.load().any()):
                mapped.unknown.append(tensor.name)  # packed layers may have a bias of zeros where the model has none
        elif pattern is None:
            mapped.direct[target] = tensor
        else:
            conversion = mapped.converted.setdefault(target, Conversion(target, deepcopy(by_pattern[pattern])))
            conversion.sources.append(tensor)
            conversion.patterns.append(pattern)
            load: Any = tensor.load  # transformers calls what it does not await
            conversion.converter.add_tensor(target, tensor.name, pattern, load)
    # leftovers of older checkpoints: buffers that were once saved and are now computed
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    ignored = [re.compile(pattern) for pattern in patterns]
    mapped.unknown = [name for name in mapped.unknown if not any(pattern.search(name) for pattern in ignored)]
    return mapped


def _natural(name: str) -> list[int | str]:
    """Sort key that puts expert 10 after expert 9: conversions stack tensors in this order."""
    return [f"{int(part):09d}" if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _aliases(model: PreTrainedModel) -> dict[str, set[str]]:
    """Parameter name -> all names of the same (tied) parameter, its own included."""
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {name: group for group in groups.values() for name in group}


def bind_weights(
    parameters: list[ir.Value],  # values without data, of the names, shapes and dtypes that the graph reads
    mapped: Mapped,
    model: PreTrainedModel,  # the model without weights that the graph was traced from
    folder: Path,
    progress: Progress,
    leave: bool = False,  # leave out the numbers of weights that are blocks in the checkpoint
) -> dict[str, GivenBlocks]:
    """Give every parameter of a graph its data: files in `folder`, references in the values."""
    # Returns the blocks of the weights that were left out, by name; of a stack of experts, by the names of its
    # matrices.
    _keep_packed(mapped)
    stored = _stored(parameters, mapped, model)
    left = {name: one.packed.named_blocks(name) for name, one in stored.items() if one.packed is not None and leave}
    one_by_one = (pair for conversion in mapped.converted.values() for pair in conversion.run(model).items())
    place(parameters, stored, one_by_one, folder, progress, left)
    return {name: blocks for named in left.values() for name, blocks in named.items()}


def _stored(parameters: list[ir.Value], mapped: Mapped, model: PreTrainedModel) -> dict[str, StoredTensor]:
    """Parameters of one checkpoint tensor each; converted ones are left out."""
    tied, converted = _aliases(model), _made_by_conversion(mapped, model)
    names = {value.name: tied.get(value.name, {value.name}) for value in parameters}
    direct = {name: _only(mapped, group) for name, group in names.items() if group & mapped.direct.keys()}
    stored = {name: _turned(name, one, model) for name, one in direct.items()}
    unfed = [name for name, group in names.items() if name not in stored and not group & converted]
    if unfed:
        raise ExportError(f"{len(unfed)} weights that the graph reads are not in the checkpoint: {some(unfed)}")
    unread = _unread(mapped, set().union(*names.values()))
    if unread:
        raise ExportError(f"{len(unread)} checkpoint tensors are read by no part of the graph: {some(unread)}")
    return stored


def _turned(name: str, tensor: StoredTensor, model: PreTrainedModel) -> StoredTensor:
    """A weight as its module keeps it: Linear keeps [out, in], Conv1D packed ones as [in, out]."""
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, ChannelProduct) and len(tensor.shape) == 3:  # of a convolution over one column
        return replace(tensor, shape=tensor.shape[:2])
    if tensor.packed is None or not isinstance(module, Conv1D):
        return tensor
    return replace(tensor, shape=tensor.shape[::-1], turned=True)


def _only(mapped: Mapped, names: set[str]) -> StoredTensor:
    """The one tensor of a tied parameter, however often the checkpoint stores it."""
    first, *others = [mapped.direct[name] for name in sorted(names) if name in mapped.direct]
    if not all(same_bytes(first, other) for other in others):
        raise ExportError(f"the checkpoint holds different tensors for the tied parameters {sorted(names)}")
    return first


def _unread(mapped: Mapped, read: set[str]) -> list[str]:
    direct = [tensor.name for name, tensor in mapped.direct.items() if name not in read]
    sources = [
        source.name
        for name, conversion in mapped.converted.items()
        if name not in read
        for source in conversion.sources
    ]
    return direct + sources + mapped.unknown


def _made_by_conversion(mapped: Mapped, model: PreTrainedModel) -> set[str]:
    """The parameters that conversions make; each conversion is named after its first."""
    names = set(mapped.converted)
    for target, conversion in mapped.converted.items():
        first, *others = conversion.converter.target_patterns
        names |= {target.replace(first, other) for other in others}
    return names & set(model.state_dict())


def _keep_packed(mapped: Mapped) -> None:
    """Let experts packed one by one be stacks of the same integers, in place."""
    # Their conversions do no more than stack experts, and put gate and up one below the other.
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
