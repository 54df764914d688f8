"""Prepacked models: the optimised graph on disk, which changes no bit."""

import os
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from families import VOCAB
from repository import REPOSITORY

from mionnx import HookPoint, HookSpec, Intervention, MIModel, Options
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine import disk_cache
from mionnx.machine.disk_cache import StoreWarning
from mionnx.run import open_graphs, prepacked


def spec_of(model: MIModel) -> HookSpec:
    return (
        HookSpec()
        .capture("*")
        .intervene(HookPoint.ResidPost(0), Intervention.Add(np.linspace(-1, 1, model.hidden_size), positions=[1, -1]))
        .intervene(HookPoint.MlpOut(1), Intervention.Scale(0.5))
    )


def equal(one, other) -> bool:
    return np.array_equal(one.output(), other.output()) and all(np.array_equal(one[k], other[k]) for k in other)


def prepared(model: MIModel, **options) -> MIModel:
    """The same model, its base made."""
    based = MIModel(model.hooked, Options(threads=1, **options))
    assert based.prepare()
    return based


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_said", set())
    return tmp_path / "cache"


def test_a_base_changes_no_bit(family, models, own_store):
    """Logits and every capture, with and without interventions, from a base and the plain way; derived values too."""
    plain = models(family)
    model = prepared(plain)
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, 9))
    for spec in (HookSpec(), HookSpec().capture("*"), spec_of(plain)):
        assert equal(model.forward(ids, spec), plain.forward(ids, spec))
    assert (
        model.generate(ids, max_new_tokens=4).new_ids[0].tolist()
        == plain.generate(ids, max_new_tokens=4).new_ids[0].tolist()
    )
    assert len(list((own_store / "bases").glob("*/base.onnx"))) == 1
    assert len(list((own_store / "graphs").glob("*/model.onnx"))) >= 1
    again = prepared(plain)
    assert equal(again.forward(ids, spec_of(plain)), plain.forward(ids, spec_of(plain)))
    assert str(again.report(spec_of(plain))) == str(model.report(spec_of(plain)))


def test_a_graph_that_other_sources_rewrote_is_rewritten_anew(shipped, own_store, monkeypatch):
    """FINDINGS part 1, tests that cannot fail: a new mionnx does not read the rewritten graphs of an old one."""
    spec = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero())

    def graphs_after_a_pass() -> int:
        prepared(shipped).forward([3, 4], spec)
        return len(list((own_store / "graphs").glob("*/model.onnx")))

    assert [graphs_after_a_pass(), graphs_after_a_pass()] == [1, 1]
    digest = open_graphs.source_digest
    for count, changed in enumerate(open_graphs.REWRITING, 2):

        def other(*modules: str, changed: str = changed) -> str:
            return digest(*modules) + changed * (changed in modules)

        monkeypatch.setattr(open_graphs, "source_digest", other)
        assert graphs_after_a_pass() == count, f"{changed} was changed, and the old graph served"


@pytest.mark.parametrize("layout", ["6-pth", "7-fla"])
def test_a_base_of_a_recurrent_model_changes_no_bit(rwkv, layout, own_store):
    plain = rwkv(layout)
    model = prepared(plain)
    for length in (1, 5, 20):
        ids = np.random.default_rng(length).integers(0, VOCAB, length)
        for spec in (HookSpec(), HookSpec().capture("*").intervene("hook_embed", Intervention.Scale(1.5))):
            assert equal(model.forward(ids, spec), plain.forward(ids, spec))


def test_without_packing_a_graph_is_the_same_to_rounding(models, own_store):
    plain = models("llama")
    model = prepared(plain, prepack=False)
    ids = np.arange(10, 19)[None]
    spec = spec_of(plain)
    found, expected = model.forward(ids, spec), plain.forward(ids, spec)
    assert np.abs(found.output() - expected.output()).max() < 5e-6
    nothing = HookSpec().capture("*").intervene("hook_embed", Intervention.Add(0.0))  # the null law holds within
    assert np.array_equal(model.forward(ids, nothing).output(), model.forward(ids).output())


