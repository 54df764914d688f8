"""Blocks of GGUF files: those that ONNX Runtime's operators can hold are the file's own, number for number."""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from families import VOCAB, make_model
from family_batches import batch, differences
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from gradient_oracle import gradients as by_autograd
from node_runner import run_in_web
from recurrent_families import make_recurrent
from transformers import AutoModelForCausalLM

from exporters.gguf.assemble import write_checkpoint
from exporters.gguf.header import read_header
from mionnx import HookPoint, HookSpec, Intervention, Logits, MIModel
from mionnx.engine.merged_products import merge_offsets, merge_products
from mionnx.engine.options import Options
from mionnx.engine.reference import Reference
from mionnx.graph.hooked_model import ROUNDING_LEVEL, HookedModel
from mionnx.graph.matrices import embedding
from mionnx.graph.onnx_file import weight
from mionnx.graph.packed_weight import at_accuracy_level
from mionnx.graph.weight_value import weight_numbers
from mionnx.machine.progress import silent
from mionnx.run.exporting import export

TOLERANCE = 5e-5
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # rows of Q4_K are whole blocks of 256


def kinds() -> list:
    slow = pytest.mark.slow
    given = [("Q4_0", "int4", 4, {}), ("Q8_0", "int8", 8, {}), ("Q8_0", "int4", 8, {}), ("Q4_K", "int4", 4, WIDE)]
    quick = pytest.param("Q4_1", "int4", 4, {"tie_word_embeddings": True}, id="Q4_1")
    return [quick, *(pytest.param(*one, id=f"{one[0]} {one[1]}", marks=slow) for one in given)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "bits", "sizes"), kinds())
def test_blocks_of_a_file_are_kept_bit_for_bit(kind, dtype, bits, sizes, tmp_path):
    """Against the numbers that the gguf package makes of the file; 8-bit weights stay so in a model of 4 bits."""
    file = write_gguf(make_model("llama", **sizes), tmp_path / "model.gguf", Type[kind])
    for name in ("float32", dtype):
        export(file, tmp_path / name, name, silent)
    floats, made = (HookedModel.open(tmp_path / name) for name in ("float32", dtype))
    blocks = [one.name for one in made.proto.graph.initializer if one.name.endswith("_blocks")]
    assert len(blocks) == 15  # seven in each of two layers, and the unembedding
    for name in blocks:
        expected = weight(floats.proto, floats.folder, name.removesuffix("_blocks"))
        np.testing.assert_array_equal(weight_numbers(made.proto, made.folder, name), expected)
    np.testing.assert_array_equal(embedding(made), embedding(floats))
    held = {entry.i for node in made.proto.graph.node for entry in node.attribute if entry.name == "bits"}
    assert held == {bits}


@pytest.mark.slow
def test_routers_of_8_bits_stay_floats_in_a_model_of_4(tmp_path):
    file = write_gguf(make_recurrent("lfm2_moe", tmp_path / "checkpoint"), tmp_path / "model.gguf", Type.Q8_0)
    export(file, tmp_path / "int4", "int4", silent)
    made = HookedModel.open(tmp_path / "int4")
    names = {one.name for one in made.proto.graph.initializer}
    assert {"model.layers.1.feed_forward.gate.weight", "model.layers.0.feed_forward.w3.weight_blocks"} <= names
    wide = {entry.i for node in made.proto.graph.node for entry in node.attribute if entry.name == "bits"}
    assert 8 in wide
    assert np.isfinite(MIModel.from_pretrained(tmp_path / "int4", threads=1).forward(batch("plain").ids).output()).all()


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A kind -> a model of blocks with offsets, the table among them, and transformers with the file's numbers."""

    @cache
    def find(kind: str):
        folder = tmp_path_factory.mktemp("blocks")
        sizes = {"tie_word_embeddings": True} if kind == "Q4_1" else WIDE
        file = write_gguf(make_model("llama", **sizes), folder / "model.gguf", Type[kind])
        write_checkpoint(read_header(file), folder / "checkpoint", "float32", silent)
        export(file, folder / "hooked", "int4", silent)
        eager = AutoModelForCausalLM.from_pretrained(
            folder / "checkpoint", attn_implementation="eager", dtype=torch.float32
        )
        return MIModel.from_pretrained(folder / "hooked", threads=1), eager.eval()

    return find


