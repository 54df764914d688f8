"""RWKV-4, RWKV-6 and RWKV-7 against the `rwkv` package, and every intervention against a float64 loop."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rwkv_checkpoints import LAYERS, LAYOUTS, VOCAB, blinkdl, run_package, write
from rwkv_loop import Gates, Loop

from exporters.rwkv import export
from mionnx import HookPoint, HookSpec, Intervention, MIModel, StateKnockoutSpec, StateSteeringSpec

TOLERANCE = 5e-5
LENGTHS = (1, 15, 16, 17, 200)
HEADS = {4: 1, 6: 2, 7: 2}
VERSIONS = [6, 7, 4]
STATE_AXES = {6: (0, 1, 2), 7: (0, 2, 1)}  # the package keeps RWKV-7's state as [head, value, key]
law = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="session")
def package(shared: Path) -> Callable[[int], dict[str, np.ndarray]]:
    """Version -> logits and states that the `rwkv` package gives for one text of each length."""

    def find(version: int) -> dict[str, np.ndarray]:
        folder = shared / f"package-{version}"
        with FileLock(f"{folder}.lock"):
            if not (folder / "out.npz").exists():
                run_package(version, blinkdl(version), {str(length): text(length) for length in LENGTHS}, folder)
        return dict(np.load(folder / "out.npz"))

    return find


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + length).integers(0, VOCAB, length)


def loop(version: int) -> Loop:
    return Loop({name: tensor.numpy().astype(np.float64) for name, tensor in blinkdl(version).items()}, version)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_states_equal_the_rwkv_package(rwkv, package, layout, length):
    version, found = int(layout[0]), rwkv(layout).forward(text(length))
    expected = package(version)
    assert np.abs(found.output()[0] - expected[f"{length}.logits"]).max() < TOLERANCE
    for i, layer in enumerate(found.state.layers):
        parts = 5 if version == 4 else 3
        att, *wkv, ffn = (expected[f"{length}.state.{parts * i + part}"] for part in range(parts))
        assert np.abs(layer.att_shift[0] - att).max() < TOLERANCE
        assert np.abs(layer.ffn_shift[0] - ffn).max() < TOLERANCE
        state = np.stack(wkv)[None] if version == 4 else wkv[0].transpose(STATE_AXES[version])
        assert relative(layer.wkv[0], state) < TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pieces", [[1] * 40, [15, 25], [16, 8, 16], [3, 37], [39, 1]])
def test_a_text_in_pieces_equals_the_text_whole(rwkv, layout, pieces):
    """Pieces under 16 tokens take the step form, the whole takes the chunked form: they are one."""
    model, ids = rwkv(layout), text(40)
    whole = model.forward(ids)
    state, found, start = None, [], 0
    for length in pieces:
        part = model.forward(ids[start : start + length], initial_state=state)
        state, start = part.state, start + length
        found.append(part.output()[0])
    assert np.abs(np.concatenate(found) - whole.output()[0]).max() < TOLERANCE
    for one, other in zip(state.layers, whole.state.layers, strict=True):
        assert np.abs(one.wkv - other.wkv).max() < TOLERANCE
    assert state.seq_len == 40


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("length", [5, 23])
def test_every_capture_equals_the_loop(rwkv, version, length):
    model, ids, oracle = rwkv(f"{version}-pth"), text(length), loop(version)
    logits = oracle.run(ids.tolist())
    found = model.forward(ids, HookSpec().capture("*").capture("blocks.*.rwkv.hook_states"))
    assert np.abs(found.output()[0] - logits).max() < TOLERANCE
    for name, value in found.items():
        last = name.endswith("hook_state")
        expected = oracle.values[f"{name}s"][-1] if last else np.stack(oracle.values[name])
        assert relative(value[0], expected) < TOLERANCE, name


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in units of the largest value where that is above 1."""
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("layer", [None, *(pytest.param(layer, marks=pytest.mark.slow) for layer in (0, 1))])
@pytest.mark.slow_beyond(1)
def test_every_intervention_equals_the_same_edit_in_the_loop(rwkv, version, layer):
    model, length, rng = rwkv(f"{version}-pth"), 20, np.random.default_rng(version)
    ids, off = text(length), {}
    points = [point for point in model.hook_points() if not point.derived and point.variant != "RwkvState"]
    for point in [point for point in points if point.layer == layer]:
        shape = [dim for dim in model.hooked.axes(point) if isinstance(dim, int)]
        one = HEADS[version] - 1
        heads = {"heads": [one]} if len(shape) == 2 else {}
        vector, whole = rng.normal(0, 0.1, shape[-1]), rng.normal(0, 0.3, (1, length, *shape))
        if point.variant == "RwkvDecay":
            whole = rng.uniform(0, 1, whole.shape)
        direction = rng.normal(size=shape[-1])
        unit = direction / np.linalg.norm(direction)
        edits = {
            "add": (Intervention.Add(vector, positions=2, **heads), lambda value, t, vector=vector: value + vector),
            "scale": (Intervention.Scale(0.7, positions=2, **heads), lambda value, t: value * 0.7),
            "zero": (Intervention.Zero(positions=2, **heads), lambda value, t: value * 0),
            "replace": (Intervention.Replace(whole, positions=2, **heads), lambda value, t, whole=whole: whole[0, t]),
            "project_out": (
                Intervention.ProjectOut(direction, positions=2, **heads),
                lambda value, t, unit=unit: value - (value @ unit)[..., None] * unit,
            ),
        }
        for kind, (intervention, change) in edits.items():

            def edit(name, t, value, change=change, point=point, heads=heads, one=one):
                if name != point.name or t != 2:
                    return value
                changed = value.copy()
                where = (one,) if heads else ()
                changed[where] = change(value, t)[where]
                return changed

            oracle = loop(version)
            logits = oracle.run(ids.tolist(), edit=edit)
            spec = HookSpec().intervene(point, intervention).capture(point)
            found = model.forward(ids, spec)
            at = relative(found[point][0], np.stack(oracle.values[point.name]))
            off[f"{point} {kind}"] = max(at, relative(found.output()[0], logits))
            if kind != "replace":  # a text of fewer than 16 tokens takes the step form
                short = model.forward(ids[:6], spec).output()[0]
                off[f"{point} {kind} short"] = relative(short, logits[:6])
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


