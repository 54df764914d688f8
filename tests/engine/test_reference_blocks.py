"""onnx's evaluator on models of blocks: an oracle that has none of ONNX Runtime's operators."""

import onnx
import pytest
from packed_files import Form, write_packed
from repository import REPOSITORY

from mionnx import MIModel
from mionnx.engine.options import Options
from mionnx.engine.reference import Reference
from mionnx.errors import ModelError
from mionnx.machine.progress import silent
from mionnx.run.exporting import export


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("world-llama", {"symmetric": False, "in_8_bits": ["*.1.*"]}),
        ("world-gpt2", {"block_size": 16, "keep": ["*.2.*"]}),
    ],
)
def test_every_hook_point_is_that_of_standard_operators(name, settings, tmp_path):
    """GPT-2's products have biases, and its table is the unembedding."""
    model = MIModel.from_pretrained(REPOSITORY / "models" / name, threads=1)
    made = MIModel.from_pretrained(model.quantise(tmp_path / "made", **settings), threads=1)
    found = made.verify("The capital of France is", ["ort-cpu", "reference"], points="*", greedy=2)
    assert not found.skipped
    assert not found.failed
    (beside,) = found.besides
    assert beside.worst.relative < 5e-6
    assert beside.greedy == 1
    assert len(beside.rows) > 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [Form("gptq", "gptq", group=32, shuffled=True), Form("awq", "gemm", group=32)], ids=str
)
def test_offsets_and_an_order_of_inputs_stay_in_the_graph(form, tmp_path):
    write_packed(form, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "made", "auto", silent)
    made = MIModel.from_pretrained(tmp_path / "made", threads=1)
    (beside,) = made.verify([[5, 17, 3, 44, 8]], ["ort-cpu", "reference"], points="*", greedy=2).besides
    assert beside.worst.relative < 5e-6


def test_other_operators_of_onnx_runtime_are_refused_by_name(tmp_path):
    node = onnx.helper.make_node("BiasGelu", ["x", "b"], ["y"], domain="com.microsoft")
    sides = [onnx.helper.make_tensor_value_info(name, 1, [2]) for name in ("x", "b", "y")]
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    proto = onnx.helper.make_model(onnx.helper.make_graph([node], "one", sides[:2], sides[2:]), opset_imports=opsets)
    with pytest.raises(ModelError, match="has no BiasGelu"):
        Reference().open(proto.SerializeToString(), tmp_path, Options(engine="reference"))
