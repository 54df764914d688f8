"""Values that grow without bound are refused before a session is made, wherever their size comes from."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import LLAMA
from onnx import helper
from onnx.numpy_helper import from_array

from mionnx import HookSpec, Intervention, MIError, ModelError
from mionnx.graph.fragment import Fragment
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.value_sizes import check_sizes

MEMORY = 3 * 2**30  # bytes of address space that opening a hostile model may take besides what Python has
SIZE = "size = Constant <value_ints = [{}]> ()"
MAKE = "bomb = ConstantOfShape <value = float[1] {1.0}> (size)"


def _doubled(times: int) -> str:
    lines = ["c0 = Constant <value_floats = [1.0, 2.0]> ()"]
    lines += [f"c{n + 1} = Concat <axis = 0> (c{n}, c{n})" for n in range(times)]
    return "\n".join([*lines, f"bomb = Identity(c{times})"])


# Nodes that make a value `bomb`: what was found to pass, and what is like it.
BOMBS = {
    "value_ints": SIZE.format(2**33) + MAKE,
    "exactly 2^31": SIZE.format(2**31) + MAKE,
    "Identity": f"a = Constant <value_ints = [{2**34}]> () size = Identity(a)" + MAKE,
    "Mul": "a = Constant <value_ints = [131072]> () size = Mul(a, a)" + MAKE,
    "Concat": "a = Constant <value_ints = [131072]> () size = Concat <axis = 0> (a, a)" + MAKE,
    "a sum of many": "a = Constant <value_ints = [100000]> () ones = ConstantOfShape <value = int64[1] {1000000}> (a)"
    "size = ReduceSum <keepdims = 1> (ones)" + MAKE,
    "Shape of a weight": 'a = Shape("model.embed_tokens.weight") b = Mul(a, a) size = Mul(b, b)' + MAKE,
    "MatMul": "a = Constant <value_ints = [131072, 1]> () b = Constant <value_ints = [1, 131072]> ()"
    "one = ConstantOfShape <value = float[1] {1.0}> (a) two = ConstantOfShape <value = float[1] {1.0}> (b)"
    "bomb = MatMul(one, two)",
    "OneHot": f"i = Constant <value_ints = [0]> () depth = Constant <value_int = {2**34}> ()"
    "values = Constant <value_floats = [0.0, 1.0]> () bomb = OneHot(i, depth, values)",
    "Resize": "w = Constant <value = float[1, 1, 2, 2] {1, 2, 3, 4}> ()"
    "sizes = Constant <value_ints = [1, 1, 131072, 131072]> () bomb = Resize(w, , , sizes)",
    "Concat doubled": _doubled(40),
    "Expand": "w = Constant <value_floats = [1.0]> () a = Constant <value_ints = [65536]> ()"
    "size = Concat <axis = 0> (a, a) bomb = Expand(w, size)",
    "Tile": f"w = Constant <value_floats = [1.0]> () size = Constant <value_ints = [{2**33}]> () bomb = Tile(w, size)",
    "Range": f"a = Constant <value_int = 0> () b = Constant <value_int = {2**34}> () c = Constant <value_int = 1> ()"
    "r = Range(a, b, c) bomb = Cast <to = 1> (r)",
    "Pad": f"w = Constant <value_floats = [1.0]> () size = Constant <value_ints = [0, {2**33}]> () bomb = Pad(w, size)",
    "If": "yes = Constant <value = bool {1}> () bomb = If (yes) <then_branch = a () => (float[1] o) "
    "{ o = Constant <value_floats = [1.0]> () }, else_branch = b () => (float[N] p) "
    f"{{ size = Constant <value_ints = [{2**33}]> () p = ConstantOfShape <value = float[1] {{1.0}}> (size) }}>",
    "Loop without end": f"n = Constant <value_int = {2**60}> () yes = Constant <value = bool {{1}}> ()"
    "w = Constant <value_floats = [1.0]> () bomb = Loop (n, yes, w) <body = b (int64 i, bool c, float[1] a) => "
    "(bool d, float[1] e) { d = Identity(c) e = Add(a, a) }>",
    "Loop while": "yes = Constant <value = bool {1}> () w = Constant <value_floats = [1.0]> ()"
    "bomb = Loop (, yes, w) <body = b (int64 i, bool c, float[1] a) => (bool d, float[1] e) "
    "{ d = Identity(c) e = Add(a, a) }>",
    "Loop that grows": "n = Constant <value_int = 40> () yes = Constant <value = bool {1}> ()"
    "w = Constant <value_floats = [1.0]> () bomb = Loop (n, yes, w) <body = b (int64 i, bool c, float[N] a) => "
    "(bool d, float[M] e) { d = Identity(c) e = Concat <axis = 0> (a, a) }>",
    "size from token ids": "a = Cast <to = 7> (input_ids) m = ReduceMax <keepdims = 0> (a)"
    "k = Constant <value_int = 1000000000> () b = Mul(m, k) o = Constant <value_ints = [-1]> ()"
    "size = Reshape(b, o)" + MAKE,
    "size from the text's length": "a = Shape(input_ids) k = Constant <value_ints = [100000]> () size = Mul(a, k)"
    + MAKE,
}


def hostile(folder: Path, nodes: str) -> Path:
    """A copy of the small trained Llama whose logits depend on a value `bomb`."""
    shutil.copytree(LLAMA, folder)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    last = next(node for node in proto.graph.node if "logits" in node.output)
    last.output[list(last.output).index("logits")] = "logits_before"
    text = f"hostile () => (float z) {{ {nodes} most = ReduceMax <keepdims = 0> (bomb) z = Sub(most, most) }}"
    proto.graph.node.extend(onnx.parser.parse_graph(text).node)
    proto.graph.node.append(helper.make_node("Add", ["logits_before", "z"], ["logits"]))
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder


CHILD = """
import json, resource, sys, time
import numpy as np
from mionnx import MIError, MIModel
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + int(sys.argv[1]),) * 2)
for folder in sys.argv[2:]:
    began = time.perf_counter()
    try:
        MIModel.from_pretrained(folder, threads=1, base=False).forward(np.arange(3, 9)[None])
        said = "ran"
    except MIError as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps([said, time.perf_counter() - began]), flush=True)
