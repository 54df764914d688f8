"""Compiled folders, read back: the model that they were made of and the spec give what the folder gives."""

import shutil

import numpy as np
import pytest
from command_line import PROMPT

from mionnx import HookSpec, InputError, Intervention, MIModel, ModelError
from mionnx.compile.layouts import CLIENT_LAYOUTS

SPEC = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Scale(0.5))
LAYOUTS = [name for name, layout in CLIENT_LAYOUTS.items() if layout.takes_decoders]


@pytest.fixture(scope="module")
def folder(shipped, tmp_path_factory):
    return shipped.compile(SPEC, tmp_path_factory.mktemp("back") / "out", knobs={"strength": None})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_any_layout_opens_its_own_model_with_the_spec(layout, shipped, tmp_path):
    made = shipped.compile(SPEC, tmp_path / "out", layout=layout)
    model, spec = MIModel.from_compiled(made, threads=1)
    assert model.options.threads == 1
    assert model.hooked.folder.name == shipped.hooked.folder.name
    assert np.array_equal(model.forward(PROMPT, spec).output(), shipped.forward(PROMPT, SPEC).output())


def test_blocks_come_back_at_the_level_that_the_folder_computes_at(shipped, tmp_path):
    blocks = MIModel.from_pretrained(shipped.quantise(tmp_path / "blocks", bits=4), threads=1)
    made = blocks.compile(SPEC, tmp_path / "out")
    model, spec = MIModel.from_compiled(made, base=tmp_path / "blocks", threads=1)
    assert model.options.accuracy_level == 4
    assert spec == SPEC or spec.sha256 == SPEC.sha256
    with pytest.raises(ModelError, match="made of other weights than"):
        MIModel.from_compiled(made, base=shipped.hooked.folder, dtype="float32", accuracy_level=None)


def test_what_cannot_be_read_back_is_refused(folder, shipped, tmp_path, models):
    with pytest.raises(ModelError, match="is no compiled folder"):
        MIModel.from_compiled(shipped.hooked.folder)
    with pytest.raises(ModelError, match="is no compiled folder"):
        MIModel.from_compiled(tmp_path / "nothing")
    with pytest.raises(ModelError, match="made of other weights"):
        MIModel.from_compiled(folder, base=models("llama").hooked.folder)
    with pytest.raises(InputError, match="engine"):
        MIModel.from_compiled(folder, engine="onnx")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    HookSpec().save(str(copy / "spec.safetensors"))
    with pytest.raises(ModelError, match="its hash is another one"):
        MIModel.from_compiled(copy)
    (copy / "spec.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no spec\.safetensors"):
        MIModel.from_compiled(copy)


def test_a_model_that_is_not_here_is_named(models, tmp_path):
    made = models("llama").compile(SPEC, tmp_path / "out")
    with pytest.raises(ModelError, match=r"was made of .*, which is not here: .*; give base="):
        MIModel.from_compiled(made)
