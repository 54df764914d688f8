"""State interventions as objects: what they mean, what they refuse, how they are saved, and what they cost."""

import numpy as np
import pytest
from command_line import RWKV

from mionnx import (
    HookError,
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    MIError,
    MIModel,
    RWKVState,
    SpecFileError,
    StateAblationResult,
    StateKnockoutSpec,
    StateSteeringSpec,
)
from mionnx.cli.interventions import parse_state_knockout, parse_state_steering
from mionnx.machine import memory
from mionnx.machine.files import write_atomic


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained(RWKV, threads=1)


def knockout(spec: StateKnockoutSpec) -> HookSpec:
    return HookSpec().set_state_knockout(spec)


def steering(spec: StateSteeringSpec) -> HookSpec:
    return HookSpec().set_state_steering(spec)


def test_targets():
    spec = StateKnockoutSpec().position(3).positions([0, -1]).layer(1).layers([4]).layer_range(2, 3)
    assert spec.positions_ == [3, 0, -1]
    assert spec.target_layers(6) == [1, 2, 3, 4]
    assert StateKnockoutSpec().position(0).target_layers(3) == [0, 1, 2]
    assert StateKnockoutSpec().terms == ["write"]
    assert StateKnockoutSpec().position(0).erase().decay().terms == ["write", "erase", "decay"]
    assert StateKnockoutSpec().invisible().terms == ["write", "erase", "decay", "token_shift", "convolution"]
    assert StateSteeringSpec(2).head(1).heads([0]).target_heads(4) == [0, 1]
    assert StateSteeringSpec(2).target_heads(2) == [0, 1]


def test_a_spec_counts_and_merges_state_interventions():
    spec = knockout(StateKnockoutSpec().position(0))
    assert not spec.is_empty()
    assert spec.num_interventions() == 0
    both = steering(StateSteeringSpec(0.5).position(1)).extend(spec)
    assert len(both.state_knockouts) == len(both.state_steerings) == 1
    later = StateKnockoutSpec().position(0)
    fixed = knockout(later)
    later.position(9)
    assert fixed.state_knockouts[0].positions_ == [0]


