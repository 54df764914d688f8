"""Checkpoints of GPTQ, AWQ and compressed-tensors: layers that the packages packed, and whole tiny checkpoints."""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import succeeded
from families import VOCAB
from family_batches import batch, differences
from gradient_oracle import gradients as by_autograd
from packed_files import Form, write_packed
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from exporters.checkpoint_tensors import read_tensors
from exporters.packed.linear import Linear, Stack
from exporters.packed.tensors import unpacked_tensors
from exporters.transformers import missing_eagerly
from mionnx import HookSpec, MIModel
from mionnx.errors import ExportError
from mionnx.graph.blocks import EXPERT
from mionnx.graph.weight_value import weight_numbers
from mionnx.machine.progress import silent
from mionnx.run.exporting import DEFAULT, export

TOLERANCE = 5e-5
LAYERS = Path(__file__).with_name("packed_layers.safetensors")
FORMS = {
    "gptq": (Form("gptq", "gptq"), "llama"),
    "gptq v2, channels": (Form("gptq", "gptq_v2", 8, -1), "gpt2"),
    "gptq, desc_act": (Form("gptq", "gptq", group=32, symmetric=True, shuffled=True), "llama"),
    "awq": (Form("awq", "gemm", group=32), "llama"),
    "awq gemv": (Form("awq", "gemv", group=32), "llama"),
    "compressed": (Form("compressed-tensors", "pack-quantized", group=32, shuffled=True), "llama"),
    "compressed int8": (Form("compressed-tensors", "int-quantized", 8, -1, symmetric=True), "llama"),
    "gptq, experts, desc_act": (Form("gptq", "gptq", group=16, shuffled=True), "mixtral"),
    "awq, experts": (Form("awq", "gemm"), "qwen3_moe"),
    "compressed, experts": (Form("compressed-tensors", "pack-quantized", symmetric=True), "qwen3_moe"),
}
MATRICES = {"gpt2": 8, "llama": 14, "mixtral": 24, "qwen3_moe": 24}  # of two layers, with four experts each
QUICK = ("gptq, desc_act", "awq")


@cache
def layers() -> dict[str, dict]:
    """Layers as AutoGPTQ 0.7.1, AutoAWQ 0.2.9 and compressed-tensors 0.20.0 packed them, on a CPU.

    Each has the numbers that it was packed of, which are those of its integers; the packages' own dequantisation gave
    them back when the file was made (AutoGPTQ's in float16; AutoAWQ's gemv has none on a CPU).
    """
    with safe_open(LAYERS, "np") as file:
        return {name: json.loads(config) for name, config in file.metadata().items()}


