"""Sweeps: every cell equals one forward pass with that one patch, in torch and here; whatever is left out of it."""

import itertools
import shutil

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Inputs, run
from scipy.special import log_softmax
from sweep_pairs import DIFFERENT, HEADS, SEQ, difference, prompts

from mionnx import HookPoint, HookSpec, Intervention, MIModel
from mionnx.analysis.sweep.patched_runs import Shortcuts
from mionnx.errors import InputError

RESIDUAL = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "mlp.hook_act")


def in_torch(reference, base, donor, point, **limits):
    """The last logits of a run with one value put in, in eager torch."""
    value = run(reference, Inputs(donor[None], np.ones((1, len(donor)), int))).values[str(point)]
    edit = Intervention.Replace(value, **limits)
    return run(reference, Inputs(base[None], np.ones((1, len(base)), int)), [(point, edit)]).logits[0, -1]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_cells_of_the_stream_equal_torch(models, references, name, direction):
    model, (clean, corrupted) = models(name), prompts()
    base, donor = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    hook = "hook_resid_pre" if direction == "denoising" else "hook_attn_out"
    found = model.patch_sweep(clean, corrupted, hook, answer=5, versus=9, patching=direction)
    point = HookPoint.ResidPre if direction == "denoising" else HookPoint.AttnOut
    assert found.values.shape == (2, SEQ)
    for layer, position in itertools.product(range(2), range(SEQ)):
        expected = in_torch(references(name), base, donor, point(layer), positions=position)
        assert found.values[layer, position] == pytest.approx(difference(expected, 5, 9), abs=5e-5)
    assert (found.effect[:, : DIFFERENT[0]] == 0).all()
    assert np.abs(found.effect).max() > 0.01


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("hook", HEADS)
def test_cells_of_heads_equal_torch(models, references, name, hook):
    model, (clean, corrupted) = models(name), prompts(1)
    found = model.patch_sweep(clean, corrupted, hook, ("head", "layer", "position"), "probability", answer=5)
    assert found.values.shape[1:] == (2, SEQ)
    for head, layer, position in itertools.product(range(found.values.shape[0]), range(2), (3, 4, SEQ - 1)):
        point = HookPoint.parse(f"blocks.{layer}.attn.{hook}")
        logits = in_torch(references(name), corrupted, clean, point, heads=head, positions=position)
        assert found.values[head, layer, position] == pytest.approx(np.exp(log_softmax(logits))[5], abs=5e-5)


@pytest.mark.parametrize("hook", [*RESIDUAL, *HEADS])
def test_every_shortcut_leaves_the_numbers_alone(models, hook):
    model, (clean, corrupted) = models("llama"), prompts(2)
    over = ("layer", "head", "position") if hook in HEADS else ("layer", "position")
    names = ("batch", "truncate", "last", "window", "skip")
    found = {
        name: model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9, shortcuts=Shortcuts(**{name: False}))
        for name in names
    }
    plain = Shortcuts(**dict.fromkeys(names, False))
    reference = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9, shortcuts=plain)
    every = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9)
    for other in (every, *found.values()):
        np.testing.assert_allclose(other.values, reference.values, atol=5e-6)
        assert ((other.effect == 0) == (reference.effect == 0)).all()
    assert np.abs(reference.effect).max() > 1e-3


@pytest.mark.parametrize("hook", ["hook_resid_pre", "hook_z", "hook_v", "hook_pattern"])
def test_shortcuts_hold_where_attention_sees_a_window_only(models, hook):
    """Gemma 2 looks 8 tokens back in every other layer; the text has 20."""
    model, (clean, corrupted) = models("gemma2"), prompts(2, seq=20)
    over = ("layer", "head", "position") if hook in HEADS else ("layer", "position")
    plain = Shortcuts(batch=False, truncate=False, last=False, window=False, skip=False)
    reference = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9, shortcuts=plain)
    every = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9)
    np.testing.assert_allclose(every.values, reference.values, atol=5e-6)
    assert ((every.effect == 0) == (reference.effect == 0)).all()
    assert np.abs(reference.effect).max() > 1e-3


