"""The kinds of calls in which an adopted file's own graph serves: tried at the first such call, and kept beside it."""

import json
import multiprocessing
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fused_llama
import numpy as np
import onnx
import pytest
from command_line import succeeded
from onnx import numpy_helper

from exporters.adopt import adopt
from mionnx import HookSpec, MIModel
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.stock_graph import (
    KINDS_OF_CALLS,
    PADDED_BIT,
    PAST_BIT,
    ROWS_BIT,
    SEVERAL_BIT,
    StockGraph,
    described,
    packed,
)
from mionnx.rewrite.plan import STOCK
from mionnx.run import stock_calls
from mionnx.run.stock_calls import CALLS_FILE, CALLS_LOCK, StockGraphWarning, Trial, problem, serves

IDS = np.random.default_rng(0).integers(3, fused_llama.VOCAB, (2, 7))
WRONG = {ROWS_BIT | PAST_BIT | SEVERAL_BIT, *range(PADDED_BIT | PAST_BIT, KINDS_OF_CALLS)}


@pytest.fixture(scope="module")
def adopted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    adopt(fused_llama.write(folder / "stock"), folder / "hooked")
    return folder / "hooked"


@pytest.fixture
def folder(adopted, tmp_path, monkeypatch):
    """A model of which nothing is known, in a process that knows nothing."""
    monkeypatch.setattr(stock_calls, "_verdicts", stock_calls.Once())
    return Path(shutil.copytree(adopted, tmp_path / "hooked"))


@pytest.fixture
def trials(monkeypatch):
    """The kinds that were tried."""
    found, run = [], Trial.problem

    def counted(self, kind):
        found.append(kind)
        return run(self, kind)

    monkeypatch.setattr(Trial, "problem", counted)
    return found


def forget(monkeypatch):
    """What another process would know: nothing but what is on disk."""
    monkeypatch.setattr(stock_calls, "_verdicts", stock_calls.Once())


def used(model):
    return [*model.compiled][-1].fused


def kept(folder):
    return json.loads((folder / CALLS_FILE).read_text())["calls"]


def falsified(folder):
    """Let the file's own graph compute something else than the hooked graph."""
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    entry = next(entry for entry in proto.metadata_props if entry.key == "mionnx.stock")
    stock = HookedModel.open(folder).stock
    head = stock.proto.graph.output[0].name
    assert head == "logits"
    last = next(node for node in stock.proto.graph.node if head in node.output)
    last.output[:] = [f"{name}.true" if name == head else name for name in last.output]
    stock.proto.graph.initializer.append(numpy_helper.from_array(np.float32(1.01), "wrong"))
    stock.proto.graph.node.append(onnx.helper.make_node("Mul", [f"{head}.true", "wrong"], [head], "wrong"))
    entry.value = json.dumps(packed(StockGraph(stock.proto, stock.expanded, stock.allowed)))
    (folder / "model.onnx").write_bytes(proto.SerializeToString())


def test_adoption_tries_none(adopted):
    assert not (adopted / CALLS_FILE).exists()


def test_a_kind_is_tried_at_its_first_call_and_never_again(folder, trials, monkeypatch):
    model = MIModel.from_pretrained(folder)
    model.forward(IDS, HookSpec().capture("hook_embed"))
    assert trials == []  # a spec that touches something
    model.forward(IDS)
    assert (trials, used(model)) == ([ROWS_BIT | SEVERAL_BIT], STOCK)
    assert kept(folder) == {str(ROWS_BIT | SEVERAL_BIT): ""}
    model.forward(IDS[:, :3])
    assert len(trials) == 1
    model.generate(IDS[:1], max_new_tokens=2, eos_token_id=[])
    assert trials[1:] == [SEVERAL_BIT, PAST_BIT]
    assert used(model) == STOCK
    forget(monkeypatch)
    again = MIModel.from_pretrained(folder)
    np.testing.assert_array_equal(again.forward(IDS).output(), model.forward(IDS).output())
    assert (len(trials), used(again)) == (3, STOCK)


