"""Sweeps: every cell equals one forward pass with that one patch, in torch and here; whatever is left out of it."""

import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Inputs, run
from scipy.special import log_softmax, softmax
from typer.testing import CliRunner

from mionnx import HookPoint, HookSpec, Intervention, MIModel
from mionnx.cli import app
from mionnx.errors import HookError, InputError, InterventionError
from mionnx.sweep import Shortcuts
from mionnx.sweep.mark import mark_of

SEQ, DIFFERENT = 7, (2, 4)
RESIDUAL = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "mlp.hook_act")
HEADS = ("hook_q", "hook_k", "hook_v", "hook_z", "hook_pattern", "hook_scores")


@pytest.fixture(scope="module")
def shipped() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama", threads=1)


def prompts(seed: int = 0, seq: int = SEQ, vocab: int = 101) -> tuple[np.ndarray, np.ndarray]:
    """A pair that differs at the positions `DIFFERENT`."""
    clean = np.random.default_rng(seed).integers(3, vocab, seq)
    corrupted = clean.copy()
    corrupted[[*DIFFERENT]] = (clean[[*DIFFERENT]] + 7) % vocab
    return clean, corrupted


def difference(logits: np.ndarray, answer: int, versus: int) -> float:
    return float(logits[answer] - logits[versus])


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
    found = model.patch_sweep(clean, corrupted, hook, answer=5, versus=9, direction=direction)
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
    names = ("batch", "truncate", "last", "window")
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
    plain = Shortcuts(batch=False, truncate=False, last=False, window=False)
    reference = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9, shortcuts=plain)
    every = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9)
    np.testing.assert_allclose(every.values, reference.values, atol=5e-6)
    assert ((every.effect == 0) == (reference.effect == 0)).all()
    assert np.abs(reference.effect).max() > 1e-3


@pytest.mark.parametrize("direction", ["denoising", "noising"])
@pytest.mark.parametrize("hook", ["hook_resid_pre", "mlp.hook_act", *HEADS])
def test_cells_equal_a_function_that_does_the_same(shipped, hook, direction):
    clean, corrupted = prompts(19)
    base, donor = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    over, indices = (("layer", "head"), (0, 1, 3)) if hook in HEADS else (("layer", "position"), (2, 4, SEQ - 1))
    found = shipped.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9, direction=direction)
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
            model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9, at=at)
        return
    found = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9, at=at)
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
        kwargs = {"answer": 5, "versus": 9, "direction": direction}
        found = model.patch_sweep(clean, corrupted, "resid_pre", ("layer",), **kwargs)
        np.testing.assert_allclose(found.normalized, 1, atol=1e-4)


@pytest.mark.parametrize("layout", ["6-hf", "7-fla"])
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
    from mionnx.sweep import engine

    sizes, real = [], engine.Patched._logits

    def failing(self, cells, metric):
        sizes.append(len(cells))
        if len(cells) > 3:
            raise engine.ModelError("ONNX Runtime failed: Failed to allocate memory for requested buffer")
        return real(self, cells, metric)

    monkeypatch.setattr(engine.Patched, "_logits", failing)
    found = model.patch_sweep(clean, corrupted, "z", ("layer", "head", "position"), answer=5, versus=9)
    np.testing.assert_allclose(found.values, expected.values, atol=5e-6)
    assert max(sizes) > 3 >= sizes[-1]


