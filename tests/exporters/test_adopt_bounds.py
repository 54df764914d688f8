"""What a foreign file would run is bounded before anything runs it: loops, constants, functions, counts, sizes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import onnx
import pytest
from onnx import TensorProto, helper

from exporters.adopt import adopt
from mionnx import ExportError, MIError, MIModel
from mionnx.graph.embedded_weights import read_light, read_properties
from mionnx.graph.validate import NODES
from mionnx.graph.value_sizes import TRIPS

FOREIGN = Path(__file__).parents[1] / "shared" / "foreign" / "optimum"
SECONDS = 20  # of this process; the clock shows more where other work runs


def constant(name: str, value: int | bool, kind: int = TensorProto.INT64) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(f"{name}_value", kind, [], [value]))


def added_to_logits(proto: onnx.ModelProto, nodes: list[onnx.NodeProto], value: str, kind: int) -> None:
    """Add a value, times 0, to the logits."""
    (end,) = [node for node in proto.graph.node if "logits" in node.output]
    end.output[list(end.output).index("logits")] = "evil_before"
    nodes = [
        *nodes,
        helper.make_node("Cast", [value], ["evil_float"], to=TensorProto.FLOAT),
        helper.make_node("Constant", [], ["evil_zero"], value_float=0.0),
        helper.make_node("Mul", ["evil_float", "evil_zero"], ["evil_none"]),
        helper.make_node("ReduceMax", ["evil_none"], ["evil_one"], keepdims=0),
        helper.make_node("Add", ["evil_before", "evil_one"], ["logits"]),
    ]
    proto.graph.node.extend(nodes)


def loop(count: list[onnx.NodeProto], trips: str) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        one = [helper.make_tensor_value_info(name, TensorProto.INT64, []) for name in ("i", "v", "w")]
        go = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("c", "d")]
        body = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Identity", ["v"], ["w"])]
        graph = helper.make_graph(body, "body", [one[0], go[0], one[1]], [go[1], one[2]])
        nodes = [constant("evil_true", True, TensorProto.BOOL), constant("evil_start", 1), *count]
        nodes.append(helper.make_node("Loop", [trips, "evil_true", "evil_start"], ["evil"], body=graph))
        added_to_logits(proto, nodes, "evil", TensorProto.INT64)

    return change


def counted(trips: int) -> Callable[[onnx.ModelProto], None]:
    return loop([constant("evil_trips", trips)], "evil_trips")


def by_tokens() -> Callable[[onnx.ModelProto], None]:
    count = [
        helper.make_node("ReduceMax", ["input_ids"], ["evil_max"], keepdims=0),
        constant("evil_many", 2**40),
        helper.make_node("Mul", ["evil_max", "evil_many"], ["evil_trips"]),
    ]
    return loop(count, "evil_trips")


def range_to(end: int) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        numbers = [constant("evil_0", 0), constant("evil_end", end), constant("evil_1", 1)]
        nodes = [*numbers, helper.make_node("Range", ["evil_0", "evil_end", "evil_1"], ["evil"])]
        added_to_logits(proto, nodes, "evil", TensorProto.INT64)

    return change


def range_of_tokens(proto: onnx.ModelProto) -> None:
    nodes = [
        constant("evil_0", 0),
        constant("evil_1", 1),
        helper.make_node("ReduceMax", ["input_ids"], ["evil_max"], keepdims=0),
        constant("evil_many", 2**32),
        helper.make_node("Mul", ["evil_max", "evil_many"], ["evil_end"]),
        helper.make_node("Range", ["evil_0", "evil_end", "evil_1"], ["evil"]),
    ]
    added_to_logits(proto, nodes, "evil", TensorProto.INT64)


def doubling(proto: onnx.ModelProto) -> None:
    first = helper.make_node("Constant", [], ["evil_0"], value_floats=[0.0] * 64)
    nodes = [helper.make_node("Concat", [f"evil_{i}"] * 2, [f"evil_{i + 1}"], axis=0) for i in range(36)]
    added_to_logits(proto, [first, *nodes], "evil_36", TensorProto.FLOAT)


def functions(proto: onnx.ModelProto) -> None:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("evil", 1)]
    for i in range(26):
        inner = helper.make_node("Identity", ["x"], ["m"]) if i == 0 else None
        calls = [helper.make_node(f"f{i - 1}", ["x"], ["m"], domain="evil")] if inner is None else [inner]
        second = (
            helper.make_node("Identity", ["m"], ["y"])
            if i == 0
            else helper.make_node(f"f{i - 1}", ["m"], ["y"], domain="evil")
        )
        proto.functions.append(helper.make_function("evil", f"f{i}", ["x"], ["y"], [*calls, second], opsets))
    proto.opset_import.append(helper.make_opsetid("evil", 1))
    first = helper.make_node("Constant", [], ["evil_0"], value_float=1.0)
    added_to_logits(proto, [first, helper.make_node("f25", ["evil_0"], ["evil"], domain="evil")], "evil", 1)


def chain(nodes: int) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        first = helper.make_node("Constant", [], ["evil_0"], value_float=1.0)
        rest = [helper.make_node("Neg", [f"evil_{i}"], [f"evil_{i + 1}"]) for i in range(nodes)]
        added_to_logits(proto, [first, *rest], f"evil_{nodes}", TensorProto.FLOAT)

    return change


def weights(count: int) -> Callable[[onnx.ModelProto], None]:
    """Initializers without a name or a byte, two bytes of the file each."""
    return lambda proto: proto.graph.initializer.extend(onnx.TensorProto() for _ in range(count))


EVIL = {
    "loop of 2^60": counted(2**60),
    "loop of 10^7": counted(10**7),
    "loop without a trip count": loop([], ""),
    "loop by the tokens": by_tokens(),
    "range to 2^34": range_to(2**34),
    "range by the tokens": range_of_tokens,
    "36 doublings": doubling,
    "26 functions": functions,
    "200,000 nodes": chain(200_000),
    "10^6 weights": weights(10**6),
}


def written(folder: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    shutil.copytree(FOREIGN, folder)
    proto = onnx.load(folder / "model.onnx")
    change(proto)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder


@pytest.mark.parametrize("evil", EVIL)
@pytest.mark.slow_beyond(6)
def test_a_graph_without_bounds_is_refused_before_it_runs(evil, tmp_path):
    """Findings 7 and 9; each of these had to be killed, or took half a minute."""
    folder = written(tmp_path / "evil", EVIL[evil])
    begun = time.process_time()
    with pytest.raises(ExportError, match=r"refused|more than"):
        adopt(folder, tmp_path / "out")
    assert time.process_time() - begun < SECONDS


@pytest.mark.slow
def test_a_graph_with_a_loop_that_ends_is_adopted(tmp_path):
    adopt(written(tmp_path / "good", counted(3)), tmp_path / "out")
    model = MIModel.from_pretrained(tmp_path / "out", threads=1)
    adopt(shutil.copytree(FOREIGN, tmp_path / "plain"), tmp_path / "plain-out")
    plain = MIModel.from_pretrained(tmp_path / "plain-out", threads=1)
    assert abs(model.forward([[5, 6, 7]]).output() - plain.forward([[5, 6, 7]]).output()).max() < 1e-6


def test_numbers_that_do_not_end(tmp_path):
    """Finding 9: 3 MB of 0xff were more than 12 s in any folder that is opened."""
    (tmp_path / "model.onnx").write_bytes(b"\xff" * 3_000_000)
    begun = time.process_time()
    for call in (read_light, read_properties):
        with pytest.raises(MIError, match="does not end"):
            call(tmp_path / "model.onnx")
    with pytest.raises(MIError):
        MIModel.from_pretrained(tmp_path)
    assert time.process_time() - begun < 5


def test_a_file_of_many_small_fields_is_refused_at_once(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07" * 5_000_000)
    with pytest.raises(MIError, match="more than"):
        read_properties(tmp_path / "model.onnx")


RUNNING = """
import numpy as np, onnx, sys
from exporters.probe import interruptible, open_session
from pathlib import Path
proto = onnx.load(sys.argv[1])
session = open_session(proto, Path(sys.argv[1]).parent, [])
size = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value
print("runs", flush=True)
try:
    interruptible(session, ["y"], {"x": np.zeros((size, size), np.float32)})