def test_shortcuts_hold_where_keys_change_between_their_last_hook_point_and_the_cache(hooked, tmp_path):
    """Llama 4 norms keys behind their rotation; here they are scaled there, each number by another factor."""
    folder = shutil.copytree(hooked("llama"), tmp_path / "scaled")
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    nodes = [*proto.graph.node]
    width = MIModel.from_pretrained(hooked("llama"), threads=1).hooked.axes(HookPoint.AttnRotK(0))[-1]
    factors = np.linspace(0.5, 2, width, dtype=np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(factors, "key_factors"))
    for joined in [node for node in nodes if node.op_type == "Concat" and node.input[0].endswith(".key")]:
        scaled = f"{joined.name}.scaled"
        nodes.insert(nodes.index(joined), onnx.helper.make_node("Mul", [joined.input[1], "key_factors"], [scaled]))
        joined.input[1] = scaled
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    onnx.save(proto, folder / "model.onnx")
    model, (clean, corrupted) = MIModel.from_pretrained(folder, threads=1, check="none"), prompts(3)
    for hook in ("hook_resid_pre", "hook_rot_k"):
        found = model.patch_sweep(clean, corrupted, hook, answer=5, versus=9)
        values = model.forward(clean, HookSpec().capture(f"blocks.*.{'attn.' * ('rot' in hook)}{hook}"))
        for layer, at in itertools.product(range(2), range(SEQ)):
            point = HookPoint.AttnRotK(layer) if "rot" in hook else HookPoint.ResidPre(layer)
            spec = HookSpec().intervene(point, Intervention.Replace(values[point], positions=at))
            logits = model.forward(corrupted, spec).output()[0, -1]
            assert found.values[layer, at] == pytest.approx(difference(logits, 5, 9), abs=5e-5)


@pytest.mark.parametrize("direction", ["denoising", "noising"])
@pytest.mark.parametrize("hook", ["hook_resid_pre", "mlp.hook_act", *HEADS])
def test_cells_equal_a_function_that_does_the_same(shipped, hook, direction):
    clean, corrupted = prompts(19)
    base, donor = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    over, indices = (("layer", "head"), (0, 1, 3)) if hook in HEADS else (("layer", "position"), (2, 4, SEQ - 1))
    found = shipped.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9, patching=direction)
    _, given = shipped.run_with_cache(donor, f"*.{hook}", return_type=None)
    for layer, index in itertools.product(range(4), indices):

        def put(value, hook, index=index):
            axis = 2 if hook.point.variant == "AttnZ" else 1  # positions of streams, heads of the others
            where = [slice(None)] * value.ndim
            where[axis] = index
            value[tuple(where)] = given[hook.name][tuple(where)]

        (name,) = [name for name in given if name.startswith(f"blocks.{layer}.")]
        logits = shipped.run_with_hooks(base, [(name, put)])[0, -1]
        assert found.values[layer, index] == pytest.approx(difference(logits, 5, 9), abs=2e-5)
    assert np.abs(found.effect).max() > 1e-3


