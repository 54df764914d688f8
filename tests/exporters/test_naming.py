"""Markers become names, on graphs small enough to read."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from exporters.transformers.hooked_graph import check_stream
from exporters.transformers.naming import name_hooks
from mionnx import ExportError

HEADER = '<ir_version: 10, opset_import: ["" : 23, "mionnx" : 1]>\n'


def named(body: str) -> tuple[ir.Model, list[str]]:
    """Parse a graph from x to y, name its hooks, and check that it still computes what it did."""
    model = ir.from_onnx_text(f"{HEADER}g (float[2] x) => (float[2] y) {{\n{body}\n}}")
    return model, name_hooks(model.graph)


def run(model: ir.Model, x: list[float], *outputs: str) -> list[np.ndarray]:
    proto = ir.to_proto(model)
    present = {output.name for output in proto.graph.output}
    proto.graph.output.extend(type(proto.graph.output[0])(name=name) for name in outputs if name not in present)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return session.run(list(outputs), {"x": np.array(x, np.float32)})


def readers(model: ir.Model, name: str) -> list[str]:
    return [node.op_type for node in model.graph for value in node.inputs if value is not None and value.name == name]


def test_a_value_of_one_reader_takes_the_name():
    model, names = named(
        """a = Neg(x)
           m = mionnx.HookPoint<name = "hook_a", stream = 0>(a)
           y = Abs(m)"""
    )
    assert names == ["hook_a"]
    assert [node.op_type for node in model.graph] == ["Neg", "Abs"]
    assert readers(model, "hook_a") == ["Abs"]
    assert run(model, [1, -2], "hook_a", "y")[0].tolist() == [-1, 2]


def test_two_hooks_on_one_value_have_a_value_each_in_order():
    model, names = named(
        """a = Neg(x)
           m = mionnx.HookPoint<name = "first", stream = 0>(a)
           n = mionnx.HookPoint<name = "second", stream = 0>(m)
           y = Abs(n)"""
    )
    assert names == ["first", "second"]
    assert [node.op_type for node in model.graph] == ["Neg", "Identity", "Abs"]
    assert readers(model, "first") == ["Identity"]
    assert readers(model, "second") == ["Abs"]


def test_on_the_stream_every_later_reader_sees_it_and_no_earlier_one():
    model, _ = named(
        """a = Neg(x)
           early = Exp(a)
           m = mionnx.HookPoint<name = "stream", stream = 1>(a)
           norm = Abs(m)
           skip = Add(a, norm)
           y = Add(skip, early)"""
    )
    assert readers(model, "stream") == ["Abs", "Add"]
    assert readers(model, "a") == ["Exp", "Identity"]
    assert np.allclose(run(model, [1, -2], "y")[0], [np.exp(-1), 4 + np.exp(2)])


def test_off_the_stream_only_the_branch_sees_it():
    model, _ = named(
        """a = Neg(x)
           m = mionnx.HookPoint<name = "branch", stream = 0>(a)
           inside = Abs(m)
           y = Add(a, inside)"""
    )
    assert readers(model, "branch") == ["Abs"]
    assert readers(model, "a") == ["Identity", "Add"]


def test_who_reads_the_shape_only_is_no_reader():
    model, _ = named(
        """a = Neg(x)
           s = Shape(a)
           m = mionnx.HookPoint<name = "hook_a", stream = 0>(a)
           y = Reshape(m, s)"""
    )
    assert [node.op_type for node in model.graph] == ["Neg", "Shape", "Reshape"]


def test_an_output_keeps_its_name_and_an_input_stays_an_input():
    model, _ = named("""y = mionnx.HookPoint<name = "hook_x", stream = 0>(x)""")
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert [out.tolist() for out in run(model, [1, 2], "hook_x", "y")] == [[1, 2], [1, 2]]


def test_what_is_scaled_before_it_joins_the_stream_is_refused():
    plain = """a = Neg(x)
               blocks.0.hook_attn_out = Abs(a)
               b = {use}(blocks.0.hook_attn_out, x)
               y = Add(b, x)"""
    text = plain.replace("blocks.0.hook_attn_out", "o")
    for use in ("Add", "Mul"):
        model = ir.from_onnx_text(f"{HEADER}g (float[2] x) => (float[2] y) {{\n{text.format(use=use)}\n}}")
        next(
            value for node in model.graph for value in node.outputs if value.name == "o"
        ).name = "blocks.0.hook_attn_out"
        if use == "Add":
            check_stream(model.graph)
        else:
            with pytest.raises(ExportError, match="goes into Mul"):
                check_stream(model.graph)