WRONG = {
    "no position": (knockout(StateKnockoutSpec().layer(0)), "no position"),
    "position": (knockout(StateKnockoutSpec().position(8)), "position 8"),
    "negative": (steering(StateSteeringSpec(2.0).position(-9)), "position -9"),
    "layer": (knockout(StateKnockoutSpec().position(0).layer(4)), "layer 4 of a model with 4 layers"),
    "head": (steering(StateSteeringSpec(2.0).position(0).head(2)), "head 2 of 2"),
    "term": (knockout(StateKnockoutSpec(terms=["wrote"]).position(0)), "'write'"),
    "no term": (knockout(StateKnockoutSpec(terms=[]).position(0)), "no term"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_would_do_nothing_is_refused(model, what):
    spec, message = WRONG[what]
    with pytest.raises(InterventionError) as caught:
        model.forward(np.arange(8), spec)
    assert message in str(caught.value)


def test_wrong_arguments():
    for make in (
        lambda: StateSteeringSpec("much"),
        lambda: StateSteeringSpec(float("nan")),
        lambda: StateKnockoutSpec().layer_range(3, 2),
        lambda: StateKnockoutSpec().layer(-1),
        lambda: StateKnockoutSpec().position(1.5),
        lambda: StateSteeringSpec(1).heads([]),
        lambda: HookSpec().set_state_knockout(StateSteeringSpec(2.0)),
        lambda: HookSpec().set_state_steering(StateKnockoutSpec()),
    ):
        with pytest.raises(MIError):
            make()


def test_positions_in_the_past_are_refused(model):
    state = model.forward(np.arange(5)).state
    with pytest.raises(InterventionError, match="position 2 of row 0 lies in the cached past"):
        model.forward([7, 8], knockout(StateKnockoutSpec().position(2)), initial_state=state)
    at_five = model.forward([7, 8], knockout(StateKnockoutSpec().position(5)), initial_state=state)
    plain = model.forward([7, 8], initial_state=state)
    assert not np.array_equal(at_five.output()[:, 1], plain.output()[:, 1])


def test_a_transformer_has_no_state(shipped):
    for spec in (knockout(StateKnockoutSpec().position(0)), steering(StateSteeringSpec(2.0).position(0))):
        with pytest.raises(InterventionError, match="no recurrent state"):
            shipped.forward([3, 4], spec)
    with pytest.raises(InputError, match="continues from a KVCache"):
        shipped.forward([3], initial_state=RWKVState([], np.zeros((1, 0), np.int64)))


def test_wrong_states(model, shipped):
    state = model.forward([[3, 4]]).state
    with pytest.raises(InputError, match="continues from a RWKVState"):
        model.forward([3], cache=shipped.forward([3], use_cache=True).kv_cache)
    with pytest.raises(InputError, match="not both"):
        model.forward([3], cache=state, initial_state=state)
    with pytest.raises(InputError, match="rows"):
        model.forward([[3], [4]], initial_state=state)
    with pytest.raises(InputError, match="layers"):
        model.forward([3], initial_state=RWKVState(state.layers[:1], state.attention_mask))
    narrow = type(state.layers[0])(state.layers[0].att_shift[:, :5], *(state.layers[0].wkv, state.layers[0].ffn_shift))
    with pytest.raises(InputError, match=r"att_shift of layer 0 is float32 \[1, 5\], expected float32 \[1, 128\]"):
        model.forward([3], initial_state=RWKVState([narrow, *state.layers[1:]], state.attention_mask))
    state.layers[1].wkv[0, 0, 0, 0] = np.nan
    with pytest.raises(InputError, match="NaN"):
        model.forward([3], initial_state=state)


def test_hook_points_that_a_recurrent_model_refuses(model):
    ids = np.arange(6)
    for spec, message in (
        (HookSpec().intervene(HookPoint.RwkvStates(0), Intervention.Zero()), "blocks.0.rwkv.hook_k"),
        (HookSpec().intervene(HookPoint.RwkvEffectiveAttn(0), Intervention.Zero()), "blocks.0.rwkv.hook_k"),
        (HookSpec().intervene(HookPoint.RwkvState(0), Intervention.Zero(positions=1)), "no positions"),
        (HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Knockout([[0.0]])), "set_state_knockout"),
    ):
        with pytest.raises(InterventionError, match=message):
            model.forward(ids, spec)
    with pytest.raises(HookError, match="no hook point"):
        model.forward(ids, HookSpec().capture(HookPoint.AttnPattern(0)))


def test_an_intervention_on_the_last_state_is_what_the_next_call_begins_with(model):
    spec = HookSpec().intervene(HookPoint.RwkvState(1), Intervention.Zero(heads=0)).capture(HookPoint.RwkvState(1))
    cache = model.forward(np.arange(6), spec)
    assert (cache["state", 1][:, 0] == 0).all()
    assert np.array_equal(cache.state.layers[1].wkv, cache["state", 1])


def test_large_values_are_captured_only_when_named(model):
    names = set(model.forward(np.arange(4), HookSpec().capture("*").capture("blocks.*").capture("*.rwkv.*")))
    assert not any("states" in name or "effective" in name for name in names)
    named = model.forward(np.arange(4), HookSpec().capture("blocks.0.rwkv.hook_effective*").capture("*.hook_states"))
    assert [HookPoint.parse(name).short for name in named] == [
        "states",
        "effective_attn",
        "effective_attn_raw",
        "states",
        "states",
        "states",
    ]


def test_memory_is_stated_before_it_is_spent(model, monkeypatch):
    spec = HookSpec().capture(HookPoint.RwkvStates(0)).capture(HookPoint.ResidPost(0))
    estimate = model.estimate(spec, batch=2, seq=11)
    found = model.forward(np.zeros((2, 11), int), spec)
    assert estimate.captures == {name: array.nbytes for name, array in found.items()}
    assert estimate.captures["blocks.0.rwkv.hook_states"] == 2 * 11 * 2 * 64 * 64 * 4
    assert estimate.peak == estimate.total + estimate.captures["blocks.0.rwkv.hook_states"]
    with pytest.raises(InputError, match=r"need \d+\.\d (G|T)iB, and .* are free"):
        model.forward(np.zeros((512, 20000), int), spec)
    monkeypatch.setattr(memory, "available", lambda: estimate.peak - 1)
    with pytest.raises(InputError, match=r"need 1\.4 MiB"):
        model.forward(np.zeros((2, 11), int), spec, batch_size=None)
    monkeypatch.setattr(memory, "available", lambda: estimate.peak)
    model.forward(np.zeros((2, 11), int), spec, batch_size=None)


def test_saved_and_loaded(model, tmp_path):
    spec = knockout(StateKnockoutSpec().positions([1, -1]).layer(1).decay())
    spec.set_state_knockout(StateKnockoutSpec().position(2).invisible())
    spec.set_state_steering(StateSteeringSpec(0.25).position(3).heads([1])).capture("blocks.0.rwkv.hook_state")
    spec.save(tmp_path / "spec.safetensors")
    loaded = HookSpec.load(tmp_path / "spec.safetensors")
    assert loaded == spec
    ids = np.arange(9)
    assert np.array_equal(model.forward(ids, loaded).output(), model.forward(ids, spec).output())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"decay"', '"decoy"'),
        ('"scale": 0.25', '"scale": NaN'),
        ('"layers": [1]', '"layers": [-1]'),
        ('"heads": [1]', '"heads": 1.5'),
        ("state_knockouts", "state_knockoutz"),
    ],
)
def test_a_damaged_file(tmp_path, old, new):
    path = tmp_path / "spec.safetensors"
    spec = knockout(StateKnockoutSpec().positions([1, -1]).layer(1).decay())
    spec.set_state_steering(StateSteeringSpec(0.25).position(3).heads([1])).save(path)
    data = path.read_bytes()
    old, new = (text.replace('"', '\\"').encode() for text in (old, new))
    assert old in data
    changed = data.replace(old, new)
    length = int.from_bytes(data[:8], "little") + len(changed) - len(data)
    write_atomic(path, length.to_bytes(8, "little") + changed[8:])
    with pytest.raises((SpecFileError, InterventionError), match=r"spec\.safetensors"):
        HookSpec.load(path)


def test_the_result_of_a_state_ablation(model):
    ids = np.arange(8)
    spec = StateKnockoutSpec().position(0).layer(1)
    baseline, ablated = (model.forward(ids, s).output()[0, -1] for s in (HookSpec(), knockout(spec)))
    result = StateAblationResult(baseline, ablated, spec)
    assert result.kl_divergence() > 0
    assert result.spec is spec


def test_written_on_the_command_line():
    spec = parse_state_knockout("positions=3,-1;layers=1,2;terms=write,decay")
    assert spec == StateKnockoutSpec().positions([3, -1]).layers([1, 2]).decay()
    assert parse_state_knockout("positions=3;terms=invisible") == StateKnockoutSpec().position(3).invisible()
    assert parse_state_steering("2.5@positions=0;heads=1") == StateSteeringSpec(2.5).position(0).head(1)
    for parse, text in (
        (parse_state_knockout, "position=3"),
        (parse_state_knockout, "positions=x"),
        (parse_state_steering, "positions=3"),
        (parse_state_steering, "two@positions=3"),
    ):
        with pytest.raises(InterventionError):
            parse(text)
