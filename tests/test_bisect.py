"""`bisect` returns the node at which a fault was planted, and a model that shows it alone."""

import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from conftest import REPOSITORY

from mionnx import InputError, MIModel

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def llama() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")


def test_a_wrong_rope_base_is_found_and_written(llama, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(llama.hooked.folder, folder)
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(tensor for tensor in graph.graph.initializer if tensor.name.endswith("inv_freq"))
    before = onnx.numpy_helper.to_array(tensor)
    width = before.size
    after = (1 / 5e5 ** (np.arange(width) / width)).astype(before.dtype).reshape(before.shape)
    tensor.CopyFrom(onnx.numpy_helper.from_array(after, tensor.name))
    (folder / "model.onnx").write_bytes(graph.SerializeToString())
    readers = {node.name for node in graph.graph.node if tensor.name in node.input}
    report = tmp_path / "report"
    found = llama.bisect(PROMPT, ["ort-cpu"], other=MIModel.from_pretrained(folder), folder=report)
    assert found.hook == "blocks.0.hook_resid_mid"
    assert readers & {node.split(" ")[0] for node in found.nodes}
    ran = subprocess.run([sys.executable, report / "reproduce.py"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "found.npz: largest difference 0" in ran.stdout
    onnx.checker.check_model(report / "model.onnx")


def test_runtimes_that_agree_have_no_such_part(llama):
    found = llama.bisect(PROMPT, ["ort-cpu", "reference"])
    assert found.hook is None
    assert found.largest[0] < 5e-5


def test_torch_runs_no_part_of_a_graph(llama):
    with pytest.raises(InputError, match="as a whole"):
        llama.bisect(PROMPT, ["ort-cpu", "torch"])
