"""Playgrounds of models that read texts whole: the graph, the rules beside Python, and pages in headless Chromium."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pytest
from playground_cases import random_case
from playground_deeds import exported
from playground_pages import LOGITS, cell, choose, idle, view, visit
from playground_rules import Rules
from repository import REPOSITORY

from mionnx import (
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    KnockoutSpec,
    MIModel,
    ModelError,
    create_knockout_mask,
)
from mionnx.playground import playground
from mionnx.playground.graph import build_graph
from mionnx.playground.reading import pair_of, reading_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from playwright.sync_api import Browser, Page

HEADS = ("masked_lm", "classes", "token_classes", "embedding")
SHORT, TEXT, OTHERS = (
    "capital of france",
    "the man plays a guitar on stage .",
    "someone performs music\nit rains in rome",
)
FRANCE, GERMANY = "The capital of France is <mask> .", "The capital of Germany is <mask> ."


@pytest.fixture(scope="module")
def bert() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-bert", threads=1)


def run_graph(model: MIModel, text: str, changes: dict[str, np.ndarray]) -> np.ndarray:
    """The main output of the whole text; slots that are not among the changes are neutral."""
    graph, ids = build_graph(model.hooked, HookSpec()), np.array([model.tokenize(text).ids])
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.hooked.folder))
    session, count = onnxruntime.InferenceSession(graph.model, options), ids.shape[1]
    feeds: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
    }
    feeds |= {"position_ids": np.arange(count)[None], "mionnx.rows.whole": np.arange(count)}
    feeds |= {"mionnx.rows": (model.num_layers - 1) * count + np.arange(count)}
    feeds |= {"mionnx.rows.k": np.array([1]), "mionnx.rows.tracked": np.array([0])}
    for site in graph.sites.values():
        names = [name for _, inputs in site.slots for name in inputs]
        feeds |= {name: np.full((1,) * len(site.axes), ".scale." in name, np.float32) for name in names}
    known, feeds = {entry.name for entry in session.get_inputs()}, feeds | changes
    given = {name: value for name, value in feeds.items() if name in known}
    return session.run(["logits"], given)[0]


@pytest.mark.parametrize("head", HEADS)
def test_left_alone_it_is_the_model_and_a_slot_changes_it(head: str, text_encoder):
    model, _ = text_encoder(head)
    hook = str(HookPoint.AttnOut(0))
    spec = HookSpec().intervene(hook, Intervention.Scale(0.5))
    ((_, (scale, _add)),) = build_graph(model.hooked, HookSpec()).sites[hook].slots
    half = {scale: np.full((1, 1, 1), 0.5, np.float32)}
    for changes, hooks in (({}, None), (half, spec)):
        expected = model.forward(TEXT, hooks).output()
        assert np.abs(run_graph(model, TEXT, changes) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["world-bert", "classes"])
@pytest.mark.slow_beyond(1)
def test_random_entries_mean_the_same_in_python_and_on_the_page(
    name: str, bert: MIModel, text_encoder, modules: Path, tmp_path: Path
):
    """Edges to later keys, and of a classifier what its head does not read, refused by both or the same logits."""
    model, prompt = (bert, "The capital of France is") if name == "world-bert" else (text_encoder(name)[0], SHORT)
    rules, chance = Rules(model, modules, HookSpec(), prompt), Random(7)
    cases = {str(n): random_case(chance, [*rules.graph.sites], model.num_heads, True) for n in range(60)}
    found = rules.compare(cases, tmp_path)
    assert {said: cases[name] for name, said in found.items() if said not in ("equal", "both refuse")} == {}
    assert [*found.values()].count("equal") > 15
    assert [*found.values()].count("both refuse") > 3


def test_what_a_page_cannot_show_is_refused(bert: MIModel, text_encoder, tmp_path: Path):
    for head, says in (("span", "has the head 'span'"), ("none", "has no head")):
        with pytest.raises(ModelError, match=says):
            build_graph(text_encoder(head)[0].hooked, HookSpec())
    path = tmp_path / "examples.json"
    for field, says in (('"generate": 4', "generate has no meaning"), ('"view": "stream"', "no view 'stream'")):
        path.write_text(f'{{"examples": [{{"name": "a", "prompt": "The <mask>", {field}}}]}}')
        with pytest.raises(InputError, match=says):
            playground(bert, tmp_path / "site", examples=path)


def test_a_pair_is_one_text_with_its_separator_in_it(text_encoder, bert: MIModel):
    model, _ = text_encoder("classes")
    assert pair_of(model) == {"between": "[SEP]", "ids": [3]}
    pair = model.tokenize("where does ann live", "rome")
    assert [*pair.ids] == model.tokenizer.encode("where does ann live [SEP] rome").ids
    assert pair_of(bert) is None
    assert reading_of(bert)["mask"] == {"id": 471, "text": "<mask>"}


def test_lessons_of_world_bert_show_what_their_texts_say(bert: MIModel):
    """The lens at the mask, what its heads read, the edge, and the three patches."""
    lessons = json.loads((REPOSITORY / "mionnx/playground/examples/world-bert.json").read_text())["examples"]
    text, second = lessons[2]["prompt"], lessons[2]["second"]
    tops = [bert.to_string(int(token)) for token in bert.logit_lens(text).top_ids[:, 3, 0]]
    assert tops == ["Canada", "Japan", "Japan", "Japan"]
    patterns = bert.forward(text, HookSpec().capture(HookPoint.AttnPattern(3)))["pattern", 3][0]
    assert patterns[:, 3, 5].min() > 0.985
    mask = create_knockout_mask(KnockoutSpec().edge(3, 5), 4, 7, both=True)
    cuts = [HookSpec().intervene(entry["hook"], Intervention.Knockout(mask)) for entry in lessons[1]["interventions"]]
    assert [bert.fill_mask(text, 1, hooks).top[0] for hooks in cuts] == ["Romania", "Japan"]
    assert bert.fill_mask(text, 1, cuts[0]).probabilities[0, 0] < 0.6
    other = bert.forward(second, HookSpec().capture("blocks.*.hook_resid_post"))
    found = []
    for entry in lessons[2]["interventions"]:
        assert entry["positions"] == entry["value"]["positions"]
        patch = Intervention.Replace(other[entry["hook"]][:, entry["positions"]], positions=entry["positions"])
        found.append(bert.fill_mask(text, 1, HookSpec().intervene(entry["hook"], patch)).top[0])
    assert found == ["Spain", "Japan", "Spain"]


@pytest.fixture
def open_page(headless: Browser, served: Callable[..., str], tmp_path: Path):
    """Model -> its page, open."""
    contexts = []

    def opened(model: MIModel) -> Page:
        contexts.append(headless.new_context(viewport={"width": 1280, "height": 900}))
        return visit(contexts[-1], served(playground(model, tmp_path / f"site{len(contexts)}")))

    yield opened
    for context in contexts:
        context.close()


def shown(page: Page) -> dict[str, str]:
    """Choice -> its numbers on the card, before and after."""
    lines = page.locator(".next .line").all()
    return {
        line.locator(".token").get_attribute("title").strip(): line.locator(".numbers").inner_text() for line in lines
    }


@pytest.mark.slow_beyond(1)
def test_a_page_fills_masks_from_both_sides(open_page, bert: MIModel, tmp_path: Path):
    """The token at the mask, an edge to a later key, the lens at the mask, another place, the exported spec."""
    page = open_page(bert)
    page.fill("#prompt", "The capital of <mask> is Tokyo .")
    idle(page)
    text = "The capital of <mask> is Tokyo ."
    assert np.abs(page.evaluate(LOGITS, "before") - bert.forward(text).output()[0, 3]).max() < 1e-4
    assert next(iter(shown(page))) == bert.fill_mask(text).top[0] == "Japan"
    tops = [bert.to_string(int(token)) for token in bert.logit_lens(text).top_ids[:, 3, 0]]
    assert [cell(page, f"layer {layer}, position 3").first.inner_text() for layer in range(4)] == tops
    assert page.locator("#writing").is_hidden()
    view(page, "attention")
    cell(page, "layer 1, head 0").click()
    choose(page, "3 “<mask>” reads 5 “Tokyo”", "Cut it in every layer")
    mask = create_knockout_mask(KnockoutSpec().edge(3, 5), 4, 7, both=True)
    spec = HookSpec().intervene("blocks.*.attn.hook_scores", Intervention.Knockout(mask))
    cut = bert.forward(text, spec).output()[0, 3]
    assert np.abs(page.evaluate(LOGITS, "after") - cut).max() < 1e-4
    assert np.abs(bert.forward(text, exported(page, tmp_path)).output()[0, 3] - cut).max() < 1e-4
    assert bert.to_string(int(cut.argmax())) in shown(page)
    page.click('#tokens button[data-place="5"]')
    idle(page)
    assert np.abs(page.evaluate(LOGITS, "before") - bert.forward(text).output()[0, 5]).max() < 1e-4
    link = page.url
    page.fill("#prompt", "The capital of France is")
    idle(page)
    assert "has no mask" in page.locator('#notices [data-key="mask"]').inner_text()
    page.wait_for_timeout(300)  # the address follows
    page.goto(link)
    idle(page)
    assert page.locator('#tokens button[aria-pressed="true"]').get_attribute("data-place") == "5"
    assert page.troubles == []


@pytest.mark.slow
def test_a_page_of_a_classifier_tells_labels_and_patches_cells(open_page, text_encoder):
    model, _ = text_encoder("classes")
    page = open_page(model)
    page.fill("#prompt", TEXT)
    idle(page)
    told = model.classify(TEXT)
    assert {*shown(page)} == {*model.hooked.metadata.labels} == {*told.choices[0]}
    assert page.locator("#tab-lens").count() == 0
    page.fill("#second", TEXT.replace("man", "woman"))
    idle(page)
    page.click("#measure-stream")
    page.wait_for_selector("#measure-stream:has-text('Patch each cell')")
    choose(page, "layer 0, position 2", "Patch with 2 “woman” of the second text")
    other = model.forward(TEXT.replace("man", "woman"), HookSpec().capture("blocks.0.hook_resid_post"))["resid_post", 0]
    patch = HookSpec().intervene("blocks.0.hook_resid_post", Intervention.Replace(other[:, [2]], positions=2))
    assert np.abs(page.evaluate(LOGITS, "after") - model.forward(TEXT, patch).output()[0]).max() < 1e-5
    first, second = "where does ann live", "ann lives in rome now"
    page.fill("#prompt", f"{first} [SEP] {second}")
    page.click("#clear")
    idle(page)
    assert np.abs(page.evaluate(LOGITS, "before") - model.forward([(first, second)]).output()[0]).max() < 1e-5
    assert page.troubles == []


@pytest.mark.slow
def test_a_page_of_an_embedding_model_compares_texts(open_page, text_encoder, tmp_path: Path):
    model, _ = text_encoder("embedding")
    page = open_page(model)
    page.fill("#prompt", TEXT)
    page.fill("#compare", OTHERS)
    idle(page)
    others = OTHERS.split("\n")
    expected = model.similarity(TEXT, others)[0]
    found = shown(page)
    assert [float(found[text]) for text in others] == pytest.approx(expected, abs=6e-4)
    view(page, "parts")
    choose(page, "attention of layer 0", "Zero it")
    spec = exported(page, tmp_path)
    changed = model.similarity(model.embed(TEXT, spec), others)[0]
    assert [float(shown(page)[text].split("\n")[1]) for text in others] == pytest.approx(changed, abs=6e-4)
    assert float(page.text_content("#kl")) == pytest.approx(np.abs(changed - expected).max(), abs=1e-3)
    assert page.troubles == []


@pytest.mark.slow
def test_a_page_of_a_tagger_tells_the_tags_of_a_token(open_page, text_encoder):
    model, _ = text_encoder("token_classes")
    page = open_page(model)
    page.fill("#prompt", TEXT)
    idle(page)
    logits = model.forward(TEXT).output()[0]
    assert np.abs(page.evaluate(LOGITS, "before") - logits[1]).max() < 1e-5
    page.click('#tokens button[data-place="2"]')
    idle(page)
    assert np.abs(page.evaluate(LOGITS, "before") - logits[2]).max() < 1e-5
    assert {*shown(page)} == {*model.hooked.metadata.labels}
    assert cell(page, "layer 1, position 2").inner_text() == model.hooked.metadata.labels[int(logits[2].argmax())]
    assert page.troubles == []
