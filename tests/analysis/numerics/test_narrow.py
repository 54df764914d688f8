"""A narrowed model is sound where the plain one is not, and means the same to every spec."""

import shutil
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from rescaled import TEXTS, loud_model

from mionnx import Diagnosis, HookSpec, InputError, Intervention, MIModel, ModelError
from mionnx.rewrite.float_graph import FloatGraph
from mionnx.rewrite.rounded import decomposed

PROMPT = "The capital of France is"
POINT = "blocks.2.hook_resid_post"


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    """A model whose stream is past float16 from layer 2 on."""
    return loud_model(tmp_path_factory.mktemp("loud") / "m")


@pytest.fixture(scope="module")
def cured(loud, tmp_path_factory):
    return MIModel.from_pretrained(loud.narrow(tmp_path_factory.mktemp("cured") / "m", texts=TEXTS), threads=1)


def test_the_remedy_is_a_power_of_two_and_the_file_is_sound(loud, cured):
    entry = cured.hooked.metadata.narrowed
    assert entry["before"]["not_finite"]
    assert not entry["after"]["not_finite"]
    assert entry["after"]["kl"] < 1e-3
    assert entry["exponents"]
    assert all(one < 0 for one in entry["exponents"].values())
    assert cured.hooked.metadata.dtype == "float16"
    assert cured.hooked.metadata.exponents[POINT] < 0
    size = sum(path.stat().st_size for path in cured.hooked.folder.glob("*.safetensors"))
    assert size < 0.6 * sum(path.stat().st_size for path in loud.hooked.folder.glob("*.safetensors"))


def test_captures_and_edits_are_of_true_values(loud, cured):
    spec = HookSpec().capture(POINT).intervene("blocks.1.hook_resid_post", Intervention.Scale(1.25))
    one, two = loud.forward(PROMPT, spec), cured.forward(PROMPT, spec)
    assert np.abs(one[POINT]).max() > 65504
    assert two[POINT].dtype == np.float32
    assert np.abs(one[POINT] - two[POINT]).max() < 2e-3 * np.abs(one[POINT]).max()
    for edit in (Intervention.Zero(), Intervention.Clamp(-7e4, 7e4), Intervention.Add(np.full(loud.hidden_size, 9e4))):
        alone = HookSpec().intervene(POINT, edit)
        first, second = (model.forward(PROMPT, alone).output().astype(np.float32) for model in (loud, cured))
        assert np.abs(first - second).max() < 0.05
        assert not np.array_equal(second, cured.forward(PROMPT).output())
    assert (loud.generate(PROMPT, max_new_tokens=3).ids[0] == cured.generate(PROMPT, max_new_tokens=3).ids[0]).all()


def test_a_compiled_file_has_the_edit_and_no_idle_products(cured, tmp_path):
    folder = cured.compile(HookSpec().intervene(POINT, Intervention.Zero()), tmp_path / "compiled")
    card = (folder / "README.md").read_text()
    assert "It was narrowed from float32 to float16: `hook_embed` and what is added to it times 2^-" in card
    proto = onnx.load(next(folder.rglob("*.onnx")), load_external_data=False)
    names = [node.name for node in proto.graph.node]
    assert f"{POINT}:again" in names
    assert "blocks.1.hook_resid_post:true" not in names
    assert onnxruntime.InferenceSession(str(next(folder.rglob("*.onnx")))).get_outputs()


def test_without_a_remedy_the_bound_is_refused(loud, tmp_path):
    with pytest.raises(ModelError, match=r"bound=0.001 is not met in float16: .* not finite at best; first not finite"):
        loud.narrow(tmp_path / "m", texts=TEXTS, rescale="none", islands="none")
    assert not (tmp_path / "m").exists()
    with pytest.raises(InputError, match="rescale='half'"):
        loud.narrow(tmp_path / "m", texts=TEXTS, rescale="half")
    with pytest.raises(InputError, match="bound must be a number above 0"):
        loud.narrow(tmp_path / "m", texts=TEXTS, bound=0.0)


def test_what_is_narrow_already_is_refused(cured, tmp_path):
    with pytest.raises(ModelError, match="narrowed already"):
        cured.narrow(tmp_path / "m", texts=TEXTS)


def test_islands_hold_what_a_decomposed_norm_cannot(loud, tmp_path):
    """A file whose norms are in their own nodes, with squares past the range."""
    hooked = loud.hooked
    opened = decomposed(FloatGraph(hooked.proto, hooked.metadata.hooks)).proto
    folder = tmp_path / "opened"
    shutil.copytree(hooked.folder, folder)
    del opened.metadata_props[:]
    for key, value in replace(hooked.metadata, weight_files={}).to_props().items():
        opened.metadata_props.add(key=key, value=value)
    (folder / "model.onnx").write_bytes(opened.SerializeToString())
    model = MIModel.from_pretrained(folder, threads=1, check="none")
    sound = MIModel.from_pretrained(model.narrow(tmp_path / "m", texts=TEXTS), threads=1)
    entry = sound.hooked.metadata.narrowed
    assert entry["islands"]
    assert entry["groups"] == ["norms' insides"]
    assert entry["after"]["kl"] < 1e-3
    one, two = (each.forward(PROMPT).output().astype(np.float32) for each in (loud, sound))
    assert np.abs(one - two).max() < 0.05


@pytest.mark.slow
def test_a_recurrence_stays_in_float32(recurrent, tmp_path):
    half = MIModel.from_pretrained(recurrent.narrow(tmp_path / "m", texts=TEXTS, rescale="2"), threads=1)
    assert half.hooked.metadata.exponents
    one, two = (model.forward(PROMPT).output().astype(np.float32) for model in (recurrent, half))
    assert np.abs(one - two).max() < 0.05
    assert half.generate(PROMPT, max_new_tokens=2).ids[0].tolist()


@pytest.mark.slow
def test_blocks_of_4_bits_have_scales_of_float16(shipped, tmp_path):
    blocks = MIModel.from_pretrained(shipped.quantise(tmp_path / "int4"), threads=1)
    half = MIModel.from_pretrained(blocks.narrow(tmp_path / "half", texts=TEXTS, rescale="4"), threads=1)
    one, two = (model.forward(PROMPT).output().astype(np.float32) for model in (blocks, half))
    assert half.hooked.metadata.weight_dtype == "int4"
    assert np.abs(one - two).max() < 0.1


def test_the_doctor_says_all_of_it_in_one_line(loud, tmp_path):
    result = loud.doctor(TEXTS, folder=tmp_path / "sound")
    line = result.line()
    assert line.startswith("float16: blocks.2.mlp.hook_post reaches ")
    assert "(limit 65,504)" in line
    assert "logits are NaN" in line
    assert "Remedy: the residual stream times 2^-" in line
    assert "After it: KL" in line
    assert not result.sound
    assert MIModel.from_pretrained(tmp_path / "sound").hooked.metadata.exponents
    assert line.split(" (")[0] in result.page()
    assert "<script>alert" not in result.page()
    result.save(tmp_path / "d.safetensors")
    assert Diagnosis.load(tmp_path / "d.safetensors").line() == line
    with pytest.raises(InputError, match="target='webgp': float16, int4, webgpu, cuda; did you mean 'webgpu'"):
        loud.doctor(TEXTS, target="webgp")