TERMS = st.lists(st.sampled_from(["write", "erase", "decay", "token_shift"]), min_size=1, unique=True)


@st.composite
def state_specs(draw: st.DrawFn, version: int, length: int) -> tuple[HookSpec, Gates]:
    """Random state interventions, and what they mean to the loop."""
    spec, gates = HookSpec(), Gates.ones(LAYERS, length, HEADS[version])
    places = st.lists(st.integers(0, length - 1), min_size=1, max_size=4, unique=True)
    layers = st.sets(st.integers(0, LAYERS - 1), min_size=1)
    for _ in range(draw(st.integers(0, 2))):
        at, where, head = draw(places), sorted(draw(layers)), draw(st.integers(0, HEADS[version] - 1))
        scale = draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]))
        spec.set_state_steering(StateSteeringSpec(scale).positions(at).layers(where).head(head))
        gates.write[np.ix_(where, at, [head])] *= scale
    for _ in range(draw(st.integers(1, 2))):
        at, where = draw(places), sorted(draw(layers))
        terms = [term for term in draw(TERMS) if version == 7 or term != "erase"] or ["write"]
        spec.set_state_knockout(StateKnockoutSpec(terms=terms).positions(at).layers(where))
        index = np.ix_(where, at)
        for term, gate in (("write", gates.write), ("erase", gates.erase), ("decay", gates.decay)):
            if term in terms:
                gate[index] = 0
        if "token_shift" in terms:
            gates.shift[index] = False
    return spec, gates


