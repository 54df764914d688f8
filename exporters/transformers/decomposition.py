"""Decomposition of a captured program without the second trace that torch's exporter makes for it.

Of the operators that models consist of, that trace changes few, in ways that need none. Where a program has others,
torch decomposes it as ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _decomp, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

TORCHS_OWN = _fx_passes.decompose_with_registry
aten = torch.ops.aten
CHECKS = (aten._assert_scalar.default, aten._assert_tensor_metadata.default)
TO_A_TYPE = (aten.to.device, aten.to.dtype, aten.to.dtype_layout)
VIEWS = (aten.flatten.using_ints, aten.reshape.default, aten.unflatten.int)
RENAMED = {  # operator -> another, and what it takes besides
    aten.__and__.Tensor: (aten.bitwise_and.Tensor,),
    aten.min.other: (aten.minimum.default,),
    aten.square.default: (aten.pow.Tensor_Scalar, 2),
}
CONTIGUOUS = {"memory_format": torch.contiguous_format}
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def one_trace() -> Iterator[None]:
    """Have torch's exporter decompose what it captures by `_decompose`."""

    def decompose(exported_program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
        by_hand = _decompose(exported_program, registry)
        return exported_program if by_hand else TORCHS_OWN(exported_program, registry)

    _fx_passes.decompose_with_registry = decompose
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = TORCHS_OWN


def _decompose(program: ExportedProgram, registry: ONNXRegistry) -> bool:
    """Decompose a program in place; False, and nothing is done, where that takes a trace."""
    graph = program.graph_module.graph
    implemented: set[Any] = {*_decomp.get_onnx_implemented_overloads(registry)}
    results = {*graph.output_node().all_input_nodes}  # whose names are in the program's signature
    sizes = dict[str, fx.Node]()  # symbol -> the node by which the program mostly knows it, as torch's trace does
    changed = list[tuple[fx.Node, dict[str, fx.Node]]]()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            symbol = str(value.node.expr)
            sizes[symbol] = max(sizes.get(symbol, node), node, key=lambda one: len(one.users))
        if node.op != "call_function" or node.target in CHECKS:
            continue
        if _writes(node):
            return False
        if not node.users:
            continue
        new = _replacement(node, sizes)
        if (node in results and isinstance(new, fx.Node)) or (new is None and not _stays(node, implemented)):
            return False
        if new is not None:
            changed.append((node, {**sizes}))
    for node, known_sizes in changed:
        new = _replacement(node, known_sizes)  # once more: what it reads may have been replaced
        if isinstance(new, fx.Node):
            node.replace_all_uses_with(new)
            continue
        node.target, node.args, node.kwargs = new
        if node.target is aten.view.default:  # which refuses what lies in memory in another order; ONNX does not
            read = node.all_input_nodes[0]
            with graph.inserting_before(node):
                in_order = graph.call_function(aten.clone.default, (read,), CONTIGUOUS)
            in_order.meta = {**read.meta}
            node.replace_input_with(read, in_order)
    for check in [node for operator in CHECKS for node in graph.find_nodes(op="call_function", target=operator)]:
        graph.erase_node(check)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return True


def _replacement(node: fx.Node, sizes: dict[str, fx.Node]) -> Any:
    """What torch's decomposition makes of a node: another call, or a node before it; None if it is neither."""
    operator, value = node.target, node.meta.get("val")
    arguments: Any = node.args
    if operator in RENAMED and not node.kwargs:
        other, *more = RENAMED[operator]
        return other, (*arguments, *more), {}
    if operator is aten.contiguous.default:
        return aten.clone.default, arguments[:1], CONTIGUOUS
    if operator in TO_A_TYPE:
        before = arguments[0]
        same = before.meta["val"].dtype == value.dtype
        return before if same else (aten._to_copy.default, (before,), {"dtype": value.dtype})
    if operator in VIEWS and not node.kwargs:
        shapes = [value.shape]
        if operator is aten.reshape.default:  # torch gives one that copies all sizes, another what it says
            shapes = [value.shape, arguments[1]][arguments[0].meta["val"].is_contiguous() :]
        for shape in shapes:
            sized = [dim.meta["val"] if isinstance(dim, fx.Node) else dim for dim in shape]
            dims = [dim if isinstance(dim, int) else sizes.get(str(dim.node.expr)) for dim in sized]
            if None not in dims:
                return aten.view.default, (arguments[0], dims), {}
    if operator is aten.chunk.default and not node.kwargs:
        size, rank = value[0].shape, arguments[0].meta["val"].dim()
        dim = (arguments[2] if len(arguments) > 2 else 0) % rank
        return (aten.split.Tensor, (arguments[0], size[dim], dim), {}) if isinstance(size[dim], int) else None
    return None


def _stays(node: fx.Node, implemented: set[Any]) -> bool:
    """Whether torch's decomposition would leave a node as it is: ONNX has it, and it is no composite that aliases."""
    operator = node.target
    if operator not in implemented or not isinstance(operator, torch._ops.OpOverload):
        return operator in implemented
    values = [*operator._schema.arguments, *operator._schema.returns]
    aliases = any(value.alias_info is not None for value in values)
    return not (aliases and operator.has_kernel_for_dispatch_key(COMPOSITE))


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