"""


def in_a_child(*folders: Path) -> list[tuple[str, float]]:
    """What opening and running each folder says and how long it takes, in one process whose memory is limited."""
    command = [sys.executable, "-c", CHILD, str(MEMORY), *map(str, folders)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"no end: {error.stdout!r}")
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [tuple(json.loads(line)) for line in ran.stdout.splitlines()]


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> Mapping[str, tuple[str, float]]:
    base = tmp_path_factory.mktemp("bombs")
    folders = [hostile(base / f"{number}", nodes) for number, nodes in enumerate(BOMBS.values())]
    return dict(zip(BOMBS, in_a_child(*folders), strict=True))


@pytest.mark.parametrize("name", BOMBS)
def test_a_hooked_model_that_grows_is_refused(said, name):
    message, seconds = said[name]
    assert message.startswith("ModelError"), message
    assert "refused" in message
    assert "ONNX Runtime" not in message
    assert seconds < 10


def model(text: str, *functions: str) -> onnx.ModelProto:
    """A fragment from [b, s, 128] to the same, in ONNX text."""
    header = '<ir_version: 10, opset_import: ["" : 23, "own" : 1]>'
    graph = f"f (float[b, s, 128] x) => (float[b, s, 128] y) {{ {text} }}"
    return onnx.parser.parse_model("\n".join([header, graph, *functions]))


FIXED = {name: nodes for name, nodes in BOMBS.items() if "input_ids" not in nodes and "model." not in nodes}


@pytest.mark.parametrize("name", FIXED)
def test_a_fragment_whose_constants_grow_is_refused(name):
    with pytest.raises(ModelError, match="refused"):
        Fragment.of(model(f"{FIXED[name]} most = ReduceMax <keepdims = 0> (bomb) y = Add(x, most)"))


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Shape(x) k = Constant <value_ints = [100000]> () size = Mul(a, k)" + MAKE,
        "a = ReduceMax <keepdims = 0> (x) b = Cast <to = 7> (a) o = Constant <value_ints = [-1]> ()"
        "size = Reshape(b, o)" + MAKE,
        "a = ReduceMax <keepdims = 0> (x) n = Cast <to = 7> (a) yes = Constant <value = bool {1}> ()"
        "bomb = Loop (n, yes, x) <body = b (int64 i, bool c, float[b, s, 128] a) => (bool d, float[b, s, 128] e) "
        "{ d = Identity(c) e = Add(a, a) }>",
    ],
    ids=["of the shape", "of the values", "steps of the values"],
)
def test_a_fragment_that_grows_with_what_it_reads_is_refused_where_it_is_put(shipped, nodes):
    fragment = model(f"{nodes} most = ReduceMax <keepdims = 0> (bomb) y = Add(x, most)")
    spec = HookSpec().intervene("blocks.0.hook_resid_post", Intervention.Splice(fragment))
    with pytest.raises(MIError, match="refused") as caught:
        shipped.forward(np.arange(3, 9)[None], spec)
    assert "blocks.0.hook_resid_post" in str(caught.value)


def test_functions_that_call_one_another_many_times_are_refused():
    """Forty functions, each of which calls the next twice."""
    head = '<domain: "own", opset_import: ["" : 23, "own" : 1]>'
    functions = [f"{head} f{n} (a) => (c) {{ b = own.f{n + 1}(a) c = own.f{n + 1}(b) }}" for n in range(40)]
    functions.append(f"{head} f40 (a) => (c) {{ c = Identity(a) }}")
    with pytest.raises(ModelError, match=r"expand to more|nested more"):
        Fragment.of(model("y = own.f0(x)", *functions))


def test_a_function_that_makes_what_its_attribute_says_is_refused():
    head = '<domain: "own", opset_import: ["" : 23]>'
    function = f"{head} large <size> (a) => (c) {{ s = Constant <value_ints: ints = @size> () c = ConstantOfShape(s) }}"
    text = f"bomb = own.large <size = [{2**33}]> (x) most = ReduceMax <keepdims = 0> (bomb) y = Add(x, most)"
    with pytest.raises(ModelError, match="refused"):
        Fragment.of(model(text, function))


def test_loops_within_loops_and_scans_within_loops():
    inner = "e = Loop (n, c, a) <body = q (int64 j, bool k, float[1] l) => (bool m, float[1] o) "
    inner += "{ m = Identity(k) o = Add(l, l) }>"
    text = f"n = Constant <value_int = {2**15}> () yes = Constant <value = bool {{1}}> ()"
    text += "z = Constant <value_floats = [1.0]> () bomb = Loop (n, yes, z) <body = b (int64 i, bool c, float[1] a) => "
    text += f"(bool d, float[1] e) {{ d = Identity(c) {inner} }}> y = Add(x, bomb)"
    with pytest.raises(ModelError, match=r"1,073,741,824 steps: refused"):
        Fragment.of(model(text))


def test_many_constants_that_are_large_together_are_refused():
    one = "size = Constant <value_ints = [60000000]> ()"
    parts = " ".join(f"c{n} = ConstantOfShape(size) m{n} = ReduceMax <keepdims = 0> (c{n})" for n in range(9))
    with pytest.raises(ModelError, match="bytes with those before: refused"):
        Fragment.of(model(f"{one} {parts} y = Sum(x, {', '.join(f'm{n}' for n in range(9))})"))


def test_a_sparse_constant_is_refused(copy):
    proto = onnx.load(copy / "model.onnx", load_external_data=False)
    values, indices = from_array(np.ones(1, np.float32), "v"), from_array(np.zeros(1, np.int64), "i")
    sparse = onnx.SparseTensorProto(values=values, indices=indices, dims=[2**40])
    proto.graph.node.append(helper.make_node("Constant", [], ["bomb"], sparse_value=sparse))
    (copy / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="sparse"):
        HookedModel.open(copy)


@pytest.mark.parametrize("length", [8000, 3000])  # 3,000 only all together: equal nodes, each of them computed
def test_products_that_take_hours_are_refused(length):
    make = f"size = Constant <value_ints = [{length}, {length}]> () a = ConstantOfShape(size)"
    parts = " ".join(f"p{n + 1} = MatMul(p{n}, a)" for n in range(3))
    text = f"{make} p0 = Identity(a) {parts} m = ReduceMax <keepdims = 0> (p3) y = Add(x, m)"
    with pytest.raises(ModelError, match="products: refused"):
        Fragment.of(model(text))


def test_low_rank_updates_of_many_weights_pass():
    """A product of constants for each of 200 weights: what it takes is by its inner length, 16."""
    parts = " ".join(f"p{n} = MatMul(a, b) s{n + 1} = Add(s{n}, p{n})" for n in range(200))
    sizes = "m = Constant <value_ints = [4096, 16]> () a = ConstantOfShape(m)"
    sizes += " n = Constant <value_ints = [16, 512]> () b = ConstantOfShape(n)"
    text = f"{sizes} s0 = MatMul(a, b) {parts} top = ReduceMax <keepdims = 0> (s200) y = Add(x, top)"
    check_sizes(model(text), {"x": (2, 3, 128)}, 2**30)


@pytest.mark.parametrize(
    ("shape", "operator"),
    [
        ([1, 1, 2**19], 'AveragePool <kernel_shape = [32768], auto_pad = "SAME_UPPER"> (a)'),  # opened in 76 s
        ([1, 1, 2**16, 1], "Attention(a, a, a)"),  # 16 GB of scores
        ([1, 2**13, 2**13], "Det(a)"),
        ([2**17, 1, 1], "GRU <hidden_size = 1> (a, a, a)"),
    ],
)
def test_constants_whose_sizes_do_not_tell_their_cost_are_refused(shape, operator):
    text = f"size = Constant <value_ints = {shape}> () a = ConstantOfShape(size) b = {operator}"
    with pytest.raises(ModelError, match="of constants alone"):
        Fragment.of(model(f"{text} m = ReduceMax <keepdims = 0> (b) y = Add(x, m)"))


def test_loops_branches_and_large_weights_that_have_a_bound_pass():
    """A Loop of a fixed count, an If on a shape, a table made of constants, and a choice of the 32 largest."""
    text = """
    n = Constant <value_int = 3> () yes = Constant <value = bool {1}> ()
    a = Loop (n, yes, x) <body = b (int64 i, bool c, float[b, s, 128] u) => (bool d, float[b, s, 128] v)
      { d = Identity(c) v = Add(u, u) }>
    start = Constant <value_int = 0> () end = Constant <value_int = 128> () step = Constant <value_int = 1> ()
    row = Range(start, end, step) table = Cast <to = 1> (row)
    k = Constant <value_ints = [32]> () top, at = TopK(a, k) z = Sub(a, a) w = ScatterElements <axis = -1> (z, at, top)
    dims = Shape(x) one = Constant <value_int = 1> () axis = Constant <value_int = 1> ()
    seq = Gather(dims, axis) alone = Equal(seq, one)
    q = If (alone) <then_branch = t () => (float[b, s, 128] g) { g = Add(w, table) },
                    else_branch = e () => (float[b, s, 128] h) { h = Mul(w, table) }>
    y = Identity(q)"""
    proto = model(text)
    Fragment.of(proto)
    check_sizes(proto, {"x": (2, 3, 128)}, 0)


def test_values_of_one_length_that_nobody_knows_stay_so_long():
    """As many as numbers above 0: a choice among such rows is a row again, not the product of all."""
    text = """found = NonZero(x) more = Add(found, found) own = Less(found, more) a = Where(own, found, more)
    b = Where(own, a, more) c = Where(own, a, b) d = Where(own, b, c) z = Cast <to = 1> (d)
    sum = ReduceSum <keepdims = 0> (z) y = Add(x, sum)"""
    check_sizes(model(text), {"x": (2, 3, 128)}, 0)
    grown = model(
        text.replace("Add(found, found)", "MatMul(turned, found)").replace("more", "turned = Transpose(found) more", 1)
    )
    with pytest.raises(ModelError, match="elements: refused"):
        check_sizes(grown, {"x": (20, 30, 128)}, 0)


def test_a_graph_of_too_many_nodes_is_refused_at_once(copy):
    proto = onnx.load(copy / "model.onnx", load_external_data=False)
    nodes = [helper.make_node("Identity", [f"n{n}" if n else "logits"], [f"n{n + 1}"]) for n in range(200_000)]
    proto.graph.node.extend(nodes)
    (copy / "model.onnx").write_bytes(proto.SerializeToString())
    ((message, seconds),) = in_a_child(copy)
    assert "more than 32,768 nodes" in message
    assert seconds < 5
