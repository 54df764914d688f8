"""A model in pieces: from any cut to any other the numbers of the whole model, bit for bit."""

import fused_llama
import numpy as np
import pytest

from exporters.adopt import adopt
from mionnx import HookPoint, HookSpec, Intervention, Logits, MIModel
from mionnx.engine.options import Options
from mionnx.rewrite.plan import Edit
from mionnx.run.segments import EMBEDDING, Rows, Segments
from mionnx.spec.kinds import KINDS

OPTIONS = Options(threads=1)
MODELS = ("llama", "gpt2", "gemma2", "rwkv7", "adopted", "int4")


@pytest.fixture(scope="module")
def model_of(models, recurrent, shipped, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")

    def find(name):
        if name == "adopted" and not (folder / name).exists():
            adopt(fused_llama.write(folder / "stock"), folder / name)
        if name == "int4" and not (folder / name).exists():
            shipped.quantise(folder / name)
        if name in ("adopted", "int4"):
            return MIModel.from_pretrained(folder / name, threads=1, fused=False)
        return recurrent if name == "rwkv7" else models(name)

    return find


@pytest.fixture(params=MODELS)
def model(request, model_of):
    return model_of(request.param)


def tokens(model, rows=2, seq=6):
    return np.random.default_rng(3).integers(3, model.vocab_size, (rows, seq))


def before(segments, rows, last):
    stream = {}
    for layer in range(EMBEDDING, last):
        stream, _ = segments.layer(layer, rows, stream)
    return stream


@pytest.mark.slow_beyond(4)
def test_all_pieces_one_after_the_other_are_the_model(model):
    ids = tokens(model)
    segments, stream = Segments(model.hooked, OPTIONS), {}
    for layer in range(EMBEDDING, segments.layers + 1):
        assert (*stream,) == segments.inputs_of(layer)
        stream, _ = segments.layer(layer, Rows(ids), stream)
    assert np.array_equal(stream["logits"], model.forward(ids).output())


def test_from_a_hook_point_to_others(model):
    ids, last = tokens(model), model.num_layers - 1
    names = [str(point(last)) for point in (HookPoint.AttnOut, HookPoint.MlpOut, HookPoint.ResidPost)]
    segments, spec = Segments(model.hooked, OPTIONS), HookSpec()
    for name in names:
        spec.capture(name)
    cache = model.forward(ids, spec)
    values = segments.run(Rows(ids), before(segments, Rows(ids), last), [*names, "logits"])
    assert all(np.array_equal(values[name], cache[name]) for name in names)
    assert np.array_equal(values["logits"], cache.output())


def test_rows_go_on_from_keys_and_values(model):
    """The second half of a row, from the keys and values of its first half: as in the whole row."""
    ids = tokens(model, 1)
    segments, stream, past = Segments(model.hooked, OPTIONS), {}, {}
    for layer in range(EMBEDDING, segments.layers):
        keys = segments.keys_of(layer)
        stream, values = segments.layer(layer, Rows(ids), stream, None, [*keys])
        past |= {name: values[hook] for hook, name in keys.items()}
    whole = segments.logits(Rows(ids), stream, last=False)
    if not past:
        assert model.hooked.metadata.carries_state
        return
    rows = Rows(ids.repeat(2, axis=0), 3, past)
    stream = before(segments, rows, segments.layers)
    assert all(value.shape[:2] == (2, 3) for value in stream.values())
    np.testing.assert_allclose(segments.logits(rows, stream, last=False), whole[[0, 0], 3:], rtol=0, atol=5e-5)


def test_logits_of_the_last_position_and_of_some_tokens(model):
    ids = tokens(model)
    segments = Segments(model.hooked, OPTIONS)
    stream = {segments.end: model.forward(ids, HookSpec().capture(segments.end))[segments.end]}
    last = segments.logits(Rows.blank(*ids.shape), stream)
    assert np.array_equal(last, model.forward(ids, logits=Logits(positions=-1)).output())
    some = segments.logits(Rows.blank(*ids.shape), stream, tokens=np.array([5, 3]))
    np.testing.assert_allclose(some, last[..., [5, 3]], rtol=0, atol=5e-5 * max(1, np.abs(last).max()))


def test_interventions_act_on_what_is_fed_and_on_what_follows(model):
    ids, start = tokens(model), str(HookPoint.ResidPre(1))
    out = str(HookPoint.MlpOut(1))
    spec = HookSpec().intervene(start, Intervention.Scale(0.5)).intervene(out, Intervention.Scale(2.0)).capture(out)
    segments = Segments(model.hooked, OPTIONS)
    stream, edits = before(segments, Rows(ids), 1), {}
    for hook, factor in ((start, 0.5), (out, 2.0)):
        edit = Edit(hook, KINDS["scale"], 0, ("batch", "seq", "hidden"))
        edits[edit] = {edit.value_input: np.full((1, 1, 1), factor, stream[start].dtype)}
    assert np.array_equal(segments.run(Rows(ids), stream, [out], edits)[out], model.forward(ids, spec)[out])


def test_calls_that_ask_for_different_values_share_a_piece(model_of):
    model = model_of("llama")
    segments, rows = Segments(model.hooked, OPTIONS), Rows(tokens(model))
    stream, _ = segments.layer(EMBEDDING, rows, {})
    names = [str(HookPoint.AttnOut(0)), str(HookPoint.MlpOut(0))]
    for ends in ([], names[1:], names):
        _, values = segments.layer(0, rows, stream, None, ends, names)
        assert [*values] == ends
    assert len(segments.variants.open) == 2


def test_a_model_keeps_its_pieces_and_closes_idle_ones(model_of):
    model = model_of("gpt2")
    segments = model.opened(Segments)
    assert model.opened(Segments) is segments
    assert model.opened(Segments.of_sweep) is model.opened(Segments.of_sweep) is not segments
    segments.layer(EMBEDDING, Rows(tokens(model)), {})
    assert len(segments.variants.open) == 1
    segments.variants.close_idle(0)
    segments.variants.close_idle(0)
    assert not segments.variants.open
