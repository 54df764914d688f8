"""Heat maps on pages and in pictures: numbers in the cells, the window's width, nothing that is -0.00."""

import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

import mionnx
from mionnx.analysis.attention.head_scores import HeadScores
from mionnx.analysis.lens.lens_result import LensResult
from mionnx.analysis.lens.readout import Readout
from mionnx.analysis.sweep.result import SweepResult
from mionnx.view.figure import empty_figure, write_numbers

TEMPLATES = Path(mionnx.__file__).parent / "view" / "templates"
ZERO = re.compile(r"[-\u2212]0(\.0+)?(?![\d.])")


def sweep(columns: int, corrupted: float | None = -9.0) -> SweepResult:
    """Four layers; the effect is in the last column, and elsewhere a little below none."""
    values = np.full((4, columns), -9.0001 if corrupted is not None else 10.9999)
    values[2, -1] = 11.0 if corrupted is not None else 3.0
    labels = {"layer": list("0123"), "position": [f"token{i}" for i in range(columns)]}
    direction = "ablation" if corrupted is None else "denoising"
    return SweepResult(
        values, values[None], ("layer", "position"), labels, 11.0, corrupted, direction, "logit_diff",
        "blocks.{i}.hook_resid_mid", "Patching", "one into the other",
    )  # fmt: skip


def lens(positions: int, points: int = 4) -> LensResult:
    """Token 7 everywhere, with a probability that ascends."""
    shape = (points, positions)
    top = np.log(np.linspace(0.1, 0.9, points * positions).reshape(*shape, 1)).astype(np.float32)
    ids = np.full((*shape, 1), 7)
    readout = Readout(top, ids, top, np.zeros((*shape, 1), np.int64), -1e-9 * np.ones(shape, np.float32), top[..., 0])
    names = [f"blocks.{i}.hook_resid_post" for i in range(points)]
    tokens = [f"t{i}" for i in range(positions)]
    return LensResult(names, [*range(positions)], tokens, readout, ids[0, :, 0], [], str, int, lambda chosen: readout)


@pytest.mark.parametrize(("columns", "number"), [(5, True), (16, True), (120, False)])
def test_cells_of_a_sweep_hold_numbers_and_fill_the_window(chromium, tmp_path, columns, number):
    page = chromium(sweep(columns).save(tmp_path / "sweep.html"))
    page.set_viewport_size({"width": 1400, "height": 800})
    cells = page.locator("table.heat td")
    assert cells.count() == 4 * columns
    wide = page.evaluate("document.querySelector('table.heat').getBoundingClientRect().width")
    assert wide > 0.7 * 1400 or columns == 120
    texts = cells.all_inner_texts()
    assert (texts[3 * columns - 1], texts[0]) == (("1.00", "0.00") if number else ("", ""))
    assert page.locator("input").is_checked() == number
    page.locator("input").set_checked(True)
    texts = cells.all_inner_texts()
    assert texts[3 * columns - 1] == "1.00"
    assert [text for text in texts if ZERO.search(text)] == []
    assert page.evaluate("[...document.querySelectorAll('td')].every((one) => one.scrollWidth <= one.clientWidth)")
    assert page.troubles == []


@pytest.mark.parametrize("corrupted", [-9.0, None])
def test_a_page_says_what_its_numbers_mean(chromium, tmp_path, corrupted):
    found = sweep(3, corrupted)
    said = chromium(found.save(tmp_path / "sweep.html")).locator("#meaning").inner_text()
    assert said == found.meaning
    told = "1: the clean run's value at this cell alone restores the whole difference (logit_diff goes from -9 to 11)"
    assert said.startswith(told if corrupted else "A number is the change of logit_diff by this cell alone")


def test_the_other_direction_means_the_other_run():
    found = sweep(3)
    found.patching = "noising"
    assert found.meaning.startswith("1: the corrupted run's value at this cell alone brings about the whole")
    assert "(logit_diff goes from 11 to -9)" in found.meaning


