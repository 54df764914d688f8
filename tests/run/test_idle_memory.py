"""What a session of analyses leaves behind: shared arenas, closed graphs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from families import CONFIGS, make_checkpoint, single_threaded
from repository import REPOSITORY

from mionnx import HookPoint, HookSpec, MIModel, Options
from mionnx.machine import memory
from mionnx.run.graph_memory import IdleMemory

LARGER = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 5,
    "intermediate_size": 2048,
    "vocab_size": 8192,
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
# Six structures of one model run on 2048 tokens: bytes of no file after the first, and after all.
ARENAS = """
import numpy as np
from mionnx import HookPoint, HookSpec, MIModel, Options
from mionnx.machine import memory
from mionnx.graph.hooked_model import HookedModel
from pathlib import Path

model = MIModel(HookedModel.open(Path("models/world-llama")), Options(threads=1, base=False))
def anonymous():
    size, of_files = memory.resident()
    return size - of_files

ids, held = np.full((32, 48), 7), [anonymous()]
for variant in ("ResidPre", "AttnOut", "ResidMid", "MlpOut", "ResidPost", "AttnZ"):
    model.forward(ids, HookSpec().capture(getattr(HookPoint, variant)(1), positions=-1))
    held.append(anonymous())
print((held[1] - held[0]) / 1e6, (held[-1] - held[0]) / 1e6)
"""

# A program that ends while memory is returned in a thread.
ENDING = """
import time
from threading import Event
from mionnx import MIModel
from mionnx.run import graph_memory

graph_memory.PAUSE, begun = 0.01, Event()
model = MIModel.from_pretrained("models/world-llama", threads=1)
model.forward([3, 4])

def release():
    begun.set()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        model.variants.engine.release()
    print("returned", flush=True)

