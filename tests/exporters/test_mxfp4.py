"""Checkpoints of gpt_oss whose experts are MXFP4: transformers' own dequantisation is the oracle."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from families import VOCAB, make_model
from family_batches import batch, differences
from gradient_oracle import gradients as by_autograd
from safetensors.torch import save_file
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from exporters.checkpoint_tensors import read_tensors
from exporters.packed.tensors import unpacked_tensors
from exporters.transformers import export_packed
from mionnx import HookPoint, HookSpec, Intervention, MIModel
from mionnx.errors import ExportError
from mionnx.graph import onnx_file
from mionnx.graph.blocks import EXPERT
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.weight_value import weight_numbers
from mionnx.machine.progress import silent
from mionnx.quantise import choice
from mionnx.quantise.choice import FewBlocksWarning
from mionnx.run.exporting import DEFAULT, export

TOLERANCE = 5e-5
CONFIG = {"quant_method": "mxfp4"}
FLOATS = "model.layers.1.mlp.experts.down_proj"  # the one stack that the tiny checkpoint leaves in floats
STACKS = 4  # of two layers


def write(folder: Path) -> None:
    """Write a tiny gpt_oss of random blocks in two shards: blocks in one, their scales in the other."""
    model, random, shards = make_model("gpt_oss", **tiny_config("gpt_oss")), np.random.default_rng(0), ({}, {})
    for name, value in model.state_dict().items():
        if name.endswith("_proj") and name != FLOATS:
            experts, inputs, outputs = value.shape
            held = experts, outputs, inputs // 32
            shards[0][f"{name}_blocks"] = torch.from_numpy(random.integers(0, 256, (*held, 16), dtype=np.uint8))
            shards[1][f"{name}_scales"] = torch.from_numpy(random.integers(118, 124, held, dtype=np.uint8))
        else:
            shards[0][name] = value.to(torch.bfloat16)
    folder.mkdir()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    places = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    given = {**CONFIG, "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head", FLOATS]}
    config = {**model.config.to_dict(), "quantization_config": given, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mxfp4") / "checkpoint"
    write(folder)
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint):
    """transformers in eager mode, with the numbers that its own loader makes of the blocks."""
    asked = {"attn_implementation": "eager", "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=Mxfp4Config(dequantize=True), **asked
    ).eval()


@pytest.fixture(scope="module")
def opened(checkpoint, tmp_path_factory):
    """The model of the checkpoint's own blocks."""
    folder = tmp_path_factory.mktemp("opened") / "hooked"
    export(checkpoint, folder, DEFAULT, silent)
    return MIModel.from_pretrained(folder, threads=1)


def read(tensors: dict[str, np.ndarray], folder: Path, family: str | None = None):
    held = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}
    save_file(held, folder / "model.safetensors")
    return unpacked_tensors(read_tensors(folder, folder, with_bytes=True), CONFIG, family)


