"""The laws of the design as properties: null, address, reach, order; and what a rewritten graph is kept for."""

import numpy as np
import pytest
from families import VOCAB, drawn_families
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mionnx import HookError, HookPoint, HookSpec, Intervention, InterventionError, MIError, MIModel, Options
from mionnx.graph.hooked_model import HookedModel

law = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [batch, seq] and a mask with padding on either side of some rows."""
    rows, seq = draw(st.integers(1, 3)), draw(st.integers(3, 12))
    ids = np.random.default_rng(draw(st.integers(0, 999))).integers(3, VOCAB, (rows, seq))
    mask = np.ones_like(ids)
    for row in range(rows):
        padding = draw(st.integers(0, seq - 2))
        mask[row, seq - padding :] = 0 if draw(st.booleans()) else 1
        mask[row, :padding] = 0 if mask[row].all() else 1
    return ids, mask


def points_of(model: MIModel) -> list[HookPoint]:
    return [point for point in model.hook_points() if not point.derived]


def forward(model: MIModel, ids: np.ndarray, mask: np.ndarray, spec: HookSpec | None = None):
    return model.forward(ids, spec, attention_mask=mask)


@drawn_families
@law
@given(batch=batches(), data=st.data())
def test_null_law(models, families, batch, data):
    """Observing changes nothing, and changing nothing changes nothing: bit for bit, with default options."""
    family = data.draw(st.sampled_from(families))
    model, (ids, mask) = models(family), batch
    plain = forward(model, ids, mask).output()
    everything = forward(model, ids, mask, HookSpec().capture("*"))
    assert np.array_equal(everything.output(), plain)
    point = data.draw(st.sampled_from(points_of(model)))
    alone = forward(model, ids, mask, HookSpec().capture(point))
    assert np.array_equal(alone.output(), plain)
    assert np.array_equal(alone[point], everything[point])
    nothing = data.draw(
        st.sampled_from([Intervention.Add(0.0), Intervention.Scale(1.0), Intervention.Replace(everything[point])])
    )
    assert np.array_equal(forward(model, ids, mask, HookSpec().intervene(point, nothing)).output(), plain)
    nowhere = Intervention.Replace(everything[point], positions=data.draw(st.sampled_from([0, -1, [0, -1]])))
    assert np.array_equal(forward(model, ids, mask, HookSpec().intervene(point, nowhere)).output(), plain)


@drawn_families
@law
@given(batch=batches(), data=st.data())
def test_address_law_in_depth(models, families, batch, data):
    """What the model computes before a hook point does not change by what is done there."""
    family = data.draw(st.sampled_from(families))
    model, (ids, mask) = models(family), batch
    names = [str(point) for point in points_of(model)]
    at = data.draw(st.integers(1, len(names) - 1))
    plain = forward(model, ids, mask, HookSpec().capture("*"))
    changed = forward(model, ids, mask, HookSpec().capture("*").intervene(names[at], Intervention.Add(0.5)))
    layer = HookPoint.parse(names[at]).layer
    earlier = [name for name in names[:at] if layer is None or (HookPoint.parse(name).layer or 0) < layer]
    for name in earlier:
        assert np.array_equal(plain[name], changed[name]), name
    assert not np.array_equal(plain[names[at]], changed[names[at]])


@drawn_families
@law
@given(batch=batches(), data=st.data())
def test_address_law_in_time(models, families, batch, data):
    """What stands before a position does not change by what is done at it."""
    family = data.draw(st.sampled_from(families))
    model, (ids, mask) = models(family), batch
    mask = np.ones_like(mask)
    position = data.draw(st.integers(1, ids.shape[1] - 1))
    point = data.draw(st.sampled_from([point for point in points_of(model) if point.short != "scores"]))
    spec = HookSpec().intervene(point, Intervention.Scale(1.5, positions=position))
    plain, changed = forward(model, ids, mask).output(), forward(model, ids, mask, spec).output()
    assert np.array_equal(plain[:, :position], changed[:, :position])
    assert not np.array_equal(plain[:, position:], changed[:, position:])


WRONG_SPECS = {
    "no such layer": (HookSpec().capture("blocks.9.hook_resid_post"), HookError, "hook_resid_post"),
    "a typing error": (HookSpec().capture("blocks.0.hook_resid_pots"), HookError, "blocks.0.hook_resid_post"),
    "an empty glob": (HookSpec().capture("blocks.*.hook_nothing"), HookError, "blocks.*.hook_nothing"),
    "custom": (HookSpec().intervene("my.value", Intervention.Zero()), HookError, "my.value"),
    "width": (
        HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Add(np.ones(7))),
        InterventionError,
        "hidden=64",
    ),
    "position": (HookSpec().intervene("hook_embed", Intervention.Zero(positions=5)), InterventionError, "5 tokens"),
    "before the start": (
        HookSpec().intervene("hook_embed", Intervention.Zero(positions=-6)),
        InterventionError,
        "position -6",
    ),
    "head": (HookSpec().intervene(HookPoint.AttnZ(0), Intervention.Zero(heads=4)), InterventionError, "head 4 of 4"),
    "row": (HookSpec().intervene("hook_embed", Intervention.Zero(rows=1)), InterventionError, "row 1 of a batch of 1"),
    "heads where there are none": (
        HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Zero(heads=0)),
        InterventionError,
        "blocks.0.attn.hook_z",
    ),
    "a derived value": (
        HookSpec().intervene(HookPoint.AttnResult(1), Intervention.Zero()),
        InterventionError,
        "blocks.1.attn.hook_z",
    ),
    "a knockout elsewhere": (
        HookSpec().intervene(HookPoint.AttnPattern(1), Intervention.Knockout([[0.0]])),
        InterventionError,
        "blocks.1.attn.hook_scores",
    ),
}


@pytest.mark.parametrize("what", WRONG_SPECS)
def test_reach_law(family, what, models):
    """A spec that would not take effect is an error that names what is meant, and nothing runs."""
    spec, kind, named = WRONG_SPECS[what]
    model = models(family)
    with pytest.raises(kind) as caught:
        model.forward(np.full((1, 5), 7), spec)
    assert isinstance(caught.value, MIError)
    assert named in str(caught.value)


@drawn_families
@law
@given(batch=batches(), data=st.data())
def test_order_law(models, families, batch, data):
    """Interventions apply in registration order; a capture sees their result, or with `before` what came in."""
    family = data.draw(st.sampled_from(families))
    model, (ids, mask) = models(family), batch
    point = data.draw(st.sampled_from([p for p in points_of(model) if p.short not in ("scores", "pattern")]))
    plain = forward(model, ids, mask, HookSpec().capture(point))[point]
    first, second = Intervention.Add(0.25), Intervention.Scale(2.0)
    spec = HookSpec().capture(point).capture(point, before=True).intervene(point, first)
    spec.extend(HookSpec().intervene(point, second))
    found = forward(model, ids, mask, spec)
    assert np.array_equal(found[f"{point}.before"], plain)
    assert np.array_equal(found[point], (plain + np.float32(0.25)) * np.float32(2))
    turned = forward(model, ids, mask, HookSpec().capture(point).intervene(point, second).intervene(point, first))
    assert np.array_equal(turned[point], plain * np.float32(2) + np.float32(0.25))


@drawn_families
@law
@given(split=st.integers(1, 11), data=st.data())
def test_cache_law(models, families, split, data):
    """A text run in two parts equals the text run whole, with an intervention at positions of the second part."""
    family = data.draw(st.sampled_from(families))
    model = models(family)
    ids = np.random.default_rng(split).integers(3, VOCAB, (2, 12))
    point = data.draw(st.sampled_from([p for p in points_of(model) if p.short not in ("scores", "pattern")]))
    spec = HookSpec().intervene(point, Intervention.Scale(1.5, positions=data.draw(st.integers(split, 11))))
    whole = model.forward(ids, spec).output()
    first = model.forward(ids[:, :split], use_cache=True)
    second = model.forward(ids[:, split:], spec, cache=first.kv_cache)
    assert np.abs(second.output() - whole[:, split:]).max() < 5e-5
    assert np.abs(first.output() - whole[:, :split]).max() < 5e-5


def test_a_sliding_window_counts_no_padding(models):
    """Texts padded on the right and continued: a window over columns would reach less far than one over the text."""
    model, rng = models("gemma2"), np.random.default_rng(0)
    ids, more, lengths = rng.integers(3, VOCAB, (2, 9)), rng.integers(3, VOCAB, (2, 4)), (9, 4)
    mask = np.array([[column < length for column in range(9)] for length in lengths], int)
    first = model.forward(ids, attention_mask=mask, use_cache=True)
    found = model.forward(more, cache=first.kv_cache).output()
    for row, length in enumerate(lengths):
        alone = model.forward(np.concatenate([ids[row, :length], more[row]])).output()
        assert np.abs(found[row] - alone[0, length:]).max() < 5e-5


def test_an_empty_spec_runs_the_graph_on_disk(family, models):
    model = models(family)
    empty, none = model.compile_graph(HookSpec()), model.compile_graph()
    assert empty.model is None
    assert empty.session is none.session
    assert empty.session._model_path == str(model.hooked.folder / "model.onnx")
    assert str(empty.report) == "the graph is untouched"


def test_other_values_open_no_other_session(family, hooked):
    model, ids = MIModel.from_pretrained(hooked(family), threads=1), np.full((2, 5), 7)

    def spec(strength: float, positions: list[int], head: int) -> HookSpec:
        direction = np.linspace(-strength, strength, model.hidden_size)
        return (
            HookSpec()
            .intervene(HookPoint.ResidPost(0), Intervention.Add(direction, positions=positions))
            .intervene(HookPoint.AttnZ(1), Intervention.Scale(strength, heads=head))
        )

    one = model.forward(ids, spec(0.5, [1], 0)).output()
    graphs = set(model.compiled)
    other = model.forward(ids[:, :4], spec(0.25, [0, -1], 1)).output()
    assert set(model.compiled) == graphs
    assert not np.array_equal(one[:, :4], other)
    assert model.compile_graph(spec(1.0, [0], 0)).session is model.compile_graph(spec(2.0, [3, 2], 1)).session
    model.forward(ids, HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Scale(2.0)))
    assert set(model.compiled) > graphs


def test_only_so_many_graphs_stay_open(hooked):
    model = MIModel(HookedModel.open(hooked("llama")), Options(threads=1, max_graphs=2))
    for layer in (0, 1, 0):
        model.forward([[3, 4]], HookSpec().capture(HookPoint.ResidPost(layer)))
    kept = model.compile_graph(HookSpec().capture(HookPoint.ResidPost(0))).session
    model.forward([[3, 4]])
    assert len(model.compiled) == 2
    assert model.compile_graph(HookSpec().capture(HookPoint.ResidPost(0))).session is kept


def test_the_report_names_every_added_node(models):
    spec = HookSpec().capture("blocks.0.attn.hook_result")
    spec.intervene(HookPoint.ResidPost(0), Intervention.Add(np.ones(64), positions=-1))
    report = models("llama").report(spec)
    assert "blocks.0.hook_resid_post.0.add.Add" in report.added["blocks.0.hook_resid_post"]
    assert "blocks.0.attn.hook_result" in report.added
    assert report.inputs == ["blocks.0.hook_resid_post.0.add.positions", "blocks.0.hook_resid_post.0.add.value"]
    assert report.outputs == ["blocks.0.attn.hook_result"]


def test_the_estimate_is_what_the_captures_take(family, models):
    model = models(family)
    spec = HookSpec().capture("*")
    estimate = model.estimate(spec, batch=2, seq=7)
    cache = model.forward(np.full((2, 7), 9), spec)
    assert estimate.captures == {name: array.nbytes for name, array in cache.items()}
    assert estimate.total == sum(array.nbytes for array in cache.values())
