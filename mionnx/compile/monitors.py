"""`Monitor`: a number that whoever runs a compiled graph may read at every token, as an output of the graph.

1. A linear monitor reads the value at a hook point, after its interventions, as `forward` would capture it: one
   product, and what its probe makes of it. Its output is float32, [batch, seq, n].
2. A lens reads the residual stream at its hook point by the model's own last norm and head: log-probabilities of the k
   top tokens, [batch, seq, k], and as `{name}.ids` their tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from mionnx.errors import HookError, InputError, InterventionError
from mionnx.graph.builder import Builder, Constant, Graph, Tensor, Variable
from mionnx.graph.dataflow import extract
from mionnx.graph.edited_graph import edit, sort_nodes
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.graph.report import Report
from mionnx.machine.brief import count
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.typed import typed
from mionnx.spec.linear_readout import LinearReadout, linear_readout

LINKS = ("identity", "sigmoid", "softmax", "relu")
TOKEN_IDS = ".ids"  # end of the name of a lens' tokens


@typed(InputError, leave=["hook", "threshold", "chosen"])
@dataclass(frozen=True, eq=False)
class Monitor:
    """What is read at one hook point of a compiled graph.

    Attributes:
        hook: the hook point, of a vector a token.
        readout: weights and intercepts; None for a lens.
        link: what is made of x W^T + b: "identity", "sigmoid", "softmax" or "relu".
        threshold: [n], below which a latent is 0 (JumpReLU); None without.
        k: how many tokens a lens names at every token of a text, from the top one down; of a readout, how many of its
            products are kept, the largest, and the others are 0 (a top-k SAE); 0: all.
        meaning: in words, for whoever runs the file.
        chosen: [m], which of the products are read; None: all.

    Example:
        model.compile(spec, "steered", monitors={"sea": direction, "lens": model.lens_monitor(16, k=3)})
    """

    hook: str
    readout: LinearReadout | None = None
    link: str = "identity"
    threshold: np.ndarray | None = field(default=None, repr=False)
    k: int = 0
    meaning: str = ""
    chosen: np.ndarray | None = field(default=None, repr=False)

    @property
    def width(self) -> int:
        """How many numbers it gives a token."""
        if self.readout is None:
            return self.k
        return len(self.readout.weights if self.chosen is None else self.chosen)

    @property
    def about(self) -> str:
        """What it says, in words."""
        if self.readout is None:
            what = f"log-probabilities of the {self.k} top tokens that the final norm and head read"
        else:
            what = f"{self.link} of {count(len(self.readout.weights), 'product')}"
        return f"{self.meaning or what} at {self.hook}"


@typed(InputError)
def lens_monitor(model: Any, layer: int, k: int = 5) -> Monitor:
    """The k top tokens of a layer's residual stream, read by the model's own last norm and head.

    Args:
        model: an open model.
        layer: counted from 0; its `hook_resid_post` is read.
        k: how many tokens it names, from the top one down.

    Raises:
        InputError: no such layer, or more tokens than the vocabulary has.

    Example:
        model.compile(spec, "steered", monitors={"lens": model.lens_monitor(2, k=3)})
    """
    sizes = model.hooked.metadata.sizes
    at_least("layer", layer, 0)
    at_most("layer", layer, sizes.num_layers - 1)
    at_least("k", k, 1)
    at_most("k", k, sizes.vocab_size)
    return Monitor(str(HookPoint.ResidPost(layer)), k=k)


def as_monitor(name: str, what: Any, model: HookedModel) -> Monitor:
    """A monitor from what callers give: one, a direction, probes by hook point, or (hook, linear probe).

    Raises:
        HookError, InterventionError: no hook point, no such one, or nothing linear.
    """
    monitor = what if isinstance(what, Monitor) else _of_probe(name, what)
    point = HookPoint.parse(monitor.hook)
    axes = model.axes(point)
    if len(axes) != 3 or point.derived or not isinstance(axes[-1], int):
        raise HookError(f"monitor {name!r}: {point} is {axes}; a monitor reads a vector a token, [batch, seq, width]")
    sizes = model.metadata.sizes
    if monitor.readout is None:
        at_least(f"monitor {name!r}: k", monitor.k, 1)
        at_most(f"monitor {name!r}: k", monitor.k, sizes.vocab_size)
        if axes[-1] != sizes.hidden_size:
            raise HookError(f"monitor {name!r}: {point} is {axes}; a lens reads the stream, [batch, seq, hidden]")
    if monitor.readout is not None and monitor.readout.weights.shape[1] != axes[-1]:
        raise InterventionError(
            f"monitor {name!r}: its weights are {list(monitor.readout.weights.shape)}, and {point} is {axes}"
        )
    return monitor


def _of_probe(name: str, what: Any) -> Monitor:
    if hasattr(what, "fits") and hasattr(what, "top"):  # probes by hook point: the best of them
        ((hook, _),) = what.top(1)
        what = (hook, what.fits[hook])
    if isinstance(what, tuple) and len(what) == 2 and isinstance(what[0], str | HookPoint):
        readout = linear_readout(what[1])
        return Monitor(str(what[0]), readout, readout.link)
    readout = linear_readout(what)
    if not readout.hook:
        raise HookError(f"monitor {name!r}: say where it reads, as a pair: (hook point, probe)")
    return Monitor(readout.hook, readout, readout.link)


def add_monitors(graph: Graph, monitors: Mapping[str, Monitor], model: HookedModel, report: Report) -> None:
    """Add the outputs of monitors.

    Raises:
        InterventionError: a name that a value of the graph has already.
    """
    for name, monitor in monitors.items():
        names = [name] if monitor.readout is not None else [name, f"{name}{TOKEN_IDS}"]
        tensors = graph.tensors()
        if not name.strip() or any(one in tensors for one in names):
            raise InterventionError(f"monitor {name!r}: no name for an output, or that of a value of the graph")
        op = Builder(graph, monitor.hook, f"mionnx.monitor.{name}", report)
        if monitor.readout is None:
            values = _lens(op, tensors[monitor.hook], monitor, model)
        else:
            values = [_linear(op, op.Cast(tensors[monitor.hook], to=np.float32), monitor, monitor.readout)]
        for output, value in zip(names, values, strict=True):
            value.name, value.shape = output, ["batch", "seq", monitor.width]
            graph.outputs.append(value)
            report.outputs.append(output)
    sort_nodes(graph)


def _linear(op: Builder, x: Tensor, monitor: Monitor, readout: LinearReadout) -> Variable:
    weights, bias = readout.weights.T.astype(np.float32), readout.bias.astype(np.float32)
    value = op.Add(op.MatMul(x, np.ascontiguousarray(weights)), bias)
    if monitor.link == "sigmoid":
        return op.Sigmoid(value)
    if monitor.link == "softmax":
        return op.Softmax(value, axis=-1)
    if monitor.link == "relu":
        value = op.Relu(value) if monitor.threshold is None else _jump(op, value, monitor.threshold)
    value = _largest(op, value, monitor.k) if monitor.k else value
    return value if monitor.chosen is None else op.Gather(value, monitor.chosen.astype(np.int64), axis=2)


def _largest(op: Builder, value: Variable, k: int) -> Variable:
    """The k largest numbers of each token, where they stand; the others are 0."""
    values, ids = op.TopK(value, [k], axis=-1, outputs=2)
    nothing = op.ConstantOfShape(op.Shape(value), dtype=np.float32)
    return op.ScatterElements(nothing, ids, values, axis=-1, dtype=np.float32)


def _jump(op: Builder, value: Variable, threshold: np.ndarray) -> Variable:
    above = op.Greater(value, threshold.astype(np.float32))
    return op.Where(above, op.Relu(value), np.zeros(1, np.float32), dtype=np.float32)


def _lens(op: Builder, x: Tensor, monitor: Monitor, model: HookedModel) -> list[Variable]:
    """The head once more, reading another stream; its weights are those of the graph."""
    last = str(HookPoint.ResidPost(model.metadata.sizes.num_layers - 1))
    head = edit(extract(model.proto, [last], [LOGITS]))
    tensors = op.graph.tensors()
    for tensor in head.tensors().values():
        if isinstance(tensor, Constant) or tensor.name in (last, *(one.name for one in op.graph.inputs)):
            continue
        tensor.name = f"{op.prefix}.{tensor.name}"
    ours = {last: x} | {one.name: tensors[one.name] for one in op.graph.inputs}
    for node in head.nodes:
        # Weights that the graph has are read in place; further ones, such as a norm's, come with the node.
        node.inputs = [
            ours.get(one.name, tensors.get(one.name, one) if isinstance(one, Constant) else one) for one in node.inputs
        ]
        node.name = f"{op.prefix}.{node.name}"
        op.graph.nodes.append(node)
        op.report.add(op.where, node.name)
    logits = op.Cast(next(one for one in head.outputs if one.name.endswith(LOGITS)), to=np.float32)
    values, ids = op.TopK(logits, [monitor.k], axis=-1, outputs=2)
    return [op.Sub(values, op.ReduceLogSumExp(logits, [2], keepdims=1)), ids]


def monitor_facts(monitors: Mapping[str, Monitor]) -> dict[str, str]:
    """Output -> what it says, for the card and the metadata."""
    facts = {}
    for name, monitor in monitors.items():
        facts[name] = monitor.about
        if monitor.readout is None:
            facts[f"{name}{TOKEN_IDS}"] = f"the tokens of {name}"
    return facts


def document_monitors(proto: onnx.ModelProto, facts: Mapping[str, str]) -> None:
    """Say of each monitor in the graph what it is."""
    for value in proto.graph.output:
        if value.name in facts:
            value.doc_string = facts[value.name]