model.idle.release(-(2**60), release, later=True)
begun.wait()
"""


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@linux
@pytest.mark.slow
def test_a_session_of_every_analysis_leaves_at_most_three_times_the_weights(tmp_path, monkeypatch):
    monkeypatch.setitem(CONFIGS, "llama", {**CONFIGS["llama"], **LARGER})
    make_checkpoint("llama", tmp_path / "checkpoint")
    from exporters.transformers import export

    single_threaded()
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    known = {**os.environ, "MIONNX_CACHE": str(tmp_path / "store"), "PYTHONPATH": str(REPOSITORY)}
    program = [sys.executable, REPOSITORY / "benchmarks" / "memory.py", "--folder", tmp_path / "hooked", "--measure"]
    program += ["--settled", "2.5"]
    done = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, env=known, cwd=REPOSITORY)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] > 100_000_000
    sizes = {row["name"]: round(row["RSS"] / found["weights"], 2) for row in found["rows"]}
    assert max(sizes.values()) <= 3.0, sizes


@linux
def test_graphs_share_one_arena():
    """Each of six graphs would otherwise keep the activations of its largest run."""
    done = subprocess.run(
        [sys.executable, "-c", ARENAS], check=True, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    first, all_six = map(float, done.stdout.split())
    assert first > 10
    assert all_six < 2 * first, (first, all_six)


def test_a_base_takes_the_place_of_graphs_with_weights_of_their_own(models, own_store):
    model = MIModel(models("llama").hooked, Options(threads=1))
    ids, spec = np.array([[3, 4, 5, 6]]), HookSpec().capture(HookPoint.ResidPost(0))
    before = model.forward(ids, spec)
    model.forward(ids)
    assert len(model.compiled) == 2
    assert model.prepare()
    assert not model.compiled
    after = model.forward(ids, spec)
    assert np.array_equal(after.output(), before.output())
    assert np.array_equal(after["resid_post", 0], before["resid_post", 0])


def test_graphs_that_the_last_analysis_did_not_use_are_closed(models):
    model = MIModel(models("llama").hooked, Options(threads=1))
    for layer in (0, 1):
        model.warm(HookSpec().capture(HookPoint.ResidPost(layer)))
    model.variants.close_idle(0)  # both were used
    assert len(model.compiled) == 2
    model.warm(HookSpec().capture(HookPoint.ResidPost(0)))
    model.variants.close_idle(2 * model.variants.weights)  # there is room for both
    assert len(model.compiled) == 2
    model.warm(HookSpec().capture(HookPoint.ResidPost(0)))
    model.variants.close_idle(0)
    assert [plan.captures[0].hook for plan in model.compiled] == ["blocks.0.hook_resid_post"]


def test_parts_from_before_a_base_are_opened_again(models, own_store):
    model = MIModel(models("llama").hooked, Options(threads=1))
    stream = np.ones(model.hidden_size, np.float32)
    logits = model.project_to_vocab(stream)
    (first,) = model.parts
    assert model.prepare()
    assert np.array_equal(model.project_to_vocab(stream), logits)
    (second,) = model.parts
    assert second is not first


def test_results_are_the_same_after_memory_was_given_back(shipped, monkeypatch):
    """Everything is given back after each call: a sweep, a lens and a forward pass give the same bits again."""
    monkeypatch.setattr("mionnx.run.graph_memory.LEAST_IDLE", 0)
    monkeypatch.setattr("mionnx.run.graph_memory.SHARE", 10**9)
    monkeypatch.setattr("mionnx.run.graph_memory.PAUSE", 0)
    model = MIModel(shipped.hooked, Options(threads=1))
    text, other = "The capital of France is", "The capital of Italy is"

    def found() -> list[np.ndarray]:
        sweep = model.patch_sweep(text, other, answer=["Paris"], versus=["Rome"]).values
        return [sweep, model.logit_lens(text).readout.top, model.forward(text).output()]

    first, kept = found(), model.forward(text, HookSpec().capture("*"))
    model.give_back()
    assert all(np.array_equal(*pair) for pair in zip(first, found(), strict=True))
    again = model.forward(text, HookSpec().capture("*"))
    assert all(np.array_equal(kept[name], again[name]) for name in again)


def test_graphs_with_gradients_have_no_weights_of_their_own(models, own_store, monkeypatch):
    """Of models for which a base is worth while; `prepack=True` packs them, and the values are the same."""
    hooked, ids, point = models("llama").hooked, np.array([[3, 4, 5, 6]]), HookPoint.ResidPost(0)
    monkeypatch.setattr("mionnx.run.prepacked.WORTHWHILE", 0)
    grads, costs = [], []
    for prepack in (None, True):
        model = MIModel(hooked, Options(threads=1, prepack=prepack, base=False))
        grads.append(model.gradients(ids, [point], answer=5).grad[point])
        (graph,) = model.compiled.values()
        assert graph.options.prepack is (prepack is True)
        costs.append(graph.cost)
    assert np.abs(grads[0] - grads[1]).max() < 1e-6 * np.abs(grads[1]).max() + 1e-7
    assert costs[1] == model.variants.weights


@linux
def test_pages_of_weights_are_let_go_and_read_again(models, own_store, monkeypatch):
    monkeypatch.setattr("mionnx.run.graph_memory.LEAST_IDLE", -(2**40))  # whatever is resident is too much
    monkeypatch.setattr("mionnx.run.graph_memory.SHARE", 2**62)
    monkeypatch.setattr("mionnx.run.graph_memory._alone", lambda: True)  # threads of other tests map no weights now
    gone: list[int] = []
    let_go = memory.let_go
    monkeypatch.setattr("mionnx.machine.memory.let_go", lambda *files: gone.append(1) or let_go(*files))
    model, ids = MIModel(models("llama").hooked, Options(threads=1)), np.array([[3, 4, 5, 6]])
    assert model.prepare()
    specs = [HookSpec().capture(HookPoint.ResidPost(0)), HookSpec().capture(HookPoint.AttnZ(1)), HookSpec()]
    first = [model.forward(ids, spec).output() for spec in specs]
    assert len(gone) >= 3
    opened = len(gone)
    assert all(np.array_equal(model.forward(ids, spec).output(), one) for spec, one in zip(specs, first, strict=True))
    assert len(gone) == opened, "a small model's are let go only where a graph is opened"
    monkeypatch.setattr("mionnx.run.graph_memory.WATCHED", 0)
    assert all(np.array_equal(model.forward(ids, spec).output(), one) for spec, one in zip(specs, first, strict=True))
    assert len(gone) <= opened + 1, "and a large one's behind a pass, not within the pause"
    monkeypatch.setattr("mionnx.run.graph_memory.PAUSE", -1)
    assert all(np.array_equal(model.forward(ids, spec).output(), one) for spec, one in zip(specs, first, strict=True))
    assert len(gone) >= opened + len(specs)


def test_free_memory_is_kept_for_the_next_analysis_and_returned_in_a_pause(shipped, monkeypatch):
    released, held, waiting = list[int](), [100], list[Callable[[], None]]()

    class Timer:
        daemon = False

        def __init__(self, pause: float, function: Callable[[], None]) -> None:
            assert pause == 2
            waiting.append(function)

        def start(self) -> None: ...

        def cancel(self) -> None: ...

    monkeypatch.setattr("mionnx.run.graph_memory.Timer", Timer)
    monkeypatch.setattr("mionnx.machine.memory.resident", lambda: (held[0], 0))
    idle, model = IdleMemory(), MIModel(shipped.hooked, Options(threads=1))

    def release() -> None:
        released.append(held[0])
        held[0] = 100

    held[0] = 1000
    idle.watch(10_000, release)
    assert not waiting, "less was added than is allowed"
    idle.release(10, release, later=True)
    model.forward([3, 4])
    waiting[0]()
    assert (len(waiting), released) == (2, []), "a graph was used meanwhile: another pause"
    waiting[0]()
    assert not released, "a timer that was replaced does nothing"
    waiting[1]()
    assert released == [1000]
    held[0] = 2000
    idle.release(10, release, later=True)
    idle.release(10, release)
    assert released == [1000, 2000], "at once where it is asked for"
    waiting[2]()
    assert released == [1000, 2000], "and once"
    held[0] = 3000
    monkeypatch.setattr("mionnx.run.graph_memory.LONGEST_WAIT", 0)
    idle.release(10, release, later=True)
    assert released == [1000, 2000, 3000], "it does not wait for ever"
    before = len(waiting)
    idle.expect(10, release)
    idle.expect(10, release)
    assert len(waiting) == before + 1, "one look is enough"
    held[0] = 4000  # by what began then, which ends with no pass
    waiting[-1]()
    assert released == [1000, 2000, 3000, 4000]


def test_a_program_that_ends_waits_for_memory_that_is_being_returned():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "returned\n"), ended.stderr
