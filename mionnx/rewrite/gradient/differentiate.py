"""Rewrite: gradients of a value become outputs.

1. What is active: floating-point values that follow from one of those asked for and lead to the value that is
   differentiated. Nothing else gets a node; weights are never differentiated, read or copied.
2. Nodes are added that go back through the active ones, by the rule of each operator (`rules`).
3. The gradient of a value has its shape and type, and is called `{name}.gradient`.
4. Only standard operators are added, and only for what is asked: nodes that no output needs are dropped.
"""

from collections.abc import Collection, Mapping, Sequence

import onnx
from onnx import ModelProto, helper

from mionnx.errors import GradientError
from mionnx.graph.dataflow import Facts, reads
from mionnx.graph.onnx_file import opset
from mionnx.rewrite.gradient.backward import Backward, FreshNames, Rule
from mionnx.rewrite.gradient.rules import RULES, SUBGRAPH_RULES
from mionnx.rewrite.gradient.subgraph import DIFFERENTIABLE, activity, prune
from mionnx.rewrite.plan import gradient_name

GRADIENT_PREFIX = "mionnx.gradient"


def differentiate(
    model: ModelProto,
    of: str,
    by: Sequence[str],  # the values by which, each a value of the graph; each gets an output, `gradient_name`
    *,
    seed: str | None = None,  # a value of the graph, or a new input, that weighs `of`, of its shape; ones if left out
    rules: Mapping[str, Rule] = RULES,
    varying: Collection[str] = (),  # further values that rules take for no constants, whichever values are asked for
) -> ModelProto:
    """Add the gradients of the sum of a value."""
    done = ModelProto()
    done.CopyFrom(model)
    graph, nodes = done.graph, [*done.graph.node]
    # data_prop: shapes that the graph itself computes (Shape, Gather, Concat) become known too
    facts = Facts(onnx.shape_inference.infer_shapes(done, data_prop=True).graph)
    active = activity(nodes, facts, [*by, *(name for name in varying if facts.type(name) in DIFFERENTIABLE)], [of])
    _refuse_idle(of, by, active)
    op = Backward(FreshNames(GRADIENT_PREFIX), facts, active, rules, SUBGRAPH_RULES, opset(done))
    gradients = op.run(nodes, {of: _seed(op, done, of, seed)})
    _refuse_constant(of, by, gradients)
    ends = [_output(op, done, name, gradients[name]) for name in by]
    # rules may add what nothing reads, such as the lengths of a Concat's inactive entries
    live = prune([*nodes, *op.nodes], [value.name for value in graph.output] + ends)
    del graph.node[:]
    graph.node.extend(live)
    read = {name for node in live for name in reads(node)}
    graph.initializer.extend(tensor for tensor in op.names.tensors.values() if tensor.name in read)
    return done


def _refuse_idle(of: str, by: Sequence[str], active: set[str]) -> None:
    idle = [name for name in by if name not in active]
    if idle:
        rest = f", and {len(idle) - 1} more" * (len(idle) > 1)
        raise GradientError(f"{of} does not depend on {idle[0]}{rest}: there is no gradient")


def _refuse_constant(of: str, by: Sequence[str], gradients: Mapping[str, str]) -> None:
    constant = [name for name in by if name not in gradients]
    if constant:
        rest = f", and {len(constant) - 1} more" * (len(constant) > 1)
        raise GradientError(
            f"these rules take all by which {of} depends on {constant[0]}{rest} for constant (a pattern or a norm's "
            "scale): nothing goes back there; other rules, or other hook points, do"
        )


def _seed(op: Backward, model: ModelProto, of: str, seed: str | None) -> str:
    if seed is None:
        return op.filled(1, of)
    if seed not in {value.name for value in model.graph.input} and seed not in op.facts.makers:
        model.graph.input.append(_declared(op.facts, seed, of))
        op.facts.types[seed] = op.facts.type(of)
    return seed


def _output(op: Backward, model: ModelProto, name: str, cotangent: str) -> str:
    output = gradient_name(name)
    op.nodes.append(helper.make_node("Identity", [cotangent], [output], f"{output}:Identity"))
    model.graph.output.append(_declared(op.facts, output, name))
    return output


def _declared(facts: Facts, name: str, like: str) -> onnx.ValueInfoProto:
    shape = facts.shapes.get(like)
    # "?...": a name that `Facts` gave to an unknown length; a declaration leaves that open
    dims = None if shape is None else [None if isinstance(dim, str) and dim[0] == "?" else dim for dim in shape]
    return helper.make_tensor_value_info(name, facts.type(like), dims)
