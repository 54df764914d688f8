"""The head reads chosen rows of several streams: a graph of four nodes beside numpy."""

import numpy as np
import onnx
import onnxruntime
import pytest

from mionnx import ModelError
from mionnx.graph.builder import edit, to_proto
from mionnx.graph.report import Report
from mionnx.rewrite.lens_rows import LENS_ROWS, ROWS_TOP_IDS, TOP, TRACKED, TRACKED_LOG_PROBS, WHOLE, K, lens_rows

HEAD = ", ".join(str(round(np.sin(3 * n), 3)) for n in range(24))
TEXT = """
<ir_version: 10, opset_import: ["" : 23]>
four (float[batch, seq, 4] x) => (float[batch, seq, 6] logits) <float[4, 6] head = {HEAD}> {
  first = Add(x, x)
  second = Sin(first)
  normed = Tanh(second)
  logits = LAST
}
""".replace("HEAD", HEAD)


def rewritten(last: str) -> onnx.ModelProto:
    origin = onnx.parser.parse_model(TEXT.replace("LAST", last))
    graph = edit(origin)
    lens_rows(graph, ["first", "second"], Report())
    return to_proto(graph, origin, {})


def test_rows_of_both_streams_are_read_as_the_last_one_is():
    made = rewritten("MatMul(normed, head)")
    onnx.checker.check_model(made, full_check=True)
    x = np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)
    feeds = {"x": x, LENS_ROWS: [5, 0, 4, 1], WHOLE: [0, 2], K: [2], TRACKED: [3]}
    given = {name: np.asarray(value, np.float32 if name == "x" else np.int64) for name, value in feeds.items()}
    found = onnxruntime.InferenceSession(made.SerializeToString()).run(
        ["logits", TOP, ROWS_TOP_IDS, TRACKED_LOG_PROBS], given
    )
    head = np.array([float(one) for one in HEAD.split(", ")]).reshape(4, 6)
    streams = np.concatenate([2 * x[0], np.sin(2 * x[0])]).astype(np.float64)
    logits = np.tanh(streams[[5, 0, 4, 1]]) @ head
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1)[:, None]
    order = np.argsort(-logits, axis=-1)[:, :2]
    assert np.abs(found[0][0] - logits[[0, 2]]).max() < 1e-6
    assert np.array_equal(found[2][0], order)
    assert np.abs(found[1][0] - np.take_along_axis(log_probs, order, -1)).max() < 1e-6
    assert np.abs(found[3][0] - log_probs[:, [3]]).max() < 1e-6


def test_a_head_that_reads_more_than_the_last_stream_is_refused():
    with pytest.raises(ModelError, match="not computed from second alone"):
        rewritten("MatMul(x, head)")
