"""Nodes that a provider leaves to the CPU are named, shapes do not count; positions are made on the device."""

import gc
import weakref
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from mionnx import FallbackWarning, HookPoint, HookSpec, Intervention, MIModel
from mionnx.engine.device import CPU
from mionnx.engine.device_graph import keep_transposed, move_positions, shape_values
from mionnx.engine.onnx_runtime import OnnxRuntime, OrtProgram
from mionnx.engine.options import Options
from mionnx.engine.session import weights_of
from mionnx.graph import onnx_file

MODELS = Path(__file__).parents[2] / "models"
OTHER = "AzureExecutionProvider"  # in every build, with kernels for nothing that a language model has

needs_other = pytest.mark.skipif(OTHER not in onnxruntime.get_available_providers(), reason=f"no {OTHER} here")


@needs_other
def test_what_a_provider_leaves_to_the_cpu_is_named():
    model = MIModel.from_pretrained(MODELS / "world-llama", provider=OTHER)
    with pytest.warns(FallbackWarning) as said:
        found = model.forward([[3, 4, 5]]).output()
    text = str(said[0].message)
    assert text.startswith(f"world-llama: {OTHER} leaves MatMul (")
    assert "Shape" not in text
    assert said[0].filename == __file__
    assert np.array_equal(found, MIModel.from_pretrained(MODELS / "world-llama").forward([[3, 4, 5]]).output())


@needs_other
def test_shapes_alone_are_no_fallback(recwarn):
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], "shape"),
        helper.make_node("Gather", ["shape", "last"], ["size"], "gather"),
    ]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, None])]
    outs = [helper.make_tensor_value_info("size", TensorProto.INT64, [1])]
    last = helper.make_tensor("last", TensorProto.INT64, [1], [1])
    model = helper.make_model(
        helper.make_graph(nodes, "g", ends, outs, [last]), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    program = OnnxRuntime().open(model.SerializeToString(), MODELS, Options(OTHER))
    assert program.run(["size"], {"x": np.ones((2, 7), np.float32)})["size"].tolist() == [7]
    assert not [one for one in recwarn if one.category is FallbackWarning]


def test_a_large_weight_is_no_shape():
    nodes = [helper.make_node("Neg", ["weight"], ["negative"]), helper.make_node("Neg", ["small"], ["less"])]
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [100], [1.0] * 100)
    small = helper.make_tensor("small", TensorProto.INT64, [1], [1])
    outs = [helper.make_tensor_value_info("negative", TensorProto.FLOAT, [100])]
    assert shape_values(helper.make_graph(nodes, "g", [], outs, [weight, small])) == {"less"}


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2"])
def test_positions_made_on_the_device_are_the_same(name):
    """The graph without the sum gives the same bits, with and without a past, plain and rewritten."""
    model, ids = MIModel.from_pretrained(MODELS / name), np.arange(3, 12)[None]
    spec = HookSpec().capture("*").intervene(HookPoint.ResidPost(0), Intervention.Scale(1.1, positions=[1, -1]))
    first = model.forward(ids[:, :5], spec, use_cache=True)
    second = model.forward(ids[:, 5:], cache=first.kv_cache)
    for graph in model.compiled.values():
        proto = onnx_file.parse(graph.model) if graph.model else onnx_file.read(MODELS / name / "model.onnx")
        assert move_positions(proto) == 1
        assert move_positions(proto) == 0
        onnx.checker.check_model(_without_weights(proto))
        moved = OnnxRuntime().open(proto.SerializeToString(), MODELS / name, Options())
        vars(graph)["program"] = moved
        assert isinstance(moved, OrtProgram)
    again = model.forward(ids[:, :5], spec, use_cache=True)
    assert all(np.array_equal(again[hook], first[hook]) for hook in first)
    assert np.array_equal(again.output(), first.output())
    assert np.array_equal(model.forward(ids[:, 5:], cache=first.kv_cache).output(), second.output())


def _without_weights(proto):
    """A model whose weights are inputs, for the checker."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    external = [one for one in copy.graph.initializer if one.data_location == TensorProto.EXTERNAL]
    for one in external:
        copy.graph.input.append(helper.make_tensor_value_info(one.name, one.data_type, list(one.dims)))
        copy.graph.initializer.remove(one)
    return copy


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2"])
def test_transposed_weights_are_kept_as_they_lie(name):
    """As inputs with defaults they give the same numbers, and nothing has to be fed."""
    folder = MODELS / name
    proto = onnx_file.read(folder / "model.onnx")
    turned = {node.input[0] for node in proto.graph.node if node.op_type == "Transpose"}
    weights = {one.name for one in proto.graph.initializer if one.data_location == TensorProto.EXTERNAL}
    assert keep_transposed(proto) == len(turned & weights) > 0
    assert keep_transposed(proto) == 0
    program = OnnxRuntime().open(proto.SerializeToString(), folder, Options())
    assert {one for one, entry in program.inputs.items() if entry.optional} == turned & weights
    model = MIModel.from_pretrained(folder)
    expected = model.forward([[3, 4, 5]]).output()
    (graph,) = model.compiled.values()
    vars(graph)["program"] = program
    assert np.abs(model.forward([[3, 4, 5]]).output() - expected).max() < 5e-5


def test_weights_of_one_file_are_held_once_and_let_go(tmp_path):
    """On the CPU, whose values go through the same DLPack; a changed file is another weight."""
    proto = onnx_file.read(MODELS / "world-llama" / "model.onnx")
    first, second = (weights_of(proto, MODELS / "world-llama", CPU) for _ in range(2))
    assert first
    assert all(second[weight] is value for weight, value in first.items())
    for weight, value in first.items():
        assert np.array_equal(value.numpy(), onnx_file.weight(proto, MODELS / "world-llama", weight))
    settings = onnxruntime.SessionOptions()
    for weight, value in first.items():
        settings.add_initializer(weight, value)  # which a value that owns its memory is refused for
    names, held = len(first), weakref.ref(next(iter(first.values())))
    assert names >= 12
    del first, second, value, settings
    gc.collect()
    assert held() is None
