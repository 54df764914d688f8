"""The prepared examples of the small Llama: what their texts claim, on the page and in Python."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from playground_pages import LOGITS, idle
from repository import REPOSITORY

from mionnx import HookPoint, HookSpec, Intervention, KnockoutSpec, MIModel, create_knockout_mask
from mionnx.errors import InputError
from mionnx.playground import playground

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

LESSONS = json.loads((REPOSITORY / "mionnx/playground/examples/world-llama.json").read_text())["examples"]
# Lesson -> the entries that are switched on, and the top token that its text promises.
CLAIMS = {
    "Where the answer appears": [((), "Paris")],
    "Two places, one fact": [((0,), "Berlin"), ((1,), "Paris"), ((2,), "Berlin")],
    "Cut the edge": [((0,), "Lisbon"), ((1,), "Paris")],
    "A head without a stand-in": [((), "Paris"), ((0,), "Beirut")],
    "Who receives the ring": [((0,), "governed"), ((), "Felix")],
    "What came before comes again": [((0, 1), "."), ((0,), "."), ((1,), "to"), ((), "wide")],
    "The way from France to Germany": [((0,), "Berlin"), ((), "Paris")],
    "Up or down?": [((0,), "41"), ((), "39")],
}
EXPORT = """async (on) => {
  const chosen = playground.state.entries.filter((_, i) => on.includes(i));
  const interventions = chosen.map((entry) => ({ ...entry, on: true }));
  return Array.from(await playground.engine.exportSpec({ tokens: playground.answers.tokens, interventions }));
}"""


def test_every_lesson_has_its_claims():
    assert [lesson["name"] for lesson in LESSONS] == [*CLAIMS]


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.slow_beyond(4)
def test_a_lesson_shows_what_its_text_says(name: str, opened: Page, shipped: MIModel, tmp_path: Path):
    number = [*CLAIMS].index(name)
    opened.locator("#lesson-list button").nth(number).click()
    idle(opened)
    prompt, path = LESSONS[number]["prompt"], tmp_path / "spec.safetensors"
    begins = tuple(i for i, entry in enumerate(LESSONS[number].get("interventions", [])) if entry.get("on", True))
    for on, answer in CLAIMS[name]:
        path.write_bytes(bytes(opened.evaluate(EXPORT, list(on))))
        logits = shipped.forward(prompt, HookSpec.load(path) if on else None).output()[0, -1]
        assert shipped.to_string(int(logits.argmax())) == answer, on
        if on == begins:
            shown = opened.evaluate(LOGITS, "after" if on else "before")
            assert np.abs(shown - logits).max() < 1e-4


def chances(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


def patterns(model: MIModel, prompt: str, layer: int) -> np.ndarray:
    return model.forward(prompt, HookSpec().capture(HookPoint.AttnPattern(layer)))["pattern", layer][0]


def test_numbers_in_the_texts_are_the_models(shipped: MIModel):
    """Reading of heads, the lens's column, one head that is not enough, doses of the direction."""
    france, ring, again = (LESSONS[n]["prompt"] for n in (0, 4, 5))
    reads = patterns(shipped, france, 2)[:, 4, 3]
    assert (reads > 0.875).sum() == 5
    lens = [shipped.to_string(int(shipped.logit_lens(france).top_ids[layer, -1, 0])) for layer in range(4)]
    assert lens == ["governed", "Canberra", "Beirut", "Paris"]
    for head in range(8):
        mask = create_knockout_mask(KnockoutSpec().head(head).edge(4, 3), 8, 5)
        spec = HookSpec().intervene(HookPoint.AttnScores(2), Intervention.Knockout(mask))
        assert chances(shipped.forward(france, spec).output()[0, -1]).max() > 0.9
    alone = HookSpec().intervene(HookPoint.AttnZ(1), Intervention.Zero(heads=1))
    assert chances(shipped.forward(france, alone).output()[0, -1]).max() < 0.01
    assert patterns(shipped, france, 1)[1, [3, 4], 2].min() > 0.98
    assert round(float(patterns(shipped, ring, 3)[1, -1, 3]), 2) == 0.98
    assert patterns(shipped, again, 3)[:2, -1, 4].min() > 0.89
    ways = [
        shipped.forward(text, HookSpec().capture(HookPoint.ResidPost(1)))["resid_post", 1][0, -1]
        for text in ("The capital of Germany", "The capital of France")
    ]
    found = {}
    for dose in (-1, 0.5, 1, 5):
        add = Intervention.Add((dose * (ways[0] - ways[1])).astype(np.float32), positions=3)
        logits = shipped.forward(france, HookSpec().intervene(HookPoint.ResidPost(1), add)).output()[0, -1]
        found[dose] = shipped.to_string(int(logits.argmax()))
    assert found == {-1: "Abuja", 0.5: "Paris", 1: "Berlin", 5: "Lima"}


@pytest.mark.parametrize(("field", "value", "said"), [("view", "map", "one of lens"), ("head", 8, "head 8 of 8")])
def test_a_lesson_of_another_form_is_refused(field: str, value: Any, said: str, shipped: MIModel, tmp_path: Path):
    path = tmp_path / "examples.json"
    path.write_text(json.dumps({"examples": [{"name": "a", "prompt": "The", field: value}]}))
    with pytest.raises(InputError, match=said):
        playground(shipped, tmp_path / "site", examples=path)
