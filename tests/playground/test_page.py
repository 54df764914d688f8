"""The page: each kind of intervention by pointing, and what it shows against Python's `forward`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from nasty import NASTY
from playground_deeds import (
    DEEDS,
    FRANCE,
    cut_an_edge,
    exported,
    steer,
    zero_a_head_by_keyboard,
    zero_attention,
)
from playground_pages import LOGITS, cell, idle, view, visit
from repository import REPOSITORY

from mionnx import AblationResult, HookSpec, MIModel
from mionnx.playground import playground

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

VIEWS = ("lens", "attention", "parts", "steer")


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.slow_beyond(3)
def test_a_deed_by_pointing_is_the_spec_that_python_runs(deed: Any, page: Page, shipped: MIModel, tmp_path: Path):
    deed(page)
    assert page.locator(".entry").count() == 1
    spec = exported(page, tmp_path)
    before, after = (shipped.forward(FRANCE, hooks).output()[0, -1] for hooks in (None, spec))
    assert np.abs(page.evaluate(LOGITS, "before") - before).max() < 1e-4
    assert np.abs(page.evaluate(LOGITS, "after") - after).max() < 1e-4
    assert np.abs(after - before).max() > 1e-2
    divergence = max(0.0, AblationResult(before, after).kl_divergence())
    shown = page.text_content("#kl").removeprefix("< ")
    assert abs(float(shown) - divergence) < 1.1 * 10 ** -len(shown.partition(".")[2])
    lines = page.locator(".next .line").all()
    rows = {line.get_attribute("data-id"): line.locator(".numbers").inner_text() for line in lines}
    for logits in (before, after):
        highest = 100 / np.exp(logits - logits.max()).sum()  # per cent
        written = "100" if highest >= 99.95 else f"{highest:.1f}" if highest >= 10 else f"{highest:.2f}"
        assert f"{written}\u00a0%" in rows[str(logits.argmax())].split("\n")


def test_texts_before_and_after_are_those_of_generate(page: Page, shipped: MIModel, tmp_path: Path):
    """At every change, or when asked; another prompt's text does not stay."""
    page.set_checked("#auto", True)
    page.select_option("#count", "4")
    cut_an_edge(page)
    page.wait_for_selector("#texts:not(.old)")
    page.wait_for_selector("#stop", state="hidden")
    said = [one.inner_text() for one in page.locator("#texts .said").all()]
    for text, spec in zip(said, (None, exported(page, tmp_path)), strict=True):
        assert text.startswith(shipped.generate(FRANCE, spec, max_new_tokens=4).texts[0])
    page.set_checked("#auto", False)
    page.select_option("#count", "100")
    page.fill("#prompt", "zero one two")
    idle(page)
    assert page.locator("#texts").is_hidden()
    page.evaluate("for (const name of ['continue', 'stop']) document.getElementById(name).click()")
    page.wait_for_selector("#stop", state="hidden")
    assert page.locator("#continue").is_enabled()
    assert len(page.locator("#texts .said").first.inner_text().split()) < 10


@pytest.mark.slow
def test_a_page_with_a_spec_begins_with_its_entries(
    headless: Browser, served: Callable[..., str], playground_folder: Path, shipped: MIModel, tmp_path: Path
):
    """All of them on; one switched off; what is downloaded; and the link."""
    context = headless.new_context()
    page = visit(context, served(playground_folder))
    assert page.locator("h1").text_content() == "<b>Capitals</b>"
    whole = HookSpec.load(playground_folder / "spec.safetensors")
    assert page.locator(".entry").count() == len(whole.interventions) > 3
    part = HookSpec()
    for n, one in enumerate(whole.interventions):
        if n != 1:
            part.intervene(*one)
    for spec in (whole, part):
        expected = shipped.forward(FRANCE, spec).output()[0, -1]
        assert np.abs(page.evaluate(LOGITS, "after") - expected).max() < 1e-4
        found = shipped.forward(FRANCE, exported(page, tmp_path)).output()[0, -1]
        assert np.abs(found - expected).max() < 1e-4
        page.locator(".entry input[type=checkbox]").nth(1).uncheck()
        idle(page)
    logits = page.evaluate(LOGITS, "after")
    page.wait_for_timeout(300)  # the address follows
    page.reload()
    assert idle(page).evaluate(LOGITS, "after") == logits
    assert page.troubles == []
    context.close()


