"""A readout is what numpy makes of all logits in float64, whatever blocks it is computed in."""

from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import REPOSITORY
from scipy.special import log_softmax

from mionnx import InputError, MIModel
from mionnx.analysis.lens import readout
from mionnx.analysis.lens.readout import Lens, Readout

quick = settings(max_examples=50, deadline=None, derandomize=True)
COUNT, POSITIONS = 5, 4


def streams(model: MIModel) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(COUNT, POSITIONS, model.hidden_size)).astype(np.float32)


def of_numpy(logits: np.ndarray, reference: np.ndarray, chosen: np.ndarray, k: int) -> Readout:
    """Logits [n, positions, vocab] and those compared with [positions, vocab], read in float64."""
    logs, compared = (log_softmax(one.astype(np.float64), axis=-1) for one in (logits, reference))
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    own = np.take_along_axis(logs, np.broadcast_to(chosen, (len(logs), *chosen.shape)), axis=-1)
    return Readout(
        np.take_along_axis(logs, ids, axis=-1),
        ids,
        own,
        (logs[..., None, :] > own[..., None]).sum(axis=-1),
        -(np.exp(logs) * logs).sum(axis=-1),
        (np.exp(compared) * (compared - logs)).sum(axis=-1),
    )


@pytest.mark.parametrize("rows", [2, 3, 9, 1000])
def test_blocks_of_any_size_give_what_numpy_gives(shipped: MIModel, monkeypatch, rows: int) -> None:
    lens, values = shipped.opened(Lens), streams(shipped)
    chosen = np.array([[3, 7], [7, 9], [0, 470], [5, 5]])
    logits = lens.logits_of(values)
    monkeypatch.setattr(readout, "ROOM", rows * shipped.vocab_size * (4 * readout.COPIES + 5 * chosen.shape[1]))
    found, expected = lens.read(values[2], values, chosen, 6), of_numpy(logits, logits[2], chosen, 6)
    for field in fields(Readout):
        assert np.abs(getattr(found, field.name) - getattr(expected, field.name)).max() < 5e-5, field.name
    assert np.abs(found.divergence[2]).max() < 1e-6 < found.divergence[0].min()


@cache
def opened() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama", threads=1)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.integers(0, 12))
@quick
def test_blocks_cover_each_stream_at_each_position_once(count: int, positions: int, chosen: int, rows: int) -> None:
    model = opened()
    room = rows * model.vocab_size * (4 * readout.COPIES + 5 * chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readout, "ROOM", room)
        blocks = [*model.opened(Lens)._blocks(count, positions, chosen)]
    times = np.zeros((count, positions), int)
    for block in blocks:
        times[block] += 1
        high, wide = times[block].shape
        assert (high + 1) * wide <= max(rows, 2)  # each block has the reference too
    assert (times == 1).all()


@pytest.mark.parametrize(("k", "chosen", "message"), [(0, 3, "k=0"), (2.0, 3, "k=2.0"), (2, -1, "token -1; the voc")])
def test_what_the_vocabulary_does_not_have_is_refused(shipped: MIModel, k: int, chosen: int, message: str) -> None:
    values = streams(shipped)
    with pytest.raises(InputError, match=message):
        shipped.opened(Lens).read(values[0], values, np.full((POSITIONS, 1), chosen), k)


def test_a_text_converges_where_its_answer_stays_on_top(shipped: MIModel) -> None:
    lens = shipped.logit_lens("The capital of France is", k=1)
    tops = np.array([[1, 9, 3, 9, 5], [1, 2, 9, 9, 5], [1, 2, 3, 9, 9], [1, 2, 3, 4, 9]])[..., None]
    found = replace(lens, readout=replace(lens.readout, top_ids=tops), answers=np.array([1, 2, 3, 4, 5]))
    first = [0, 1, 2, 3, None]
    assert found.converged == [None if at is None else f"blocks.{at}.hook_resid_post" for at in first]