@pytest.mark.parametrize("kind", ["Q4_1", pytest.param("Q4_K", marks=pytest.mark.slow)])
def test_every_hook_point_of_blocks_with_offsets_is_that_of_eager_transformers(kind, opened):
    model, eager = opened(kind)
    inputs = batch("left past")
    point, edit = HookPoint.MlpAct(0), Intervention.Scale(0.3)
    for edits in ([], [(point, edit)]):
        off = differences(model, eager, inputs, edits)
        assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


def test_gradients_heads_matrices_and_parts_of_the_logits_have_the_offsets(opened):
    model, eager = opened("Q4_1")
    inputs = batch("plain")
    seed = np.random.default_rng(0).normal(size=(*inputs.ids.shape, VOCAB))
    expected = by_autograd(eager, inputs, seed, torch.float64)
    spec = HookSpec().gradient("*").set_metric("cotangent", cotangent=seed)
    grad = model.forward(inputs.ids, spec, logits=False).grad
    assert set(grad) == set(expected)
    off = {name: np.abs(grad[name] - value).max() / np.abs(value).max() for name, value in expected.items()}
    assert {name: d for name, d in off.items() if not d < 1e-5} == {}
    cache = model.forward(inputs.ids, HookSpec().capture("*hook_result").capture("*hook_attn_out"))
    np.testing.assert_allclose(cache.stack("result").sum(axis=3), cache.stack("attn_out"), rtol=0, atol=TOLERANCE)
    state = eager.state_dict()
    np.testing.assert_array_equal(model.W_U, state["lm_head.weight"].numpy().T)
    np.testing.assert_array_equal(model.W_E, state["model.embed_tokens.weight"].numpy())
    whole = cache.output()
    last = model.forward(inputs.ids, logits=Logits(positions=-1))
    np.testing.assert_allclose(last.output()[:, -1], whole[:, -1], rtol=0, atol=1e-5)
    assert {node.op_type for node in model.hooked.proto.graph.node} >= {"MatMulNBits", "ReduceSum"}


def test_offsets_of_products_of_one_value_are_added_at_once(opened):
    """Queries, keys and values, and the halves of the MLP: the same bits at every hook point."""
    model, _ = opened("Q4_1")
    merged = [at_accuracy_level(model.hooked.proto, ROUNDING_LEVEL)[0] for _ in range(2)]
    for proto in merged:
        assert merge_products(proto) == 5 * model.num_layers
    sums = [Counter(node.op_type for node in proto.graph.node)["MatMul"] for proto in merged]
    assert merge_offsets(merged[1]) == 5 * model.num_layers
    assert Counter(node.op_type for node in merged[1].graph.node)["MatMul"] == sums[0] - 3 * model.num_layers
    made = {name for node in merged[0].graph.node for name in node.output}
    names = ["logits", *(name for name in model.hooked.metadata.hooks if name in made)]
    settings = onnxruntime.SessionOptions()
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.hooked.folder))
    for tokens in (1, 5):
        feeds = {
            "input_ids": np.arange(tokens)[None] + 3,
            "attention_mask": np.ones((1, 4 + tokens), np.int64),
            "position_ids": np.arange(4, 4 + tokens)[None],
        }
        shapes = model.hooked.metadata.past_shapes(1, 4)
        feeds |= {name: np.full(shape, 0.1, np.float32) for name, shape in shapes.items()}
        one, other = (run_all(proto, settings, names, feeds) for proto in merged)
        assert [name for name, a, b in zip(names, one, other, strict=True) if not np.array_equal(a, b)] == []