def test_an_entry_is_switched_limited_and_removed(page: Page, shipped: MIModel, tmp_path: Path):
    zero_a_head_by_keyboard(page)
    page.select_option(".entry select", "[3]")
    idle(page)
    expected = shipped.forward(FRANCE, exported(page, tmp_path)).output()[0, -1]
    assert np.abs(page.evaluate(LOGITS, "after") - expected).max() < 1e-4
    page.uncheck(".entry input[type=checkbox]")
    idle(page)
    assert page.evaluate("playground.answers.after") is None
    assert page.locator("#kl").count() == 0
    page.check(".entry input[type=checkbox]")
    page.fill("#prompt", "three four")  # the position that it is limited to is gone
    page.wait_for_selector(".entry .wrong")
    idle(page)
    assert "position" in page.locator(".entry .wrong").inner_text()
    page.click("#clear")
    idle(page)
    assert page.locator(".entry").count() == 0


def test_zeroing_each_part_in_turn_measures_its_divergence(page: Page, shipped: MIModel):
    """The first layers at once, the others when asked."""
    page.fill("#prompt", "The capital of Peru is")
    idle(page)
    view(page, "parts")
    page.locator('#view td[aria-label^="head 0 of layer 0"][aria-label*="KL"]').wait_for()
    page.fill("#prompt", FRANCE)
    idle(page)
    page.click("#measure")
    page.get_by_role("button", name="Zero each").wait_for()
    assert "KL 5.384 nats" in cell(page, "head 1 of layer 1").get_attribute("aria-label")
    assert cell(page, "head 0 of layer 1").inner_text() == "0"


def test_a_menu_closes_with_escape_and_the_tip_tells_the_top_tokens(page: Page):
    target = cell(page, "layer 3, position 4 “is”: Paris")
    target.hover()
    assert page.locator("#tip").inner_text().startswith("after layer 3, at 4 “is”")
    target.focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("dialog").count() == 1
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0
    assert page.evaluate("document.activeElement.ariaLabel").startswith("layer 3, position 4")


@pytest.mark.slow_beyond(1)
def test_a_link_replays_what_was_made(page: Page, headless: Browser, address: str):
    steer(page)
    zero_attention(page)
    page.wait_for_timeout(300)  # the address follows
    link, logits, entries = page.url, page.evaluate(LOGITS, "after"), page.evaluate("playground.state.entries")
    assert len(link) < 600
    context = headless.new_context()
    other = visit(context, link)
    assert other.evaluate(LOGITS, "after") == logits
    assert [strip(entry) for entry in other.evaluate("playground.state.entries")] == [strip(entry) for entry in entries]
    assert other.locator(".entry").count() == 2
    assert other.troubles == []
    context.close()


def strip(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if value is not None}


def test_a_lens_of_a_large_vocabulary_reads_some_layers_first(page: Page):
    page.evaluate("playground.engine.manifest.model.choices = 1e6")
    page.fill("#prompt", "The capital of Peru is")
    idle(page)
    rows = page.locator("#view table.lens").first.locator("th.side")
    assert rows.all_inner_texts() == ["layer 3", "layer 1"]
    page.get_by_role("button", name="Show all layers").click()
    idle(page)
    assert rows.all_inner_texts() == ["layer 3", "layer 2", "layer 1", "layer 0"]
    page.evaluate("playground.engine.manifest.model.choices = 471")


