"""Rewrite: copy a fragment into a graph.

1. Its values get the names `{hook}.{name}` where these begin with `hook_`, and else, as its nodes do, the prefix of the
   splice: two copies of a fragment never collide.
2. The values that go in, and the one that comes out, are cast where the fragment computes in another dtype.
3. Its weights become inputs of the graph.
"""

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import DTypeLike

from mionnx.graph.builder import Builder, write
from mionnx.graph.builder import edit as editable
from mionnx.graph.fitted_fragment import HOOK, FittedFragment
from mionnx.rewrite.plan import Edit


def splice(op: Builder, edit: Edit, old: gs.Variable) -> gs.Variable:
    """Insert the edit's fragment behind a value; its output, of the value's dtype."""
    fit = edit.fit
    if fit is None:
        raise ValueError(f"{edit.prefix} has no fragment")
    inner = editable(fit.proto)
    weights = [tensor for tensor in inner.inputs if tensor.name in fit.weights]
    activations = [tensor for tensor in inner.inputs if tensor.name not in fit.weights]
    output = inner.outputs[0]
    _rename(inner, edit, fit)
    op.graph.inputs += weights
    op.report.inputs += [tensor.name for tensor in weights]
    sources = [old] if edit.reads is None else [old, op.graph.tensors()[edit.reads]]
    for value, into in zip(sources, activations, strict=True):
        write(_cast(op, value, into.dtype), into)
    for node in inner.nodes:
        op.graph.nodes.append(node)
        op.report.add(edit.hook, node.name)
    return _cast(op, output, old.dtype)


def _cast(op: Builder, value: gs.Tensor, dtype: DTypeLike) -> gs.Variable:
    """A value under another name, cast if its dtype is another."""
    if value.dtype is None or np.dtype(value.dtype) == np.dtype(dtype):
        return op.Identity(value, dtype=np.dtype(dtype))
    return op.Cast(value, to=np.dtype(dtype))


def _rename(inner: gs.Graph, edit: Edit, fit: FittedFragment) -> None:
    """Give values and nodes of a fragment unique names, also inside `If`, `Loop` and `Scan`."""
    known = {one.name: one for one in fit.inner}
    done = set[int]()
    for number, graph in enumerate([inner, *inner.subgraphs(recursive=True)]):
        for tensor in [*graph.inputs, *graph.tensors().values(), *graph.outputs]:
            if id(tensor) in done or not tensor.name:
                continue
            done.add(id(tensor))
            here = known.get(tensor.name) if number == 0 else None
            if here is not None and not isinstance(tensor, gs.Constant):
                tensor.dtype, tensor.shape = np.dtype(here.dtype), None
            own = tensor.name.startswith(HOOK) and here is not None
            tensor.name = f"{edit.hook if own else edit.prefix}.{tensor.name}"
        for at, node in enumerate(graph.nodes):
            node.name = f"{edit.prefix}.{number}.{node.name or at}:{node.op}"