def test_an_interrupted_sweep_goes_on_where_it_stopped(models, tmp_path):
    model, (clean, corrupted) = models("llama"), prompts(12)
    kwargs = {"answer": 5, "versus": 9, "shortcuts": Shortcuts(batch=False), "resume": tmp_path / "sweep.safetensors"}
    seen = []

    def stop(stage, done, total):
        seen.append(done)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.patch_sweep(clean, corrupted, progress=stop, **kwargs)
    again = []
    found = model.patch_sweep(clean, corrupted, progress=lambda stage, done, total: again.append(done), **kwargs)
    assert again[0] == seen[-1] + 1
    assert again[-1] == 2 * SEQ
    assert (found.values == model.patch_sweep(clean, corrupted, **{**kwargs, "resume": False}).values).all()
    with pytest.raises(InputError, match="another sweep"):
        model.patch_sweep(clean, corrupted, "resid_mid", **kwargs)
    (tmp_path / "sweep.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="no file of a sweep"):
        model.patch_sweep(clean, corrupted, **kwargs)


def test_the_store_keeps_an_interrupted_sweep_and_forgets_a_finished_one(models, tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    model, (clean, corrupted) = models("llama"), prompts(12)

    def stop(stage, done, total):
        raise KeyboardInterrupt

    kwargs = {"answer": 5, "versus": 9, "shortcuts": Shortcuts(batch=False), "resume": True}
    with pytest.raises(KeyboardInterrupt):
        model.patch_sweep(clean, corrupted, progress=stop, **kwargs)
    assert len(list((tmp_path / "sweeps").iterdir())) == 1
    assert np.isfinite(model.patch_sweep(clean, corrupted, **kwargs).values).all()
    assert list((tmp_path / "sweeps").iterdir()) == []


def test_a_sweep_that_fails_leaves_nothing_in_the_store(models, tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    model, (clean, corrupted) = models("llama"), prompts(12)

    def fail(stage, done, total):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.patch_sweep(clean, corrupted, metric=of_token(4), progress=fail, resume=True)
    assert list((tmp_path / "sweeps").iterdir()) == []


def test_the_store_knows_interrupted_sweeps(models, tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    model, (clean, corrupted) = models("llama"), prompts(12)

    def stop(stage, done, total):
        raise KeyboardInterrupt

    def interrupted() -> Path:
        with pytest.raises(KeyboardInterrupt):
            model.patch_sweep(clean, corrupted, metric=of_token(4), progress=stop, resume=True)
        (file,) = (tmp_path / "sweeps").iterdir()
        return file

    def command(*arguments: str) -> str:
        return CliRunner().invoke(app, ["cache", *arguments], catch_exceptions=False).output

    file = interrupted()
    (entry,) = [one for one in json.loads(command("ls", "--json")) if one["kind"] == "sweeps"]
    assert entry["bytes"] == file.stat().st_size
    assert entry["key"] == file.name
    assert "every entry is whole" in command("verify")
    assert f"removed {len(json.loads(command('ls', '--json')))} entries" in command("prune", "--to", "0B")
    assert not file.exists()
    assert interrupted() == file
    command("clear")
    assert not file.exists()


def test_the_estimate_counts_what_is_computed(models):
    model, (clean, corrupted) = models("llama"), prompts(13)
    estimates = []
    found = model.patch_sweep(
        clean, corrupted, "z", ("layer", "head", "position"), answer=5, versus=9,
        before=lambda sweep: estimates.append(sweep.estimate()),
    )  # fmt: skip
    (estimate,) = estimates
    assert estimate.cells == found.values.size == 2 * 4 * SEQ
    assert estimate.computed == found.cost["cells"] - found.cost["without effect"] < estimate.cells
    assert estimate.calls >= 1


@pytest.mark.parametrize("kind", ["patch", "ablation", "paths"])
def test_the_estimate_is_of_the_size_of_what_it_takes(shipped, kind):
    """Sixty tokens, so that there is something to time; the sessions are opened by a first sweep."""
    (clean, corrupted), seen = prompts(13, seq=60), []
    given = {"over": ("layer", "head"), "answer": 5, "versus": 9, "metric": "logit_diff"}

    def sweep(**more):
        if kind == "ablation":
            return shipped.ablation_sweep(clean, "z", **given, **more)
        if kind == "patch":
            return shipped.patch_sweep(clean, corrupted, "z", **given, **more)
        return shipped.path_patch(clean, corrupted, "all", "z", **given, **more)

    sweep()
    estimates = []
    found = sweep(before=lambda ready: estimates.append((ready.estimate(), seen.append(ready))))
    assert found.cost["seconds"] / 5 < estimates[0][0].seconds < 5 * found.cost["seconds"]
    record = seen[0]._first[0].base
    assert estimates[0][0].memory > record.nbytes > 4 * 60 * shipped.hidden_size * shipped.num_layers


def test_the_estimate_counts_the_vocabulary_and_what_is_kept(shipped, tmp_path):
    estimates, kept = [], {"resume": tmp_path / "kept", "shortcuts": Shortcuts(batch=False)}
    stops = iter([None, None, KeyboardInterrupt()])

    def stop(stage, done, total):
        if error := next(stops, None):
            raise error

    def take(sweep):
        estimates.append((sweep.estimate(), sweep._first[0].row_bytes(1)))

    for metric in ({"metric": "probability", "answer": 5}, {"metric": "logit_diff", "answer": 5, "versus": 9}):
        shipped.patch_sweep(CLEAN, CORRUPTED, before=take, **metric)
    assert estimates[0][1] - estimates[1][1] == (shipped.vocab_size - 2) * (4 + 4 * 8)
    assert estimates[0][0].memory > estimates[1][0].memory
    with pytest.raises(KeyboardInterrupt):
        shipped.patch_sweep(CLEAN, CORRUPTED, answer=5, versus=9, progress=stop, before=take, **kept)
    shipped.patch_sweep(CLEAN, CORRUPTED, answer=5, versus=9, before=take, **kept)
    shipped.patch_sweep(CLEAN, CORRUPTED, answer=5, versus=9, before=take, **kept)
    computed = [estimate.computed for estimate, _ in estimates[2:]]
    assert computed == [computed[0], computed[0] - 3, 0]
    assert estimates[-1][0].seconds == 0


def of_token(token: int):
    return lambda logits: logits[:, token]


def nested(token: int, other: int = 3):
    def inner(logits):
        return (lambda row: row[:, token] - row[:, other])(logits)

    return inner


ROWS = np.arange(3)
SAME = {
    "closure": lambda: of_token(4),
    "nested code": lambda: nested(4),
    "partial": lambda: partial(np.take, indices=4, axis=-1),
    "array": lambda: lambda logits: logits[:, ROWS].sum(-1),
    "library": lambda: lambda logits: log_softmax(logits, axis=-1)[:, 4],
}
OTHER = {
    "name": (lambda logits: logits.max(-1), lambda logits: logits.min(-1)),
    "closure": (of_token(4), of_token(5)),
    "closure of nested code": (nested(4), nested(4, 5)),
    "nested code": (lambda logits: [row.max() for row in logits], lambda logits: [row.min() for row in logits]),
    "default": (lambda logits, token=4: logits[:, token], lambda logits, token=5: logits[:, token]),
    "partial": (partial(np.take, indices=4, axis=-1), partial(np.take, indices=5, axis=-1)),
    "library": (lambda logits: log_softmax(logits)[:, 4], lambda logits: softmax(logits)[:, 4]),
}


def test_metrics_are_told_apart_by_what_they_compute():
    for name, make in SAME.items():
        assert mark_of(make()) == mark_of(make()), name
    for name, (one, other) in OTHER.items():
        assert mark_of(one) != mark_of(other), name
    before = mark_of(SAME["array"]())
    ROWS[0] += 1
    try:
        assert mark_of(SAME["array"]()) != before
    finally:
        ROWS[0] -= 1


def test_metrics_are_the_same_in_another_process():
    program = (
        "import json, sys; sys.path.insert(0, 'tests'); import test_sweep as t; from mionnx.sweep.mark import mark_of; "
        "print(json.dumps({name: mark_of(make()) for name, make in t.SAME.items()}))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert json.loads(ran.stdout) == {name: mark_of(make()) for name, make in SAME.items()}


class Counting:
    def __call__(self, logits):
        return logits[:, 0]


def test_a_sweep_is_resumed_with_its_own_metric_only(models, tmp_path):
    model, (clean, corrupted) = models("llama"), prompts(12)
    kept = {"over": ("layer",), "resume": tmp_path / "sweep.safetensors"}
    model.patch_sweep(clean, corrupted, metric=of_token(4), **kept)
    with pytest.raises(InputError, match="another sweep"):
        model.patch_sweep(clean, corrupted, metric=of_token(5), **kept)
    for wrong in (Counting(), Counting().__call__, lambda logits: logits[:, model.num_layers]):
        with pytest.raises(InputError, match="cannot be resumed"):
            model.patch_sweep(clean, corrupted, metric=wrong, **kept)
    assert model.patch_sweep(clean, corrupted, over=("layer",), metric=Counting()).values.shape == (2,)


@pytest.mark.parametrize(
    ("hook", "layers"),
    [
        ("resid_pre", [0, 1, 2, 3]),
        ("blocks.{i}.hook_resid_pre", [0, 1, 2, 3]),
        ("blocks.*.hook_resid_pre", [0, 1, 2, 3]),
        (HookPoint.ResidPre(3), [3]),
        ("blocks.3.hook_resid_pre", [3]),
        ("blocks.[12].hook_resid_pre", [1, 2]),
    ],
)
def test_a_hook_says_the_layers_too(shipped, hook, layers):
    found = shipped.patch_sweep([5, 6, 7], [5, 8, 7], hook, answer=5, versus=9)
    assert found.labels["layer"] == [str(layer) for layer in layers]
    whole = shipped.patch_sweep([5, 6, 7], [5, 8, 7], answer=5, versus=9)
    np.testing.assert_allclose(found.values, whole.values[layers], atol=1e-5)
    with pytest.raises(InputError, match="layers"):
        shipped.patch_sweep([5, 6, 7], [5, 8, 7], hook, answer=5, versus=9, layers={*range(5)} - {*layers})


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("blocks.99.hook_resid_pre", "did you mean 'blocks"),
        ("mlp.hook_z", "no hook point"),
        ("blocks.*.mlp.hook_z", "no hook point"),
        ("nonsense_hook_resid_pre", "no hook point"),
        ("blocks.0.attn.hook_zz", "did you mean 'blocks.0.attn.hook_z'"),
        ("blocks.*.hook_resid_p*", "several hook points"),
        ("hook_embed", "no hook point"),
        ("hook_result", "no hook point"),
    ],
)
def test_a_hook_that_is_not_there_is_said(shipped, hook, message):
    with pytest.raises(HookError, match=message):
        shipped.patch_sweep([5, 6, 7], [5, 8, 7], hook, answer=5, versus=9)


def test_cells_without_effect_are_exactly_so_however_many_pairs_there_are(shipped):
    pairs = [prompts(seed) for seed in range(20)]
    clean, corrupted = [list(side) for side in zip(*pairs, strict=True)]
    for direction in ("denoising", "noising"):
        found = shipped.patch_sweep(clean, corrupted, metric="probability", answer=5, direction=direction)
        idle = (found.by_pair == found.by_pair[:, :1, :1]).all(axis=0)
        assert idle.sum() == 4 * DIFFERENT[0] + 3  # before the first difference; tokens that are the same in layer 0
        assert (found.effect[idle] == 0).all()
        assert (found.effect[~idle] != 0).all()
        np.testing.assert_allclose(found.values, found.by_pair.mean(axis=0), rtol=1e-12)


CLEAN, CORRUPTED = prompts(14)
WRONG = {
    "hook": (HookError, "did you mean", {"hook": "hook_resid_pra"}),
    "axis of the hook": (InputError, "no axis 'head'", {"over": ("layer", "head")}),
    "axis": (InputError, "did you mean 'position'", {"over": ("layer", "positon")}),
    "no layer": (InputError, "the layer among them", {"over": ("position",)}),
    "twice": (InputError, "each axis once", {"over": ("layer", "layer")}),
    "layers": (InputError, "layers 0 to 1", {"layers": [2]}),
    "metric": (InputError, "did you mean 'logit_diff'", {"metric": "logit_dif"}),
    "direction": (InputError, "did you mean 'noising'", {"direction": "noise"}),
    "same answers": (InputError, "and itself", {"answer": 5, "versus": 5}),
    "answer": (InputError, "vocabulary is 0 to 100", {"answer": 101, "versus": 5}),
    "answers": (InputError, "2 tokens for 1 prompts", {"answer": [1, 2], "versus": 5}),
    "useless answer": (InputError, "reads no answer", {"metric": "kl", "answer": 5}),
    "useless versus": (InputError, "reads no `versus`", {"metric": "rank", "versus": 5}),
    "at": (InputError, "the prompt has 7 tokens", {"at": 7}),
    "fractional layers": (InputError, "integers are expected", {"layers": [1.7]}),
    "layers as text": (InputError, "integers are expected", {"layers": "01"}),
    "fractional answers": (InputError, "or an integer", {"answer": [5.7], "versus": 9}),
    "fractional answer": (InputError, "or an integer", {"answer": 5.7, "versus": 9}),
    "three arguments": (InputError, "not 3 values", {"metric": lambda logits, pair, more: logits[:, 0]}),
    "function": (InputError, "one number a row", {"metric": lambda logits: logits}),
    "lengths": (InputError, "the corrupted one 6", {"corrupted": CORRUPTED[:-1]}),
    "counts": (InputError, "come in pairs", {"corrupted": [CORRUPTED, CORRUPTED]}),
    "same": (InputError, "are the same", {"corrupted": CLEAN}),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_cannot_be_swept_is_said(models, case):
    kind, message, change = WRONG[case]
    with pytest.raises(kind, match=message):
        models("llama").patch_sweep(**{"clean": CLEAN, "corrupted": CORRUPTED, **change})


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("did you mean 'mean'", {"kind": "means"}),
        ("no use for reference", {"reference": CLEAN}),
        ("needs `versus=`", {"metric": "logit_diff"}),
        ("no mean", {"kind": "mean", "hook": "hook_pattern"}),
        ("no other reference prompt has 7", {"kind": "resample"}),
        ("draws nothing", {"seed": 9}),
        ("draws nothing", {"kind": "mean", "seed": 0}),
        ("seed=-1", {"kind": "resample", "seed": -1}),
        ("seed=1.5", {"kind": "resample", "seed": 1.5}),
    ],
)
def test_what_cannot_be_ablated_is_said(models, message, change):
    with pytest.raises(InputError, match=message):
        models("llama").ablation_sweep(CLEAN, **change)


def test_a_value_without_tokens_has_no_mean(rwkv):
    with pytest.raises(InputError, match="no tokens to take the mean over"):
        rwkv("7-fla").ablation_sweep(CLEAN, "blocks.*.rwkv.hook_state", kind="mean")


def test_one_layer_may_be_given_as_a_number_and_keywords_are_no_second_argument(models):
    model = models("llama")
    found = model.patch_sweep(CLEAN, CORRUPTED, metric=lambda logits, **named: logits[:, 3] + len(named), layers=1)
    assert (found.values == model.patch_sweep(CLEAN, CORRUPTED, metric=of_token(3), layers=[1]).values).all()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("hook", ["hook_z", "hook_pattern", "hook_v", "mlp.hook_act", "hook_resid_pre"])
def test_a_path_to_all_receivers_is_plain_patching(models, name, hook):
    model, (clean, corrupted) = models(name), prompts(15)
    over = ("layer", "head") if hook in HEADS else ("layer", "position")
    plain = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9)
    path = model.path_patch(clean, corrupted, "all", hook, over, answer=5, versus=9)
    np.testing.assert_allclose(path.values, plain.values, atol=1e-5)
    assert np.abs(path.effect).max() > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_a_path_to_one_receiver_is_that_of_frozen_runs(models, references, name):
    """Wang et al.: record what the receiver reads with all other heads and MLPs frozen, then put in just that."""
    model, (clean, corrupted) = models(name), prompts(16)
    receiver, heads = HookPoint.AttnQ(1), [1, 3]
    found = model.path_patch(clean, corrupted, [(receiver, heads)], answer=5, versus=9)
    old = run(references(name), Inputs(corrupted[None], np.ones((1, SEQ), int))).values
    new = run(references(name), Inputs(clean[None], np.ones((1, SEQ), int))).values
    for head in range(4):
        z = old[str(HookPoint.AttnZ(0))].copy()
        z[:, :, head] = new[str(HookPoint.AttnZ(0))][:, :, head]
        frozen = [
            (HookPoint.AttnZ(0), Intervention.Replace(z)),
            (HookPoint.MlpOut(0), Intervention.Replace(old[str(HookPoint.MlpOut(0))])),
        ]
        inputs = Inputs(corrupted[None], np.ones((1, SEQ), int))
        queries = run(references(name), inputs, frozen).values[str(receiver)]
        logits = run(references(name), inputs, [(receiver, Intervention.Replace(queries, heads=heads))]).logits[0, -1]
        assert found.values[0, head] == pytest.approx(difference(logits, 5, 9), abs=5e-5)
    assert (found.effect[1] == 0).all()  # layer 1 sends nothing to its own queries
    assert np.abs(found.effect[0]).max() > 1e-4


def test_a_path_to_the_end_is_the_direct_effect(models):
    model, (clean, corrupted) = models("llama"), prompts(17)
    found = model.path_patch(clean, corrupted, "hook_final_norm", answer=5, versus=9)
    wanted = HookSpec().capture("blocks.*.hook_resid_post").capture("blocks.*.attn.hook_result")
    old, new = (model.forward(ids, wanted) for ids in (corrupted, clean))
    for layer, head in np.ndindex(2, 4):
        moved = new["result", layer][0, -1, head] - old["result", layer][0, -1, head]
        logits = model.project_to_vocab(old["resid_post", 1][0, -1] + moved)
        assert found.values[layer, head] == pytest.approx(difference(logits, 5, 9), abs=2e-5)


@pytest.mark.parametrize(
    ("kind", "message", "receivers"),
    [
        (HookError, "receives nothing", "blocks.1.attn.hook_z"),
        (HookError, "did you mean 'blocks.1.attn.hook_q'", "blocks.1.attn.hook_qq"),
        (InputError, "has 4", [("blocks.1.attn.hook_q", 4)]),
        (InputError, "no heads", [("blocks.1.mlp.hook_pre", 0)]),
        (InputError, "nobody would read", []),
        (InputError, "nobody would read", 5),
        (InputError, "a pair of one and its heads", [("blocks.1.attn.hook_q", 0, 1)]),
        (InputError, "read by none of the receivers blocks.0.attn.hook_q", "blocks.0.attn.hook_q"),
        (InterventionError, "a head is an integer", [("blocks.1.attn.hook_q", 1.5)]),
        (InterventionError, "heads are counted from 0", [("blocks.1.attn.hook_q", -1)]),
    ],
)
def test_what_receives_nothing_is_said(models, kind, message, receivers):
    with pytest.raises(kind, match=message):
        models("llama").path_patch(CLEAN, CORRUPTED, receivers)


@pytest.mark.parametrize(
    ("given", "heads"),
    [
        ([("k", 0), ("k", 1)], [0, 1]),
        ([("k", np.int64(1))], 1),
        (["k", ("k", 1)], None),
        ([("k", 1), "k"], None),
        ([("k", [1, 0]), ("k", 1)], [0, 1]),
    ],
)
def test_receivers_named_twice_receive_with_the_heads_of_both(models, given, heads):
    model, (clean, corrupted), k = models("llama"), prompts(16), "blocks.1.attn.hook_k"
    receivers = [(k, entry[1]) if isinstance(entry, tuple) else k for entry in given]
    found = model.path_patch(clean, corrupted, receivers, answer=5, versus=9)
    expected = model.path_patch(clean, corrupted, k if heads is None else [(k, heads)], answer=5, versus=9)
    single = model.path_patch(clean, corrupted, [(k, 0)], answer=5, versus=9)
    assert (found.values == expected.values).all()
    assert (found.values[0] != single.values[0]).all()


def test_paths_of_several_pairs_of_unequal_length_the_other_way(shipped):
    pairs = [prompts(20), prompts(21, seq=9)]
    clean, corrupted = [list(side) for side in zip(*pairs, strict=True)]
    given = {"answer": 5, "versus": 9, "direction": "noising"}
    receivers = [("blocks.2.attn.hook_q", [1, 6]), "blocks.3.mlp.hook_pre"]
    found = shipped.path_patch(clean, corrupted, receivers, **given)
    assert found.by_pair.shape == (2, 4, 8)
    for number, (one, other) in enumerate(pairs):
        alone = shipped.path_patch(one, other, receivers, **given)
        np.testing.assert_allclose(found.by_pair[number], alone.values, atol=1e-5)
    assert (found.effect[3] != 0).all()  # layer 3's heads send to its MLP
    every = shipped.path_patch(clean, corrupted, "all", **given)
    plain = shipped.patch_sweep(clean, corrupted, "z", ("layer", "head"), **given)
    np.testing.assert_allclose(every.by_pair, plain.by_pair, atol=2e-5)
    assert np.abs(found.effect).max() > 1e-3


def test_a_recurrent_model_has_no_paths(rwkv):
    with pytest.raises(HookError, match="attention heads"):
        rwkv("7-fla").path_patch(CLEAN, CORRUPTED, "all", "resid_pre", ("layer",))