PACK = """async (state) => {
  const { writeLink } = await import("./link.js");
  const whole = { prompt: "The", second: "", entries: [], view: "lens", layer: 0, head: 0, ...state };
  return "#" + await writeLink(whole, state.model ?? "world-llama");
}"""
BROKEN: dict[str, Any] = {
    "no link": "#hello",
    "cut off": "#1.q1bKVbJSKs",
    "another version": "#2.q1bKVbJSKs",
    "not compressed": "#1.AAAA",
    "another model": {"model": "gpt-5"},
    "no hook point": {"entries": [{"hook": "blocks.9.hook_mlp_out", "kind": "zero"}]},
    "a glob without an end": {"entries": [{"hook": "[", "kind": "zero"}]},
    "no kind": {"entries": [{"hook": "blocks.1.hook_mlp_out", "kind": "constructor"}]},
    "a kind that does not fit": {"entries": [{"hook": "blocks.1.attn.hook_scores", "kind": "zero"}]},
    "no value": {"entries": [{"hook": "blocks.1.hook_mlp_out", "kind": "add", "value": {"from": "toString"}}]},
    "a head too many": {"entries": [{"hook": "blocks.1.attn.hook_z", "kind": "zero", "heads": [8]}]},
    "a strange field": {"entries": [{"hook": "blocks.1.hook_mlp_out", "kind": "zero", "<img>": 1}]},
    "no list": {"entries": {"length": 3}},
    "a view": {"view": "<script>"},
    "a bomb": {"prompt": "a" * 1_000_000},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_link_is_a_sentence(name: str, page: Page):
    link = BROKEN[name] if isinstance(BROKEN[name], str) else page.evaluate(PACK, BROKEN[name])
    page.evaluate("link => { location.hash = link; }", link)
    said = page.locator('#notices .problem[data-key="link"] span')
    said.wait_for()
    assert "link" in said.inner_text().lower()
    assert said.inner_text().endswith(".")
    assert page.input_value("#prompt") == FRANCE
    page.locator("#notices button").click()


@pytest.mark.slow
def test_gpt2_has_a_page_too(headless: Browser, served: Callable[..., str], tmp_path: Path):
    """Learned positions, biases, tied embeddings: logits and lens before and after a part is zeroed."""
    model = MIModel.from_pretrained(REPOSITORY / "models" / "world-gpt2", threads=1)
    context = headless.new_context()
    page = visit(context, served(playground(model, tmp_path / "site")))
    assert page.input_value("#prompt") == FRANCE
    tops = [model.to_string(int(token)) for token in model.logit_lens(FRANCE).top_ids[:, -1, 0]]
    shown = [cell(page, f"layer {layer}, position 4").inner_text() for layer in range(4)]
    assert shown == tops
    zero_attention(page)
    spec = exported(page, tmp_path)
    for which, hooks in (("before", None), ("after", spec)):
        assert np.abs(page.evaluate(LOGITS, which) - model.forward(FRANCE, hooks).output()[0, -1]).max() < 1e-4
    assert page.troubles == []
    context.close()


@pytest.mark.slow
def test_a_reload_without_network_works(headless: Browser, address: str, shipped: MIModel):
    context = headless.new_context()
    page = visit(context, address)
    page.evaluate("navigator.serviceWorker.ready")
    context.set_offline(True)
    page.reload()
    idle(page)
    zero_attention(page)
    assert np.abs(page.evaluate(LOGITS, "before") - shipped.forward(FRANCE).output()[0, -1]).max() < 1e-4
    assert page.evaluate("playground.answers.after") is not None
    context.close()


def test_the_page_stands_before_the_model_and_a_missing_file_is_a_sentence(headless: Browser, address: str):
    context = headless.new_context(service_workers="block")
    page = context.new_page()
    page.route("**/model/**", lambda route: route.abort())
    page.goto(address)
    assert page.locator("#prompt").is_visible()  # before anything of the model came
    page.get_by_role("heading", name="The model did not open").wait_for()
    assert page.locator("#loading-text").inner_text().endswith(".")
    assert page.get_by_role("button", name="Try again").is_visible()
    context.close()


def test_a_file_without_a_server_says_how_to_open_it(headless: Browser, lessons_folder: Path):
    page = headless.new_page()
    page.goto((lessons_folder / "index.html").as_uri())
    assert "python -m http.server" in page.inner_text("#loading-text")
    page.close()


CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgb = (layers) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of layers) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const found = [];
  let seen = 0;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest(":disabled, .visually-hidden, .skip, .cut")) continue;
    const layers = [];
    seen++;
    for (let at = element; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
    const ground = light(rgb(layers)), ink = light(rgb([...layers, getComputedStyle(element).color]));
    const ratio = (Math.max(ground, ink) + 0.05) / (Math.min(ground, ink) + 0.05);
    if (ratio < 4.5) found.push([element.className, element.textContent.slice(0, 30), ratio]);
  }
  return seen > 60 ? found : ["too few texts", seen];
}"""


@pytest.mark.slow
def test_texts_stand_out_and_a_phone_scrolls_only_downwards(headless: Browser, address: str):
    """In both schemes of colours, in every view; then with the colours that the reader chooses, which are kept."""
    context = headless.new_context(viewport={"width": 360, "height": 740}, has_touch=True)
    page = visit(context, address)
    page.locator("#lesson-list button").nth(1).click()
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        for name in VIEWS:
            view(page, name)
            assert page.evaluate("document.documentElement.scrollWidth") == 360, (scheme, name)
            assert page.evaluate(CONTRASTS) == [], (scheme, name)
    view(page, "lens")
    cell(page, "layer 1, position 3").first.tap()
    assert page.evaluate(CONTRASTS) == []
    page.keyboard.press("Escape")
    ground = page.evaluate(GROUND)
    page.click("#theme")
    assert page.evaluate(GROUND) != ground
    page.reload()
    assert page.evaluate(GROUND) != ground
    assert page.troubles == []
    context.close()


GROUND = "getComputedStyle(document.body).backgroundColor"

ELSEWHERE = """new Promise((done) => {
  addEventListener("securitypolicyviolation", ({ effectiveDirective }) => done(effectiveDirective));
  fetch("https://example.com/").catch(() => null);
})"""
HOSTILE = """(text) => {
  const { engine } = playground, run = engine.run.bind(engine);
  engine.tokenText = () => text;
  engine.run = async (asked) => {
    const found = await run(asked), at = found.lens?.at;
    found.next.forEach((one) => { one.text = text; });
    if (at) found.lens.at = (...place) => at(...place).map((one) => ({ ...one, text }));
    return found;
  };
}"""


@pytest.mark.slow
def test_tokens_titles_lessons_and_links_never_become_markup(
    headless: Browser, lessons_folder: Path, served: Callable[..., str], tmp_path: Path
):
    folder = Path(shutil.copytree(lessons_folder, tmp_path / "site"))
    lesson = {"name": NASTY, "text": f"{NASTY}\n\n{NASTY}", "prompt": NASTY, "second": NASTY, "view": "lens"}
    lesson["interventions"] = [{"hook": "blocks.1.attn.hook_z", "kind": "zero", "label": NASTY}]
    (folder / "examples.json").write_text(json.dumps({"examples": [lesson]}))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"title": NASTY}))
    context = headless.new_context()
    page = visit(context, served(folder))
    page.evaluate(HOSTILE, NASTY)
    page.fill("#prompt", "The capital of France is")
    idle(page)
    for name in VIEWS:
        view(page, name)
    view(page, "lens")
    page.locator("#view td[role]").first.hover()
    page.locator("#view td[role]").first.click()
    page.keyboard.press("Escape")
    page.click("#continue")
    page.wait_for_selector("#stop", state="hidden")
    page.wait_for_timeout(300)
    page.reload()  # by the link, which holds the label and the prompts
    idle(page)
    assert page.locator("h1").text_content() == NASTY
    assert page.locator("#lesson-list button").text_content() == f"1. {NASTY}"
    assert page.locator(".entry .what").text_content() == NASTY
    assert page.locator("img").count() == 1  # the sign beside the title
    assert page.locator("script").count() == 2
    assert page.troubles == []
    assert page.evaluate(ELSEWHERE) == "connect-src"  # the page calls nobody, whatever it is made to say
    context.close()
