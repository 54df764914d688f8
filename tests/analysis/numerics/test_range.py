"""Magnitudes are those of the values; a planted overflow is found where it is."""

import numpy as np
import pytest
from repository import REPOSITORY
from rescaled import planted

from mionnx import HookPoint, HookSpec, InputError, RangeReport
from mionnx.graph.axes import sequence_axis

LLAMA = REPOSITORY / "models" / "world-llama"
TEXTS = ["The capital of France is Paris .", "The capital of Germany is"]


@pytest.fixture(scope="module")
def report(shipped):
    return shipped.check_range(TEXTS)


def test_magnitudes_are_those_of_captured_values(shipped, report):
    caches = [shipped.forward(text, HookSpec().capture("*")) for text in TEXTS]
    rows = {row.value: row for row in report.rows if row.what == "value"}
    assert {*rows} >= {str(point) for point in shipped.hook_points() if not point.derived}
    for name in [str(point) for point in shipped.hook_points() if not point.derived]:
        sizes = [np.abs(np.where(cache[name] < -1e30, 0, cache[name])) for cache in caches]
        row = rows[name]
        assert row.largest == max(one.max() for one in sizes), name
        if row.position is not None:
            axis = sequence_axis(shipped.hooked.axes(HookPoint.parse(name)))
            assert np.moveaxis(sizes[row.text], axis, 0)[row.position].max() == row.largest, name
            lines = [np.moveaxis(one, axis, 0).reshape(one.shape[axis], -1).max(1) for one in sizes]
            assert row.least == pytest.approx(min(line.min() for line in lines)), name


def test_sums_of_squares_are_those_that_norms_read(shipped, report):
    cache = shipped.forward(TEXTS[0], HookSpec().capture("blocks.2.hook_resid_mid"))
    squares = np.square(cache["blocks.2.hook_resid_mid"]).sum(-1)
    one = next(row for row in report.rows if (row.value, row.what) == ("blocks.2.hook_resid_mid", "sum of squares"))
    assert one.largest >= squares.max() * (1 - 1e-6)
    assert one.absorbed is False
    assert not report.over()
    assert "nothing overflows" in report.line()


def test_a_planted_overflow_is_named_at_its_hook_point(tmp_path):
    model = planted(LLAMA, tmp_path / "planted", "model.layers.2.mlp.down_proj.weight", 2.0**14)
    report = model.check_range(TEXTS)
    first = report.first
    assert first.value == "blocks.2.mlp.hook_post"
    assert first.largest > 65504
    assert first.token
    # squares are past the limit too, and silent
    assert {row.value for row in report.absorbed} >= {"blocks.3.hook_resid_pre"}
    assert [row.value for row in report.over("bfloat16")] == []
    assert report.massive[0].hook.startswith("blocks.")
    stream = [row.largest for row in report.rows if "hook_resid" in row.value and row.what == "value"]
    assert abs(report.massive[0].value) == max(stream)
    report.save(tmp_path / "report.safetensors")
    assert RangeReport.load(tmp_path / "report.safetensors").to_json() == report.to_json()


def test_partial_sums_bound_products(shipped):
    report = shipped.check_range(TEXTS[0], products=True)
    rows = {(row.value, row.what): row.largest for row in report.rows}
    bounds = [value for value, what in rows if what == "partial sums"]
    assert len(bounds) == 7 * shipped.num_layers + 1
    assert all(rows[value, "partial sums"] >= rows[value, "value"] for value in bounds)


def test_a_wrong_dtype_is_refused(shipped):
    with pytest.raises(InputError, match="float16 or bfloat16; did you mean 'bfloat16'"):
        shipped.check_range(TEXTS, dtype="bfloat6")