def test_a_kind_that_fails_runs_the_hooked_graph_and_is_said_once(folder, trials, monkeypatch):
    plain = MIModel.from_pretrained(folder, fused=False).forward(IDS).output()
    falsified(folder)
    model = MIModel.from_pretrained(folder)
    with pytest.warns(StockGraphWarning, match=r"several rows of several tokens run .* logits differs by 9\.9e-03"):
        found = model.forward(IDS).output()
    assert used(model) != STOCK
    np.testing.assert_allclose(found, plain, atol=2e-5)
    forget(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = MIModel.from_pretrained(folder)
        np.testing.assert_array_equal(again.forward(IDS).output(), found)
        assert used(again) != STOCK
    assert trials == [ROWS_BIT | SEVERAL_BIT]
    assert "logits differs" in kept(folder)[str(ROWS_BIT | SEVERAL_BIT)]


def test_all_kinds_by_the_command_line(folder, trials):
    told = json.loads(succeeded("adopt", "--check", "--calls", str(folder), "--json"))["calls"]
    assert [described(kind) for kind in trials] == [*told]
    assert len(trials) == KINDS_OF_CALLS - 2  # padding before one token without a past would be all there is
    assert {kind for kind in trials if told[described(kind)]} == WRONG
    # GroupQueryAttention refuses several rows of several tokens after a past: what does not run is not written down
    refused = {ROWS_BIT | PAST_BIT | SEVERAL_BIT, ROWS_BIT | PAST_BIT | SEVERAL_BIT | PADDED_BIT}
    assert "batch_size must be 1" in told[described(ROWS_BIT | PAST_BIT | SEVERAL_BIT)]
    assert {int(kind) for kind in kept(folder)} == {*trials} - refused
    hooked = HookedModel.open(folder)
    assert all(serves(hooked, kind) == (kind not in WRONG) for kind in trials)


def test_verdicts_of_another_graph_are_not_believed(folder, trials, monkeypatch):
    hooked = HookedModel.open(folder)
    for record in (
        {"graph": "another", "calls": {str(SEVERAL_BIT): "no"}},
        {"graph": hooked.digest, "calls": [1]},
        {"graph": hooked.digest, "calls": {str(SEVERAL_BIT): 1}},
        [],
    ):
        (folder / CALLS_FILE).write_text(json.dumps(record))
        assert serves(hooked, SEVERAL_BIT)
        forget(monkeypatch)
    (folder / CALLS_FILE).write_text("{")
    assert serves(hooked, SEVERAL_BIT)
    assert trials == [SEVERAL_BIT] * 5
    assert kept(folder) == {str(SEVERAL_BIT): ""}


@pytest.mark.parametrize("obstacle", [CALLS_FILE, CALLS_LOCK])
def test_where_nothing_can_be_written_a_verdict_lasts_as_long_as_the_process(folder, trials, obstacle, monkeypatch):
    (folder / obstacle).mkdir()
    before = sorted(path.name for path in folder.iterdir())
    model = MIModel.from_pretrained(folder)
    for _ in range(2):
        model.forward(IDS)
        assert used(model) == STOCK
    assert trials == [ROWS_BIT | SEVERAL_BIT]
    assert sorted({*(path.name for path in folder.iterdir())} - {CALLS_LOCK}) == sorted({*before} - {CALLS_LOCK})
    forget(monkeypatch)
    assert serves(model.hooked, ROWS_BIT | SEVERAL_BIT)
    assert len(trials) == 2


def test_threads_that_call_at_once_try_a_kind_once(folder, trials):
    model = MIModel.from_pretrained(folder, threads=1)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: model.forward(IDS).output(), range(4))]
    assert trials == [ROWS_BIT | SEVERAL_BIT]
    assert used(model) == STOCK
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


def one_kind(folder, kind, ready):
    ready.wait()
    assert problem(HookedModel.open(folder), kind) == ""


@pytest.mark.slow
def test_two_processes_at_once_keep_what_each_found(folder):
    kinds, context = [0, ROWS_BIT, SEVERAL_BIT, ROWS_BIT | SEVERAL_BIT], multiprocessing.get_context("spawn")
    ready = context.Barrier(len(kinds))
    children = [context.Process(target=one_kind, args=(folder, kind, ready)) for kind in kinds]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert kept(folder) == {str(kind): "" for kind in kinds}
    assert not [*folder.glob("*.partial")]
