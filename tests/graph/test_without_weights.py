"""A graph of a config alone can be rewritten, compiled and estimated; whatever reads a weight is refused by name."""

import json

import onnx
import pytest

from mionnx import ExportError, HookSpec, Intervention, MIModel, ModelError
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.onnx_file import WEIGHTLESS
from mionnx.run import exporting

SPEC = HookSpec().capture("*.hook_resid_post").intervene("blocks.1.hook_mlp_out", Intervention.Scale(0.5))
REFUSED = "has no weights: it was exported from a config alone"


@pytest.fixture
def bare(copy):
    """A shipped model as `--graph-only` would write it."""
    proto = onnx.load(copy / "model.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = WEIGHTLESS if entry.key == "location" else entry.value
    for entry in [entry for entry in proto.metadata_props if entry.key.startswith("mionnx.weight")]:
        proto.metadata_props.remove(entry)
    (copy / "model.onnx").write_bytes(proto.SerializeToString())
    (copy / "model.safetensors").unlink()
    return copy


def test_it_is_rewritten_compiled_and_estimated(bare, tmp_path, shipped):
    model = MIModel.from_pretrained(bare)
    assert str(model.report(SPEC)) == str(shipped.report(SPEC))
    assert model.estimate(SPEC, 2, 8) == shipped.estimate(SPEC, 2, 8)
    model.compile(SPEC, tmp_path / "compiled")
    shipped.compile(SPEC, tmp_path / "whole")
    one, other = (onnx.load(tmp_path / name / "model.onnx", load_external_data=False) for name in ("compiled", "whole"))
    assert list(one.graph.node) == list(other.graph.node)
    assert "cannot run" in (tmp_path / "compiled" / "README.md").read_text()


@pytest.mark.parametrize(
    "verb",
    [
        lambda model: model.forward([[1, 2]], SPEC),
        lambda model: model.generate([[1, 2]], max_new_tokens=1),
        lambda model: model.prepare(),
        lambda model: model.W_U,
        lambda model: model.patch_sweep([[1, 2, 3]], [[1, 2, 4]], "resid_pre"),
        lambda model: model.verify([[1, 2, 3]]),
    ],
    ids=["forward", "generate", "prepare", "matrix", "sweep", "verify"],
)
def test_what_reads_a_weight_is_refused(bare, verb):
    with pytest.raises(ModelError, match=REFUSED):
        verb(MIModel.from_pretrained(bare))


def test_packages_that_hold_weights_are_refused(bare, tmp_path):
    model = MIModel.from_pretrained(bare)
    for choice in ({"weights": "embedded"}, {"target": "ort-cpu"}, {"target": "web"}):
        with pytest.raises(ModelError, match=REFUSED):
            model.compile(SPEC, tmp_path / "compiled", **choice)
    with pytest.raises(ModelError, match=REFUSED):
        HookedModel.open(bare, check="full")


@pytest.mark.slow
def test_a_config_of_eighty_layers_is_exported_without_weights(tmp_path):
    shape = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80}
    config = {"model_type": "llama", "intermediate_size": 28672, "vocab_size": 128256, **shape}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match="--graph-only"):
        MIModel.from_pretrained(tmp_path / "config")
    exporting.export(tmp_path / "config", tmp_path / "graph", "bfloat16", lambda *_: None, graph_only=True)
    model = MIModel.from_pretrained(tmp_path / "graph")
    assert (model.num_layers, model.hooked.metadata.dtype, model.hooked.has_weights) == (80, "bfloat16", False)
    assert model.estimate(HookSpec().capture("*.hook_resid_post"), 1, 10).total == 80 * 10 * 8192 * 2
    assert model.estimate(HookSpec(), 1, 10).weights == 2 * 70_553_706_496  # Llama 3's 70B


@pytest.mark.slow
def test_what_a_model_of_seven_billion_takes_is_told_before_it_is_there(tmp_path):
    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **shape}))
    exporting.export(tmp_path / "config", tmp_path / "graph", "float32", lambda *_: None, graph_only=True)
    estimate = MIModel.from_pretrained(tmp_path / "graph").estimate(HookSpec(), 1, 32)
    assert estimate.weights == 4 * 6_738_415_616  # Llama 2's 7B
    assert "weights of 25.1 GiB" in str(estimate)
    assert estimate.store == 0  # beyond the limit of the store: none is written


@pytest.mark.slow
def test_what_weights_take_in_the_store_is_told_where_it_has_room(tmp_path, monkeypatch):
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 6}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **shape}))
    exporting.export(tmp_path / "config", tmp_path / "graph", "float32", lambda *_: None, graph_only=True)

    def store(**options):
        return MIModel.from_pretrained(tmp_path / "graph", **options).estimate(HookSpec(), 1, 32)

    assert store().store > store().weights
    assert store(base=False).store == 0
    monkeypatch.setenv("MIONNX_CACHE_LIMIT", "1000000")
    assert store().store == 0
