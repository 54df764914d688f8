"""Tokens hidden from short convolutions: in passes, generations and compiled files, beside a loop in float64."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from random_specs import Call, Capture, StateEdit, points_of
from recurrent_families import VOCAB
from repository import REPOSITORY
from spec_reference import Reference, check
from spec_reference import hybrid as reference_of

from mionnx import HookPoint, HookSpec, InterventionError, MIModel, StateKnockoutSpec, StateSteeringSpec

TOLERANCE = 5e-5
EACH = ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba2", "qwen3_5_text"))]
IDS = np.random.default_rng(7).integers(3, VOCAB, (2, 12))
RAGGED = np.array([[1] * 12, [0] * 4 + [1] * 8])
Pair = tuple[MIModel, Reference]


@pytest.fixture(params=EACH)
def pair(hybrid, shared: Path, request: pytest.FixtureRequest) -> Pair:
    """A hybrid whose first and last layers have convolutions, and its reference."""
    model = hybrid(request.param)
    return model, reference_of(shared / "hybrids" / request.param / "checkpoint", model)


def edit(model: MIModel, positions: tuple[int | str, ...], layers: tuple[int, ...] = (0, -1), *terms: str) -> StateEdit:
    return StateEdit(positions, tuple(layer % model.num_layers for layer in layers), ("convolution", *terms))


def captures(model: MIModel) -> list[Capture]:
    wanted = [HookPoint.SsmConv(0).name, HookPoint.AttnOut(0).name, HookPoint.SsmConv(model.num_layers - 1).name]
    return [Capture(point) for point in points_of(model) if point.name in wanted]


def test_by_position_and_layer_in_one_pass(pair):
    model, reference = pair
    plain = model.forward(IDS, HookSpec().capture("blocks.*.ssm.hook_conv"), attention_mask=RAGGED)
    for states in (
        [edit(model, (3,))],
        [edit(model, (1, 2, 5), (0,))],
        [edit(model, (0, -2), (-1,))],
        [edit(model, ("prompt",), (0,)), edit(model, (4,), (-1,))],
    ):
        call = Call(IDS, RAGGED, states=states, captures=captures(model))
        found = check(model, reference, [call])
        assert found.refused is None
        assert found.agrees, found
        hidden = model.forward(IDS, call.spec, attention_mask=RAGGED)
        assert np.abs(hidden.output() - plain.output())[RAGGED == 1].max() > 1e-3
    last = model.num_layers - 1
    layers = HookSpec().set_state_knockout(StateKnockoutSpec(terms=["convolution"]).position(3).layer(last))
    cut = model.forward(IDS, layers.capture("blocks.*.ssm.hook_conv"), attention_mask=RAGGED)
    assert (cut["conv", 0] == plain["conv", 0]).all()
    differs = np.abs(cut["conv", last] - plain["conv", last])[0].max(-1) > 1e-6
    width = model.hooked.metadata.layers[last].recurrence.kernel
    assert np.flatnonzero(differs).tolist() == [*range(4, 3 + width)]  # its own place reads it still


def test_in_calls_and_generations(pair):
    """What an earlier call has hidden is not carried on; a generation hides prompt and new tokens at each step."""
    model, reference = pair
    first = Call(IDS, RAGGED, states=[edit(model, (5, 7))], captures=captures(model))
    second = Call(IDS[:, :3], np.ones((2, 3), int), states=[edit(model, (-2,), (0,))])
    last = Call(
        IDS[:, 3:5], np.ones((2, 2), int), new=5, states=[edit(model, ("generated",)), edit(model, (-1,), (-1,))]
    )
    for calls in ([first, second], [first, last], [Call(IDS, RAGGED, new=4, states=[edit(model, ("generated", 2))])]):
        found = check(model, reference, calls)
        assert found.refused is None
        assert found.agrees, found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_text"])
def test_beside_the_other_terms_of_a_state(hybrid, shared, family):
    model = hybrid(family)
    reference = reference_of(shared / "hybrids" / family / "checkpoint", model)
    terms = [term for term in model.hooked.metadata.state_gates if term != "convolution"]
    found = check(model, reference, [Call(IDS, RAGGED, new=3, states=[edit(model, (2, 6), (0, -1), *terms)])])
    assert found.refused is None
    assert found.agrees, found


def test_compiled(pair, tmp_path):
    model, _ = pair
    spec = HookSpec().set_state_knockout(StateKnockoutSpec(terms=["convolution"]).positions([1, 4, 9]).layer(0))
    folder = model.compile(spec, tmp_path / "out")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    names, wanted = ([one.name for one in ports] for ports in (session.get_outputs(), session.get_inputs()))
    assert "conv_seen" not in {*wanted, *(one.name for one in session.get_overridable_initializers())}
    shapes = model.hooked.metadata.past_shapes(1, 0)
    past, logits = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, []
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):
        feeds = {"input_ids": IDS[:1, start:stop], "attention_mask": np.ones((1, stop), np.int64)}
        feeds |= {"position_ids": np.arange(start, stop)[None], **past}
        found = dict(zip(names, session.run(None, {name: feeds[name] for name in wanted}), strict=True))
        logits.append(found["logits"])
        past = {port.past: found[port.present] for port in model.hooked.metadata.ports}
    expected = model.forward(IDS[:1], spec).output()
    np.testing.assert_allclose(np.concatenate(logits, 1), expected, atol=TOLERANCE)
    assert np.abs(model.forward(IDS[:1]).output() - expected).max() > 1e-3


def test_what_has_no_convolution_is_refused_by_name(hybrid):
    model = hybrid("lfm2")
    for state, message in (
        (StateKnockoutSpec().position(3), "lfm2 has no term write; it has convolution"),
        (StateKnockoutSpec().position(3).layer(1).convolution(), "layer 1 of this lfm2 model has no recurrent state"),
        (StateKnockoutSpec().position(3).decay().convolution(), "lfm2 has no term write; it has convolution"),
        (StateKnockoutSpec().position(30).convolution(), "position 30 does not exist"),
    ):
        with pytest.raises(InterventionError, match=message):
            model.forward(IDS, HookSpec().set_state_knockout(state))
    with pytest.raises(InterventionError, match="state steering: lfm2 has no term write"):
        model.forward(IDS, HookSpec().set_state_steering(StateSteeringSpec(2.0).position(3)))
    alone, chained = StateKnockoutSpec(terms=["convolution"]), StateKnockoutSpec().convolution()
    runs = [model.forward(IDS, HookSpec().set_state_knockout(one.position(3))).output() for one in (alone, chained)]
    assert (runs[0] == runs[1]).all()  # of a convolution alone its columns are all that a token writes


def test_the_last_token_is_hidden_from_nothing_but_what_follows():
    model = MIModel.from_pretrained(REPOSITORY / "models" / "world-hybrid", threads=1)
    text = "The capital of France is"
    spec = HookSpec().set_state_knockout(StateKnockoutSpec(terms=["convolution"]).position(-1))
    with pytest.raises(InterventionError, match="stands before its positions"):
        model.forward(text, spec)
    hidden, seen = (model.forward(text, one, use_cache=True).kv_cache for one in (spec, HookSpec()))
    after = [model.forward([[7]], cache=one).output() for one in (hidden, seen)]
    assert np.abs(after[0] - after[1]).max() > 1e-3


def test_a_spec_file_keeps_it(tmp_path):
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(3).convolution())
    spec.save(tmp_path / "spec.safetensors")
    assert HookSpec.load(tmp_path / "spec.safetensors").state_knockouts[0].terms == ["write", "convolution"]


@pytest.mark.parametrize("family", EACH)
def test_an_export_from_before_the_gate_is_to_be_made_again(family, hybrid):
    model = hybrid(family)
    metadata = model.hooked.metadata
    older = [one and replace(one, gates=[t for t in one.gates if t != "convolution"]) for one in metadata.recurrence]
    old = MIModel(replace(model.hooked, metadata=replace(metadata, recurrence=older)))
    hidden = StateKnockoutSpec(terms=["convolution"]).position(3)
    with pytest.raises(
        InterventionError, match=r"layer 0 of this .* no gate \(conv_seen\).*export its checkpoint again"
    ):
        old.forward(IDS, HookSpec().set_state_knockout(hidden))
    whole = HookSpec().set_state_knockout(StateKnockoutSpec().position(3).invisible())  # by the mask, as before
    assert np.array_equal(old.forward(IDS, whole).output(), model.forward(IDS, whole).output())
