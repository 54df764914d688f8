"""Products of one value as one product: the same bits, no copy of a weight, and nothing merged that does not fit."""

import numpy as np
import onnx
import onnxruntime
import pytest

from mionnx import HookSpec, MIModel, Options
from mionnx.engine.engines import ENGINES
from mionnx.engine.merged_products import merge_products, with_merged
from mionnx.graph.dataflow import attributes
from mionnx.graph.packed_weight import at_accuracy_level

LEVEL = 4


@pytest.fixture(scope="module")
def blocks(shipped, tmp_path_factory):
    """The shipped Llama in 4 bits, with zero points, and its graph at level 4."""
    folder = shipped.quantise(tmp_path_factory.mktemp("merged") / "int4", block_size=16, symmetric=False)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    return folder, at_accuracy_level(proto, LEVEL)[0]


def copy(proto: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(proto.SerializeToString())


def products(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in proto.graph.node if node.op_type == "MatMulNBits"]


def opened(proto: onnx.ModelProto, folder, names: list[str]) -> onnxruntime.InferenceSession:
    proto = copy(proto)
    known = {one.name for one in proto.graph.output}
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in names if name not in known)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 2
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(proto.SerializeToString(), settings)


def test_queries_keys_and_values_and_the_halves_of_the_mlp_are_merged_without_a_copy(blocks, shipped):
    _, proto = blocks
    merged = copy(proto)
    layers = shipped.num_layers
    assert merge_products(merged) == 5 * layers
    assert len(products(merged)) == len(products(proto)) - 3 * layers
    assert sum(attributes(node)["N"] for node in products(merged)) == sum(
        attributes(node)["N"] for node in products(proto)
    )
    added = merged.graph.initializer[len(proto.graph.initializer) :]
    in_memory = [one for one in added if one.data_location != onnx.TensorProto.EXTERNAL]
    assert {one.name.rpartition(".")[2] for one in in_memory} == {"columns"}


@pytest.mark.parametrize("tokens", [1, 5])
def test_every_hook_point_has_the_same_bits(blocks, shipped, tokens):
    folder, proto = blocks
    merged = copy(proto)
    assert merge_products(merged)
    feeds = {
        "input_ids": np.arange(tokens)[None] + 3,
        "attention_mask": np.ones((1, 4 + tokens), np.int64),
        "position_ids": np.arange(4, 4 + tokens)[None],
    }
    random = np.random.default_rng(0)
    for name, shape in shipped.hooked.metadata.past_shapes(1, 4).items():
        feeds[name] = random.normal(size=shape).astype(np.float32)
    made = {name for node in proto.graph.node for name in node.output}
    names = ["logits", *(name for name in shipped.hooked.metadata.hooks if name in made)]
    one, other = (opened(graph, folder, names).run(names, feeds) for graph in (proto, merged))
    differing = [name for name, a, b in zip(names, one, other, strict=True) if not np.array_equal(a, b)]
    assert differing == []


def test_what_does_not_fit_stays(blocks):
    _, proto = blocks

    def count(change) -> int:
        changed = copy(proto)
        change(changed)
        return merge_products(changed)

    assert count(lambda model: None)

    def in_floats(model):
        for node in products(model):
            for one in node.attribute:
                one.i = 0 if one.name == "accuracy_level" else one.i

    def apart(model):
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = f"{tensor.name}.bin"

    def packed(model):
        for tensor in model.graph.initializer:
            tensor.external_data.add(key="prepacked_0", value="x|0|64")

    def narrow(model):
        for node in products(model):
            for one in node.attribute:
                one.i = one.i - 1 if one.name == "N" else one.i

    assert [count(change) for change in (in_floats, apart, packed, narrow)] == [0, 0, 0, 0]


def test_models_without_blocks_are_passed_on(shipped, blocks, tmp_path):
    path, empty = shipped.hooked.folder / "model.onnx", tmp_path / "empty.onnx"
    empty.write_bytes(b"")
    assert with_merged(path) is path
    assert with_merged(empty) is empty
    in_floats = blocks[0] / "model.onnx"  # its products say nothing of a level
    assert with_merged(in_floats) is in_floats


def test_sessions_compute_merged_products_and_those_that_optimise_nothing_do_not(blocks, shipped, tmp_path):
    folder, proto = blocks
    layers = shipped.num_layers
    write, model = ENGINES[Options.engine].write_optimised, proto.SerializeToString()
    write(model, folder, tmp_path / "model.onnx", "data", Options())
    found = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert len(products(found)) == len(products(proto)) - 3 * layers
    write(model, folder, tmp_path / "plain.onnx", "plain", Options(level="none"))
    found = onnx.load(tmp_path / "plain.onnx", load_external_data=False)
    assert len(products(found)) == len(products(proto))


def test_generations_from_a_base_and_without_one_are_the_same(blocks, shipped, monkeypatch, tmp_path):
    folder, _ = blocks
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    spec = HookSpec().capture("blocks.*.attn.hook_q").capture("blocks.*.mlp.hook_gate")
    plain, based = (MIModel.from_pretrained(folder, accuracy_level=LEVEL) for _ in range(2))
    assert based.prepare()
    one, other = (model.generate("The capital of France is", spec, max_new_tokens=4) for model in (plain, based))
    assert one.new_ids[0].tolist() == other.new_ids[0].tolist()
    for step, same in zip(one.steps, other.steps, strict=True):
        assert all(np.array_equal(step[name], same[name]) for name in step)