@law
@given(st.sampled_from(VERSIONS), st.sampled_from([1, 7, 16, 21]), st.data())
def test_gates_equal_the_loop(rwkv, version, length, data):
    spec, gates = data.draw(state_specs(version, length))
    oracle, ids = loop(version), text(length)
    logits = oracle.run(ids.tolist(), gates)
    found = rwkv(f"{version}-pth").forward(ids, spec)
    assert relative(found.output()[0], logits) < TOLERANCE
    for layer, expected in zip(found.state.layers, oracle.states, strict=True):
        for part, value in zip(("att_shift", "wkv", "ffn_shift"), expected, strict=True):
            assert relative(getattr(layer, part)[0], value) < TOLERANCE


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_of_a_batch_have_gates_of_their_own(rwkv, version):
    """Negative positions count from each row's own end, so rows of unequal length differ in where the gate falls."""
    model, ids = rwkv(f"{version}-pth"), text(20)
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(-3))
    found = model.forward([ids, ids[:17]], spec)
    for row, length in enumerate((20, 17)):
        gates = Gates.ones(LAYERS, length, HEADS[version])
        gates.write[:, length - 3] = 0
        logits = loop(version).run(ids[:length].tolist(), gates)
        assert relative(found.output()[row, 20 - length :], logits) < TOLERANCE


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_nothing(rwkv, version, left):
    model, ids = rwkv(f"{version}-pth"), text(24)
    mask = np.ones((2, 24), int)
    real = slice(5, None) if left else slice(None, -5)
    mask[1, : 5 if left else 0] = 0
    mask[1, 24 if left else -5 :] = 0
    found, alone = model.forward([ids, ids], attention_mask=mask), model.forward(ids[real])
    assert np.abs(found.output()[1, real] - alone.output()[0]).max() < TOLERANCE
    for one, other in zip(found.state.layers, alone.state.layers, strict=True):
        assert np.abs(one.wkv[1] - other.wkv[0]).max() < TOLERANCE
        assert np.abs(one.att_shift[1] - other.att_shift[0]).max() < TOLERANCE
    after = model.forward([[3], [3]], initial_state=found.state)
    assert np.abs(after.output()[1] - model.forward([3], initial_state=alone.state).output()[0]).max() < TOLERANCE


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("length", [9, 40])
def test_an_invisible_token_is_as_if_it_were_not_there(rwkv, version, length):
    model, ids = rwkv(f"{version}-pth"), text(length)
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().positions([3, 4]).invisible())
    found = model.forward(ids, spec)
    others = ids.copy()
    others[3:5] = (others[3:5] + 50) % VOCAB
    changed = model.forward(others, spec)
    assert np.array_equal(found.output()[:, 5:], changed.output()[:, 5:])
    assert not np.array_equal(found.output()[:, 3:5], changed.output()[:, 3:5])
    without = model.forward(np.delete(ids, [3, 4]))
    assert np.abs(found.output()[:, 5:] - without.output()[:, 3:]).max() < TOLERANCE
    for one, other in zip(found.state.layers, without.state.layers, strict=True):
        assert np.abs(one.wkv - other.wkv).max() < TOLERANCE
        assert np.abs(one.ffn_shift - other.ffn_shift).max() < TOLERANCE


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "change",
    [
        HookSpec(),
        HookSpec().set_state_knockout(StateKnockoutSpec().position(2)),
        HookSpec().set_state_steering(StateSteeringSpec(3.0).positions([1, 5]).head(0)),
        HookSpec().set_state_knockout(StateKnockoutSpec().position(4).decay()),
        HookSpec().intervene(HookPoint.RwkvK(1), Intervention.Scale(2.0, positions=[2, 6])),
        HookSpec().intervene(HookPoint.RwkvDecay(0), Intervention.Scale(0.5, heads=0)),
    ],
    ids=["plain", "knockout", "steering", "decay", "keys", "decays"],
)
def test_effective_attention_times_values_is_what_the_recurrence_gives(rwkv, version, change):
    """Raw effective attention is true to the interventions in force; the other is its positive part, normalised."""
    found = rwkv(f"{version}-pth").forward(
        text(21), HookSpec().capture("*.hook_eff*").capture("*.rwkv.hook_v").capture("*.hook_wkv").extend(change)
    )
    for layer in range(LAYERS):
        raw, wkv = found["effective_attn_raw", layer], found["wkv", layer]
        values = found[HookPoint.RwkvV(layer)]
        if version == 4:  # channels stand for heads
            values, wkv = values.swapaxes(2, 3), wkv.swapaxes(2, 3)
        product = np.einsum("bhqs,bshv->bqhv", raw, values)
        assert relative(product, wkv) < 1e-5
        positive = np.maximum(raw, 0)
        assert np.allclose(found["effective_attn", layer] * positive.sum(-1, keepdims=True), positive, atol=1e-5)
        assert (np.triu(raw, 1) == 0).all()


