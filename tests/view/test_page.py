"""What all pages and pictures have in common."""

import json
from io import BytesIO

import numpy as np
import pytest
from matplotlib.image import imread
from nasty import NASTY

from mionnx.errors import SpecFileError
from mionnx.view import Lines, Series, Shown, Text, View


class Result(Shown):
    """The smallest result there can be."""

    def view(self) -> View:
        line = Lines([0, 1], [Series(NASTY, [0.5, np.nan])], NASTY, NASTY)
        return View(NASTY, [line, Text([NASTY, "$"], [np.array([1 / 3, np.nan], np.float32)], 1.0)], about=NASTY + "$")

    def _columns(self):
        return self.to_dict()

    def to_dict(self):
        return {"token": NASTY, "values": np.array([1.0, np.nan, -np.inf, 1 / 3], np.float32)}


def test_a_page_runs_offline_and_executes_nothing_that_a_token_says(chromium, tmp_path):
    page = chromium(Result().save(tmp_path / "page.html"))
    assert page.troubles == []
    assert page.locator("h1").text_content() == NASTY
    assert page.locator("img").count() == 0
    assert page.locator(".text span").first.text_content() == NASTY
    assert page.evaluate("data.panels[1].scores") == [[0.33333, None]]
    assert page.evaluate("data.panels[0].series[0].values") == [0.5, None]
    assert page.evaluate("[visible(' '), visible('a\\n'), spelled(0.00012345), spelled(null)]") == [
        "␣", "a⏎", "1.23e-4", "\u2013"
    ]  # fmt: skip


def test_a_notebook_shows_the_page_in_a_frame(chromium, tmp_path):
    (tmp_path / "notebook.html").write_text(f"<meta charset=utf-8>{Result()._repr_html_()}")
    page = chromium(tmp_path / "notebook.html")
    assert page.frames[1].locator("h1").text_content() == NASTY
    assert [trouble for trouble in page.troubles if "srcdoc" not in trouble] == []


def test_a_picture_and_json_are_saved(tmp_path):
    picture = imread(BytesIO(Result().save(tmp_path / "a.png").read_bytes()))
    assert min(picture.shape[:2]) > 400
    assert np.unique(picture).size > 2
    saved = json.loads(Result().save(tmp_path / "a.json").read_text())
    assert saved == {"token": NASTY, "values": [1.0, None, None, float(np.float32(1 / 3))]}


@pytest.mark.parametrize("name", ["a.pdf", "a", "missing/a.png"])
def test_another_ending_or_folder_is_an_error(tmp_path, name):
    with pytest.raises(SpecFileError, match=r"saved as|cannot write"):
        Result().save(tmp_path / name)
