"""Models of the Hub: of several ONNX files one is downloaded, with its weights; the Hub is a folder here."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import onnx
import pytest
from command_line import succeeded
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from repository import REPOSITORY

from mionnx import ExportError, MIModel, ModelError
from mionnx.machine.progress import silent
from mionnx.run.adopt import adopt
from mionnx.run.find_model import hub_folder

FOREIGN = REPOSITORY / "tests" / "shared" / "foreign"
FILES = ("model.onnx", "model_q4.onnx", "model_fp16.onnx")


class Hub:
    """A repository in a folder, and what was downloaded of it."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.cache, self.reached = repository, cache, True

    def names(self, folder: Path) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def model_info(self, _api: object, _name: str) -> SimpleNamespace:
        if not self.reached:
            raise RuntimeError("no network")
        return SimpleNamespace(
            sha="1", siblings=[SimpleNamespace(rfilename=one) for one in self.names(self.repository)]
        )

    def download(self, _name: str, *, allow_patterns: list[str], local_files_only: bool = False, revision: str = ""):
        if local_files_only and not self.cache.exists():
            raise LocalEntryNotFoundError("not in the cache")
        for name in (
            [] if local_files_only else filter_repo_objects(self.names(self.repository), allow_patterns=allow_patterns)
        ):
            (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.repository / name, self.cache / name)
        return str(self.cache)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Three ONNX files, one with its weights beside it, in the layout of transformers.js."""
    (tmp_path / "repository" / "onnx").mkdir(parents=True)
    source = next(path.parent for path in sorted(FOREIGN.rglob("*.onnx")) if "optimum" in str(path))
    proto = onnx.load(next(source.glob("*.onnx")))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, tmp_path / "repository" / name)
    for name in FILES:
        data = {"save_as_external_data": True, "location": f"{name}_data", "size_threshold": 2000}
        onnx.save(proto, tmp_path / "repository" / "onnx" / name, **(data if "q4" in name else {}))
    made = Hub(tmp_path / "repository", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda api, name: made.model_info(api, name))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    return made


def test_one_onnx_file_is_downloaded_and_the_choice_is_said(hub):
    with pytest.warns(UserWarning, match=r"holds 3 ONNX files, and onnx/model.onnx is taken.*model_q4.onnx"):
        model = MIModel.from_pretrained("somebody/llama")
    assert model.num_layers
    assert [name for name in hub.names(hub.cache) if "onnx/" in name] == ["onnx/model.onnx"]


def test_the_named_file_is_downloaded_with_its_weights(hub, tmp_path):
    said = succeeded("adopt", "somebody/llama", "--file", "model_q4.onnx", "-o", str(tmp_path / "out"))
    assert "model_q4.onnx" in said
    assert [name for name in hub.names(hub.cache) if "onnx/" in name] == [
        "onnx/model_q4.onnx",
        "onnx/model_q4.onnx_data",
    ]
    assert MIModel.from_pretrained(tmp_path / "out").forward(np.array([[1, 2, 3]])).output().shape[1] == 3


def test_of_a_checkpoint_no_onnx_files_are_downloaded(hub):
    shutil.copyfile(REPOSITORY / "models" / "world-llama" / "model.safetensors", hub.repository / "model.safetensors")
    hub_folder("somebody/llama", None)
    assert [name for name in hub.names(hub.cache) if not name.endswith(".json")] == ["model.safetensors"]


def test_a_file_that_the_repository_lacks_is_refused_before_a_download(hub, tmp_path):
    with pytest.raises(ExportError, match=r"somebody/llama has no ONNX file 'model_q8.onnx'; it has .*model_q4.onnx"):
        adopt(Path("somebody/llama"), tmp_path / "out", "model_q8.onnx", silent)
    assert not hub.cache.exists()


@pytest.mark.parametrize("copies", [False, True])
def test_linked_weights_are_said_and_copied_on_request(hub, tmp_path, copies):
    source, target = hub.repository / "onnx" / "model_q4.onnx", tmp_path / "out"
    said = succeeded("adopt", str(source), "-o", str(target), *(["--copy"] if copies else []))
    assert ("--copy" in said) == (not copies)
    assert {
        path.stat().st_nlink for path in (target / "model_q4.onnx_data", source.with_name("model_q4.onnx_data"))
    } == {1 if copies else 2}
    if copies:
        onnx.load(source)
        onnx.load(target / "model.onnx")
    else:
        with pytest.raises(onnx.checker.ValidationError, match="hard links"):
            onnx.load(source)


def test_without_a_network_the_cache_serves(hub):
    hub.reached = False
    with pytest.raises(ModelError, match="Hugging Face Hub"):
        MIModel.from_pretrained("somebody/llama")
    hub.reached = True
    with pytest.warns(UserWarning, match="is taken"):
        MIModel.from_pretrained("somebody/llama")
    hub.reached = False
    assert MIModel.from_pretrained("somebody/llama").num_layers
