"""Sweeps that are interrupted, resumed and estimated: what is kept, for which metric, and what is left to do."""

import json
from pathlib import Path

import numpy as np
import pytest
from sweep_metrics import of_token
from sweep_pairs import SEQ, prompts
from typer.testing import CliRunner

from mionnx.analysis.sweep.patched_runs import Shortcuts
from mionnx.cli.main import app
from mionnx.errors import InputError
from mionnx.machine.progress import reported_to

CLEAN, CORRUPTED = prompts(14)


def test_an_interrupted_sweep_goes_on_where_it_stopped(models, tmp_path):
    model, (clean, corrupted) = models("llama"), prompts(12)
    kwargs = {"answer": 5, "versus": 9, "shortcuts": Shortcuts(batch=False), "resume": tmp_path / "sweep.safetensors"}
    seen = []

    def stop(stage, done, total):
        seen.append(done)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), reported_to(stop):
        model.patch_sweep(clean, corrupted, **kwargs)
    again = []
    with reported_to(lambda stage, done, total: again.append(done)):
        found = model.patch_sweep(clean, corrupted, **kwargs)
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
    with pytest.raises(KeyboardInterrupt), reported_to(stop):
        model.patch_sweep(clean, corrupted, **kwargs)
    assert len(list((tmp_path / "sweeps").iterdir())) == 1
    assert np.isfinite(model.patch_sweep(clean, corrupted, **kwargs).values).all()
    assert list((tmp_path / "sweeps").iterdir()) == []


def test_a_sweep_that_fails_leaves_nothing_in_the_store(models, tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    model, (clean, corrupted) = models("llama"), prompts(12)

    def fail(stage, done, total):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), reported_to(fail):
        model.patch_sweep(clean, corrupted, metric=of_token(4), resume=True, resume_key="mine")
    assert list((tmp_path / "sweeps").iterdir()) == []


def test_the_store_knows_interrupted_sweeps(models, tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    model, (clean, corrupted) = models("llama"), prompts(12)

    def stop(stage, done, total):
        raise KeyboardInterrupt

    def interrupted() -> Path:
        with pytest.raises(KeyboardInterrupt), reported_to(stop):
            model.patch_sweep(clean, corrupted, metric=of_token(4), resume=True, resume_key="mine")
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
    took = [
        sweep(before=lambda ready: estimates.append((ready.estimate(), seen.append(ready)))).cost["seconds"]
        for _ in range(4)  # a busy machine delays one of them
    ]
    ratios = [estimate.seconds / seconds for (estimate, _), seconds in zip(estimates, took, strict=True)]
    assert 1 / 5 < np.median(ratios) < 5
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
    with pytest.raises(KeyboardInterrupt), reported_to(stop):
        shipped.patch_sweep(CLEAN, CORRUPTED, answer=5, versus=9, before=take, **kept)
    shipped.patch_sweep(CLEAN, CORRUPTED, answer=5, versus=9, before=take, **kept)
    shipped.patch_sweep(CLEAN, CORRUPTED, answer=5, versus=9, before=take, **kept)
    computed = [estimate.computed for estimate, _ in estimates[2:]]
    assert computed == [computed[0], computed[0] - 3, 0]
    assert estimates[-1][0].seconds == 0


def test_a_function_is_resumed_by_the_name_that_the_user_gives_it(models, tmp_path):
    model, (clean, corrupted) = models("llama"), prompts(12)
    kwargs = {"over": ("layer",), "resume": tmp_path / "sweep.safetensors"}
    first = model.patch_sweep(clean, corrupted, metric=of_token(4), resume_key="logit of 4", **kwargs)
    again = model.patch_sweep(clean, corrupted, metric=of_token(4), resume_key="logit of 4", **kwargs)
    assert (first.values == again.values).all()
    with pytest.raises(InputError, match="another sweep"):
        model.patch_sweep(clean, corrupted, metric=of_token(5), resume_key="logit of 5", **kwargs)
    with pytest.raises(InputError, match="another sweep"):
        model.patch_sweep(clean, corrupted, answer=5, versus=9, **kwargs)


@pytest.mark.parametrize("verb", ["patch_sweep", "path_patch", "ablation_sweep"])
@pytest.mark.parametrize("resume", [True, "file"])
def test_a_function_without_a_name_is_not_resumed(models, tmp_path, monkeypatch, verb, resume):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    model, (clean, corrupted) = models("llama"), prompts(12)
    texts = {"patch_sweep": (clean, corrupted), "path_patch": (clean, corrupted, "all"), "ablation_sweep": (clean,)}
    resume = tmp_path / "sweep.safetensors" if resume == "file" else resume
    with pytest.raises(InputError, match=r"resumed by a name that you give it: resume_key="):
        getattr(model, verb)(*texts[verb], over=("layer",), metric=of_token(4), resume=resume)
    assert not (tmp_path / "sweep.safetensors").exists()
    assert getattr(model, verb)(*texts[verb], over=("layer",), metric=of_token(4)).values.shape == (2,)


def test_the_name_of_a_function_is_part_of_the_identity_of_each_sweep(models, tmp_path):
    model, (clean, corrupted) = models("llama"), prompts(12)
    for verb, texts in (("path_patch", (clean, corrupted, "all")), ("ablation_sweep", (clean,))):
        kwargs = {"over": ("layer",), "metric": of_token(4), "resume": tmp_path / verb}
        getattr(model, verb)(*texts, resume_key="mine", **kwargs)
        with pytest.raises(InputError, match="another sweep"):
            getattr(model, verb)(*texts, resume_key="yours", **kwargs)


def test_a_name_without_a_file_to_resume_is_refused(models):
    model, (clean, corrupted) = models("llama"), prompts(12)
    with pytest.raises(InputError, match="has no effect without resume"):
        model.patch_sweep(clean, corrupted, metric=of_token(4), resume_key="mine")


def test_other_tokens_are_another_sweep(models, tmp_path):
    model, (clean, corrupted) = models("llama"), prompts(12)
    kwargs = {"over": ("layer",), "resume": tmp_path / "sweep.safetensors"}
    found = model.patch_sweep(clean, corrupted, answer=5, versus=9, **kwargs)
    again = model.patch_sweep(clean, corrupted, answer=np.int64(5), versus=np.int64(9), **kwargs)
    assert (found.values == again.values).all()
    for answer in (6, [5]):
        with pytest.raises(InputError, match="another sweep"):
            model.patch_sweep(clean, corrupted, answer=answer, versus=9, **kwargs)
