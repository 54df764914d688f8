"""Model files from somebody else: what they may not do is refused when they are opened; damage never crashes."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import LLAMA
from onnx import TensorProto, helper

from mionnx import HookSpec, Intervention, MIError, MIModel, ModelError
from mionnx.graph.hooked_model import HookedModel

IDS = np.arange(3, 13)[None]
Change = Callable[[onnx.ModelProto], None]


def change(folder: Path, what: Change) -> None:
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    what(proto)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())


def external(proto: onnx.ModelProto) -> list[TensorProto]:
    return [tensor for tensor in proto.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]


def entry(tensor: TensorProto, key: str) -> onnx.StringStringEntryProto:
    return next(item for item in tensor.external_data if item.key == key)


def elsewhere(location: str) -> TensorProto:
    tensor = TensorProto(name="far", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def in_a_constant(proto: onnx.ModelProto) -> None:
    proto.graph.node.append(helper.make_node("Constant", [], ["far"], value=elsewhere("../secret.bin")))


def in_a_subgraph(proto: onnx.ModelProto) -> None:
    inner = helper.make_graph([helper.make_node("Identity", ["far"], ["out"])], "inner", [], [])
    inner.initializer.append(elsewhere("../secret.bin"))
    proto.graph.node.append(helper.make_node("If", ["condition"], ["chosen"], then_branch=inner, else_branch=inner))


def in_a_function(proto: onnx.ModelProto) -> None:
    node = helper.make_node("Constant", [], ["far"], value=elsewhere("../secret.bin"))
    proto.functions.append(helper.make_function("own", "f", [], ["far"], [node], proto.opset_import))


def overlapping(proto: onnx.ModelProto) -> None:
    one, other = external(proto)[:2]
    entry(other, "location").value = entry(one, "location").value
    entry(other, "offset").value = str(int(entry(one, "offset").value) + 4)


def longer(proto: onnx.ModelProto) -> None:
    external(proto)[0].dims[0] += 1


def huge(proto: onnx.ModelProto) -> None:
    external(proto)[0].dims[0] = 2**40


def negative(proto: onnx.ModelProto) -> None:
    external(proto)[0].dims[0] = -1


def empty_bomb(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(TensorProto(name="bomb", data_type=TensorProto.FLOAT, dims=[2**20, 2**20]))


def short(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(TensorProto(name="bomb", data_type=TensorProto.FLOAT, dims=[100], raw_data=bytes(8)))


def dtype(proto: onnx.ModelProto) -> None:
    external(proto)[0].data_type = 99


def sparse(proto: onnx.ModelProto) -> None:
    proto.graph.sparse_initializer.add().values.name = "thin"


def constant_of_shape(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2**16, 2**16, 2**8]), "shape"))
    proto.graph.node.append(helper.make_node("ConstantOfShape", ["shape"], ["bomb"]))


def expanded(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2**62, 4]), "shape"))
    proto.graph.node.append(helper.make_node("Expand", ["hook_embed", "shape"], ["bomb"]))


def ranged(proto: onnx.ModelProto) -> None:
    shape = onnx.numpy_helper.from_array(np.array(2**50))
    proto.graph.node.append(helper.make_node("Constant", [], ["end"], value=shape))
    proto.graph.node.append(helper.make_node("Range", ["zero", "end", "one"], ["bomb"]))


REFUSED = {
    in_a_constant: "outside the model's folder",
    in_a_subgraph: "outside the model's folder",
    in_a_function: "outside the model's folder",
    overlapping: "overlap",
    longer: "takes",
    huge: "takes",
    negative: "shape",
    empty_bomb: "0 of its numbers",
    short: "has 8",
    dtype: "dtype 99",
    sparse: "sparse",
    constant_of_shape: "ConstantOfShape",
    expanded: "Expand",
    ranged: "Range",
}


@pytest.mark.parametrize("what", REFUSED, ids=lambda what: what.__name__)
def test_it_is_refused_before_a_session_is_made(copy, what, monkeypatch):
    (copy.parent / "secret.bin").write_bytes(b"secret" * 100)
    change(copy, what)
    monkeypatch.setattr("onnxruntime.InferenceSession", None)
    with pytest.raises(ModelError) as caught:
        MIModel.from_pretrained(copy)
    assert REFUSED[what] in str(caught.value)


@pytest.mark.parametrize("location", ["model.safetensors\0", ".", "model.safetensors/x", "a\n", "\\\\host\\x", "C:\\x"])
def test_names_that_no_weight_file_has(copy, location):
    def move(proto: onnx.ModelProto) -> None:
        entry(external(proto)[0], "location").value = location

    change(copy, move)
    with pytest.raises(ModelError):
        MIModel.from_pretrained(copy)


def test_tied_weights_may_share_their_bytes(copy):
    """Two initializers of the same bytes are not an overlap."""

    def tie(proto: onnx.ModelProto) -> None:
        twin = proto.graph.initializer.add()
        twin.CopyFrom(external(proto)[0])
        twin.name = "twin"

    change(copy, tie)
    MIModel.from_pretrained(copy)


def scrambled(proto: onnx.ModelProto, rng: random.Random) -> None:
    """One random change to the structure: something another exporter, or somebody malicious, could have written."""
    graph = proto.graph
    node, tensor = rng.choice(graph.node), rng.choice(graph.initializer)
    numbers = [0, 1, -1, 2**31, 2**62, -(2**62)]
    kind = rng.randrange(12)
    if kind == 0 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(graph.node).output[0]
    elif kind == 1:
        node.op_type = rng.choice(["Identity", "MatMul", "Reshape", "Loop", "Nothing", ""])
    elif kind == 2:
        graph.node.remove(node)
    elif kind == 3:
        node.output[0] = rng.choice(["", "logits", "hook_embed", rng.choice(graph.node).output[0]])
    elif kind == 4 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(numbers)
    elif kind == 5:
        tensor.data_type = rng.randrange(30)
    elif kind == 6 and tensor.external_data:
        item = rng.choice(tensor.external_data)
        item.value = rng.choice(["", "..", "/etc/passwd", "model.onnx", *map(str, numbers)])
    elif kind == 7 and node.attribute:
        attribute = rng.choice(node.attribute)
        attribute.i, attribute.type = rng.choice(numbers), rng.randrange(15)
    elif kind == 8:
        value = rng.choice([*graph.input, *graph.output])
        value.name = rng.choice(["", "x", graph.input[0].name])
    elif kind == 9:
        item = rng.choice(proto.metadata_props)
        item.value = rng.choice(["", "{}", "[]", "null", "1e999", item.value[: len(item.value) // 2]])
    elif kind == 10:
        proto.opset_import[0].version = rng.choice([0, 1, 23, 999])
    else:
        graph.node.insert(0, rng.choice(graph.node))


@pytest.mark.parametrize("seed", range(150))
def test_a_mutated_model_is_an_error_or_an_answer(tmp_path, seed):
    """Nothing but an `MIError`, whatever was changed, from opening, rewriting, or compiling it."""
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder, copy_function=shutil.copyfile)
    rng = random.Random(seed)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for _ in range(rng.randrange(1, 4)):
        scrambled(proto, rng)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    spec = HookSpec().capture("*").intervene("blocks.0.hook_resid_post", Intervention.Scale(2.0, positions=-1))
    try:
        model = HookedModel.open(folder)
        opened = MIModel(model)
        opened.compile(spec, tmp_path / "compiled")
        assert (tmp_path / "compiled" / "model.onnx").is_file()
        found = opened.forward(IDS, spec)
    except MIError:
        return
    assert found.output().shape[:2] == IDS.shape
