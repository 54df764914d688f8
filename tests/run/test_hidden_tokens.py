"""Tokens hidden from all layers beside other interventions, which count positions as if they were not hidden."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from random_specs import Call, Capture, Edit, StateEdit, points_of
from recurrent_families import VOCAB
from spec_reference import Reference, check
from spec_reference import hybrid as reference_of

from mionnx import (
    HookSpec,
    Intervention,
    InterventionError,
    KnockoutSpec,
    MIModel,
    StateKnockoutSpec,
    create_knockout_mask,
)

IDS = np.random.default_rng(11).integers(3, VOCAB, (2, 9))
RAGGED = np.array([[1] * 9, [0, 0, 1, 1, 1, 0, 1, 1, 1]])
# Mamba counts positions on the mask alone: it has no input of them.
each = pytest.mark.parametrize("family", ["lfm2", pytest.param("mamba", marks=pytest.mark.slow)])
SHOWN = [1, 2, 4, 5, 6, 7, 8]
Pair = tuple[MIModel, Reference]


@pytest.fixture
def pair(hybrid, shared: Path, family: str) -> Pair:
    model = hybrid(family)
    return model, reference_of(shared / "hybrids" / family / "checkpoint", model)


def feeds_of(model: MIModel, session: onnxruntime.InferenceSession) -> dict[str, np.ndarray]:
    feeds = {name: np.zeros(shape, np.float32) for name, shape in model.hooked.metadata.past_shapes(2, 0).items()}
    feeds |= {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.tile(np.arange(9), (2, 1))}
    return {one.name: feeds[one.name] for one in session.get_inputs()}


@each
@pytest.mark.parametrize("new", [0, 3])
def test_positions_of_other_interventions_do_not_move(pair, new):
    model, reference = pair
    points = {point.short: point for point in points_of(model) if ".0." in point.name}
    change = np.linspace(-1, 1, 64, dtype=np.float32)
    edits = [
        Edit(points["pre"], "add", (change,), [[4, 3], [0, 5]]),
        Edit(points["attn_out"], "scale", (2.5,), [-1, 2]),
        Edit(points["resid_post"], "low_rank", (change[None], change[None], np.float32(1)), "prompt", None, (1,)),
    ]
    captures = [Capture(points[name]) for name in ("pre", "conv", "attn_out", "resid_post")]
    call = Call(IDS, RAGGED, new=new, edits=edits, states=[StateEdit((1, 2), None)], captures=captures)
    if new:  # padding stands on the left
        call = Call(IDS, np.sort(RAGGED), new=new, edits=edits, states=[StateEdit((1, 2), None)], captures=captures)
    found = check(model, reference, [call])
    assert found.refused is None
    assert found.agrees, found


@pytest.mark.parametrize("family", ["lfm2"])
def test_an_edit_of_patterns_or_scores_does_not_show_hidden_keys(pair, tmp_path):
    model, reference = pair
    points = {point.short: point for point in points_of(model)}
    edits = [Edit(points["pattern"], "add", (0.5,)), Edit(points["scores"], "scale", (0.0,), None, (1, 2))]
    captures = [Capture(points["z"]), Capture(points["pattern"])]
    states = [StateEdit((0, 3), None)]
    for mask, new in ((np.ones_like(IDS), 0), (RAGGED, 0), (np.sort(RAGGED), 3)):
        call = Call(IDS, mask, new=new, edits=edits, states=states, captures=captures)
        found = check(model, reference, [call])
        assert found.refused is None
        assert found.agrees, found
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().positions([0, 3]).invisible())
    spec.intervene("blocks.1.attn.hook_pattern", Intervention.Add(0.5))
    session = onnxruntime.InferenceSession(model.compile(spec, tmp_path / "out") / "model.onnx")
    (logits,) = session.run(["logits"], feeds_of(model, session))
    np.testing.assert_allclose(logits[:, SHOWN], model.forward(IDS, spec).output()[:, SHOWN], atol=5e-5)


@each
def test_an_edit_at_the_hidden_token_itself_is_made_there(pair):
    model, _ = pair
    point = "blocks.0.hook_resid_pre"
    hidden = HookSpec().set_state_knockout(StateKnockoutSpec().position(3).invisible()).capture(point)
    plain = model.forward(IDS, hidden)
    edited = model.forward(IDS, hidden.intervene(point, Intervention.Add(1.0, positions=[3, 5])))
    moved = np.abs(edited[point] - plain[point]).max(-1)
    assert np.flatnonzero(moved[0] > 0.5).tolist() == [3, 5]
    before, after = (one.output()[:, [0, 1, 2, 4, 5]] for one in (plain, edited))
    assert (before[:, :4] == after[:, :4]).all()  # nothing reads the hidden one
    assert np.abs(before[:, 4] - after[:, 4]).max() > 1e-3


@each
def test_a_compiled_graph_counts_the_same_positions(pair, tmp_path):
    model, _ = pair
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().positions([0, 3]).invisible())
    spec.intervene("blocks.0.hook_attn_out", Intervention.Scale(3.0, positions=[1, 4]))
    session = onnxruntime.InferenceSession(model.compile(spec, tmp_path / "out") / "model.onnx")
    (logits,) = session.run(["logits"], feeds_of(model, session))
    np.testing.assert_allclose(logits[:, SHOWN], model.forward(IDS, spec).output()[:, SHOWN], atol=5e-5)


@pytest.mark.parametrize("family", ["lfm2"])
def test_a_query_is_not_left_with_hidden_keys_alone(pair):
    model, _ = pair

    def cutting(*keys: int) -> HookSpec:
        knockout = KnockoutSpec()
        for key in keys:
            knockout.edge(2, key)
        return HookSpec().intervene(
            "blocks.1.attn.hook_scores", Intervention.Knockout(create_knockout_mask(knockout, model.num_heads, 9))
        )

    hidden = StateKnockoutSpec().position(0).invisible()
    message = "query at position 2 of row 0 is left with no key"
    with pytest.raises(InterventionError, match=message):
        model.forward(IDS, cutting(0, 1, 2))
    model.forward(IDS, cutting(0, 1).set_state_knockout(hidden))
    model.forward(IDS, cutting(1, 2))
    with pytest.raises(InterventionError, match=message):
        model.forward(IDS, cutting(1, 2).set_state_knockout(hidden))