def test_every_byte_with_every_exponent_has_the_numbers_of_transformers(tmp_path):
    exponents = np.arange(253, dtype=np.uint8)
    held = {
        "experts.up_proj_blocks": np.tile(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (2, 253, 1, 1)),
        "experts.up_proj_scales": np.stack([exponents, exponents[::-1]])[..., None].repeat(16, axis=2),
    }
    (stack,) = read(held, tmp_path)
    expected = [
        convert_moe_packed_tensors(*(torch.from_numpy(array.copy()) for array in held.values()), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert (stack.name, stack.shape) == ("experts.up_proj", tuple(expected[0].shape))
    numbers = stack.load()
    assert torch.equal(numbers, expected[0])
    assert torch.equal(numbers.to(torch.bfloat16), expected[1])
    blocks = stack.packed.named_blocks("weight")
    assert [*blocks] == [f"weight{EXPERT}0", f"weight{EXPERT}1"]
    for own, matrix in zip(blocks.values(), expected[0], strict=True):
        np.testing.assert_array_equal(own.numbers(), matrix.numpy().T)


@pytest.mark.slow
def test_weights_and_metadata_are_those_of_the_file(opened, reference):
    model, state = opened, reference.state_dict()
    graph, folder, facts = model.hooked.proto, model.hooked.folder, model.hooked.metadata
    blocks = [one.name for one in graph.graph.initializer if one.name.endswith("_blocks")]
    assert len(blocks) == (STACKS - 1) * reference.config.num_local_experts
    for name in blocks:
        stack, _, number = name.removesuffix("_blocks").rpartition(EXPERT)
        np.testing.assert_array_equal(weight_numbers(graph, folder, name), state[stack][int(number)].numpy().T)
    np.testing.assert_array_equal(onnx_file.weight(graph, folder, FLOATS), state[FLOATS].numpy())
    assert (facts.family, facts.weight_dtype, facts.dtype) == ("gpt_oss", "int4", "float32")
    assert (facts.quantised["block_size"], facts.quantised["matrices"]) == (64, len(blocks))


STEERED = HookPoint.MlpExpertOut(0), Intervention.Add(np.linspace(-1, 1, 64, dtype=np.float32), experts=[1])


@pytest.mark.slow
@pytest.mark.parametrize("edits", [(), (STEERED,)], ids=["plain", "an expert steered"])
def test_every_hook_point_is_that_of_eager_transformers(edits, opened, reference):
    off = differences(opened, reference, batch("left past"), edits)
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_are_made_where_they_are_asked_for(dtype, checkpoint, reference, tmp_path):
    export(checkpoint, tmp_path / "hooked", dtype, silent)
    made, state = HookedModel.open(tmp_path / "hooked"), reference.state_dict()
    assert made.metadata.weight_dtype == dtype
    stacks = [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(stacks) == STACKS
    for name in stacks:
        found = onnx_file.weight(made.proto, made.folder, name).astype(np.float32)
        np.testing.assert_array_equal(found, state[name].numpy())


@pytest.mark.slow
def test_verify_runs_transformers_on_the_same_file(checkpoint, opened):
    runtimes = "torch", "ort-cpu", "reference"
    assert opened.verify(batch("plain").ids[:1], runtimes=runtimes, checkpoint=checkpoint).agrees


@pytest.mark.slow
def test_every_gradient_is_that_of_autograd(opened, reference):
    inputs = batch("plain")
    seed = np.random.default_rng(0).normal(size=(*inputs.ids.shape, VOCAB))
    expected = by_autograd(reference, inputs, seed, torch.float64)
    grad = opened.forward(
        inputs.ids, HookSpec().gradient("*").set_metric("cotangent", cotangent=seed), logits=False
    ).grad
    assert set(grad) == set(expected)
    off = {name: np.abs(grad[name] - value).max() / np.abs(value).max() for name, value in expected.items()}
    assert {name: d for name, d in off.items() if not d < 5e-6} == {}


@pytest.mark.slow
def test_stacks_stay_in_floats_where_the_graph_would_be_too_large(checkpoint, reference, tmp_path, monkeypatch):
    experts = reference.config.num_local_experts  # two nodes for each: room for those of a single stack
    export_packed(checkpoint, tmp_path / "floats")
    room = len(HookedModel.open(tmp_path / "floats", check="none").proto.graph.node) + 2 * experts
    monkeypatch.setattr(choice, "MOST_NODES", room)
    with pytest.warns(FewBlocksWarning, match=f"more than {room} nodes"):
        export(checkpoint, tmp_path / "hooked", DEFAULT, silent)
    made, state = HookedModel.open(tmp_path / "hooked"), reference.state_dict()
    held = {one.name for one in made.proto.graph.initializer}
    assert sum(name.endswith("_blocks") for name in held) == experts
    left = [name for name in state if name.endswith("_proj") and name in held]
    assert len(left) == STACKS - 1
    for name in left:
        np.testing.assert_array_equal(onnx_file.weight(made.proto, made.folder, name), state[name].numpy())


def test_other_bits_are_refused(checkpoint, tmp_path):
    with pytest.raises(ExportError, match="holds int4 already"):
        export(checkpoint, tmp_path / "other", "int8", silent)


BLOCKS, SCALES = np.zeros((2, 6, 3, 16), np.uint8), np.zeros((2, 6, 3), np.uint8)


@pytest.mark.parametrize(
    ("tensors", "family", "said"),
    [
        ({}, "mixtral", "mxfp4 for 'mixtral': the experts of 'gpt_oss' are read"),
        ({"x_scales": None}, "gpt_oss", "has x_blocks, and no x_scales"),
        ({"x_blocks": None}, "gpt_oss", "has x_scales, and no x_blocks"),
        ({"x_blocks": None, "x_scales": None, "y": BLOCKS}, "gpt_oss", "no tensor's name ends in _blocks or _scales"),
        ({"y": BLOCKS + np.uint8(1)}, "gpt_oss", "^y holds bytes"),
        ({"x_blocks": BLOCKS[..., :8]}, "gpt_oss", r"x_blocks is torch.uint8 \[2, 6, 3, 8\]"),
        ({"x_blocks": BLOCKS[0]}, "gpt_oss", r"x_blocks is torch.uint8 \[6, 3, 16\]"),
        ({"x_blocks": BLOCKS.astype(np.int8)}, "gpt_oss", "x_blocks is torch.int8"),
        ({"x_scales": SCALES[:, :5]}, "gpt_oss", r"x_scales torch.uint8 \[2, 5, 3\]"),
        ({"x_scales": SCALES + np.uint8(255)}, "gpt_oss", "x_scales: x.expert0 has the exponent 255"),
        ({"x_scales": SCALES + np.uint8(253)}, "gpt_oss", "exponents up to 252"),
    ],
)
def test_what_is_no_mxfp4_of_gpt_oss_is_refused(tensors, family, said, tmp_path):
    held = {"x_blocks": BLOCKS, "x_scales": SCALES} | tensors
    with pytest.raises(ExportError, match=said):
        [one.load() for one in read({name: one for name, one in held.items() if one is not None}, tmp_path, family)]


def test_bytes_of_other_checkpoints_are_refused(tmp_path):
    save_file({"x": torch.from_numpy(BLOCKS)}, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match="tensor x is U8; of quantised checkpoints those of GPTQ"):
        read_tensors(tmp_path, tmp_path)
