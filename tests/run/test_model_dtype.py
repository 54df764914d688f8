"""A dtype that a model does not have, or that its engine does not compute in, is refused before any work."""

import json
import shutil
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from repository import REPOSITORY
from safetensors.numpy import save_file

from mionnx import ExportError, InputError, MIModel, ModelError
from mionnx.run import find_model
from mionnx.run.exporting import stored_dtype

LLAMA = REPOSITORY / "models" / "world-llama"


@pytest.fixture
def checkpoint_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint of world-llama, which nothing exports."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(LLAMA / name, tmp_path)
    monkeypatch.setattr(find_model, "_exported", lambda *_: pytest.fail("it was exported"))
    return tmp_path


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_hooked_model_of_another_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(InputError, match=f"dtype='{dtype}', but .*world-llama is a hooked model in float32 already"):
        MIModel.from_pretrained(LLAMA, dtype=dtype, provider="cpu")


@pytest.mark.parametrize("given", [{}, {"dtype": "float32"}, {"dtype": "auto"}])
def test_its_own_dtype_is_taken(given: dict[str, str]) -> None:
    assert MIModel.from_pretrained(LLAMA, **given).cfg.dtype == "float32"


def test_the_default_is_no_wish(copy: Path) -> None:
    """A float16 model opens without `dtype`, and is refused as float32."""
    graph = onnx.load(copy / "model.onnx", load_external_data=False)
    entry = next(one for one in graph.metadata_props if one.key == "mionnx.dtype")
    assert json.loads(entry.value) == "float32"
    entry.value = json.dumps("float16")
    (copy / "model.onnx").write_bytes(graph.SerializeToString())
    assert MIModel.from_pretrained(copy).cfg.dtype == "float16"
    with pytest.raises(InputError, match=r"dtype='float32', but .* is a hooked model in float16 already"):
        MIModel.from_pretrained(copy, dtype="float32")


def test_an_unknown_dtype_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        InputError, match="'float61' is none of float32, float16, bfloat16, int4, int8, auto; did you mean 'float16'"
    ):
        MIModel.from_pretrained(LLAMA, dtype="float61")


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_bfloat16_is_refused_before_the_export(checkpoint_copy: Path, dtype: str) -> None:
    if dtype == "auto":
        save_file({"a": np.zeros(3, ml_dtypes.bfloat16)}, checkpoint_copy / "model.safetensors")
    with pytest.raises(InputError, match="onnxruntime on cpu does not compute in bfloat16; use float32 or float16"):
        MIModel.from_pretrained(checkpoint_copy, dtype=dtype)


def test_the_dtype_of_a_checkpoint_is_that_of_most_tensors(tmp_path: Path) -> None:
    assert stored_dtype(tmp_path) is None
    save_file({name: np.zeros(2, np.float16) for name in "ab"} | {"c": np.zeros(9)}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == "float16"
    (tmp_path / "other.safetensors").write_bytes(b"junk")
    assert stored_dtype(tmp_path) is None


def test_a_config_without_weights_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(LLAMA / "config.json", tmp_path)
    for name in ("exporters.transformers.assemble", "exporters.transformers.trace"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    begin = time.process_time()
    with pytest.raises(ExportError, match="holds no weights: it has neither"):
        MIModel.from_pretrained(tmp_path)
    assert time.process_time() - begin < 5


def test_a_hooked_model_in_bfloat16_says_that_the_cpu_does_not_compute_in_it(copy: Path, monkeypatch) -> None:
    """Before a graph is rewritten or opened; hook points and specs can be looked at."""
    model = MIModel.from_pretrained(copy)
    object.__setattr__(model.hooked.metadata, "dtype", "bfloat16")  # of this copy alone
    monkeypatch.setattr("mionnx.run.open_graphs.rewrite", None)
    for call in (lambda: model.forward([5, 6]), lambda: model.gradients([5, 6], "hook_embed", answer=7)):
        with pytest.raises(ModelError, match="in bfloat16, in which onnxruntime on cpu does not compute"):
            call()
    assert model.hook_points()
