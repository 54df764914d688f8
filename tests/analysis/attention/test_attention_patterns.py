"""Attention patterns: the arrays, and the page in Chromium, weight by weight."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from command_line import succeeded
from nasty import NASTY
from repository import REPOSITORY

from mionnx import HookPoint, HookSpec, InputError, Intervention, MIModel
from mionnx.analysis.attention.attention_patterns import AttentionPatterns

LLAMA, RWKV = (REPOSITORY / "models" / name for name in ("world-llama", "world-rwkv7"))
PROMPT = "The capital of France is"
EIGHT_BITS = 1 / 255  # what a weight w may be off by is sqrt(w) / 255 and a little


@pytest.fixture(scope="module")
def world() -> MIModel:
    return MIModel.from_pretrained(LLAMA, threads=1)


def random_patterns(layers: int, heads: int, size: int) -> np.ndarray:
    weights = np.tril(np.random.default_rng(0).random((layers, heads, size, size)).astype(np.float32) ** 8)
    return weights / weights.sum(axis=-1, keepdims=True)


def test_patterns_are_those_of_forward(world):
    found = world.attention(PROMPT)
    cache = world.forward(PROMPT, HookSpec().capture("blocks.*.attn.hook_pattern"))
    assert np.array_equal(found.patterns, cache.stack("pattern")[:, 0])
    some = world.attention(PROMPT, layers=[2, 0], heads=3)
    assert (some.layers, some.heads) == ([2, 0], [3])
    assert np.array_equal(some.of(2, 3), cache["pattern", 2][0, 3])
    masked = HookSpec().intervene(HookPoint.AttnPattern(1), Intervention.Scale(0.5))
    assert np.array_equal(world.attention(PROMPT, 1, hooks=masked).patterns[0], cache["pattern", 1][0] / 2)


def test_sinks_and_massive_activations_are_told(world):
    """One number is made massive: it is told for each layer that it stays in, by the definition."""
    raised = np.zeros(world.hidden_size, np.float32)
    raised[7] = 5000
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Add(raised, positions=0))
    found = world.attention(PROMPT, hooks=spec)
    cache = world.forward(PROMPT, HookSpec().extend(spec).capture("blocks.*.hook_resid_post"))
    expected = set()
    for layer in range(world.num_layers):
        stream = np.abs(cache["resid_post", layer][0])
        for place in np.argwhere((stream > 100) & (stream > 1000 * np.median(stream))).tolist():
            expected.add((layer, *place))
    assert (1, 0, 7) in expected
    assert {entry[:3] for entry in found.massive} == expected
    assert all(number == cache["resid_post", layer][0, at, i] for layer, at, i, number in found.massive)
    np.testing.assert_allclose(found.first_token, found.patterns[:, :, 1:, 0].mean(axis=2), atol=1e-6)
    sinks = int((found.first_token > 0.3).sum())
    assert f"from {sinks} of 32 heads" in found.view().facts
    assert "number 7 at token 0 'The' (layers 1 to 3)" in found.view().facts
    assert world.attention(PROMPT).massive == []
    scores = world.head_scores("first_token", batch=2, hooks=spec)
    assert (1, 0, 7) in {entry[:3] for entry in scores.massive}
    assert f"from {int((scores['first_token'] > 0.3).sum())} of 32 heads" in scores.view().meaning
    assert world.head_scores("induction", batch=2, hooks=spec).massive == []


def test_of_an_rwkv_it_is_the_effective_attention():
    model = MIModel.from_pretrained(RWKV, threads=1)
    found = model.attention(PROMPT)
    wanted = model.forward(PROMPT, HookSpec().capture("blocks.*.rwkv.hook_effective_attn")).stack("effective_attn")
    assert np.array_equal(found.patterns, wanted[:, 0])
    assert found.view().title == "Effective attention"


@pytest.mark.parametrize("shape", [(2, 3, 7), (1, 1, 40)])
def test_the_page_holds_every_weight(chromium, tmp_path, shape):
    layers, heads, size = shape
    weights = random_patterns(*shape)
    tokens = [f"token {i}" for i in range(size)]
    found = AttentionPatterns(tokens, list(range(layers)), list(range(heads)), weights, False)
    page = chromium(found.save(tmp_path / "attention.html"))
    read = page.evaluate(
        """([layers, heads, size]) => Array.from({length: layers}, (_, i) => Array.from({length: heads}, (_, j) =>
        Array.from({length: size}, (_, query) => Array.from({length: size}, (_, key) =>
        patterns.weight(i, j, query, key)))))""",
        list(shape),
    )
    assert (np.abs(np.array(read) - weights) <= np.sqrt(weights) * EIGHT_BITS + EIGHT_BITS**2).all()
    assert page.troubles == []


def test_a_pattern_that_reads_ahead_is_kept_whole(world, chromium, tmp_path):
    mean = HookSpec().intervene(HookPoint.AttnScores(1), Intervention.Zero(heads=2))
    found = world.attention(PROMPT, 1, 2, hooks=mean)
    assert np.abs(found.of(1, 2) - 0.2).max() < 1e-6  # without scores there is no mask either
    page = chromium(found.save(tmp_path / "attention.html"))
    assert page.evaluate("patterns.weight(0, 0, 0, 4)") == pytest.approx(0.2, abs=EIGHT_BITS)


@pytest.mark.slow
def test_tokens_and_heads_are_looked_through(world, chromium, tmp_path):
    found = world.attention(PROMPT)
    page = chromium(found.save(tmp_path / "attention.html"))
    assert page.locator("#reads span").all_text_contents() == found.tokens
    assert page.locator("#grid canvas").count() == 32
    page.locator("#grid canvas").nth(2 * 8 + 5).click()
    assert page.locator("#which").text_content() == "Layer 2, head 5"
    page.locator("#reads span").nth(4).click()
    assert page.locator("#most").text_content().startswith("France 0.9")
    page.locator("#read span").nth(4).hover()
    assert page.locator("#who1").text_content() == "is"
    page.locator("#reads span").nth(3).hover()
    assert page.locator("#who1").text_content() == "France"
    assert "France reads France" in page.locator("#tip").text_content()
    page.mouse.move(5, 5)
    assert page.locator("#who1").text_content() == "is"
    page.keyboard.press("ArrowLeft")
    assert page.locator("#which").text_content() == "Layer 2, head 4"
    page.locator("#main").click(position={"x": 3, "y": 3})
    assert page.locator("#who2").text_content() == "The"
    before = page.locator("#main").screenshot()
    page.locator("#root").check()
    assert page.locator("#main").screenshot() != before
    assert page.troubles == []


def test_no_token_is_executed(world, chromium, tmp_path):
    found = replace(world.attention(PROMPT), tokens=[NASTY] * 5)
    page = chromium(found.save(tmp_path / "attention.html"))
    page.locator("#reads span").nth(2).hover()
    assert NASTY in page.locator("#tip").text_content()
    assert page.locator("#left span").count() == 5
    assert page.locator("img").count() == 0
    assert page.troubles == []


def test_a_large_page_is_small_and_quick(chromium, tmp_path):
    """24 layers, 16 heads, 128 tokens: under 10 MB, and no step takes half a second."""
    rng = np.random.default_rng(1)
    tokens = [str(word) for word in rng.choice([" antidisestablishmentarianism", " the", "\n", "ing"], 128)]
    found = AttentionPatterns(tokens, list(range(24)), list(range(16)), random_patterns(24, 16, 128), False)
    path = found.save(tmp_path / "attention.html")
    assert path.stat().st_size < 10_000_000
    begin = time.monotonic()
    page = chromium(path)
    page.locator("#which").wait_for()
    assert time.monotonic() - begin < 20
    steps = """(step) => { const begin = performance.now(); step === "head" ?
        patterns.chooseHead(13, 7) : patterns.show(77);
        return performance.now() - begin; }"""
    assert min(page.evaluate(steps, "head") for _ in range(3)) < 500
    assert min(page.evaluate(steps, "token") for _ in range(3)) < 500
    drawn = "patterns.thumbnails.filter((canvas) => canvas.dataset.drawn).length"
    assert 0 < page.evaluate(drawn) < 24 * 16  # those in view
    page.locator("#grid canvas").last.scroll_into_view_if_needed()
    page.wait_for_function("patterns.thumbnails.at(-1).dataset.drawn === 'yes'")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.troubles == []


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda model: model.attention(PROMPT, layers=4), "layers 0 to 3"),
        (lambda model: model.attention(PROMPT, heads=[-1]), "heads 0 to 7"),
        (lambda model: model.attention(PROMPT, layers=[]), "layers 0 to 3"),
        (lambda model: model.attention(PROMPT, layers=[1, 1]), "once"),
        (lambda model: model.attention(PROMPT, hooks=HookSpec().capture("hook_embed")), "interventions"),
        (lambda model: model.attention(PROMPT, 1).of(2, 0), "layers \\[1\\]"),
        (lambda model: model.attention(PROMPT).at(5), "position 5"),
    ],
)
def test_what_is_not_there_is_an_error(world, ask, message):
    with pytest.raises(InputError, match=message):
        ask(world)


def test_a_page_that_nobody_could_open_is_refused():
    shared = np.broadcast_to(np.float32(0), (64, 64, 256, 256))
    with pytest.raises(InputError, match="choose layers"):
        AttentionPatterns(["a"] * 256, list(range(64)), list(range(64)), shared, False).page()


def test_figure_and_json(world, tmp_path):
    for found in (world.attention(PROMPT), world.attention(PROMPT, 2, 3)):
        assert found.save(tmp_path / "attention.png").stat().st_size > 5000
        assert np.abs(np.array(json.loads(found.to_json())["patterns"]) - found.patterns).max() < 1e-6


def test_the_command(tmp_path):
    files = [tmp_path / "attention.html", tmp_path / "attention.png"]
    table = succeeded("attention", LLAMA, PROMPT, "--html", files[0], "--png", files[1])
    assert all(path.stat().st_size > 5000 for path in files)
    assert "'France'" in table
    saved = json.loads(succeeded("attention", RWKV, PROMPT, "--layers", "3", "--json"))
    assert saved["effective"]
    assert np.shape(saved["patterns"]) == (1, 2, 5, 5)
