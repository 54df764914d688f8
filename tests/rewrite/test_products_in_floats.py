"""Products with weights in blocks as products of floats: the same logits, in ONNX Runtime."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from mionnx import MIModel
from mionnx.rewrite.products_in_floats import products_in_floats

SETTINGS = {
    "8 bits": {"bits": 8},
    "8 bits, zero points": {"bits": 8, "symmetric": False, "block_size": 16},
    "4 bits": {"bits": 4},
    "4 bits, zero points": {"bits": 4, "symmetric": False, "block_size": 16},
    "both": {"bits": 4, "in_8_bits": ["*down_proj*"]},
}


def logits(proto: onnx.ModelProto, folder: Path) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    ids = np.array([[3, 4, 5, 39, 6]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(5)[None]}
    past = [entry.name for entry in session.get_inputs() if entry.name.startswith("past")]
    return session.run(["logits"], {**feeds, **{name: np.zeros((1, 4, 0, 16), np.float32) for name in past}})[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_logits_stay(name: str, shipped: MIModel, tmp_path: Path):
    model = MIModel.from_pretrained(shipped.quantise(tmp_path / "blocks", **SETTINGS[name]))
    proto = model.hooked.proto
    before = proto.SerializeToString(deterministic=True)
    made, size = products_in_floats(proto)
    assert proto.SerializeToString(deterministic=True) == before
    kinds = {node.op_type for node in made.graph.node}
    assert "MatMulNBits" not in kinds
    assert {"GatherBlockQuantized", "DequantizeLinear", "Gemm"} <= kinds
    floats = [tensor for tensor in shipped.hooked.proto.graph.initializer if len(tensor.dims) == 2]
    products = [tensor for tensor in floats if "embed" not in tensor.name]
    assert size == sum(4 * int(np.prod(tensor.dims)) for tensor in products)
    folder = model.hooked.folder
    assert np.abs(logits(made, folder) - logits(proto, folder)).max() < 2e-5


def test_blocks_that_end_beyond_the_weight_stay(shipped: MIModel, tmp_path: Path):
    """352 numbers a row in blocks of 256."""
    model = MIModel.from_pretrained(shipped.quantise(tmp_path / "blocks", block_size=256, bits=8))
    made, _ = products_in_floats(model.hooked.proto)
    left = [node for node in made.graph.node if node.op_type == "MatMulNBits"]
    assert len(left) == model.num_layers
    folder = model.hooked.folder
    assert np.abs(logits(made, folder) - logits(model.hooked.proto, folder)).max() < 2e-5
