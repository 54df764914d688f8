"""Spans of texts on a page: marked where they stand, and the probabilities of labels at each token."""

import numpy as np
import torch
from nasty import NASTY

from mionnx import Spans
from mionnx.run.spans import TextSpan

LABELS = ("O", "B-PER", "I-PER")


def test_a_text_is_marked_and_its_tokens_take_the_colour_of_the_chosen_label(chromium, tmp_path):
    text = f"{NASTY} Ann Lee saw Bo"
    place = {part: text.index(part) for part in ("Ann Lee", "Bo")}
    spans = [TextSpan(0, "PER", part, at, at + len(part), (1, 1), 0.75) for part, at in place.items()]
    spans.append(TextSpan(0, "PER", "Lee", text.index("Lee"), text.index(" saw"), (2, 2), 0.5))  # inside another one
    shares = np.array([[0.9, 0.1, 0.0], [0.2, 0.75, 0.05], [0.25, 0.0, 0.75], [1, 0, 0], [0.25, 0.75, 0.0]])
    found = Spans.of([text], spans, LABELS, [((NASTY, "Ann", "Lee", "saw", "Bo"), shares)])
    page = chromium(found.save(tmp_path / "page.html"))
    assert page.troubles == []
    line = page.locator(".marked")
    assert [one.evaluate("mark => mark.firstChild.textContent") for one in line.locator("mark").all()] == [*place]
    assert line.locator("small").all_text_contents() == ["PER", "PER"]
    assert line.evaluate("line => line.textContent") == text.replace("Lee", "LeePER") + "PER"
    tokens = page.locator(".text:not(.marked) .token")

    def coloured():
        return [one.text_content() for one in tokens.all() if one.get_attribute("style")]

    assert page.evaluate("data.options[chosen]") == "B-PER"
    assert coloured() == [NASTY, "Ann", "Bo"]
    page.locator(".chip", has_text="I-PER").first.click()
    assert coloured() == ["Ann", "Lee"]
    assert page.locator("section p.faint").first.text_content() == "the most probable label at 1 token"
    assert Spans.load(found.save(tmp_path / "spans.safetensors")).page() == found.page()
    assert found.figure().get_size_inches().min() > 0.3


def test_a_page_says_that_it_shows_the_first_texts():
    texts = [f"{n} Bo" for n in range(21)]
    spans = [TextSpan(row, "PER", "Bo", len(text) - 2, len(text), (1, 1), 0.5) for row, text in enumerate(texts)]
    assert "first 20 texts are shown" in Spans.of(texts, spans, LABELS).view().facts
    assert "are shown" not in Spans.of(texts[:20], spans[:20], LABELS).view().facts


def test_probabilities_of_tokens_are_those_of_transformers(text_encoder):
    model, reference = text_encoder("token_classes")
    texts = ["ann plays unlikely music in rome", "it rains"]
    found = model.tag(texts)
    assert found.token_labels == LABELS
    for row, text in enumerate(texts):
        ids = model.tokenize(text).ids
        with torch.no_grad():
            expected = reference(torch.from_numpy(ids[None])).logits[0].softmax(-1).numpy()
        assert np.abs(found.token_probabilities[row] - expected).max() < 5e-5
        assert found.tokens[row][0] == "[CLS]"
        assert len(found.tokens[row]) == len(ids)
    assert "tokens" not in found.to_dict()
    model, _ = text_encoder("span")
    found = model.answer_span("where does ann live?", "ann lives in rome, and it rains.", k=4)
    assert found.token_labels == ("start", "end")
    assert np.allclose(found.token_probabilities[0].sum(0), 1)
    first, last = found.positions[0]
    assert np.isclose(
        found.token_probabilities[0][first, 0] * found.token_probabilities[0][last, 1], found.probabilities[0]
    )
    assert found.view().options == found.token_labels
