"""A tied table is stored once in every target, and the graph computes the same bits (part 3, 9)."""

import numpy as np
import onnx
import onnxruntime
import pytest

from mionnx import HookSpec, Intervention, MIModel

IDS = np.arange(3, 12)[None]
SPEC = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Scale(0.5))


@pytest.fixture(scope="module", params=["floats", "blocks"])
def tied(request, tmp_path_factory) -> MIModel:
    """A model whose table of tokens is its unembedding."""
    model = MIModel.from_pretrained("models/world-gpt2", threads=1)
    if request.param == "blocks":
        folder = model.quantise(tmp_path_factory.mktemp("tied") / "blocks", bits=4)
        model = MIModel.from_pretrained(folder, threads=1, accuracy_level=0)
    return model


def run(model: MIModel, graph: str, level: onnxruntime.GraphOptimizationLevel | None = None) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if level is not None:
        options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(graph, options)
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.arange(IDS.shape[1])[None]}
    for value in session.get_inputs():
        if value.name not in feeds:
            feeds[value.name] = np.zeros((1, model.num_kv_heads, 0, model.head_dim), np.float32)
    return session.run(["logits"], feeds)[0]


@pytest.mark.parametrize("target", ["generic", "ort-cpu", "web"])
@pytest.mark.slow_beyond(4)
def test_a_tied_table_is_stored_once(tied, target, tmp_path):
    folder = tied.compile(SPEC, tmp_path / "out", target=target)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    beside = sum(file.stat().st_size for file in (*folder.glob("*.data"), *folder.glob("*.safetensors")))
    stored = beside - (folder / "spec.safetensors").stat().st_size
    stored += sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    weights = sum(file.stat().st_size for file in tied.hooked.folder.glob("*.safetensors"))
    assert stored < 1.015 * weights
    plain = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    fast = MIModel.from_pretrained(tied.hooked.folder, threads=1, fast=True, accuracy_level=tied.options.accuracy_level)
    assert np.array_equal(run(tied, str(folder / "model.onnx")), fast.forward(IDS, SPEC).output())
    assert np.abs(run(tied, str(folder / "model.onnx"), plain) - tied.forward(IDS, SPEC).output()).max() < 5e-5
