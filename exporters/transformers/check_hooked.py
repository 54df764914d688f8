"""Checks on an exported graph before it becomes a hooked model; unknown layouts are refused."""

from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir

from exporters.hook_axes import axes_of
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint, layer_of
from mionnx.graph.metadata import Heads, Sizes


def hook_axes(graph: ir.Graph, hooks: list[str], sizes: Sizes, heads: Sequence[Heads]) -> dict[str, list[str | int]]:
    """The axes of each hook point, dynamic ones by name.

    Raises:
        ExportError: a value whose static sizes are not those that the vocabulary gives its axes.
    """
    shapes = {value.name: value.shape or () for node in graph for value in node.outputs}
    return {name: _axes(name, shapes[name], sizes, heads) for name in hooks}


def _axes(name: str, shape: Iterable[Any], sizes: Sizes, heads: Sequence[Heads]) -> list[str | int]:
    known = [dim if isinstance(dim, int) else None for dim in shape]
    return axes_of(name, known, sizes, heads[layer_of(name) or 0])


def expert_sizes(graph: ir.Graph, hooks: list[str]) -> dict[str, int]:
    """The sizes n_experts, n_chosen and d_expert, those of the first layer with experts."""
    values = {value.name: value for node in graph for value in node.outputs}
    found: dict[str, int] = {}
    for name in hooks:
        for axis, dim in zip(HookPoint.parse(name).axes or (), values[name].shape or (), strict=False):
            if axis in ("n_experts", "n_chosen", "d_expert") and isinstance(dim, int):
                found.setdefault(axis, dim)
    return found


def check_stream(graph: ir.Graph) -> None:
    """Check that `hook_attn_out` and `hook_mlp_out` are added to the residual stream.

    Raises:
        ExportError: something (a residual multiplier) stands between such a value and its addition.
    """
    for node in graph:
        for value in node.outputs:
            added = value.name and value.name.endswith((".hook_attn_out", ".hook_mlp_out"))
            if added and not any(_adds(user) for user, _ in value.uses()):
                users = sorted({user.op_type for user, _ in value.uses()})
                raise ExportError(
                    f"{value.name} is not added to the residual stream as it is, it goes into {', '.join(users)}: "
                    "the family needs an entry in exporters/transformers/families.py"
                )


def _adds(node: ir.Node) -> bool:
    """An addition, or the identity of another hook point on the same value that is then added."""
    if node.op_type == "Identity":
        return any(_adds(user) for user, _ in node.outputs[0].uses())
    return node.op_type == "Add"
