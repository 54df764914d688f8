"""Layouts: what the folder of each client holds, and what it cannot hold; `test_clients.py` runs them."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from command_line import LLAMA, PROMPT, mionnx, succeeded

from mionnx import HookSpec, InputError, Intervention, InterventionError, Knob, MIModel, ModelError
from mionnx.compile.layouts import CLIENT_LAYOUTS

SPEC = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Scale(0.5))
LAYOUTS = [name for name, layout in CLIENT_LAYOUTS.items() if layout.takes_decoders]  # others: test_encoder_layouts.py
AXES = {"batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"}


def graph_of(folder: Path) -> onnx.ModelProto:
    return onnx.load(next(iter(sorted(folder.rglob("*.onnx")))), load_external_data=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_names_axes_as_clients_do_and_hashes_its_files(layout, shipped, tmp_path):
    folder = shipped.compile(SPEC, tmp_path / "out", layout=layout)
    graph = graph_of(folder).graph
    values = (*graph.input, *graph.output)
    assert {dim.dim_param for one in values for dim in one.type.tensor_type.shape.dim} - {""} == AXES
    (sums,) = folder.rglob("SHA256SUMS")
    lines = [line.split("  ") for line in sums.read_text().splitlines()]
    found = {(sums.parent / name).resolve(): digest for digest, name in lines}
    files = {path.resolve() for path in folder.rglob("*") if path.is_file() and path != sums}
    assert found == {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    card = next(folder.rglob("README.md")).read_text()
    assert "license: other\nlicense_name: same-as-the-project" in card  # of the checkpoint's own card
    assert "pipeline_tag: text-generation" in card
    assert card.count("past_key_values.{i}.key") == 1


def test_a_knob_says_what_it_is_in_graph_card_and_metadata(shipped, tmp_path):
    knob = Knob("blocks.1.*", low=0, high=2, unit="times the MLP's output", meaning="how much the MLP says")
    for layout, required in (("plain", False), ("genai", True)):
        folder = shipped.compile(SPEC, tmp_path / layout, layout=layout, knobs={"mlp": knob})
        proto = graph_of(folder)
        (value,) = [one for one in proto.graph.input if one.name == "mlp"]
        fed = "must be fed" if required else "may be left out"
        says = f"mlp: how much the MLP says; times the MLP's output; default 0.5, range 0 to 2; {fed}"
        assert value.doc_string == says
        assert says.replace("mlp:", "`mlp`:", 1) in (folder / "README.md").read_text()
        facts = json.loads({one.key: one.value for one in proto.metadata_props}["mionnx.compiled"])["knobs"]["mlp"]
        assert (facts["default"], facts["low"], facts["high"], facts["required"]) == (0.5, 0, 2, required)
        assert ("mlp" in {one.name for one in proto.graph.initializer}) is not required


def test_a_file_a_dose_is_the_spec_of_that_strength_and_shares_the_weights(shipped, tmp_path):
    folder = shipped.compile(SPEC, tmp_path / "out", layout="optimum", knobs={"mlp": Knob(doses=[0, 1.5])})
    assert sorted(path.name for path in folder.glob("*.onnx")) == [
        "model.onnx",
        "model_mlp_0.onnx",
        "model_mlp_1.5.onnx",
    ]
    assert len([*folder.glob("*.safetensors")]) == 2  # the weights and the spec
    ids = shipped.tokenize(PROMPT).ids[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    past = [f"past_key_values.{i}.{part}" for i in range(4) for part in ("key", "value")]
    feeds |= {name: np.zeros((1, 4, 0, 16), np.float32) for name in past}
    for file, dose in (("model.onnx", 0.5), ("model_mlp_0.onnx", 0.0), ("model_mlp_1.5.onnx", 1.5)):
        (logits,) = onnxruntime.InferenceSession(folder / file).run(["logits"], feeds)
        spec = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Scale(dose))
        assert np.abs(logits - shipped.forward(PROMPT, spec).output()).max() < 5e-5


REFUSED = {
    "optional": ("genai", {"knobs": {"k": None}, "required": False}, InputError, "feeds no input that has a default"),
    "no knob": ("genai", {"required": True}, InputError, "no knob is an input"),
    "turned": ("optimum", {"knobs": {"k": None}}, InputError, "a file a dose"),
    "default": ("plain", {"knobs": {"k": Knob(low=1, high=2)}}, InterventionError, "default of 0.5 is outside"),
    "layout": ("transformers_js", {}, InputError, "transformers.js"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_layout_cannot_hold_is_refused(what, shipped, tmp_path):
    layout, how, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        shipped.compile(SPEC, tmp_path / "out", layout=layout, **how)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_model_without_keys_has_no_past_that_transformers_js_could_count(hybrid, tmp_path):
    with pytest.raises(InputError, match=r"by its keys, and no layer of this mamba2 model has any: use layout='plain'"):
        hybrid("mamba2").compile(HookSpec(), tmp_path / "out", layout="transformers.js", plain=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_states_without_columns_are_refused_where_a_client_asks_for_both(hybrid, tmp_path):
    with pytest.raises(InputError, match=r"without columns of a convolution, of which this minimax model has none"):
        hybrid("minimax").compile(HookSpec(), tmp_path / "out", layout="genai", plain=True)
    assert not [*tmp_path.iterdir()]


def test_a_hybrid_is_refused_where_a_client_carries_keys_and_values_alone(hybrid, tmp_path):
    with pytest.raises(InputError, match=r"a lfm2 model a state of other parts \(conv\): use layout='plain'"):
        hybrid("lfm2").compile(HookSpec(), tmp_path / "out", layout="optimum", plain=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("layout", ["genai", "transformers.js", "optimum"])
def test_a_recurrent_model_is_refused_where_clients_carry_keys_and_values(layout, recurrent, tmp_path):
    spec = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Scale(0.5))
    with pytest.raises(InputError, match=r"a rwkv7 model a state of other parts .*layout='plain'"):
        recurrent.compile(spec, tmp_path / "out", layout=layout)
    assert not [*tmp_path.iterdir()]


def test_ranges_that_are_none_are_refused():
    for how, message in (
        ({"low": 2, "high": 1}, "the lower first"),
        ({"high": 1, "doses": [2]}, "outside of the knob"),
    ):
        with pytest.raises(InterventionError, match=message):
            Knob(**how)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_occupied_folder_and_a_full_disk_leave_nothing(layout, shipped, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        shipped.compile(SPEC, tmp_path / "out", layout=layout)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ModelError, match="No space left"):
        shipped.compile(SPEC, tmp_path / "other", layout=layout)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not [*(tmp_path / "out").iterdir()]


def test_genai_reads_the_logits_of_the_last_position_off_the_axis(shipped, tmp_path):
    folder = shipped.compile(SPEC, tmp_path / "out", layout="genai", last_logits=True)
    (logits,) = [one for one in graph_of(folder).graph.output if one.name == "logits"]
    assert logits.type.tensor_type.shape.dim[1].dim_value == 1


def test_blocks_are_compiled_at_level_4_unless_asked(shipped, tmp_path):
    """And the file of transformers.js is named by their bits."""
    blocks = MIModel.from_pretrained(shipped.quantise(tmp_path / "blocks", bits=4), threads=1)
    for level, how in ((4, {}), (0, {"accuracy_level": 0})):
        folder = blocks.compile(SPEC, tmp_path / str(level), layout="transformers.js", **how)
        proto = graph_of(folder)
        levels = {
            next((one.i for one in node.attribute if one.name == "accuracy_level"), 0)
            for node in proto.graph.node
            if node.op_type == "MatMulNBits"
        }
        assert levels == {level}
        assert f"at accuracy level {level}" in (folder / "README.md").read_text()
    config = json.loads((folder / "config.json").read_text())["transformers.js_config"]
    assert config == {"dtype": "q4", "use_external_data_format": 1}
    assert sorted(path.name for path in (folder / "onnx").iterdir()) == ["model_q4.onnx", "model_q4.onnx_data"]


def test_a_compiled_folder_says_what_it_is_when_it_is_opened(shipped, tmp_path):
    says = r"compiled .*world-llama.*scale at blocks.1.hook_mlp_out.*spec.safetensors"
    for layout in LAYOUTS:
        folder = shipped.compile(SPEC, tmp_path / layout, layout=layout, knobs=None)
        with pytest.raises(ModelError, match=says):
            MIModel.from_pretrained(folder)


@pytest.mark.slow
def test_the_command_line_writes_a_layout_and_a_plain_model(checkpoint, tmp_path):
    options = ["--layout", "genai", "--scale", "blocks.2.hook_attn_out=0.5", "--knobs", "strength"]
    succeeded("compile", LLAMA, "-o", tmp_path / "genai", *options)
    assert (tmp_path / "genai" / "genai_config.json").is_file()
    succeeded("export", checkpoint("llama"), "-o", tmp_path / "plain", "--layout", "transformers.js")
    card = (tmp_path / "plain" / "README.md").read_text()
    assert "nothing in it was changed" in card
    assert "against the checkpoint in transformers, eager, float32" in card
    assert "| prompt | 9 | " in card
    assert (tmp_path / "plain" / "onnx" / "model.onnx_data").is_file()
    again = mionnx("export", checkpoint("llama"), "-o", tmp_path / "plain", "--layout", "genai")
    assert again.returncode == 1
    assert "exists already" in " ".join(again.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["genai", "plain"]