AXES = {"hook_resid_mid": ["layer", "position"], "hook_z": ["layer", "position", "head"]}
AXES["hook_pattern"] = [*AXES["hook_z"], "source"]
SHAPES = st.sampled_from(list(AXES)).flatmap(
    lambda hook: st.tuples(st.just(hook), st.permutations(AXES[hook]).map(tuple), st.integers(1, len(AXES[hook])))
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=SHAPES, seed=st.integers(0, 99), at=st.integers(-SEQ, SEQ - 1), name=st.sampled_from(["gpt2", "gemma2"]))
def test_any_axes_equal_one_forward_a_cell(models, shape, seed, at, name):
    hook, order, count = shape
    over = tuple(dict.fromkeys(["layer", *order[:count]]))[::-1]
    model, (clean, corrupted) = models(name), prompts(seed)
    end = at % SEQ
    if end < DIFFERENT[0]:
        with pytest.raises(InputError, match="the same up to what is read"):
            model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9, position=at)
        return
    found = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9, position=at)
    for cell in np.random.default_rng(seed).permutation(list(np.ndindex(found.values.shape)))[:4].tolist():
        where = dict(zip(over, cell, strict=True))
        point = f"blocks.{where['layer']}.{'' if 'resid' in hook else 'attn.'}{hook}"
        values = model.forward(clean, HookSpec().capture(point))[point]
        if "source" in where:  # no limit of an intervention says which keys
            old = model.forward(corrupted, HookSpec().capture(point))[point].copy()
            old[..., where["source"]] = values[..., where["source"]]
            values = old
        limits = {"heads": where.get("head"), "positions": where.get("position")}
        spec = HookSpec().intervene(point, Intervention.Replace(values, **limits))
        logits = model.forward(corrupted, spec).output()[0, end]
        assert found.values[tuple(cell)] == pytest.approx(difference(logits, 5, 9), abs=5e-6)
        if where.get("position", 0) > end or where.get("source", 0) > end:
            assert found.effect[tuple(cell)] == 0


def test_pairs_are_averaged_and_may_differ_in_length(models):
    model, pairs = models("llama"), [prompts(3), prompts(4, seq=9), prompts(5)]
    clean, corrupted = [list(side) for side in zip(*pairs, strict=True)]
    found = model.patch_sweep(clean, corrupted, "z", ("layer", "head"), answer=[5, 6, 7], versus=9)
    assert found.by_pair.shape == (3, 2, 4)
    for number, (one, other) in enumerate(pairs):
        alone = model.patch_sweep(one, other, "z", ("layer", "head"), answer=5 + number, versus=9)
        np.testing.assert_allclose(found.by_pair[number], alone.values, atol=5e-6)
    np.testing.assert_allclose(found.values, found.by_pair.mean(axis=0))
    with pytest.raises(InputError, match="different lengths have no positions"):
        model.patch_sweep(clean, corrupted, answer=5, versus=9)


def test_metrics_mean_what_their_names_say(models):
    model, (clean, corrupted) = models("llama"), prompts(6)
    point = HookPoint.ResidMid(1)
    patch = model.forward(clean, HookSpec().capture(point))[point]
    spec = HookSpec().intervene(point, Intervention.Replace(patch, positions=4))
    logits = model.forward(corrupted, spec).output()[0, -1].astype(np.float64)
    good = log_softmax(model.forward(clean).output()[0, -1].astype(np.float64))
    expected = {
        "log_probability": log_softmax(logits)[5],
        "probability": np.exp(log_softmax(logits)[5]),
        "rank": (logits > logits[5]).sum(),
        "kl": (np.exp(good) * (good - log_softmax(logits))).sum(),
        "logit_diff": logits[5] - logits[9],
    }
    given = {"kl": {}, "logit_diff": {"answer": 5, "versus": 9}}
    for name, value in expected.items():
        kwargs = given.get(name, {"answer": 5})
        found = model.patch_sweep(clean, corrupted, "resid_mid", metric=name, **kwargs)
        assert found.values[1, 4] == pytest.approx(value, abs=1e-5), name
    own = model.patch_sweep(clean, corrupted, "resid_mid", metric=lambda logits, pair: logits[:, 5] - pair)
    assert own.values[1, 4] == pytest.approx(logits[5], abs=1e-5)
    assert own.metric == "<lambda>"


def test_answers_are_those_of_the_two_prompts_if_none_is_given(models):
    model, (clean, corrupted) = models("gpt2"), prompts(8)
    corrupted[-1] = (clean[-1] + 11) % 101
    answer, versus = (int(model.forward(ids).output()[0, -1].argmax()) for ids in (clean, corrupted))
    assert answer != versus
    found = model.patch_sweep(clean, corrupted)
    assert (found.values == model.patch_sweep(clean, corrupted, answer=answer, versus=versus).values).all()
    assert found.clean > 0 > found.corrupted
    for ids, shown in ((clean, found.clean), (corrupted, found.corrupted)):
        assert shown == pytest.approx(difference(model.forward(ids).output()[0, -1], answer, versus), abs=5e-6)
    expected = (found.values - found.corrupted) / (found.clean - found.corrupted)
    np.testing.assert_allclose(found.normalized, expected, atol=1e-12)
    assert found.normalized[-1, -1] > 0.1