def test_a_knocked_out_token_gets_no_effective_attention_from_later_ones(rwkv):
    for version in VERSIONS:
        spec = HookSpec().capture(HookPoint.RwkvEffectiveAttn(1)).set_state_knockout(StateKnockoutSpec().position(2))
        assert (rwkv(f"{version}-pth").forward(text(12), spec)["effective_attn", 1][:, :, 3:, 2] == 0).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_knockout_wins_over_steering_position_by_position(rwkv, version):
    model, ids = rwkv(f"{version}-pth"), text(12)
    knockout, steering = StateKnockoutSpec().position(2), StateSteeringSpec(2.0).positions([2, 6])
    both = model.forward(ids, HookSpec().set_state_steering(steering).set_state_knockout(knockout)).output()
    turned = model.forward(ids, HookSpec().set_state_knockout(knockout).set_state_steering(steering)).output()
    apart = HookSpec().set_state_knockout(knockout).set_state_steering(StateSteeringSpec(2.0).position(6))
    assert np.array_equal(both, turned)
    assert np.array_equal(both, model.forward(ids, apart).output())
    zero = HookSpec().set_state_steering(StateSteeringSpec(0.0).position(2))
    assert np.array_equal(
        model.forward(ids, zero).output(), model.forward(ids, HookSpec().set_state_knockout(knockout)).output()
    )


def strong(version: int) -> dict:
    """RWKV-6 whose decays are from 1 to far below the smallest float; RWKV-7 that removes all of nearly equal keys.

    RWKV-4 whose decays are from 1 to near the smallest float, and keys hundreds, of which no exponential is a float.
    """
    tensors = blinkdl(version, seed=1)
    for layer in range(LAYERS):
        if version == 4:
            speed = tensors[f"blocks.{layer}.att.time_decay"] * 2 + 2
            tensors[f"blocks.{layer}.att.time_decay"] = speed.clip(max=4.4)  # a decay of 5e-36
            tensors[f"blocks.{layer}.att.key.weight"] *= 12
        elif version == 6:
            tensors[f"blocks.{layer}.att.time_decay"] *= 4
            tensors[f"blocks.{layer}.att.time_decay_w2"] *= 8
        else:
            tensors[f"blocks.{layer}.att.a0"] += 12
            tensors[f"blocks.{layer}.att.w0"] -= 12
            tensors[f"blocks.{layer}.att.x_k"] *= 0
    return tensors


@pytest.mark.parametrize("version", VERSIONS)
def test_adversarial_recurrences_stay_exact(tmp_path, version):
    tensors = write(f"{version}-pth", tmp_path / "checkpoint", strong(version))
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked")
    oracle = Loop({name: tensor.numpy().astype(np.float64) for name, tensor in tensors.items()}, version)
    ids = np.tile([7, 7, 7, 9], 25)
    oracle.run(ids.tolist())
    cache = model.forward(ids, HookSpec().capture("*.rwkv.*"))
    decay, keys = cache["decay", 0], cache[HookPoint.RwkvA(0)] if version == 7 else None
    assert decay.min() < 1e-30 if version < 7 else (keys[0, 20] * keys[0, 21]).sum(-1).min() > 0.99
    if version == 4:
        assert np.abs(cache[HookPoint.RwkvK(0)]).max() > 90
    for name in ("wkv", "state"):
        for layer in range(LAYERS):
            values = oracle.values[f"blocks.{layer}.rwkv.hook_{'states' if name == 'state' else name}"]
            expected = values[-1][None] if name == "state" else np.stack(values)[None]
            found = cache[name, layer]
            assert np.isfinite(found).all()
            # RWKV-4: keys of 100 are rounded by 4e-6, which is a share of their exponentials
            most = 3e-5 if version == 4 else 1e-5
            assert np.abs(found - expected).max() / np.abs(expected).max() < most, (name, layer)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [4, 33])
def test_null_law(rwkv, layout, length):
    """Captures, edits that change nothing, and gates of ones leave the logits bit for bit as they were."""
    model, ids = rwkv(layout), text(length)
    plain = model.forward(ids).output()
    everything = model.forward(ids, HookSpec().capture("*").capture("*.hook_states").capture("*.hook_eff*"))
    assert np.array_equal(everything.output(), plain)
    ones = HookSpec().set_state_steering(StateSteeringSpec(1.0).positions(range(length)).erase())
    assert np.array_equal(model.forward(ids, ones).output() if layout[0] == "7" else plain, plain)
    points = [point for point in model.hook_points() if not point.derived]
    for nothing in ("add", "scale", "replace"):
        spec = HookSpec()
        for point in points:
            value = {"add": 0.0, "scale": 1.0, "replace": everything[point]}[nothing]
            limits = {"positions": range(length)} if "seq" in point.axes else {"heads": range(HEADS[int(layout[0])])}
            whole = nothing != "replace"  # a replacement of all would shadow those before it
            spec.intervene(point, getattr(Intervention, nothing.title())(value, **({} if whole else limits)))
        assert np.array_equal(model.forward(ids, spec).output(), plain), nothing