def written(figure) -> list[str]:
    """The numbers in the cells of a figure."""
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_pictures_of_sweeps_and_heads_hold_numbers():
    numbers = written(sweep(5).figure())
    assert len(numbers) == 20
    assert {*numbers} == {"0.00", "1.00"}
    assert written(sweep(60).figure()) == []
    scores = HeadScores(("induction",), np.linspace(0, 1, 32).reshape(1, 4, 8), 0.03, 24, 8, "model")
    assert written(scores.figure())[::31] == ["0.00", "1.00"]
    assert written(HeadScores(("induction",), np.zeros((1, 32, 32)), 0.03, 24, 8, "model").figure()) == []


def test_cells_of_heads_hold_numbers(chromium, tmp_path):
    scores = HeadScores(("induction",), np.linspace(0, 1, 32).reshape(1, 4, 8), 0.03, 24, 8, "model")
    page = chromium(scores.save(tmp_path / "heads.html"))
    assert page.locator("table.heat td").all_inner_texts()[::31] == ["0.00", "1.00"]


@given(st.floats(-1e6, 1e6, allow_subnormal=True), st.floats(1e-9, 1e6))
def test_no_number_in_a_picture_is_a_negative_zero(value, limit):
    figure = empty_figure(2, 2)
    axes = figure.subplots()
    write_numbers(axes, np.array([[value]]), limit)
    assert ZERO.search(written(figure)[0]) is None


def test_no_number_on_a_page_is_a_negative_zero(chromium, tmp_path):
    page = chromium(sweep(3).save(tmp_path / "sweep.html"))
    numbers = [-0.0, -1e-12, -0.001, -0.004, -0.4, -3e-5]
    texts = page.evaluate(
        "(all) => all.flatMap((one) => [fixed(one, 2), fixed(one, 0), spelled(one), brief(one, 1), brief(one, 0), "
        "brief(one, 1e-3)])",
        numbers,
    )
    assert [text for text in texts if ZERO.fullmatch(text)] == []
    assert page.evaluate("[fixed(-0.006, 2), fixed(null, 2), brief(0.1234, 1), brief(-0.01234, 0.02)]") == [
        "-0.01", "\u2013", "0.12", "-0.012"
    ]  # fmt: skip


def test_templates_have_one_format_of_fractions():
    """`toFixed` gives "-0.00": pages call `fixed`; coordinates of drawings are no numbers that anybody reads."""
    for file in TEMPLATES.iterdir():
        calls = [
            line
            for line in file.read_text().splitlines()
            if ".toFixed(" in line and "map((x) => x.toFixed(1))" not in line
        ]
        assert len(calls) == (2 if file.name == "page.js" else 0), file.name


def test_the_lens_of_a_long_text_opens_where_its_chart_points(chromium, tmp_path):
    page = chromium(lens(112).save(tmp_path / "lens.html"))
    assert page.locator("h2:visible").inner_text().startswith("Position 111")
    chosen = page.locator("th.chosen").bounding_box()
    assert 0 <= chosen["x"] <= 1200 - chosen["width"]
    assert page.evaluate("scrollY") == 0
    assert page.troubles == []


@pytest.mark.parametrize("positions", [1, 5, 30, 31, 112, 240])
def test_a_picture_of_a_lens_has_at_most_30_tokens_a_row(positions):
    figure = lens(positions).figure()
    panels = [axes for axes in figure.axes if axes.images and axes.texts]
    assert len(panels) == -(-positions // 30)
    assert sum(len(axes.texts) for axes in panels) == 4 * positions
    assert max(axes.images[0].get_array().shape[1] for axes in panels) <= 30
    assert figure.get_size_inches()[0] <= 31
    labels = [label.get_text() for axes in panels for label in axes.get_xticklabels()]
    assert labels == [f"t{i}\n{i}" for i in range(positions)]


@pytest.mark.parametrize("positions", [241, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_picture_of_a_very_long_text_stays_a_picture(positions):
    picture = imread(BytesIO(lens(positions, points=8)._png()))
    assert max(picture.shape[:2]) < 6000
    assert min(picture.shape[:2]) > 200
