"""Positions of a knockout's mask are those of each row's own text, in every batch: beside transformers, row by row."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mionnx import HookPoint, HookSpec, Intervention, InterventionError, KnockoutSpec, MIModel, create_knockout_mask

MODELS = Path(__file__).parents[2] / "models"
LENGTHS = (6, 3, 5)
HEADS = 8
NAMES = ("world-llama", "world-gpt2")
law = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@cache
def model_of(name: str) -> MIModel:
    return MIModel.from_pretrained(MODELS / name, threads=1)


@cache
def transformer_of(name: str):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODELS / name, attn_implementation="eager", dtype=torch.float32).eval()


def texts(lengths=LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 200, length) for length in lengths]


def alone(name: str, ids: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """[seq, vocab]: transformers' logits of one text by itself, some edges masked in every layer.

    Args:
        cut: [n_heads or 1, seq, seq] bool, (query, key).
    """
    import torch

    hidden = cut | ~np.tril(np.ones((len(ids), len(ids)), bool))
    mask = np.where(hidden, np.finfo(np.float32).min, 0).astype(np.float32)
    model = transformer_of(name)
    mask = np.broadcast_to(mask, (model.config.num_attention_heads, *mask.shape[1:])).copy()
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None], attention_mask=torch.from_numpy(mask)[None]).logits[0].numpy()


def padded(rows: list[np.ndarray], side: str, extra: int = 0) -> tuple[np.ndarray, np.ndarray]:
    width = max(map(len, rows)) + extra
    ids, mask = np.full((len(rows), width), 1), np.zeros((len(rows), width), int)
    for row, text in enumerate(rows):
        where = slice(width - len(text), width) if side == "left" else slice(0, len(text))
        ids[row, where], mask[row, where] = text, 1
    return ids, mask


def knocked_out(name: str, mask: np.ndarray, **limits) -> HookSpec:
    spec = HookSpec()
    for layer in range(model_of(name).num_layers):
        spec.intervene(HookPoint.AttnScores(layer), Intervention.Knockout(mask, **limits))
    return spec


def check(name: str, spec: HookSpec, rows: list[np.ndarray], cuts: list[np.ndarray], side: str, extra: int = 0) -> None:
    """A padded batch gives each row what transformers gives it alone."""
    ids, mask = padded(rows, side, extra)
    logits = model_of(name).forward(ids, spec, attention_mask=mask).output()
    for row, (text, cut) in enumerate(zip(rows, cuts, strict=True)):
        assert np.abs(logits[row][mask[row] == 1] - alone(name, text, cut)).max() < 5e-4, row


def own_part(blocked: np.ndarray, length: int) -> np.ndarray:
    return blocked[..., :length, :length]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_edge_is_that_of_each_rows_own_text(name, side):
    spec = KnockoutSpec().edge(2, 1).to_position(0).heads([1, 3])
    mask, rows = create_knockout_mask(spec, model_of(name).num_heads, 6), texts()
    cuts = [own_part(np.isneginf(mask[0]), len(text)) for text in rows]
    for text, cut in zip(rows, cuts, strict=True):
        assert np.abs(alone(name, text, cut) - alone(name, text, cut & False)).max() > 1e-2
    check(name, knocked_out(name, mask), rows, cuts, side)


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_length_for_each_row_lets_negative_positions_count_from_its_own_end(side, extra):
    spec = KnockoutSpec().edge(-1, 1).edge(-2, -3)
    mask = create_knockout_mask(spec, HEADS, LENGTHS)
    assert mask.shape == (3, HEADS, 6, 6)
    cuts = [np.isneginf(create_knockout_mask(spec, HEADS, length))[0] for length in LENGTHS]
    check("world-llama", knocked_out("world-llama", mask), texts(), cuts, side, extra)


@pytest.mark.parametrize("shape", ["whole text", "this call"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_keys_of_the_past_count_as_the_rows_text(side, shape):
    """Of a mask, the queries of the past are no longer computed; its keys are."""
    name, rows, more = "world-llama", texts((4, 2, 3)), texts((3, 3, 3))
    model, whole = model_of(name), [np.concatenate(pair) for pair in zip(rows, more, strict=True)]
    ids, attention = padded(rows, side)
    past = model.forward(ids, attention_mask=attention, use_cache=True).kv_cache
    mask = create_knockout_mask(KnockoutSpec().edge(-1, 1).edge(-2, -3), HEADS, list(map(len, whole)))
    cuts = [own_part(np.isneginf(mask[row]), len(text)) for row, text in enumerate(whole)]
    if shape == "this call":
        mask = np.stack([part[:, len(text) - 3 : len(text)] for part, text in zip(mask, whole, strict=True)])
    logits = model.forward(np.stack(more), knocked_out(name, mask), cache=past).output()
    for row, (text, cut) in enumerate(zip(whole, cuts, strict=True)):
        assert np.abs(logits[row] - alone(name, text, cut)[-3:]).max() < 5e-4


def test_a_generation_means_the_rows_own_text_at_every_step():
    name, rows = "world-llama", texts()
    mask = np.zeros((1, HEADS, 8, 8), np.float32)
    mask[..., 2, 1] = mask[:, :4, 5:, 4] = mask[..., 7, 3] = -np.inf
    spec = knocked_out(name, mask)
    found = model_of(name).generate(rows, spec, max_new_tokens=5, eos_token_id=[], output_logits=True)
    ours = np.concatenate([step.output() for step in found.steps], axis=1)
    for row, text in enumerate(found.ids):
        cut = np.zeros((HEADS, len(text) - 1, len(text) - 1), bool)
        part = np.isneginf(own_part(mask[0], len(text) - 1))
        cut[:, : part.shape[1], : part.shape[2]] = part
        assert np.abs(ours[row, -len(text) + 1 :] - alone(name, text[:-1], cut)).max() < 5e-4


@law
@given(data=st.data())
def test_any_mask_in_any_batch_is_each_row_alone(data):
    """Drawn masks, rows, padding and limits: each row of a batch equals transformers on it alone."""
    name = "world-llama"
    lengths = data.draw(st.lists(st.integers(3, 7), min_size=1, max_size=3))
    rows, longest = texts(lengths), max(lengths)
    edges = st.tuples(st.integers(1, min(lengths) - 1), st.integers(0, longest - 1), st.integers(0, HEADS - 1))
    blocked = np.zeros((HEADS, longest, longest), bool)
    for query, back, head in data.draw(st.lists(edges, min_size=1, max_size=8)):
        blocked[head, query, max(0, query - 1 - back)] = True
    anywhere = st.tuples(st.integers(0, longest - 1), st.integers(0, longest - 1))
    for query, key in data.draw(st.lists(anywhere, max_size=4)):
        blocked[:, query, key] |= query != key
    mask = np.where(blocked, -np.inf, 0)
    cuts = [own_part(blocked, length) for length in lengths]
    limits = {}
    if data.draw(st.booleans()):
        limits["rows"] = row = data.draw(st.integers(0, len(rows) - 1))
        cuts = [cut & (n == row) for n, cut in enumerate(cuts)]
    side, extra = data.draw(st.sampled_from(["left", "right"])), data.draw(st.integers(0, 2))
    check(name, knocked_out(name, mask, **limits), rows, cuts, side, extra)


def test_a_row_that_has_none_of_the_edges_is_refused_with_the_way_to_say_it():
    mask = create_knockout_mask(KnockoutSpec().edge(-1, 3), HEADS, 6)
    with pytest.raises(
        InterventionError, match=r"nothing out in row 1, which has 3 tokens.*rows=.*length for each row"
    ):
        model_of("world-llama").forward(texts(), knocked_out("world-llama", mask))
    model_of("world-llama").forward(texts(), knocked_out("world-llama", mask, rows=0))


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(InterventionError, match=r"positions of each row's own text, 1 or 6 of them"):
        model_of("world-llama").forward(texts(), knocked_out("world-llama", np.full((4, 4), -np.inf)))
