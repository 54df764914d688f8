"""Magnitudes as outputs: of values without numbers, of NaN, of joined ones, each beside numpy."""

import numpy as np
import onnxruntime
import pytest
from onnx import parser
from repository import REPOSITORY
from rescaled import planted

from mionnx.analysis.numerics.range import Measured, measure
from mionnx.analysis.numerics.remedy import true_sizes
from mionnx.analysis.numerics.texts_run import TextsRun
from mionnx.machine.progress import silent
from mionnx.rewrite.float_graph import FloatGraph
from mionnx.rewrite.largest import RANGE_OUTPUTS, WATCHED_OUTPUT, largest

GRAPH = """<ir_version: 10, opset_import: ["": 23]>
g (float[batch, 2, past, 4] cached, float[batch, seq, 8] x) => (float[batch, seq, 8] y, float[batch, 2, all, 4] keys) {
  factor = Constant <value = float {-3.0}> ()
  before = Mul(cached, factor)
  doubled = Add(x, x)
  shape = Constant <value_ints = [0, 0, 2, 4]> ()
  heads = Reshape(doubled, shape)
  turned = Transpose <perm = [0, 2, 1, 3]> (heads)
  own = Mul(turned, factor)
  keys = Concat <axis = 2> (before, own)
  y = Relu(doubled)
}"""


def seen(past: np.ndarray, x: np.ndarray, nan: bool = False) -> dict[str, float]:
    """The largest magnitudes of the values of one run, and what is watched."""
    proto, observations = largest(FloatGraph(parser.parse_model(GRAPH), []), nan=nan)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [one.name for one in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, {"cached": past, "x": x}), strict=True))
    measured = Measured(observations)
    measured.add(0, outputs)
    sizes = {one.value: size for one, size in zip(observations, measured.largest, strict=True)}
    return sizes | {name: float(outputs[name][0]) for name in names if name not in RANGE_OUTPUTS}


@pytest.mark.parametrize("length", [0, 3])
def test_an_empty_past_has_no_magnitude(length):
    draw = np.random.default_rng(length)
    past, x = (draw.normal(size=shape).astype(np.float32) for shape in ((1, 2, length, 4), (1, 5, 8)))
    doubled = np.float32(2) * x
    expected = {"doubled": np.abs(doubled).max(), "own": np.float32(3) * np.abs(doubled).max(), "y": doubled.max()}
    expected["before"] = np.abs(np.float32(-3) * past).max() if length else -np.inf
    sizes = seen(past, x)
    assert sizes.pop(WATCHED_OUTPUT) == pytest.approx(np.square(np.maximum(doubled, 0)).sum())
    assert sizes == expected  # what is joined is not looked at again


@pytest.mark.parametrize("place", [(0, 0, 0), (0, 2, 3), (0, 4, 7)])
def test_a_nan_counts_as_infinity_wherever_it_stands(place):
    x, past = np.ones((1, 5, 8), np.float32), np.ones((1, 2, 1, 4), np.float32)
    x[place] = np.nan
    sizes = seen(past, x, nan=True)
    assert sizes["doubled"] == sizes["own"] == np.inf
    assert sizes["before"] == 3
    assert np.isnan(seen(past, x)[WATCHED_OUTPUT])


def test_the_first_nan_of_a_model_is_in_the_report(tmp_path):
    model = planted(
        REPOSITORY / "models" / "world-llama", tmp_path / "nan", "model.layers.2.mlp.down_proj.weight", np.nan
    )
    report = model.check_range(["The capital of France is Paris .", "The capital of Germany is"])
    assert report.first.value == "blocks.2.mlp.hook_post"
    assert report.first.largest == np.inf
    before = [row for row in report.rows if row.value.startswith(("blocks.0.", "blocks.1."))]
    assert all(np.isfinite(row.largest) for row in before)


def test_what_is_joined_is_as_large_as_the_largest_part(shipped):
    """Keys behind a past are no row, but a value that a rescale may have to refuse."""
    run = TextsRun(shipped, ["The capital of France is Paris ."], silent)
    joined = [node.output[0] for node in run.graph.proto.graph.node if node.op_type == "Concat"]
    joined = [name for name in joined if name in run.graph.carrying]
    assert joined
    sizes = true_sizes(run.graph, measure(run, run.graph))
    proto = type(run.graph.proto)()
    proto.CopyFrom(run.graph.proto)
    known = {value.name: value for value in run.graph.proto.graph.value_info}
    proto.graph.output.extend(known[name] for name in joined)
    with run.opened(proto) as program:
        values = program.run(joined, run.feeds(run.calls[0]))
    for name in joined:
        assert sizes[name] == np.abs(values[name]).max(), name