except KeyboardInterrupt:
    print("heard", flush=True)
"""
ADOPTING = """
import sys
from pathlib import Path
from exporters.adopt import adopt
def tell(stage, done, total):
    if stage == "running once":
        print("runs", flush=True)
try:
    adopt(Path(sys.argv[1]), Path(sys.argv[1]) / "out", None, tell)
except KeyboardInterrupt:
    print("heard", flush=True)
"""


LISTENING = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a background job
HEARD = 10  # seconds, on a machine with other work: a graph that does not listen takes minutes


def seconds_until_heard(program: str, path: Path) -> float:
    """Seconds from Ctrl-C, half a second after a process says that it runs something, until it is heard."""
    child = subprocess.Popen([sys.executable, "-c", LISTENING + program, path], stdout=subprocess.PIPE, text=True)
    ending = Timer(90, child.kill)  # whatever happens
    ending.start()
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "runs\n"
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGINT)
        begun = time.monotonic()
        assert child.stdout.readline() == "heard\n"
        return time.monotonic() - begun
    finally:
        ending.cancel()
        child.kill()
        child.communicate()


@pytest.mark.parametrize(("products", "size"), [(3000, 2000), (1, 8192)])
def test_ctrl_c_is_heard_while_a_graph_runs(products, size, tmp_path):
    """Of many operators, or in one that takes long: the largest value that a graph may have."""
    nodes = [helper.make_node("MatMul", [f"v{i}" if i else "x", "x"], [f"v{i + 1}"]) for i in range(products)]
    nodes.append(helper.make_node("Identity", [f"v{products}"], ["y"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "long", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    assert seconds_until_heard(RUNNING, tmp_path / "m.onnx") < HEARD


def products_of_tokens(proto: onnx.ModelProto) -> None:
    """A loop of products that the tokens enter: within every bound, and long."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1024, 1024]) for name in ("v", "w")]
    go = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("c", "d")]
    step = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    body = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("MatMul", ["v", "v"], ["w"])]
    graph = helper.make_graph(body, "body", [step, go[0], values[0]], [go[1], values[1]])
    shape = helper.make_tensor("evil_sizes", TensorProto.INT64, [2], [1024, 1024])
    nodes = [
        helper.make_node("Constant", [], ["evil_shape"], value=shape),
        helper.make_node("ConstantOfShape", ["evil_shape"], ["evil_zeros"]),
        helper.make_node("ReduceMax", ["input_ids"], ["evil_max"], keepdims=0),
        helper.make_node("Cast", ["evil_max"], ["evil_number"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["evil_zeros", "evil_number"], ["evil_start"]),
        constant("evil_true", True, TensorProto.BOOL),
        constant("evil_trips", 120),
        helper.make_node("Loop", ["evil_trips", "evil_true", "evil_start"], ["evil"], body=graph),
    ]
    added_to_logits(proto, nodes, "evil", TensorProto.FLOAT)


def test_ctrl_c_is_heard_while_a_file_is_adopted(tmp_path):
    assert seconds_until_heard(ADOPTING, written(tmp_path / "long", products_of_tokens)) < HEARD


@pytest.mark.slow
def test_the_longest_loop_is_adopted_in_seconds(tmp_path):
    begun = time.process_time()
    adopt(written(tmp_path / "long", counted(TRIPS - 1)), tmp_path / "out")
    assert time.process_time() - begun < 2 * SECONDS


def test_the_limit_of_nodes_is_above_any_model():
    assert NODES > 30_000