def test_gradients_are_those_of_the_models_own_graph(models, own_store):
    """A base has its engine's operators, which have no rules."""
    plain, ids = models("llama"), [[5, 3, 9, 7]]
    model = prepared(plain)
    hooks = ["blocks.*.attn.hook_z", "hook_embed"]
    model.forward(ids, HookSpec().capture(hooks[0]))
    assert len(list((own_store / "bases").glob("*/base.onnx"))) == 1
    found, expected = (one.gradients(ids, hooks, answer=7).grad for one in (model, plain))
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-7)


def test_a_base_keeps_weights_as_the_checkpoint_has_them(models, own_store):
    """[out, in], which unpacked products read faster; the transposition is a part of the product, same bits."""
    plain = models("llama")
    model = prepared(plain)
    ids, spec = np.arange(10, 19)[None], HookSpec().capture("blocks.*.attn.hook_result").capture("blocks.*.mlp.*")
    assert equal(model.forward(ids, spec), plain.forward(ids, spec))
    graph = onnx.load(next(own_store.glob("bases/*/base.onnx")), load_external_data=False).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    assert shapes["model.layers.0.mlp.up_proj.weight"] == [96, 64]
    turned = {name for node in graph.node if node.op_type == "Transpose" for name in node.input}
    assert not turned & shapes.keys()


def test_other_weights_have_another_base(models, hooked, tmp_path):

    shutil.copytree(hooked("llama"), tmp_path / "copy")
    options = Options()
    one = prepacked.key_of(HookedModel.open(tmp_path / "copy"), options)
    assert prepacked.key_of(HookedModel.open(tmp_path / "copy"), options) == one
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    assert prepacked.key_of(HookedModel.open(tmp_path / "copy"), options) != one
    assert prepacked.key_of(HookedModel.open(tmp_path / "copy"), Options(fast=True)) != prepacked.key_of(
        HookedModel.open(tmp_path / "copy"), options
    )


def test_a_damaged_base_is_made_again(models, own_store):
    plain, ids = models("llama"), np.arange(10, 15)[None]
    expected = plain.forward(ids, spec_of(plain))
    prepared(plain)
    (data,) = (own_store / "bases").glob("*/base.data")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 255
    data.write_bytes(content)
    with pytest.warns(StoreWarning, match=r"base\.data was changed"):
        found = prepared(plain).forward(ids, spec_of(plain))
    assert equal(found, expected)


def test_a_store_that_cannot_be_written_is_said_once(models, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(disk_cache, "_said", set())
    plain, ids = models("llama"), np.arange(10, 15)[None]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = MIModel(plain.hooked, Options(threads=1))
        assert not model.prepare()
        assert equal(model.forward(ids, spec_of(plain)), plain.forward(ids, spec_of(plain)))
        assert not model.prepare()
    (one,) = [one for one in said if one.category is StoreWarning]
    assert "running without it" in str(one.message)


FULL = """
import signal, sys, warnings
import numpy as np
import onnx
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from mionnx import HookSpec, MIModel, Options
from mionnx.graph.hooked_model import HookedModel
model = MIModel(HookedModel.open(__import__("pathlib").Path(sys.argv[1])), Options(threads=1))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert not model.prepare()
    logits = model.forward(np.arange(10, 15)[None], HookSpec().capture("*")).output()
print(len(said), str(said[0].message)[:60])
np.save(sys.argv[2], logits) if len(sys.argv) > 2 else print(float(np.abs(logits).sum()))
"""


def test_a_disk_that_is_full(models, hooked, tmp_path):
    """Files that may not grow beyond 64 KiB: the base cannot be written, the model runs without it."""
    environment = {**os.environ, "MIONNX_CACHE": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", FULL, str(hooked("llama"))],
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16)),
    )
    assert ran.returncode == 0, ran.stderr
    said, total = ran.stdout.splitlines()
    assert said.startswith("1 the store")
    expected = models("llama").forward(np.arange(10, 15)[None]).output()
    assert float(total) == pytest.approx(float(np.abs(expected).sum()), rel=1e-6)
    assert list((tmp_path / "cache").rglob("base.*")) == []


