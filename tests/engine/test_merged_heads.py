"""Queries, keys and values of one product become heads together: the same bits, and what others read stays."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from mionnx import MIModel
from mionnx.engine.merged_products import merge_heads, merge_products, with_merged
from mionnx.graph.packed_weight import at_accuracy_level

LEVEL = 4
FAMILIES = ("world-llama", "world-gpt2")


@pytest.fixture(scope="module", params=FAMILIES)
def blocks(request, tmp_path_factory):
    """A shipped model in 4 bits, and its graph at level 4."""
    model = MIModel.from_pretrained(request.param, threads=1)
    folder = model.quantise(tmp_path_factory.mktemp("heads") / "int4", block_size=16)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    return MIModel.from_pretrained(folder), at_accuracy_level(proto, LEVEL)[0]


def copy(proto: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(proto.SerializeToString())


def results(proto: onnx.ModelProto, folder, names: list[str], feeds) -> list[np.ndarray]:
    proto = copy(proto)
    known = {one.name for one in proto.graph.output}
    proto.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in names if name not in known)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 2
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(proto.SerializeToString(), settings).run(names, feeds)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("texts", [1, 3])
def test_every_hook_point_has_the_same_bits(blocks, tokens, texts):
    model, proto = blocks
    merged = copy(proto)
    merge_products(merged)
    nodes = len(merged.graph.node)
    assert merge_heads(merged) == model.num_layers
    assert len(merged.graph.node) == nodes - 4 * model.num_layers
    feeds = {
        "input_ids": np.arange(texts * tokens).reshape(texts, tokens) + 3,
        "attention_mask": np.ones((texts, 4 + tokens), np.int64),
        "position_ids": np.tile(np.arange(4, 4 + tokens), (texts, 1)),
    }
    random = np.random.default_rng(0)
    for name, shape in model.hooked.metadata.past_shapes(texts, 4).items():
        feeds[name] = random.normal(size=shape).astype(np.float32)
    made = {name for node in proto.graph.node for name in node.output}
    names = ["logits", *(name for name in model.hooked.metadata.hooks if name in made)]
    assert {"blocks.0.attn.hook_q", "blocks.0.attn.hook_k", "blocks.0.attn.hook_v"} <= {*names}
    one, other = (results(graph, model.hooked.folder, names, feeds) for graph in (proto, merged))
    assert [name for name, a, b in zip(names, one, other, strict=True) if not np.array_equal(a, b)] == []


def test_sessions_move_heads_together(blocks):
    _, proto = blocks
    opened = onnx.ModelProto.FromString(with_merged(proto.SerializeToString()))
    splits = [node for node in opened.graph.node if node.op_type == "Split" and "blocks.0.attn.hook_q" in node.output]
    assert [[one.i for one in node.attribute if one.name == "axis"] for node in splits] == [[1]]
    assert {"blocks.0.attn.hook_k", "blocks.0.attn.hook_v"} <= {*splits[0].output}
    assert merge_heads(opened) == 0


def test_what_others_read_or_is_moved_another_way_stays(blocks):
    model, proto = blocks
    merged = copy(proto)
    merge_products(merged)

    def count(change) -> int:
        changed = copy(merged)
        made_by = {name: node for node in changed.graph.node for name in node.output}
        transpose = made_by["blocks.0.attn.hook_k"]
        reshape = made_by[transpose.input[0]]
        change(changed.graph, transpose, reshape)
        return merge_heads(changed)

    def captured(graph, transpose, reshape):
        graph.output.append(helper.make_tensor_value_info(reshape.output[0], 1, None))

    def part_captured(graph, transpose, reshape):
        graph.output.append(helper.make_tensor_value_info(reshape.input[0], 1, None))

    def read_again(graph, transpose, reshape):
        graph.node.append(helper.make_node("Neg", [reshape.output[0]], ["again"]))

    def read_in_a_branch(graph, transpose, reshape):
        inner = helper.make_graph([helper.make_node("Neg", [reshape.output[0]], ["in"])], "inner", [], [])
        graph.node.append(helper.make_node("If", ["so"], ["again"], then_branch=inner, else_branch=inner))

    def turned_otherwise(graph, transpose, reshape):
        transpose.attribute[0].ints[:] = [0, 2, 3, 1]

    def of_another_name(graph, transpose, reshape):
        for node in graph.node:
            node.input[:] = ["some.heads" if name == transpose.output[0] else name for name in node.input]
        transpose.output[0] = "some.heads"

    def of_other_shape(graph, transpose, reshape):
        graph.initializer.append(numpy_helper.from_array(np.array([1, -1, 2, 4]), "other"))
        reshape.input[1] = "other"

    def columns_of_each_head(graph, transpose, reshape):
        """As where the last axis is that of one head: [batch, seq, heads, 3 * width]."""
        for entry in graph.value_info:
            if entry.name == reshape.input[0]:
                entry.type.tensor_type.shape.dim.add().dim_value = 1

    def of_known_heads(graph, transpose, reshape):
        """All parts have a shape that says how many heads there are."""
        graph.initializer.append(numpy_helper.from_array(np.array([1, -1, 2, 4]), "other"))
        shape = reshape.input[1]
        for node in graph.node:
            if node.op_type == "Reshape" and node.input[1] == shape:
                node.input[1] = "other"

    layers = model.num_layers
    assert count(lambda *_: None) == layers
    changes = (
        captured,
        part_captured,
        read_again,
        read_in_a_branch,
        turned_otherwise,
        of_other_shape,
        of_another_name,
        columns_of_each_head,
    )
    assert [count(change) for change in changes] == [layers - 1] * len(changes)
    assert count(of_known_heads) == 0