def test_the_whole_stream_patched_is_the_other_run(models):
    model, (clean, corrupted) = models("gemma2"), prompts(9)
    for direction in ("denoising", "noising"):
        kwargs = {"answer": 5, "versus": 9, "patching": direction}
        found = model.patch_sweep(clean, corrupted, "resid_pre", ("layer",), **kwargs)
        np.testing.assert_allclose(found.normalized, 1, atol=1e-4)


@pytest.mark.parametrize("layout", ["6-hf", "7-fla"])
@pytest.mark.slow_beyond(1)
def test_recurrent_models_too(rwkv, layout):
    model = rwkv(layout)
    clean, corrupted = prompts(0, vocab=model.vocab_size)
    for hook in ("resid_pre", "attn_out", "rwkv.hook_k"):
        over = ("layer", "position") if "rwkv" not in hook else ("layer", "head", "position")
        found = model.patch_sweep(clean, corrupted, hook if "rwkv" not in hook else f"blocks.*.{hook}", over, "kl")
        for cell in [(0, *[0] * (len(over) - 2), 2), (1, *[0] * (len(over) - 2), SEQ - 1)]:
            point = found.hook.format(i=cell[0])
            values = model.forward(clean, HookSpec().capture(point))[point]
            limits = {"heads": cell[1]} if len(cell) == 3 else {}
            edit = Intervention.Replace(values, positions=cell[-1], **limits)
            logits = model.forward(corrupted, HookSpec().intervene(point, edit)).output()[0, -1]
            good = log_softmax(model.forward(clean).output()[0, -1].astype(np.float64))
            expected = (np.exp(good) * (good - log_softmax(logits.astype(np.float64)))).sum()
            assert found.values[cell] == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
@pytest.mark.parametrize("hook", ["hook_z", "hook_mlp_out", "hook_v"])
def test_ablations_equal_one_forward_a_cell(models, kind, hook):
    model, (prompt, other) = models("llama"), prompts(10)
    over = ("layer",) if hook == "hook_mlp_out" else ("layer", "head")
    found = model.ablation_sweep(
        prompt, hook, over, "logit_diff", kind=kind, answer=5, versus=9, reference=None if kind == "zero" else [other]
    )
    for cell in np.ndindex(found.values.shape):
        point = f"blocks.{cell[0]}.{'' if 'mlp' in hook else 'attn.'}{hook}"
        value = model.forward(other, HookSpec().capture(point))[point]
        axis = 2 if hook == "hook_v" else 1
        donor = {"zero": np.zeros_like(value), "mean": value.mean(axis=axis, keepdims=True), "resample": value}[kind]
        edit = Intervention.Replace(np.broadcast_to(donor, value.shape), heads=cell[1] if len(cell) > 1 else None)
        logits = model.forward(prompt, HookSpec().intervene(point, edit)).output()[0, -1]
        assert found.values[cell] == pytest.approx(difference(logits, 5, 9), abs=2e-5)
    assert found.corrupted is None
    with pytest.raises(InputError, match="no second run"):
        _ = found.normalized


def test_too_little_memory_halves_the_batch_and_changes_nothing(models, monkeypatch):
    model, (clean, corrupted) = models("llama"), prompts(11)
    expected = model.patch_sweep(clean, corrupted, "z", ("layer", "head", "position"), answer=5, versus=9)
    from mionnx.analysis.sweep import patched_runs

    sizes, real = [], patched_runs.PatchedRuns._logits

    def failing(self, cells, metric):
        sizes.append(len(cells))
        if len(cells) > 3:
            raise patched_runs.ModelError("ONNX Runtime failed: Failed to allocate memory for requested buffer")
        return real(self, cells, metric)

    monkeypatch.setattr(patched_runs.PatchedRuns, "_logits", failing)
    found = model.patch_sweep(clean, corrupted, "z", ("layer", "head", "position"), answer=5, versus=9)
    np.testing.assert_allclose(found.values, expected.values, atol=5e-6)
    assert max(sizes) > 3 >= sizes[-1]


