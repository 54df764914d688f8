"""The head reads chosen rows of several streams: a graph of four nodes beside numpy."""

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest

from mionnx import ModelError
from mionnx.graph.edited_graph import edit, to_proto
from mionnx.graph.report import Report
from mionnx.rewrite.lens_rows import (
    LENS_ROWS,
    MAPPED,
    ROWS_TOP_IDS,
    TOP,
    TRACKED,
    TRACKED_LOG_PROBS,
    WHOLE,
    K,
    RowMap,
    lens_rows,
)

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


MATRIX, BIAS = np.cos(np.arange(16, dtype=np.float32)).reshape(4, 4), np.arange(4, dtype=np.float32)


def rewritten(last: str, maps: Sequence[RowMap] = ()) -> onnx.ModelProto:
    origin = onnx.parser.parse_model(TEXT.replace("LAST", last))
    graph = edit(origin)
    lens_rows(graph, ["first", "second"], Report(), maps)
    return to_proto(graph, origin, {})


@pytest.mark.parametrize("mapped", [None, [], [2, 0]])
def test_rows_of_streams_and_of_their_maps_are_read_as_the_last_one_is(mapped: list[int] | None):
    maps = [] if mapped is None else [RowMap("first", MATRIX), RowMap("first", MATRIX.T, BIAS)]
    made = rewritten("MatMul(normed, head)", maps)
    onnx.checker.check_model(made, full_check=True)
    x = np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)
    rows = [5, 0, 4, 1] + ([9, 6] if mapped else [])
    feeds = {"x": x, LENS_ROWS: rows, WHOLE: [0, 2], K: [2], TRACKED: [3]} | ({MAPPED: mapped} if maps else {})
    given = {name: np.asarray(value, np.float32 if name == "x" else np.int64) for name, value in feeds.items()}
    found = onnxruntime.InferenceSession(made.SerializeToString()).run(
        ["logits", TOP, ROWS_TOP_IDS, TRACKED_LOG_PROBS], given
    )
    head = np.array([float(one) for one in HEAD.split(", ")]).reshape(4, 6)
    chosen = 2 * x[0][mapped or []]
    streams = np.concatenate([2 * x[0], np.sin(2 * x[0]), chosen @ MATRIX.T, chosen @ MATRIX + BIAS])
    logits = np.tanh(streams[rows].astype(np.float64)) @ head
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1)[:, None]
    order = np.argsort(-logits, axis=-1)[:, :2]
    assert np.abs(found[0][0] - logits[[0, 2]]).max() < 1e-6
    assert np.array_equal(found[2][0], order)
    assert np.abs(found[1][0] - np.take_along_axis(log_probs, order, -1)).max() < 1e-6
    assert np.abs(found[3][0] - log_probs[:, [3]]).max() < 1e-6


def test_a_head_that_reads_more_than_the_last_stream_is_refused():
    with pytest.raises(ModelError, match="not computed from second alone"):
        rewritten("MatMul(x, head)")
