"""A model of float32 leaves in float16 with the remedy: its spec means the same, nothing is narrowed in silence."""

import json
import shutil

import numpy as np
import onnx
import onnxruntime
import pytest
from rescaled import TEXTS, loud_model

from mionnx import HookSpec, InputError, Intervention, InterventionError, MIModel, ModelError
from mionnx.machine.progress import silent
from mionnx.verify.plain_model import export_plain

PROMPT = "The capital of France is"
POINT = "blocks.2.hook_resid_post"


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    """A model whose stream is past float16 from layer 2 on."""
    return loud_model(tmp_path_factory.mktemp("loud") / "m")


def run(model, file, **more):
    """All outputs of a compiled file for the prompt, by name."""
    session = onnxruntime.InferenceSession(str(file))
    ids = model.tokenize(PROMPT).ids[None]
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.shape[1])[None],
        **more,
    }
    dtypes = {"tensor(float16)": np.float16, "tensor(float)": np.float32}
    for one in session.get_inputs():
        if one.name.startswith("past"):
            feeds[one.name] = np.zeros([1, one.shape[1], 0, one.shape[3]], dtypes[one.type])
    known = {one.name for one in session.get_inputs()}
    values = session.run(None, {name: value for name, value in feeds.items() if name in known})
    return dict(zip((one.name for one in session.get_outputs()), values, strict=True))


def test_a_spec_means_the_same_in_float16_with_its_knob_monitor_and_capture(loud, tmp_path):
    direction = np.linspace(-1, 1, loud.hidden_size).astype(np.float32)
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Add(2 * direction)).capture(POINT)
    monitors = {"sea": (POINT, direction), "lens": loud.lens_monitor(2, k=3)}
    options = {"knobs": {"strength": None}, "monitors": monitors}
    wide = loud.compile(spec, tmp_path / "wide", **options)
    half = loud.compile(spec, tmp_path / "half", dtype="float16", texts=TEXTS, weights="referenced", **options)
    for strength in (0.0, 1.0):
        knob = np.array(strength, np.float32)
        one, two = (run(loud, folder / "model.onnx", strength=knob) for folder in (wide, half))
        assert two["logits"].dtype == np.float16
        assert np.abs(one["logits"] - two["logits"]).max() < 0.05
        assert np.abs(one[POINT]).max() > 65504
        for name in (POINT, "sea"):
            assert two[name].dtype == np.float32
            assert np.abs(one[name] - two[name]).max() < 2e-3 * np.abs(one[name]).max()
        assert (one["lens.ids"] == two["lens.ids"]).mean() > 0.8
    card = (half / "README.md").read_text()
    assert "It was narrowed from float32 to float16: `hook_embed` and what is added to it times 2^-" in card
    assert "- activations: float16" in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "wide"]  # nothing is left beside them
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (wide, half)]
    assert sizes[1] < 0.6 * sizes[0]


def test_what_has_no_effect_or_does_not_fit_is_refused_before_anything_is_measured(
    loud, shipped, tmp_path, monkeypatch
):
    def measured(model, folder, *, dtype, texts, bound=0.001):
        raise ModelError(f"measured within {bound} in {dtype} on {texts}")

    monkeypatch.setattr(MIModel, "narrow", measured)
    edit = HookSpec().intervene(POINT, Intervention.Zero())
    with pytest.raises(InputError, match="texts= is of a dtype that the model is narrowed to, and without dtype="):
        shipped.compile(edit, tmp_path / "m", texts=TEXTS)
    with pytest.raises(InputError, match=r"bound= is of a dtype .* the model computes in float32 already"):
        shipped.compile(edit, tmp_path / "m", dtype="float32", bound=0.1)
    wrong = HookSpec().intervene(POINT, Intervention.Add(np.ones(3)))
    with pytest.raises(InterventionError):
        loud.compile(wrong, tmp_path / "m", dtype="float16", texts=TEXTS)
    with pytest.raises(ModelError, match=r"measured within 0.01 in bfloat16 on The capital"):
        shipped.compile(edit, tmp_path / "m", dtype="bfloat16", texts=TEXTS, bound=0.01)
    monkeypatch.undo()
    with pytest.raises(InputError, match="dtype='float8': float16 or bfloat16"):
        shipped.compile(edit, tmp_path / "m", dtype="float8")
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_blocks_of_4_bits_leave_with_scales_of_float16(shipped, tmp_path):
    blocks = MIModel.from_pretrained(shipped.quantise(tmp_path / "int4"), threads=1)
    spec = HookSpec().intervene(POINT, Intervention.Zero())
    one = blocks.compile(spec, tmp_path / "wide", accuracy_level=0)
    two = blocks.compile(spec, tmp_path / "half", accuracy_level=0, dtype="float16", texts=TEXTS)
    first, second = (run(shipped, folder / "model.onnx")["logits"] for folder in (one, two))
    assert np.abs(first - second).max() < 0.1
    proto = onnx.load(two / "model.onnx", load_external_data=False)
    scales = {node.input[2] for node in proto.graph.node if node.op_type == "MatMulNBits"}
    kinds = {one.data_type for one in proto.graph.initializer if one.name in scales}
    assert kinds == {onnx.TensorProto.FLOAT16}


@pytest.mark.slow
def test_an_export_in_a_layout_has_the_remedy_and_is_checked_against_float32(loud, tmp_path):
    source = shutil.copytree(loud.hooked.folder, tmp_path / "loud")
    (source / "model.onnx").unlink()
    folder = export_plain(source, tmp_path / "plain", "genai", "float16", silent, [TEXTS])
    card = (folder / "README.md").read_text()
    assert "It was narrowed from float32 to float16: `hook_embed` and what is added to it times 2^-" in card
    assert "Verified when it was written, against the checkpoint in transformers, eager, float32" in card
    assert json.loads((folder / "genai_config.json").read_text())["model"]["type"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loud", "plain"]