def test_cells_without_effect_are_exactly_so_however_many_pairs_there_are(shipped):
    pairs = [prompts(seed) for seed in range(20)]
    clean, corrupted = [list(side) for side in zip(*pairs, strict=True)]
    for direction in ("denoising", "noising"):
        found = shipped.patch_sweep(clean, corrupted, metric="probability", answer=5, patching=direction)
        idle = (found.by_pair == found.by_pair[:, :1, :1]).all(axis=0)
        assert idle.sum() == 4 * DIFFERENT[0] + 3  # before the first difference; tokens that are the same in layer 0
        assert (found.effect[idle] == 0).all()
        assert (found.effect[~idle] != 0).all()
        np.testing.assert_allclose(found.values, found.by_pair.mean(axis=0), rtol=1e-12)


CLASSES = {"position": lambda row: np.arange(len(row)), "token": lambda row: row, "function": lambda row: row % 3}


@pytest.mark.parametrize("by", CLASSES)
def test_mean_ablation_by_class_equals_torch(models, references, by):
    """Means of z over reference prompts, at the same position, of the same token or class, put into a head."""
    draw, classify = np.random.default_rng(5), CLASSES[by]
    reference = [draw.integers(3, 9, length) for length in (7, 9, 8, 7)]
    ids, given = draw.integers(3, 9, 7), {"by": classify if by == "function" else by, "reference": reference}
    found = models("llama").ablation_sweep(ids, "z", metric="log_probability", answer=5, kind="mean", **given)

    def in_eager(row, edits=()):
        return run(references("llama"), Inputs(row[None], np.ones((1, len(row)), int)), edits)

    classes = np.concatenate([classify(row) for row in reference])
    for layer in range(2):
        point = HookPoint.AttnZ(layer)
        values = np.concatenate([in_eager(row).values[str(point)][0] for row in reference])
        means = np.stack([values[classes == one].mean(axis=0) for one in classify(ids)])[None]
        for head in range(4):
            logits = in_eager(ids, [(point, Intervention.Replace(means, heads=head))]).logits[0, -1]
            assert found.values[layer, head] == pytest.approx(log_softmax(logits)[5], abs=5e-5)
    assert np.abs(found.effect).max() > 1e-3


def test_resampling_from_a_dataset_equals_torch(models, references):
    """Longer texts count as far as the prompt goes; several draws of one prompt are averaged."""
    draw, model = np.random.default_rng(6), models("llama")
    reference, rows = [draw.integers(3, 101, length) for length in (7, 9, 4, 12)], draw.integers(3, 101, (2, 7))
    asked = {"metric": "log_probability", "answer": 5}
    resampled = {**asked, "kind": "resample", "reference": reference, "seed": 3}
    found = model.ablation_sweep(rows[0], "z", **resampled, repeats=6)
    long = [row[:7] for row in reference if len(row) >= 7]
    patched = [model.patch_sweep(rows[0], other, "z", ("layer", "head"), **asked, patching="noising") for other in long]
    possible = np.stack([one.values for one in patched])
    for values in found.by_pair:
        assert (np.abs(possible - values).max(axis=(1, 2)) < 1e-5).sum() == 1
    assert len({row.tobytes() for row in found.by_pair}) > 1
    expected = in_torch(references("llama"), rows[0], long[1], HookPoint.AttnZ(1), heads=2)
    assert possible[1, 1, 2] == pytest.approx(log_softmax(expected)[5], abs=5e-5)
    assert (model.ablation_sweep(rows[0], "z", **resampled, repeats=6).values == found.values).all()
    assert model.ablation_sweep(rows, "z", **resampled, repeats=3).n == 2
