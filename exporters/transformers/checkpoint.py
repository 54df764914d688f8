"""Map checkpoint tensors to model parameters by the rules of transformers itself."""

import re
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from exporters.checkpoint_tensors import StoredTensor


@dataclass
class Mapped:
    """Checkpoint tensors by the parameters they become.

    Attributes:
        direct: parameter name -> the tensor that is the parameter as it is.
        converted: conversions, each with the checkpoint tensors it reads.
        unknown: checkpoint tensors that belong to no parameter of the model.
    """

    direct: dict[str, StoredTensor] = field(default_factory=dict)
    converted: dict[str, "Conversion"] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


@dataclass
class Conversion:
    """Checkpoint tensors that become parameters of another shape (experts stacked, say).

    Attributes:
        target: the first of these parameters.
        patterns: of each, the one of the rule's source patterns that its name has.
    """

    target: str
    converter: WeightConverter
    sources: list[StoredTensor] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)

    def run(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The parameters, by name."""
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
        target, pattern = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, names)
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
    ignored = [re.compile(pattern) for pattern in _ignored(model)]
    mapped.unknown = [name for name in mapped.unknown if not any(pattern.search(name) for pattern in ignored)]
    return mapped


def _natural(name: str) -> list[int | str]:
    """Sort key that puts expert 10 after expert 9: conversions stack tensors in this order."""
    return [f"{int(part):09d}" if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _ignored(model: PreTrainedModel) -> set[str]:
    """Leftovers of older checkpoints: buffers that were once saved and are now computed."""
    return {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}


def aliases(model: PreTrainedModel) -> dict[str, set[str]]:
    """Parameter name -> all names of the same (tied) parameter, its own included."""
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {name: group for group in groups.values() for name in group}