def test_a_base_that_has_no_room_is_not_begun(models, own_store, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE_LIMIT", "100KB")
    plain = models("llama")
    with pytest.warns(StoreWarning, match="there is room for 100"):
        assert not MIModel(plain.hooked, Options()).prepare()


def test_a_model_whose_base_has_no_room_reads_its_weights_as_they_are(models, own_store, monkeypatch):
    """Each structure would hold packed weights of its own; the null law holds among unpacked ones."""
    monkeypatch.setattr(prepacked, "WORTHWHILE", 1)
    monkeypatch.setenv("MIONNX_CACHE_LIMIT", "100KB")
    model, ids = MIModel(models("llama").hooked, Options(threads=1)), np.arange(10, 15)[None]
    with pytest.warns(StoreWarning, match="there is room for 100.*reading its weights as they are"):
        plain = model.forward(ids).output()
    assert np.array_equal(model.forward(ids, HookSpec().capture("*")).output(), plain)
    np.testing.assert_allclose(plain, models("llama").forward(ids).output(), rtol=1e-4, atol=1e-5)
    assert [graph.options.prepack for graph in model.compiled.values()] == [False, False]
    assert not (own_store / "bases").exists()


def test_the_second_structure_of_a_large_model_makes_a_base(models, own_store, monkeypatch):
    monkeypatch.setattr(prepacked, "WORTHWHILE", 1)
    model, ids = MIModel(models("llama").hooked, Options(threads=1)), np.arange(10, 15)[None]
    model.forward(ids)
    model.forward(ids, HookSpec().capture("hook_embed"))
    assert not (own_store / "bases").exists()
    model.warm(HookSpec().capture(HookPoint.ResidPost(0)))
    assert len(list((own_store / "bases").glob("*/base.onnx"))) == 1
    other = MIModel(models("llama").hooked, Options(threads=1))
    other.forward(ids, HookSpec().capture("hook_embed"))
    assert other.compile_graph(HookSpec().capture("hook_embed")).cost < 2**26
    never = MIModel(models("llama").hooked, Options(threads=1, base=False))
    never.forward(ids, HookSpec().capture("hook_embed"))
    assert never.compile_graph(HookSpec().capture("hook_embed")).cost == never.variants.weights


def test_graphs_that_run_once_each_make_no_base(models, own_store, monkeypatch):
    monkeypatch.setattr(prepacked, "WORTHWHILE", 1)
    model, ids = MIModel(models("llama").hooked, Options(threads=1, prepack=False)), np.arange(10, 15)[None]
    for layer in range(2):
        model.forward(ids, HookSpec().capture(HookPoint.ResidPost(layer)))
    assert not (own_store / "bases").exists()
    assert model.prepare()
    assert not model.compiled


@pytest.mark.parametrize(
    "model", ["world-bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("world-gpt2", "world-llama"))]
)
@pytest.mark.slow
def test_an_edit_at_each_hook_point_is_that_of_the_models_own_graph(model, own_store):
    """ONNX Runtime turns keys once more beside their hook point, which nothing reads then: such edits use no base."""
    plain = MIModel.from_pretrained(REPOSITORY / "models" / model, threads=1, base=False)
    based, ids = prepared(plain), [[3, 5, 7, 4, 9]]
    before = plain.forward(ids).output()
    for point in [point for point in plain.hook_points() if not point.derived and point.layer in (0, 1)]:
        spec = HookSpec().intervene(point, Intervention.Zero())
        expected = plain.forward(ids, spec).output()
        assert np.abs(expected - before).max() > 1e-5, point
        assert np.abs(based.forward(ids, spec).output() - expected).max() <= 1e-5 * np.abs(expected).max(), point
    passed = prepacked.passed_by(plain.hooked.proto, based.variants.base.proto, {*plain.hooked.metadata.hooks})
    assert ("blocks.0.attn.hook_k" in passed) == (model == "world-bert")