def run_all(proto: onnx.ModelProto, settings, names: list[str], feeds) -> list[np.ndarray]:
    shown = onnx.ModelProto.FromString(proto.SerializeToString())
    known = {one.name for one in proto.graph.output}
    shown.graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in names if name not in known)
    return onnxruntime.InferenceSession(shown.SerializeToString(), settings).run(names, feeds)


def steering(hidden: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=hidden).astype(np.float32)


def steered_by_torch(eager, ids: np.ndarray, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits with a vector added behind layer 0 at positions 2 and 3, and logit 7's gradient there."""
    kept = []

    def steer(module, given, value):
        vector = torch.zeros_like(value)
        vector[:, 2:4] = strength * torch.from_numpy(steering(value.shape[-1]))
        kept.append((value.detach() + vector).requires_grad_())
        return kept[0]

    eager.set_attn_implementation("eager")  # another test has traced it
    handle = eager.model.layers[0].register_forward_hook(steer)
    logits = eager(torch.from_numpy(ids)).logits
    logits[:, -1, 7].sum().backward()
    handle.remove()
    return logits.detach().numpy(), kept[0].grad.numpy()


def in_onnxruntime(file: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # a knob's default
    session = onnxruntime.InferenceSession(file, options)
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def in_the_evaluator(file: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [one.name for one in onnx.load(file, load_external_data=False).graph.output]
    return Reference().open(file, file.parent, Options(engine="reference")).run(names, feeds)


@pytest.mark.parametrize(
    ("target", "run"), [("generic", in_onnxruntime), ("ort-cpu", in_onnxruntime), ("generic", in_the_evaluator)]
)
@pytest.mark.parametrize("kind", ["Q4_1", pytest.param("Q4_K", marks=pytest.mark.slow)])
def test_a_compiled_graph_with_offsets_is_steered_as_transformers_is(kind, target, run, opened, tmp_path):
    """The strength is an input; gradients go through the products of offsets too."""
    model, eager = opened(kind)
    file, feeds = compiled(model, tmp_path / "steered", target)
    for strength in (1.0, 0.25):
        found = run(file, feeds | {"strength": np.array(strength, np.float32)})
        same_as_torch(found, eager, feeds["input_ids"], strength)


@pytest.mark.slow
def test_a_compiled_graph_with_offsets_in_onnxruntime_web(opened, web, tmp_path):
    model, eager = opened("Q4_1")
    file, feeds = compiled(model, tmp_path / "steered", "web")
    same_as_torch(run_in_web(web, file, feeds, tmp_path), eager, feeds["input_ids"], 1.0)


def compiled(model: MIModel, folder: Path, target: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A steered model with a knob and a gradient, and what it is fed."""
    add = Intervention.Add(steering(model.hidden_size), positions=[2, 3])
    spec = HookSpec().intervene("blocks.0.hook_resid_post", add).gradient("blocks.0.hook_resid_post")
    spec.set_metric("logit", answer=7)
    model.compile(spec, folder, target=target, knobs={"strength": None}, accuracy_level=0)
    inputs = batch("plain")
    ids = inputs.ids[:1]
    sizes = model.hooked.metadata.past_shapes(1, 0)
    feeds = {name: np.zeros(shape, np.float32) for name, shape in sizes.items()}
    return folder / "model.onnx", feeds | {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.shape[1])[None],
    }


def same_as_torch(found: dict[str, np.ndarray], eager, ids: np.ndarray, strength: float) -> None:
    logits, grad = steered_by_torch(eager, ids, strength)
    np.testing.assert_allclose(found["logits"], logits, rtol=0, atol=TOLERANCE * np.abs(logits).max())
    own = found["blocks.0.hook_resid_post.gradient"]
    np.testing.assert_allclose(own, grad, rtol=0, atol=TOLERANCE * np.abs(grad).max())