@pytest.mark.parametrize("version", VERSIONS)
def test_fed_gates_of_ones_are_the_defaults(rwkv, version):
    """The graph alone: each gate fed with ones gives the bits that it gives unfed."""
    model, ids = rwkv(f"{version}-pth"), text(18)[None]
    session = model.compile_graph().session
    feeds = {"input_ids": ids}
    for entry in session.get_inputs():
        if entry.name.startswith("past_state"):
            feeds[entry.name] = np.zeros([1 if isinstance(dim, str) else dim for dim in entry.shape], np.float32)
    plain = session.run(None, feeds)
    gate = (LAYERS, 1, 18, HEADS[version])
    ones = {
        "state_write": np.ones(gate, np.float32),
        "state_erase": np.ones(gate, np.float32),
        "state_decay": np.ones(gate, bool),
        "shift_distance": np.ones((LAYERS, 1, 19), np.int64),
    }
    optional = {entry.name for entry in session.get_overridable_initializers()}
    assert optional == {*ones} - ({"state_erase"} if version < 7 else set())
    for name in optional:
        for one, other in zip(session.run(None, {**feeds, name: ones[name]}), plain, strict=True):
            assert np.array_equal(one, other), name


@law
@given(st.sampled_from(VERSIONS), st.integers(2, 20), st.data())
@pytest.mark.slow
def test_address_and_order_laws(rwkv, version, length, data):
    model, ids = rwkv(f"{version}-pth"), text(length)
    points = [p for p in model.hook_points() if not p.derived and p.variant != "RwkvState"]
    point, position = data.draw(st.sampled_from(points)), data.draw(st.integers(1, length - 1))
    plain = model.forward(ids, HookSpec().capture(point))
    add, scale = Intervention.Add(0.25, positions=position), Intervention.Scale(0.5, positions=position)
    one = model.forward(ids, HookSpec().capture(point).capture(point, before=True).intervene(point, add))
    assert np.array_equal(one[f"{point}.before"], plain[point])
    assert np.array_equal(one.output()[:, :position], plain.output()[:, :position])
    both = model.forward(ids, HookSpec().capture(point).intervene(point, add).intervene(point, scale))
    at = (plain[point][:, position] + np.float32(0.25)) * np.float32(0.5)
    assert np.array_equal(both[point][:, position], at)


@law
@given(st.sampled_from(VERSIONS), st.integers(1, 29), st.data())
def test_cache_law(rwkv, version, split, data):
    """State interventions at absolute positions: in pieces as in one."""
    model, ids = rwkv(f"{version}-pth"), text(30)
    position = data.draw(st.integers(split, 29))
    spec = (
        HookSpec()
        .set_state_knockout(StateKnockoutSpec().position(position).layer(1))
        .intervene(HookPoint.ResidPost(0), Intervention.Scale(1.5, positions=position))
    )
    whole = model.forward(ids, spec).output()
    first = model.forward(ids[:split])
    second = model.forward(ids[split:], spec, cache=first.state)
    assert np.abs(second.output() - whole[:, split:]).max() < TOLERANCE


def test_no_session_is_opened_for_state_interventions(rwkv):
    model, ids = rwkv("7-fla"), text(9)
    model.forward(ids)
    graphs = set(model.compiled)
    for layer in range(LAYERS):
        model.forward(ids, HookSpec().set_state_knockout(StateKnockoutSpec().position(1).layer(layer)))
        model.forward(ids, HookSpec().set_state_steering(StateSteeringSpec(2).position(1).layer(layer)))
    assert set(model.compiled) == graphs


def test_project_to_vocab_gives_the_models_own_logits(rwkv):
    for layout in LAYOUTS:
        cache = rwkv(layout).forward(text(6), HookSpec().capture(HookPoint.ResidPost(LAYERS - 1)))
        found = rwkv(layout).project_to_vocab(cache["resid_post", LAYERS - 1])
        assert np.abs(found - cache.output()).max() < 1e-5
