"""Models of blocks: every hook point against transformers with the same numbers, and what cannot be quantised."""

import json
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from command_line import succeeded
from families import VOCAB, make_checkpoint
from family_batches import batch, differences, forward
from gradient_oracle import gradients as by_autograd
from oracle import run
from quantised_reference import with_numbers
from repository import REPOSITORY
from transformers import AutoModelForCausalLM

from mionnx import FewBlocksWarning, HookPoint, HookSpec, InputError, Intervention, MIModel, ModelError
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.leftovers import LOCK_FILE
from mionnx.quantise import Quantisation, quantise
from mionnx.quantise.blocks import quantise_blocks
from mionnx.run.exporting import export

TOLERANCE = 5e-5
SETTINGS = {
    "int4": Quantisation(block_size=16),
    "int4 with zero points": Quantisation(symmetric=False),
    "int8": Quantisation(8),
    "mixed": Quantisation(in_8_bits=("*.1.*",), keep=("*.0.*",), unembedding=False, embedding=False),
}


def numbers(packed: np.ndarray, scales: np.ndarray, zero: np.ndarray | None, bits: int) -> np.ndarray:
    """What ONNX Runtime's documentation says of blocks, one number at a time."""
    rows, blocks, _ = packed.shape
    size = packed.shape[2] * 8 // bits
    found = np.empty((rows, blocks * size), np.float32)
    for row, block, place in np.ndindex(rows, blocks, size):
        byte = int(packed[row, block, place * bits // 8])
        integer = byte if bits == 8 else byte >> (4 * (place % 2)) & 15
        at = 2 ** (bits - 1)
        if zero is not None:
            byte = int(zero[row, block * bits // 8])
            at = byte if bits == 8 else byte >> (4 * (block % 2)) & 15
        found[row, block * size + place] = (integer - at) * scales[row, block]
    return found


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_the_nearest_numbers_and_what_the_kernel_multiplies_with(bits, symmetric):
    random = np.random.default_rng(bits)
    matrix = random.normal(size=(6, 80)).astype(np.float32) * np.exp(random.normal(size=(6, 1))).astype(np.float32)
    matrix[2, 32:64] = 0
    blocks = quantise_blocks(matrix, bits, 32, symmetric)
    read = numbers(blocks.packed, blocks.scales, blocks.zero_points, bits)
    steps = np.repeat(np.abs(blocks.scales), 32, axis=1)[:, :80]
    over = 1.0 if symmetric else 0.5  # the number opposite to the largest may lie one step beyond the last integer
    assert (np.abs(read[:, :80] - matrix) <= steps * over * 1.001 + 1e-7).all()
    assert not read[2, 32:64].any()
    named = ["B", "scales"] + ([] if symmetric else ["zero_points"])
    given = {"K": 80, "N": 6, "bits": bits, "block_size": 32}
    node = onnx.helper.make_node("MatMulNBits", ["x", *named], ["y"], domain="com.microsoft", **given)
    arrays = [blocks.packed, blocks.scales, blocks.zero_points]
    held = [onnx.numpy_helper.from_array(array, name) for array, name in zip(arrays, named, strict=False)]
    sides = [onnx.helper.make_tensor_value_info(name, 1, [None, size]) for name, size in (("x", 80), ("y", 6))]
    graph = onnx.helper.make_graph([node], "one", [sides[0]], [sides[1]], held)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": np.eye(80, dtype=np.float32)})[0], read[:, :80].T, atol=1e-6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, models, checkpoint):
    """(family, settings) -> the quantised model, and transformers with the same numbers in its weights."""
    made = {}

    def find(family: str, name: str):
        if (family, name) not in made:
            folder = tmp_path_factory.mktemp("quantised") / "model"
            hooked = HookedModel.open(quantise(models(family).hooked, folder, SETTINGS[name]))
            reference = AutoModelForCausalLM.from_pretrained(
                checkpoint(family), attn_implementation="eager", dtype=torch.float32
            ).eval()
            made[family, name] = MIModel.from_pretrained(folder, threads=1), with_numbers(reference, hooked)
        return made[family, name]

    return find


@pytest.mark.parametrize("kind", ["plain", "left past"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_hook_point_is_that_of_eager_transformers_with_the_same_numbers(family, settings, kind, pair):
    model, reference = pair(family, settings)
    off = differences(model, reference, batch(kind))
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


def test_an_intervention_is_that_of_eager_transformers(family, pair):
    model, reference = pair(family, "int4")
    inputs, point, edit = batch("left"), HookPoint.AttnZ(1), Intervention.Scale(0.3, heads=[1])
    expected = run(reference, inputs, [(point, edit)])
    found = forward(model, inputs, HookSpec().intervene(point, edit))
    assert np.abs(found.logits - expected.logits)[inputs.real].max() < TOLERANCE * max(1, np.abs(expected.logits).max())


@pytest.mark.parametrize("settings", ["int4", "int4 with zero points", "int8"])
def test_every_gradient_is_that_of_autograd_with_the_same_numbers(family, settings, pair):
    model, reference = pair(family, settings)
    inputs = batch("plain")
    seed = np.random.default_rng(0).normal(size=(*inputs.ids.shape, VOCAB)) * inputs.real[..., None]
    exact, single = (by_autograd(reference, inputs, seed, dtype) for dtype in (torch.float64, torch.float32))
    spec = HookSpec().gradient("*").set_metric("cotangent", cotangent=seed)
    cache = model.forward(inputs.ids, spec, attention_mask=inputs.mask, logits=False)
    assert set(cache.grad) == set(exact)
    off, own = (
        {name: np.abs(one[name] - exact[name]).max() / np.abs(exact[name]).max() for name in exact}
        for one in (cache.grad, single)
    )
    assert {name: d for name, d in off.items() if not d <= max(3 * max(own.values()), 2e-6)} == {}


def test_shares_of_heads_and_matrices_are_those_of_the_blocks(family, pair):
    model, _ = pair(family, "int4 with zero points")
    ids = batch("plain").ids
    found = model.forward(ids, HookSpec().capture("blocks.1.attn.hook_result").capture("blocks.1.attn.hook_z"))
    z = np.moveaxis(found["z", 1], 1, 2) if found["z", 1].shape[1] != ids.shape[1] else found["z", 1]
    expected = np.einsum("bshd,hde->bshe", z, model.W_O[1])
    np.testing.assert_allclose(found["result", 1], expected, rtol=0, atol=TOLERANCE)
    assert model.W_U.dtype == model.W_E.dtype == np.float32


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2", "world-rwkv7"])
def test_8_bits_keep_what_a_shipped_model_knows(name, tmp_path):
    whole = MIModel.from_pretrained(REPOSITORY / "models" / name, threads=1)
    small = MIModel.from_pretrained(quantise(whole.hooked, tmp_path / "made", Quantisation(8)), threads=1)
    for country, capital in (("France", "Paris"), ("Spain", "Madrid")):
        found = small.forward(f"The capital of {country} is").output()[0, -1].argmax()
        assert small.tokenizer.decode([int(found)]).strip() == capital
    size = [sum(file.stat().st_size for file in one.hooked.folder.glob("*.safetensors")) for one in (whole, small)]
    assert size[1] < 0.45 * size[0]
    assert small.hooked.metadata.quantised["bits"] == 8


def test_two_runs_give_the_same_bytes(shipped, tmp_path):
    one, other = (quantise(shipped.hooked, tmp_path / name, Quantisation()) for name in ("one", "other"))
    for file in sorted(path.name for path in one.iterdir()):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


@pytest.mark.slow
def test_a_router_stays_in_floats(models, tmp_path):
    hooked = HookedModel.open(quantise(models("mixtral").hooked, tmp_path / "made", Quantisation()))
    held = {tensor.name: tensor.data_type for tensor in hooked.proto.graph.initializer}
    routers = [name for name in held if ("gate" in name and "gate_up" not in name) or "router" in name]
    assert routers
    assert {held[name] for name in routers} == {onnx.TensorProto.FLOAT}


def test_what_cannot_be_quantised_is_refused_and_leaves_nothing(shipped, tmp_path):
    made = quantise(shipped.hooked, tmp_path / "made", Quantisation())
    with pytest.raises(ModelError, match="blocks already"):
        quantise(HookedModel.open(made), tmp_path / "again", Quantisation())
    with pytest.raises(ModelError, match="exists already"):
        quantise(shipped.hooked, made, Quantisation())
    for without_effect in (
        Quantisation(keep=("*nothing*",)),
        Quantisation(keep=("*norm*",)),  # floats anyway
        Quantisation(keep=("*down_proj*",), in_8_bits=("*.1.*down_proj*",)),
    ):
        with pytest.raises(ModelError, match="names no weight that becomes blocks"):
            quantise(shipped.hooked, tmp_path / "again", without_effect)
    for wrong in (
        {"bits": 3},
        {"block_size": 20},
        {"accuracy_level": 1},
        {"keep": "lm_head"},
        {"bits": 8, "in_8_bits": ["*"]},
    ):
        with pytest.raises(InputError):
            Quantisation(**wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_damaged_file_of_blocks_is_noticed(shipped, tmp_path):
    made = quantise(shipped.hooked, tmp_path / "made", Quantisation())
    file = made / "quantised.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"quantised\.safetensors"):
        MIModel.from_pretrained(made)


def test_weights_that_stay_in_floats_unasked_are_said_and_counted(shipped, tmp_path):
    """Rows of 128 numbers are no block of 256."""
    with pytest.warns(FewBlocksWarning, match=r"token table .* whole blocks of 256") as told:
        made = quantise(shipped.hooked, tmp_path / "made", Quantisation(block_size=256))
    assert "numbers in a row, a block has 256" in str(told[0].message)
    entry = HookedModel.open(made).metadata.quantised
    floats = {tensor.name: tensor.dims for tensor in shipped.hooked.proto.graph.initializer if len(tensor.dims) > 1}
    assert entry["matrices"] + entry["matrices_left"] == len(floats)
    assert entry["bytes_in_blocks"] + entry["bytes_left"] == 4 * sum(int(np.prod(dims)) for dims in floats.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantise(shipped.hooked, tmp_path / "asked", Quantisation(keep=("*_proj*",)))


@pytest.mark.slow
def test_a_model_without_weights_is_refused(tmp_path):
    from exporters.transformers import export_graph

    make_checkpoint("llama", tmp_path / "checkpoint")
    export_graph(tmp_path / "checkpoint", tmp_path / "graph", "float32", lambda *_: None)
    with pytest.raises(ModelError, match="quantising it"):
        quantise(HookedModel.open(tmp_path / "graph"), Path(tmp_path / "made"), Quantisation())


@pytest.mark.slow
def test_a_checkpoint_opens_in_blocks(checkpoint, tmp_path):
    """The export leaves nothing of its floats, and an open model in blocks is quantised only once."""
    export(checkpoint("llama"), tmp_path / "made", "int4", lambda *_: None)
    assert sum(file.stat().st_size for file in (tmp_path / "made").glob("*.safetensors")) < 70_000
    assert not [path.name for path in (tmp_path / "made").iterdir() if path.name.startswith(".")]
    assert MIModel.from_pretrained(tmp_path / "made", dtype="int4").hooked.folder == tmp_path / "made"
    with pytest.raises(InputError, match="in int4 already"):
        MIModel.from_pretrained(tmp_path / "made", dtype="int8")


def test_a_hooked_model_opens_in_blocks_from_the_store(shipped, monkeypatch, tmp_path):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    one, other = (MIModel.from_pretrained(shipped.hooked.folder, dtype="int8") for _ in range(2))
    assert one.hooked.folder == other.hooked.folder
    assert tmp_path in one.hooked.folder.parents
    assert one.hooked.metadata.weight_dtype == "int8"
    assert MIModel.from_pretrained(shipped.hooked.folder).hooked.metadata.weight_dtype == "float32"


def test_the_command_says_what_it_made(tmp_path):
    source = REPOSITORY / "models" / "world-llama"
    printed = succeeded("quantise", source, "-o", tmp_path / "made", "--bits", 8, "--keep", "lm_head*", "--json")
    assert json.loads(printed)["dtype"] == "int8"
    assert json.loads(printed)["bytes"] < 0.5 * json.loads(printed)["bytes_before"]


@pytest.mark.parametrize("options", [{}, {"importance": "The capital of France is Paris ."}])
def test_what_a_killed_quantise_left_goes_with_the_next(options, tmp_path):
    """Finding 12: of a folder that another program made nothing goes."""
    left, other = (tmp_path / f".{name}.0a1b2c.4000000.partial" for name in ("small", "other"))
    for folder, file in ((left, LOCK_FILE), (left, "quantised.safetensors"), (other, "quantised.safetensors")):
        folder.mkdir(exist_ok=True)
        (folder / file).touch()
    MIModel.from_pretrained(REPOSITORY / "models" / "world-llama", threads=1).quantise(tmp_path / "small", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "small"]