@pytest.mark.parametrize("name", sorted(layers()))
def test_a_layer_that_a_package_packed_has_its_numbers(name, tmp_path):
    found = {
        key.removeprefix(f"{name}."): value for key, value in load_file(LAYERS).items() if key.startswith(f"{name}.")
    }
    expected = found.pop("numbers").numpy()
    save_file({f"layer.{part}": value for part, value in found.items()}, tmp_path / "model.safetensors")
    (weight,) = unpacked_tensors(read_tensors(tmp_path, tmp_path), layers()[name])
    assert weight.name == "layer.weight"
    np.testing.assert_array_equal(weight.load().numpy(), expected)
    np.testing.assert_array_equal(weight.packed.blocks().numbers(), expected)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Name of a form -> the checkpoint, its hooked model, and transformers with the numbers of its integers."""

    @cache
    def find(name: str):
        folder = tmp_path_factory.mktemp("packed")
        form, family = FORMS[name]
        reference = write_packed(form, folder / "checkpoint", family)
        export(folder / "checkpoint", folder / "hooked", DEFAULT, silent)
        return folder / "checkpoint", MIModel.from_pretrained(folder / "hooked", threads=1), reference.eval()

    return find


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FORMS]
)
@pytest.mark.slow_beyond(1)
def test_every_hook_point_is_that_of_eager_transformers(name, opened):
    _, model, reference = opened(name)
    form, family = FORMS[name]
    assert model.hooked.metadata.weight_dtype == f"int{form.bits}"
    off = differences(model, reference, batch("left past"))
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}
    state = reference.state_dict()
    blocks = [one.name for one in model.hooked.proto.graph.initializer if one.name.endswith("_blocks")]
    assert len(blocks) == MATRICES[family]
    for held in blocks:
        stack, _, number = held.removesuffix("_blocks").rpartition(EXPERT)
        own = state[stack][int(number)] if number.isdigit() else state[held.removesuffix("_blocks")]
        numbers = weight_numbers(model.hooked.proto, model.hooked.folder, held)
        np.testing.assert_array_equal(numbers, own.numpy().T if family == "gpt2" else own.numpy())


@pytest.mark.parametrize("name", ["gptq, desc_act", pytest.param("gptq, experts, desc_act", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_matrices_heads_and_gradients_follow_the_order_of_the_inputs(name, opened):
    _, model, reference = opened(name)
    assert {node.op_type for node in model.hooked.proto.graph.node} >= {"Gather", "MatMulNBits"}
    projection = reference.model.layers[1].self_attn.o_proj.weight.detach().numpy()
    np.testing.assert_array_equal(model.W_O[1].reshape(-1, projection.shape[0]), projection.T)
    inputs = batch("plain")
    spec = HookSpec().capture("blocks.1.attn.hook_result").capture("blocks.1.hook_attn_out")
    cache = model.forward(inputs.ids, spec, attention_mask=inputs.mask)
    np.testing.assert_allclose(cache["result", 1].sum(axis=2), cache["attn_out", 1], rtol=0, atol=TOLERANCE)
    seed = np.random.default_rng(0).normal(size=(*inputs.ids.shape, VOCAB)) * inputs.real[..., None]
    expected = by_autograd(reference, inputs, seed, torch.float64)
    grad = model.forward(
        inputs.ids,
        HookSpec().gradient("*").set_metric("cotangent", cotangent=seed),
        attention_mask=inputs.mask,
        logits=False,
    ).grad
    assert set(grad) == set(expected)
    off = {name: np.abs(grad[name] - value).max() / np.abs(value).max() for name, value in expected.items()}
    assert {name: d for name, d in off.items() if not d < 1e-5} == {}


@pytest.mark.parametrize("name", ["awq", pytest.param("awq, experts", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_floats_are_made_where_they_are_asked_for_and_other_bits_are_refused(name, opened, tmp_path):
    checkpoint, model, _ = opened(name)
    shutil.copytree(checkpoint, tmp_path / "copy")
    succeeded("export", tmp_path / "copy", "-o", tmp_path / "floats", "--dtype", "float32")
    floats, ids = MIModel.from_pretrained(tmp_path / "floats", threads=1), batch("plain").ids
    assert floats.hooked.metadata.weight_dtype == "float32"
    assert np.abs(floats.forward(ids).output() - model.forward(ids).output()).max() < TOLERANCE
    assert "kernels of other packages" in missing_eagerly(checkpoint)
    with pytest.raises(ExportError, match="holds int4 already"):
        export(checkpoint, tmp_path / "other", "int8", silent)


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"checkpoint_format": "marlin"}, {}, "save it as gptq or gptq_v2"),
        ({"group_size": 24}, {}, "float32"),
        ({}, {"g_idx": np.array([0] * 20 + [1] * 44, np.int32)}, "g_idx puts other than 32 inputs"),
        ({}, {"qzeros": None}, "no qzeros"),
        ({}, {"qzeros": np.zeros((2, 3), np.int32)}, "integers of 3 bits"),
    ],
)
def test_what_no_blocks_are_is_refused_with_what_is(config, tensors, said, tmp_path):
    size = config.get("group_size", 32)
    groups = -(-64 // size)
    held = {
        "qweight": np.zeros((8, 32), np.int32),
        "qzeros": np.zeros((groups, 4), np.int32),
        "scales": np.ones((groups, 32), np.float16),
        "g_idx": (np.arange(64) // size).astype(np.int32),
    } | tensors
    given = {f"layer.{name}": torch.from_numpy(array) for name, array in held.items() if array is not None}
    save_file(given, tmp_path / "model.safetensors")
    said_by_config = {"quant_method": "gptq", "bits": 4, "group_size": 32, **config}
    with pytest.raises(ExportError, match=said):
        [weight.packed.blocks() for weight in unpacked_tensors(read_tensors(tmp_path, tmp_path), said_by_config)]


def held_by(kind: str) -> tuple[dict[str, np.ndarray], dict]:
    """Tensors of a layer of 64 inputs and 32 outputs in groups of 32, and the config."""
    words = {"qweight": np.zeros((8, 32), np.int32), "qzeros": np.zeros((2, 4), np.int32)}
    if kind == "gptq":
        given = {"quant_method": "gptq", "bits": 4, "group_size": 32}
        return {**words, "scales": np.ones((2, 32), np.float16), "g_idx": (np.arange(64) // 32).astype(np.int32)}, given
    if kind == "gemm":
        words["qweight"] = np.zeros((64, 4), np.int32)
        given = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
        return {**words, "scales": np.ones((2, 32), np.float16)}, given
    if kind == "gemv":
        words = {"qweight": np.zeros((32, 8), np.int32), "qzeros": np.zeros((32, 1), np.int32)}
        given = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
        return {**words, "scales": np.ones((32, 8), np.float16)}, given
    form = Form("compressed-tensors", "pack-quantized", group=32)
    packed = {"weight_packed": np.zeros((32, 8), np.int32), "weight_scale": np.ones((32, 2), np.float16)}
    more = {"weight_zero_point": np.zeros((4, 2), np.int32), "weight_g_idx": (np.arange(64) // 32).astype(np.int32)}
    return {**packed, **more, "weight_shape": np.array([32, 64])}, form.config()


def weights_of(folder: Path, held: dict[str, np.ndarray], given: dict) -> list:
    save_file({f"layer.{name}": torch.from_numpy(array) for name, array in held.items()}, folder / "model.safetensors")
    return unpacked_tensors(read_tensors(folder, folder), given)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.int32, np.int64, np.float16, np.bool_])
@pytest.mark.parametrize("kind", ["gptq", "gemm", "gemv", "compressed"])
def test_parts_of_other_dtypes_are_refused(kind, dtype, tmp_path):
    """FINDINGS, part 4, 4: they became words and scales by a cast."""
    held, given = held_by(kind)
    assert [weight.shape for weight in weights_of(tmp_path, held, given)] == [(32, 64)]
    for part, array in held.items():
        name = np.dtype(dtype).name
        fitting = {"f": ("float16", "float32"), "i": ("int32", "int64") if "g_idx" in part or "shape" in part else ()}
        if (
            dtype == array.dtype
            or name in fitting.get(array.dtype.kind, ())
            or (part, name)
            == (
                "weight_zero_point",
                "int8",
            )
        ):
            continue
        with pytest.raises(ExportError, match=rf"layer\.{part} is {name}; {given['quant_method']} writes "):
            weights_of(tmp_path, held | {part: array.astype(dtype)}, given)


def test_groups_out_of_order_need_their_order(tmp_path):
    for kind, part, more in (("gptq", "g_idx", {"desc_act": True}), ("compressed", "weight_g_idx", {})):
        held, given = held_by(kind)
        del held[part]
        given |= more
        if kind == "compressed":
            assert weights_of(tmp_path, held, given)
            given["config_groups"]["group_0"]["weights"]["actorder"] = "group"
        with pytest.raises(ExportError, match=f"layer has no {part}, and .* out of order"):
            weights_of(tmp_path, held, given)


@pytest.mark.parametrize("size", [0, -7, [16], True, 10**18, "32", 48.0])
def test_a_gemv_layer_of_no_group_size_is_refused(size, tmp_path):
    held, given = held_by("gemv")
    with pytest.raises(ExportError, match="group_size"):
        weights_of(tmp_path, held, given | {"group_size": size})


def test_a_gemv_layer_without_group_size_has_transformers(tmp_path):
    from transformers import AwqConfig

    held, given = held_by("gemv")
    held["qweight"] = np.zeros((32, 32), np.int32)
    del given["group_size"]
    (weight,) = weights_of(tmp_path, held, given)
    assert weight.packed.group_size == AwqConfig().group_size == 128


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4,), (2, 4, 1)])
@pytest.mark.parametrize("kind", ["gptq", "gemm", "gemv"])
def test_parts_of_other_axes_are_one_sentence(kind, part, shape, tmp_path):
    """Part 4, 10."""
    held, given = held_by(kind)
    with pytest.raises(ExportError, match=r"^layer"):
        weights_of(tmp_path, held | {part: np.zeros(shape, held[part].dtype)}, given)


@pytest.mark.parametrize("shape", [(4, 1), (3, 2), (1, 2)])
def test_zero_points_of_other_shapes_are_not_repeated(shape, tmp_path):
    """numpy repeats one row or column for all, and else throws when the weight is read."""
    held, given = held_by("compressed")
    (weight,) = weights_of(tmp_path, held | {"weight_zero_point": np.zeros(shape, np.int32)}, given)
    for read in (weight.packed.numbers, lambda: weight.packed.blocks().read()):
        with pytest.raises(ExportError, match=r"layer: integers .* scales \[32, 2\] and zero points .* do not fit"):
            read()


@pytest.mark.parametrize("groups", [{"group_0": 7}, {"group_0": {"weights": [1]}}, {"group_0": None}])
def test_a_config_of_groups_that_are_none(groups, tmp_path):
    held, given = held_by("compressed")
    with pytest.raises(ExportError, match=r"quantization_config is damaged"):
        weights_of(tmp_path, held, given | {"config_groups": groups})


def test_layers_of_an_expert_whose_inputs_stand_in_other_orders_are_refused():
    def linear(groups: list[int], zeros: np.ndarray | None) -> Linear:
        made = np.arange(32, dtype=np.uint8)[None] % 16, np.ones((1, 2), np.float32)
        return Linear("w", 32, 1, 4, 16, np.array(groups), zeros, lambda: made)

    straight, turned = linear([0] * 16 + [1] * 16, None), linear([1, 0] * 16, None)
    with pytest.raises(ExportError, match=r"w and w are one matrix .*the order of their inputs; .*--dtype float32"):
        Stack(((straight, turned),), turned=False).named_blocks("x")
    shifted = linear([0] * 16 + [1] * 16, np.array([[3, 8]], np.uint8))
    both = Stack(((straight, shifted),), turned=False)
    (blocks,) = both.named_blocks("x").values()
    np.testing.assert_array_equal(blocks.numbers(), both.numbers()[0])
    np.testing.assert_array_equal(both.numbers()[0, 1] - both.numbers()[0, 0], [5] * 16 + [0] * 16)


def test_integers_of_activations_are_refused(tmp_path):
    config = Form("compressed-tensors", "int-quantized", 8, -1).config()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    with pytest.raises(ExportError, match="rounds activations too"):
        unpacked_tensors([], config)
