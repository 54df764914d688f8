"""A lens in the model's folder is one that the page reads layers by: the numbers are those of `logit_lens`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from playground_pages import idle, visit
from repository import REPOSITORY

from mionnx import JacobianLens, MIModel
from mionnx.errors import InputError, RuntimeMissingError
from mionnx.playground import playground

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser, Page

PROMPT, SECOND = "The capital of France is", "The capital of Germany is"
SAID = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def lens() -> JacobianLens:
    """A tuned lens: it reads the stream before a layer, has biases, and lacks a layer."""
    random, eye = np.random.default_rng(5), np.eye(128)
    maps = {layer: eye + random.normal(size=(128, 128)) * 0.08 for layer in (0, 2, 3)}
    biases = {layer: random.normal(size=128) * 0.2 for layer in maps}
    return JacobianLens(maps, biases=biases, reads="resid_pre", n_prompts=7, metadata={"estimator": "tuned_lens"})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, lens: JacobianLens) -> Path:
    folder = tmp_path_factory.mktemp("lens")
    shutil.copytree(REPOSITORY / "models" / "world-llama", folder / "world-llama")
    lens.save(folder / "world-llama" / "lens.safetensors")
    try:
        return playground(MIModel.from_pretrained(folder / "world-llama"), folder / "site")
    except RuntimeMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def visited(headless: Browser, served: Callable[..., str], site: Path) -> Page:
    page = visit(headless.new_context(viewport={"width": 1280, "height": 900}), served(site))
    page.fill("#prompt", PROMPT)
    return idle(page)


def by_lens(page: Page, text: str, entries: list[dict] | None = None) -> dict:
    return page.evaluate(
        """async ([text, interventions]) => {
          const { engine } = playground, tokens = await engine.encode(text);
          const found = await engine.run({ tokens, interventions, want: { lens: true, mapped: true, top: 5 } });
          return { layers: found.lens.layers, ids: [...found.lens.ids], probabilities: [...found.lens.probabilities] };
        }""",
        [text, entries or []],
    )


def test_the_engine_reads_by_it_what_logit_lens_reads(visited: Page, shipped: MIModel, lens: JacobianLens):
    found = by_lens(visited, PROMPT)
    assert found["layers"] == [1, 2, 3]  # behind 1 and 2, which is before 2 and 3; and the last as it is
    mapped, plain = (shipped.logit_lens(PROMPT, lens=one, k=5) for one in (lens, None))
    tops, ids = (
        np.concatenate([getattr(mapped, name)[1:], getattr(plain, name)[-1:]]) for name in ("top_probs", "top_ids")
    )
    assert (np.array(found["ids"]).reshape(ids.shape) == ids).all()
    chances = np.array(found["probabilities"]).reshape(ids.shape)
    assert np.abs(chances - tops).max() < 1e-5
    assert (plain.top_ids[[1, 2]] != ids[:2]).any()
    # An intervention reaches it: the stream is zero there, and what is left is the bias.
    zeroed = {"hook": SAID, "kind": "zero", "positions": None, "heads": None, "rows": None}
    one = np.array(by_lens(visited, PROMPT, [zeroed])["ids"]).reshape(ids.shape)[0]
    assert (one == one[0]).all()


@pytest.mark.slow
def test_the_page_switches_between_the_two_and_a_link_says_which(
    visited: Page, headless: Browser, shipped: MIModel, lens: JacobianLens
):
    switch = visited.get_by_role("group", name="Read each layer by the")
    assert switch.get_by_role("button").all_inner_texts() == ["Logit lens", "Tuned lens"]
    rows, table = "th.side", visited.locator("#view table.lens").first
    assert table.locator(rows).all_inner_texts() == ["layer 3", "layer 2", "layer 1", "layer 0"]
    switch.get_by_role("button", name="Tuned lens").click()
    visited.fill("#second", SECOND)
    idle(visited)
    assert table.locator(rows).all_inner_texts() == ["layer 3", "layer 2", "layer 1"]
    second = visited.locator("#view table.lens").nth(1)
    for shown, text in ((table, PROMPT), (second, SECOND)):
        mapped, plain = (shipped.logit_lens(text, lens=one).top_ids[..., 0] for one in (lens, None))
        ids = np.stack([plain[3], mapped[2], mapped[1]])
        words = [shipped.to_string(int(token)).strip() for token in ids.ravel()]
        assert [one.strip() for one in shown.locator("td").all_inner_texts()] == words
    assert "7 texts" in visited.locator("#view p").first.inner_text()
    visited.wait_for_function("location.hash.length > 3")
    other = visit(headless.new_context(), visited.url)
    assert other.get_by_role("button", name="Tuned lens").get_attribute("aria-pressed") == "true"
    switch.get_by_role("button", name="Logit lens").click()
    idle(visited)
    assert table.locator(rows).count() == 4
    assert (visited.troubles, other.troubles) == ([], [])


def test_the_lens_of_another_model_is_refused(shipped: MIModel, lens: JacobianLens, copy: Path, tmp_path: Path):
    other = JacobianLens({0: np.eye(64)})
    with pytest.raises(InputError, match="width 64"):
        playground(shipped, tmp_path / "site", lens=other)
    other.save(copy / "lens.safetensors")
    with pytest.raises(InputError, match="width 64"):
        playground(MIModel.from_pretrained(copy), tmp_path / "site")
    assert not (tmp_path / "site").exists()
