"""What would take no effect is refused before anything runs, and nothing that has one is."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mionnx import (
    HookPoint,
    HookSpec,
    Intervention,
    InterventionError,
    KnockoutSpec,
    Logits,
    MIModel,
    StateKnockoutSpec,
    StateSteeringSpec,
    create_knockout_mask,
)
from mionnx.spec.hook_choice import Capture

MODELS = Path(__file__).parents[2] / "models"
IDS = np.arange(3, 8)[None]
LAST = 3  # layer of the world models
HIDDEN = 128
ADD = np.linspace(-3, 3, HIDDEN)
law = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@cache
def model_of(name: str) -> MIModel:
    return MIModel.from_pretrained(MODELS / name, threads=1)


def at(point: str | HookPoint, *edits: Intervention) -> HookSpec:
    spec = HookSpec()
    for edit in edits:
        spec.intervene(point, edit)
    return spec


def cut(*edges: tuple[int, int], size: int = 5) -> np.ndarray:
    mask = np.zeros((size, size))
    for query, key in edges:
        mask[query, key] = -np.inf
    return mask


def knock_out(mask: np.ndarray, layer: int = 1, **limits: object) -> HookSpec:
    return at(HookPoint.AttnScores(layer), Intervention.Knockout(mask, **limits))


ZERO, FIRST, RESID = Intervention.Zero(), Intervention.Add(ADD, positions=0), HookPoint.ResidPost

WHOLE = Intervention.Replace(np.ones((1, 5, HIDDEN)))
LATE = Intervention.Zero(positions=3)
END = Logits(positions=-1)
# name -> spec, what `forward` is asked besides, what the message says
IDLE = {
    "a mask of zeros": (knock_out(np.zeros((5, 5))), {}, "no -inf"),
    "later keys only": (knock_out(cut((1, 2), (0, 4))), {}, "knocks nothing out"),
    "queries that are not selected": (knock_out(cut((4, 3)), positions=[0, 1]), {}, "knocks nothing out"),
    "heads that are not selected": (
        knock_out(create_knockout_mask(KnockoutSpec().edge(4, 3).head(2), 8, 5), heads=[0, 1]),
        {},
        "nothing out",
    ),
    "shadowed by a zero": (at(RESID(1), Intervention.Add(ADD), ZERO), {}, r"add at blocks\.1.*the zero after it"),
    "shadowed where it applies": (
        at(RESID(1), Intervention.Add(ADD, positions=[0, 2]), Intervention.Replace(ADD, positions=[2, 3, 0])),
        {},
        "the replace",
    ),
    "shadowed by two together": (
        at(
            RESID(1),
            Intervention.Scale(2, positions=[0, -1]),
            Intervention.Zero(positions=0),
            Intervention.Zero(positions=4),
        ),
        {},
        "scale at .*the zero after it",
    ),
    "a shadowed head": (
        at(HookPoint.AttnZ(0), Intervention.Scale(2, heads=1), Intervention.Zero(heads=[0, 1])),
        {},
        "the zero after it",
    ),
    "a shadowed knockout": (
        at(HookPoint.AttnScores(0), Intervention.Knockout(cut((4, 3))), Intervention.Zero(positions=4)),
        {},
        "the zero",
    ),
    "overwritten on the way": (
        at(HookPoint.AttnOut(LAST), Intervention.Add(ADD)).intervene(RESID(LAST), WHOLE),
        {},
        "changes nothing that is asked for",
    ),
    "the last layer, other logits": (at(RESID(LAST), FIRST), {"logits": END}, r"position 0.*logits in part"),
    "the last layer's queries": (
        at(HookPoint.AttnQ(LAST), Intervention.Scale(2, positions=[0, 1])),
        {"logits": Logits(positions=[2, -1])},
        "in part",
    ),
    "a knockout at other queries": (knock_out(cut((2, 1)), LAST), {"logits": END}, "position 2"),
    "a later key": (at(HookPoint.AttnV(LAST), LATE), {"logits": Logits(positions=1)}, "position 3"),
    "logits themselves": (at("hook_logits", Intervention.Scale(2, positions=0)), {"logits": END}, "position 0"),
    "a capture of another position": (
        at(HookPoint.MlpOut(LAST), FIRST).capture(RESID(LAST), positions=-1),
        {"logits": False},
        "hook_resid_post in part",
    ),
    "a capture before it": (at(RESID(1), ZERO).capture(RESID(0)), {"logits": False}, "changes nothing"),
    "shadowed where it is shown": (
        at(HookPoint.MlpOut(LAST), Intervention.Add(ADD, positions=[0, 3]), Intervention.Zero(positions=0)),
        {"logits": Logits(positions=[0, 2])},
        r"add at .* at position 3 changes nothing",
    ),
    "shadowed at one head, not shown at the other's": (
        at(
            HookPoint.AttnZ(LAST),
            Intervention.Scale(2, heads=[0, 1], positions=[1, 4]),
            Intervention.Zero(heads=[1, 0], positions=-1),
        ),
        {"logits": END},
        r"scale at .* at position 1 changes nothing",
    ),
    "a cache before it": (at(HookPoint.MlpOut(LAST), FIRST), {"logits": END, "use_cache": True}, "the cache"),
}

EFFECTIVE = {
    "no dose": (at(RESID(1), Intervention.Add(0.0)), {}),
    "a factor of one": (at(RESID(1), Intervention.Scale(1.0)), {}),
    "an edge among later keys": (knock_out(cut((1, 2), (4, 3))), {}),
    "an edit after a replacement": (at(RESID(1), ZERO, Intervention.Add(ADD)), {}),
    "a replacement of other tokens": (
        at(RESID(1), Intervention.Add(ADD, positions=[0, 2]), Intervention.Zero(positions=[0, 1])),
        {},
    ),
    "a replacement of other heads": (
        at(HookPoint.AttnZ(0), Intervention.Scale(2, heads=[1, 2]), Intervention.Zero(heads=1)),
        {},
    ),
    "earlier layers are read by later tokens": (at(RESID(LAST - 1), FIRST), {"logits": END}),
    "keys of the last layer": (at(HookPoint.AttnK(LAST), Intervention.Zero(positions=0)), {"logits": END}),
    "the position itself": (at(RESID(LAST), Intervention.Add(ADD, positions=[0, -1])), {"logits": END}),
    "the cache alone": (at(HookPoint.AttnV(LAST), LATE), {"logits": Logits(positions=1), "use_cache": True}),
    "a capture there": (at(RESID(LAST), FIRST).capture(RESID(LAST)), {"logits": END}),
    "keys go on beside a replaced stream": (
        at(RESID(1), Intervention.Add(ADD)).intervene(RESID(2), WHOLE),
        {"use_cache": True},
    ),
}


@pytest.mark.parametrize("what", IDLE)
def test_what_takes_no_effect_is_refused(what):
    spec, asked, message = IDLE[what]
    with pytest.raises(InterventionError, match=message):
        model_of("world-llama").forward(IDS, spec, **asked)


@pytest.mark.parametrize("what", EFFECTIVE)
def test_what_has_one_runs(what):
    spec, asked = EFFECTIVE[what]
    model_of("world-llama").forward(IDS, spec, **asked)


def test_edges_outside_a_window_and_padding_are_none(models):
    ids = np.arange(3, 15)[None]
    far = np.zeros((12, 12))
    far[11, 0] = -np.inf
    with pytest.raises(InterventionError, match="each query reading"):
        models("gemma2").forward(ids, at(HookPoint.AttnScores(0), Intervention.Knockout(far)))
    mask = np.zeros((1, 12), int)
    mask[0, -4:] = 1
    with pytest.raises(InterventionError, match="has 4 tokens"):
        model_of("world-llama").forward(ids, knock_out(cut((11, 9), size=12)), attention_mask=mask)


def test_a_generation_is_asked_as_a_whole():
    model, prompt, never = model_of("world-llama"), IDS[0].tolist(), knock_out(cut((8, 6), size=9))
    for spec, message in ((at(RESID(LAST), FIRST), "position 0 changes nothing"), (never, "knocks nothing out")):
        with pytest.raises(InterventionError, match=message):
            model.generate(prompt, spec, max_new_tokens=4)
    last, later = (at(RESID(LAST), Intervention.Add(ADD, positions=place)) for place in (-1, 6))
    for spec in (last, later, knock_out(cut((7, 6), size=9))):
        model.generate(prompt, spec, max_new_tokens=4, eos_token_id=[])
    model.generate(prompt, at(RESID(LAST), FIRST), max_new_tokens=2, output_logits=True)


def test_a_recurrent_model_mixes_tokens_by_its_state():
    model = model_of("world-rwkv7")
    early, before = (Intervention.Add(np.cos(np.arange(model.hidden_size)), positions=place) for place in (0, 3))
    with pytest.raises(InterventionError, match="position 0"):
        model.forward(IDS, at(RESID(LAST), early), logits=END)
    plain = model.forward(IDS, logits=END).output()
    for spec in (at(RESID(LAST - 1), early), at(HookPoint.AttnOut(LAST), before)):
        assert not np.array_equal(model.forward(IDS, spec, logits=END).output(), plain)


def test_a_channel_mix_reads_the_token_before_alone():
    """Behind the last recurrence a token reaches the next one, and the state only as the last."""
    model = model_of("world-rwkv7")
    points = (HookPoint.AttnOut(LAST), HookPoint.MlpPre(LAST), HookPoint.RwkvWkv(LAST))
    plain = model.forward(IDS)
    for point in points:
        for position in range(5):
            spec = at(point, Intervention.Scale(-1.5, positions=position))
            whole = model.forward(IDS, spec)
            pairs = zip(whole.state.layers, plain.state.layers, strict=True)
            kept = all(np.array_equal(one, other) for layers in pairs for one, other in zip(*layers, strict=True))
            same = kept and np.array_equal(whole.output()[:, -1], plain.output()[:, -1])
            assert same == (position < 3)
            if same:
                with pytest.raises(InterventionError, match=rf"position {position} changes nothing.*the cache"):
                    model.forward(IDS, spec, logits=END)
            else:
                model.forward(IDS, spec, logits=END)
    with pytest.raises(InterventionError, match="position 0 changes nothing"):
        model.generate(IDS[0, :3].tolist(), at(points[0], Intervention.Scale(-1.5, positions=0)), max_new_tokens=3)
    model.generate(IDS[0, :3].tolist(), at(points[0], Intervention.Scale(-1.5, positions=1)), max_new_tokens=3)
    hidden = StateKnockoutSpec().position(3).layer(LAST).token_shift()  # then the last token reads the one before
    spec = at(points[0], Intervention.Scale(-1.5, positions=2)).set_state_knockout(hidden)
    changed, other = (model.forward(IDS, one, logits=END) for one in (spec, HookSpec().set_state_knockout(hidden)))
    assert not np.array_equal(changed.output(), other.output())


STATE = StateKnockoutSpec().position(2).layer(2)


@pytest.mark.parametrize(
    ("state", "point", "positions", "seen"),
    [
        (STATE, HookPoint.ResidPre(2), None, False),
        (STATE, HookPoint.RwkvK(2), None, False),
        (STATE, HookPoint.RwkvWkv(2), None, True),
        (STATE, HookPoint.RwkvStates(2), None, True),
        (STATE, HookPoint.RwkvState(2), None, True),
        (STATE, HookPoint.ResidPost(2), [0, 1], False),
        (STATE, HookPoint.ResidPost(3), [0, -1], True),
        (StateKnockoutSpec().position(2).layer(2).invisible(), HookPoint.RwkvK(2), None, True),
        (StateKnockoutSpec().position(2).layer(2).invisible(), HookPoint.ResidPre(2), None, False),
        (StateSteeringSpec(3.0).position("prompt"), HookPoint.MlpOut(0), [0], True),
    ],
)
def test_a_state_intervention_is_seen_by_a_capture_or_refused(state, point, positions, seen):
    model, plain = model_of("world-rwkv7"), HookSpec().capture(point, positions=positions)
    spec = HookSpec().extend(plain)
    (spec.set_state_knockout if isinstance(state, StateKnockoutSpec) else spec.set_state_steering)(state)
    if not seen:
        with pytest.raises(InterventionError, match=r"state knockout: (no capture lies behind|what is asked for)"):
            model.forward(IDS, spec, logits=False)
    one, other = (model.forward(IDS, each)[point] for each in (spec, plain))  # the logits show it
    assert np.array_equal(one, other) != seen


def test_a_state_intervention_behind_which_all_is_replaced_is_refused():
    spec = at(RESID(2), WHOLE).set_state_knockout(STATE).capture(RESID(3))
    with pytest.raises(InterventionError, match="no capture lies behind"):
        model_of("world-rwkv7").forward(IDS, spec, logits=False)
    model_of("world-rwkv7").forward(IDS, spec.capture(HookPoint.RwkvWkv(2)), logits=False)


def test_a_compiled_graph_is_refused_what_no_call_shows(tmp_path):
    for spec in (knock_out(np.zeros((5, 5))), knock_out(cut((1, 3))), at(RESID(1), Intervention.Add(ADD), ZERO)):
        with pytest.raises(InterventionError, match="nothing"):
            model_of("world-llama").compile(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def outputs(model: MIModel, spec: HookSpec, whole: bool = False, **asked: Any) -> list[np.ndarray]:
    """Everything that a call returns; with `whole`, the same part of a call that returns everything."""
    if not whole:
        found = model.forward(IDS, spec, **asked)
        arrays = [*found.values(), *([] if asked["logits"] is False else [found.output()])]
    else:
        all_of = HookSpec(list(map(_whole, spec.captures)), spec.interventions)
        all_of.capture(spec.interventions[0][0])
        found = model.forward(IDS, all_of, use_cache=True)
        arrays = [_part(found[str(one.what)], one.positions, one.what.axes) for one in spec.captures]
        if asked["logits"] is not False:
            places = asked["logits"].positions_ if isinstance(asked["logits"], Logits) else [0, 1, 2, 3, 4]
            arrays.append(found.output()[:, places])
    return [*arrays, *(part for layer in found.kv_cache.layers for part in layer)] if asked["use_cache"] else arrays


def _whole(request: Capture) -> Capture:
    return replace(request, positions=None)


def _part(value: np.ndarray, positions: tuple[int, ...] | None, axes: tuple[str, ...]) -> np.ndarray:
    return value if positions is None else value.take(positions, axis=axes.index("seq"))


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2"])
@law
@given(data=st.data())
@pytest.mark.slow_beyond(1)
def test_refused_or_seen(name, data):
    """A drawn edit changes something that is returned, or it is refused and nothing returned depends on it."""
    model = model_of(name)
    points = [point for point in model.hook_points() if not point.derived and point.short not in ("scores", "pattern")]
    point = data.draw(st.sampled_from([p for p in points if p.layer in (None, LAST - 1, LAST)]))
    least = 1 if point.variant in ("AttnQ", "AttnRotQ") else 0  # the first query has one key to read, whatever it asks
    places = st.lists(st.integers(least, 4), min_size=1, max_size=2, unique=True)
    positions, part = data.draw(st.one_of(st.none(), places)), data.draw(st.sampled_from([None, 0, 2, -1]))
    watched = data.draw(st.one_of(st.none(), st.sampled_from(points)))
    logits = data.draw(st.sampled_from([True, END, Logits(positions=[0, 2]), *([False] if watched else [])]))
    asked = {"logits": logits, "use_cache": data.draw(st.booleans())}
    seen = HookSpec() if watched is None else HookSpec().capture(watched, positions=part)
    spec = HookSpec().extend(seen).intervene(point, Intervention.Scale(-1.5, positions=positions))
    plain = outputs(model, seen, **asked)
    try:
        changed = outputs(model, spec, **asked)
    except InterventionError:
        changed = outputs(model, spec, whole=True, **asked)
        assert all(np.array_equal(one, other) for one, other in zip(plain, changed, strict=True))
    else:
        assert not all(np.array_equal(one, other) for one, other in zip(plain, changed, strict=True))
