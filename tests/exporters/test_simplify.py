"""Numbers beside 0 and 1 stay in a simplified graph; 0 and 1 themselves go."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from exporters.transformers.simplify import simplify

GRAPH = """
<ir_version: 10, opset_import: ["" : 23]>
form (float[n] x) => (float[n] y)
{{
    number = Constant <value = float {{{number}}}> ()
    y = {operator} (x, number)
}}
"""


def simplified(operator: str, number: float) -> ir.Model:
    model = ir.from_onnx_text(GRAPH.format(operator=operator, number=f"{number:.9e}"))
    assert simplify(model, set()) == []
    return model


@pytest.mark.parametrize(
    ("operator", "number", "neutral"),
    [("Add", 1e-8, 0.0), ("Sub", -9e-9, 0.0), ("Mul", 1.000005, 1.0), ("Div", 0.999995, 1.0)],
)
def test_only_what_changes_nothing_goes(operator, number, neutral):
    kept, gone = simplified(operator, number), simplified(operator, neutral)
    assert [node.op_type for node in kept.graph] == [operator]
    assert [node.op_type for node in gone.graph] in ([], ["Identity"])
    x = np.array([0.0, 1e-8, 1.0], np.float32)
    (y,) = onnxruntime.InferenceSession(ir.to_proto(kept).SerializeToString()).run(None, {"x": x})
    by = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}[operator]
    assert np.array_equal(y, by(x, np.float32(number)))
    assert not np.array_equal(y, x)
