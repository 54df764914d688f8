"""Recurrences as one node, `com.microsoft.LinearAttention`, where a graph has them in standard operators.

    S_t = exp(g_t) S_(t-1) + k_t (x) u_t        y_t = q_t S_t
    u_t = v_t, or by the delta rule b_t (v_t - e_t k_t exp(g_t) S_(t-1))

A graph has such a recurrence as an `If` whose first branch takes a single token (`exporters/recurrence`). That branch
says all there is to know, and is recognised by its nodes alone. All that can be captured or changed lies around the
`If`, so what is captured or changed never decides which form is taken. The node has no factor of what is taken out: it
goes into value and strength, b (v - e k S) = (b e) (v / e - k S), a factor of 0 as one so small that it takes out less
than rounding does.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state

from mionnx.engine.halved_products import constants_of, replace_nodes
from mionnx.graph.dataflow import attributes
from mionnx.graph.operator_table import DOMAIN

FUSED = "LinearAttention"
BRANCH = "then_branch"  # of an `If`; its name lies in every file that has one
LEAST = 2.0**-60  # stands for an erase gate of 0
CONSTANTS = {"packed": np.array([0, 0, -1]), "least": np.array(LEAST, np.float32)}
HEADS_AXIS = 2  # of y
CONSTANT_PREFIX = "mionnx.recurrence."  # begins the names of constants

Pattern = str | tuple[Any, ...]  # a value from outside the branch, by what it is here; or an operator and its inputs


def _row(value: Pattern) -> Pattern:
    return "Transpose", (0, 2, 1, 3), value


def _column(value: Pattern) -> Pattern:
    return "Transpose", (0, 2, 3, 1), value


_DECAYED = "Mul", _column(("Exp", "g")), "state"
_TAKEN = "Sub", _row("v"), ("MatMul", _row(("Mul", "k", "e")), _DECAYED)
_WRITTEN = {"gated": _row("v"), "gated_delta": ("Mul", _row("b"), _TAKEN)}
AFTER = {rule: ("Add", _DECAYED, ("Mul", _column("k"), written)) for rule, written in _WRITTEN.items()}
Y = {rule: ("Reshape", ("MatMul", _row("q"), after), "shape") for rule, after in AFTER.items()}


@cache
def _has_kernel() -> bool:
    """Whether this ONNX Runtime knows the operator."""
    schemas = onnxruntime_pybind11_state.get_all_operator_schema()
    return any((schema.domain, schema.name) == (DOMAIN, FUSED) for schema in schemas)


def fuse_recurrences(model: onnx.ModelProto) -> int:
    """Replace recurrences by the fused operator, in place; return how many were."""
    graph = model.graph
    constants = constants_of(graph)
    fused: dict[int, list[onnx.NodeProto]] = {}
    branching = [(at, node) for at, node in enumerate(graph.node) if node.op_type == "If"]
    for at, node in branching if branching and _has_kernel() else ():
        values = _recurrence(node)
        if (shape := values.get("shape")) is None:
            continue
        # a rewritten graph has the constants of a branch in the branch
        own = {tensor.name: tensor for one in node.attribute for tensor in one.g.initializer}
        tensor = own.get(shape, constants.get(shape))
        if tensor is not None and tensor.data_location != TensorProto.EXTERNAL:
            fused[at] = _fused(node, values, int(numpy_helper.to_array(tensor)[HEADS_AXIS]), graph)
    if fused:
        replace_nodes(graph, fused)
        graph.initializer.extend(
            numpy_helper.from_array(value, CONSTANT_PREFIX + name) for name, value in CONSTANTS.items()
        )
        if DOMAIN not in {entry.domain for entry in model.opset_import}:
            model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return len(fused)


def _recurrence(node: onnx.NodeProto) -> dict[str, str]:
    """What a recurrence reads, by what it is; empty for any other node."""
    branch = next((one.g for one in node.attribute if one.name == BRANCH), None)
    if branch is None or len(branch.output) != len(node.output) or len(branch.output) != 2:
        return {}
    if any(value.type.tensor_type.elem_type != TensorProto.FLOAT for value in branch.output):
        return {}
    makers = {name: one for one in branch.node for name in one.output}
    y, after = (value.name for value in branch.output)
    for rule in AFTER:
        values: dict[str, str] = {}
        if _matches(after, AFTER[rule], makers, values) and _matches(y, Y[rule], makers, values):
            return values
    return {}


def _matches(name: str, pattern: Pattern, makers: Mapping[str, onnx.NodeProto], values: dict[str, str]) -> bool:
    """Whether a value of a branch is made as a pattern says; what it is made from is put into `values`."""
    node = makers.get(name)
    if isinstance(pattern, str):
        return node is None and values.setdefault(pattern, name) == name
    operator, *inputs = pattern
    if node is None or node.op_type != operator or node.domain:
        return False
    if operator == "Transpose" and attributes(node).get("perm") != [*inputs.pop(0)]:
        return False
    pairs = zip(node.input, inputs, strict=True) if len(node.input) == len(inputs) else ()
    return (
        bool(node.input)
        and len(node.input) == len(inputs)
        and all(_matches(one, inner, makers, values) for one, inner in pairs)
    )


def _fused(node: onnx.NodeProto, values: Mapping[str, str], heads: int, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The fused operator in the place of a recurrence."""
    y, after = node.output
    nodes: list[onnx.NodeProto] = []

    def write(operator: str, *inputs: str, outputs: tuple[str, ...] = (), **settings: Any) -> str:
        outputs = outputs or (f"{y}.fused.{len(nodes)}",)
        nodes.append(helper.make_node(operator, inputs, outputs, f"{y}.fused.{len(nodes)}:{operator}", **settings))
        return outputs[0]

    v, b, packed = values["v"], values.get("b"), f"{CONSTANT_PREFIX}packed"
    if b is not None:
        least = f"{CONSTANT_PREFIX}least"
        erase = write("Where", write("Less", write("Abs", values["e"]), least), least, values["e"])
        v, b = write("Div", v, erase), write("Mul", b, erase)
    reads = [write("Reshape", one, packed) for one in (values["q"], values["k"], v)]
    reads += [values["state"], write("Reshape", values["g"], packed)]
    reads += [] if b is None else [write("Reshape", b, packed)]
    rule = "gated" if b is None else "gated_delta"
    settings = {"q_num_heads": heads, "kv_num_heads": heads, "scale": 1.0, "update_rule": rule}
    flat = write(FUSED, *reads, outputs=(f"{y}.fused", after), domain=DOMAIN, **settings)
    apart = numpy_helper.from_array(np.array([0, 0, heads, -1]), f"{y}.fused.apart")
    graph.initializer.append(apart)
    write("Reshape", flat, apart.name, outputs=(y,))
    return nodes
