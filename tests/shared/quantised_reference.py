"""A model in transformers with the numbers that the blocks of a quantised one stand for."""

from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from mionnx.graph import matrices
from mionnx.graph.blocks import EXPERT
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.weight_value import weight_numbers


def with_numbers(reference: Any, hooked: HookedModel) -> Any:
    """Put what the blocks stand for into the weights of a model in transformers."""
    parameters = reference.state_dict()
    blocks = [one.name for one in hooked.proto.graph.initializer if one.name.endswith("_blocks")]
    assert blocks
    tables = [one.name for one in hooked.proto.graph.initializer if one.name.endswith("_table")]
    for name in tables:
        parameters[name.removesuffix("_table")].copy_(torch.from_numpy(matrices.embedding(hooked)))
    for name in blocks:
        weight = name.removesuffix("_blocks")
        found = weight_numbers(hooked.proto, hooked.folder, name)  # [out, in], as Linear has it, and Conv1D has not
        stack, _, number = weight.rpartition(EXPERT)
        if number.isdigit():
            parameters[stack][int(number)].copy_(torch.from_numpy(found))
            continue
        turned = isinstance(reference.get_submodule(weight.removesuffix(".weight")), Conv1D)
        parameters[weight].copy_(torch.from_numpy(np.ascontiguousarray(found.T if turned else found)))
    return reference
