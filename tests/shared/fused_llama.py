"""A small random Llama as onnxruntime-genai's builder writes one: fused attention, norms and residual additions."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LAYERS, HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, VOCAB, LONGEST = 2, 32, 2, 1, 16, 48, 100, 64
EXPERTS, CHOSEN = 4, 2
MICROSOFT = "com.microsoft"
SIZES = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": WIDTH**-0.5, "do_rotary": 1}


class _Graph:
    """Nodes and weights of the file."""

    def __init__(self, seed: int, router: str | None, standard: bool, cached: bool, adds: bool) -> None:
        self.router, self.standard, self.cached, self.adds = router, standard, cached, adds
        self.shapes: list[onnx.ValueInfoProto] = []
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(seed)

    def held(self, name: str, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, *shape: int, mean: float = 0.0) -> str:
        return self.held(name, (mean + self.random.standard_normal(shape) * 0.2).astype(np.float32))

    def node(self, operator: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes) -> str:
        self.nodes.append(
            helper.make_node(operator, inputs, outputs, f"n{len(self.nodes)}", domain=domain, **attributes)
        )
        return outputs[0]

    def product(self, name: str, x: str, *shape: int) -> str:
        axes = ["batch", "seq", shape[1]]
        self.shapes.append(helper.make_tensor_value_info(f"{name}.out", TensorProto.FLOAT, axes))
        return self.node("MatMul", [x, self.weight(f"{name}.weight", *shape)], [f"{name}.out"])

    def lengths(self) -> list[str]:
        """What fused attention alone reads: the last index of each row, and the number of keys."""
        one, axis = self.held("one", np.array([1], np.int64)), self.held("index", np.array(1, np.int64))
        total = self.node("ReduceSum", ["attention_mask", one], ["mask.sum"], keepdims=0)
        last = self.node("Sub", [total, one], ["mask.last"])
        size = self.node("Gather", [self.node("Shape", ["attention_mask"], ["mask.shape"]), axis], ["mask.total"])
        return [self.node("Cast", [value], [f"{value}.int32"], to=TensorProto.INT32) for value in (last, size)]

    def tables(self) -> list[str]:
        angles = np.outer(np.arange(LONGEST), 10000.0 ** -np.arange(0, 1, 2 / WIDTH)).astype(np.float32)
        return [self.held("cos_cache", np.cos(angles)), self.held("sin_cache", np.sin(angles))]

    def block(self, layer: int, stream: str, normed: str, lengths: list[str], tables: list[str]) -> tuple[str, str]:
        """One layer; the stream before the last addition, and the branch that is still to be added."""
        name, shared = f"layers.{layer}", (HEADS + 2 * KV_HEADS) * WIDTH
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        present = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        packed = self.product(f"{name}.qkv", normed, HIDDEN, shared)
        if self.standard:
            z = self.attention(name, packed, past, present)
        else:
            inputs = [packed, "", "", *past, *lengths, *tables]
            z = self.node("GroupQueryAttention", inputs, [f"{name}.z", *present], MICROSOFT, **SIZES)
        branch = self.product(f"{name}.o", z, HEADS * WIDTH, HIDDEN)
        stream, normed = self.skip(f"{name}.mid", stream, branch)
        if self.router is not None:
            return stream, self.mixture(name, normed)
        gate, up = (self.product(f"{name}.{part}", normed, HIDDEN, INNER) for part in ("gate", "up"))
        grown = self.node("Mul", [gate, self.node("Sigmoid", [gate], [f"{name}.sigmoid"])], [f"{name}.silu"])
        inner = self.node("Mul", [grown, up], [f"{name}.inner"])
        return stream, self.product(f"{name}.down", inner, INNER, HIDDEN)

    def angles(self, tables: list[str]) -> None:
        """Cosines and sines of the positions, [batch, seq, width / 2]."""
        for table in tables:
            self.node("Gather", [table, "position_ids"], [f"{table}.rows"])

    def visible(self) -> None:
        """The keys that each query reads, [batch, 1, seq, total], true or false."""
        zero, one = self.held("zero", np.array(0, np.int64)), self.held("step", np.array(1, np.int64))
        axes = {axis: self.held(f"axes.{axis}", np.array(axis, np.int64)) for axis in ((0,), (1,), (0, 1), (1, 2))}
        total, seq = (
            self.node("Gather", [self.node("Shape", [name], [f"{name}.shape"]), one], [f"{name}.length"])
            for name in ("attention_mask", "input_ids")
        )
        first = self.node("Sub", [total, seq], ["mask.first"])
        keys = self.node("Unsqueeze", [self.node("Range", [zero, total, one], ["keys"]), axes[0,]], ["keys.row"])
        rows = [zero, seq, one] if self.adds else [first, total, one]
        queries = self.node("Unsqueeze", [self.node("Range", rows, ["qs"]), axes[1,]], ["qs.column"])
        early = self.node("LessOrEqual", [keys, queries], ["mask.causal"])
        real = self.node("Cast", ["attention_mask"], ["mask.bool"], to=TensorProto.BOOL)
        both = [
            self.node("Unsqueeze", [early, axes[0, 1]], ["mask.4d"]),
            self.node("Unsqueeze", [real, axes[1, 2]], ["real.4d"]),
        ]
        seen = self.node("And", both, ["mask.seen"])
        if self.adds:
            numbers = [self.held(f"number.{n}", np.array(n, np.float32)) for n in (0, -3e38)]
            self.node("Where", [seen, *numbers], ["mask.added"])

    def attention(self, name: str, packed: str, past: list[str], present: list[str]) -> str:
        """Rotated queries and keys, keys and values behind those of a past, and their attention."""
        sizes = self.held(f"{name}.sizes", np.array([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], np.int64))
        parts = [f"{name}.{part}" for part in "qkv"]
        self.node("Split", [packed, sizes], parts, axis=-1)
        q, k, v = (self.heads(part, heads) for part, heads in zip(parts, (HEADS, KV_HEADS, KV_HEADS), strict=True))
        q, k = (self.node("RotaryEmbedding", [x, "cos_cache.rows", "sin_cache.rows"], [f"{x}.turned"]) for x in (q, k))
        for old, new, made in zip(past, (k, v), present, strict=True):
            self.node("Concat", [old, new] if self.cached else [new], [made], axis=2)
        if self.adds:
            times = self.held(f"{name}.times", np.array([1, HEADS // KV_HEADS, 1, 1], np.int64))
            wide = [self.node("Tile", [x, times], [f"{x}.wide"]) for x in present]
            inputs = [*(self.merged(x, f"{x}.flat") for x in (q, *wide)), "", "", "mask.added"]
            sizes = {"num_heads": HEADS, "scale": WIDTH**-0.5}
            return self.node("MultiHeadAttention", inputs, [f"{name}.z"], MICROSOFT, **sizes)
        z = self.node("Attention", [q, *present, "mask.seen"], [f"{name}.z4"], scale=WIDTH**-0.5)
        return self.merged(z, f"{name}.z")

    def merged(self, x: str, name: str) -> str:
        """[batch, heads, seq, width] as [batch, seq, heads * width]."""
        shape = self.held(f"{name}.merged", np.array([0, 0, HEADS * WIDTH], np.int64))
        return self.node("Reshape", [self.node("Transpose", [x], [f"{name}.t"], perm=[0, 2, 1, 3]), shape], [name])

    def heads(self, x: str, count: int) -> str:
        """[batch, seq, count * width] as [batch, count, seq, width]."""
        shape = self.held(f"{x}.shape", np.array([0, 0, count, WIDTH], np.int64))
        return self.node(
            "Transpose", [self.node("Reshape", [x, shape], [f"{x}.split"])], [f"{x}.heads"], perm=[0, 2, 1, 3]
        )

    def chosen_experts(self, name: str, normed: str) -> str:
        """Linear experts, chosen and weighted by nodes that compute on [batch * seq, experts]."""
        sizes, k = (
            self.held(f"{name}.{what}", np.array(numbers, np.int64))
            for what, numbers in (("flat", [-1, HIDDEN]), ("k", [CHOSEN]))
        )
        flat = self.node("Reshape", [normed, sizes], [f"{name}.rows"])
        weights = [self.weight(f"{name}.router.weight", EXPERTS, HIDDEN), self.weight(f"{name}.router.bias", EXPERTS)]
        logits = self.node("Gemm", [flat, *weights], [f"{name}.router"], transB=1)
        largest, indices = f"{name}.largest", f"{name}.indices"
        self.node("TopK", [logits, k], [largest, indices])
        shares = self.node("Softmax", [largest], [f"{name}.shares"], axis=-1)
        size = self.node("Shape", [logits], [f"{name}.router.size"])
        empty = self.node("ConstantOfShape", [size], [f"{name}.none"])
        spread = self.node("ScatterElements", [empty, indices, shares], [f"{name}.spread"], axis=1)
        turned = self.node("Transpose", [spread], [f"{name}.turned"], perm=[1, 0])
        last, first = (self.held(f"{name}.axes.{axis}", np.array([axis], np.int64)) for axis in (2, 0))
        column = self.node("Unsqueeze", [turned, last], [f"{name}.column"])
        made = self.node("MatMul", [flat, self.weight(f"{name}.experts", EXPERTS, HIDDEN, HIDDEN)], [f"{name}.made"])
        summed = self.node(
            "ReduceSum", [self.node("Mul", [made, column], [f"{name}.weighed"]), first], [f"{name}.sum"], keepdims=0
        )
        shape = self.node("Shape", [normed], [f"{name}.shape"])
        return self.node("Reshape", [summed, shape], [f"{name}.mixed"])

    def mixture(self, name: str, normed: str) -> str:
        """Experts inside of one operator, that reads the router's logits as [batch * seq, experts]."""
        if self.router == "TopK":
            return self.chosen_experts(name, normed)
        logits = self.product(f"{name}.router", normed, HIDDEN, EXPERTS)
        if self.router:
            logits = self.node(self.router, [logits], [f"{name}.router.turned"])
        rows = self.held(f"{name}.rows", np.array([-1, EXPERTS], np.int64))
        flat = self.node("Reshape", [logits, rows], [f"{name}.router.flat"])
        inner = self.weight(f"{name}.first", EXPERTS, INNER, HIDDEN)
        outer = self.weight(f"{name}.last", EXPERTS, HIDDEN, INNER)
        sizes = {"k": CHOSEN, "activation_type": "silu", "normalize_routing_weights": 1}
        return self.node("MoE", [normed, flat, inner, "", outer], [f"{name}.experts"], MICROSOFT, **sizes)

    def skip(self, name: str, stream: str, branch: str) -> tuple[str, str]:
        """The stream with a branch added, and its norm."""
        inputs = [stream, branch, self.weight(f"{name}.norm", HIDDEN, mean=1)]
        outputs = [f"{name}.normed", "", "", f"{name}.sum"]
        normed = self.node("SkipSimplifiedLayerNormalization", inputs, outputs, MICROSOFT, epsilon=1e-5)
        return f"{name}.sum", normed


def write(
    folder: Path,
    seed: int = 0,
    router: str | None = None,
    standard: bool = False,
    cached: bool = True,
    adds: bool = False,
) -> Path:
    """Write the file.

    Args:
        folder: a new one.
        seed: of its weights.
        router: of a mixture of experts, what its logits go through before experts are chosen, if not empty; "TopK"
            for experts that nodes choose, None for dense MLPs.
        standard: rotation and attention as operators of ONNX's opset 23, with a mask and positions as inputs.
        cached: whether it has a past; a standard one need not.
        adds: attention of a standard one as MultiHeadAttention, whose added mask is wrong after a past.
    """
    graph = _Graph(seed, router, standard, cached, adds)
    stream = graph.node("Gather", [graph.weight("embedding", VOCAB, HIDDEN), "input_ids"], ["embedded"])
    lengths, tables = [] if standard else graph.lengths(), graph.tables()
    if standard:
        graph.angles(tables)
        graph.visible()
    inputs = [stream, graph.weight("first.norm", HIDDEN, mean=1)]
    normed = graph.node("SimplifiedLayerNormalization", inputs, ["first.normed"], axis=-1, epsilon=1e-5)
    for layer in range(LAYERS):
        stream, branch = graph.block(layer, stream, normed, lengths, tables)
        stream, normed = graph.skip(f"layers.{layer}.post", stream, branch)
    graph.node("MatMul", [normed, graph.weight("head", HIDDEN, VOCAB)], ["logits"])
    kinds, integer, fraction = ("key", "value"), TensorProto.INT64, TensorProto.FLOAT
    shape = ["batch", KV_HEADS, "past", WIDTH]
    values = [("input_ids", integer, ["batch", "seq"]), ("attention_mask", integer, ["batch", "total"])]
    values += [("position_ids", integer, ["batch", "seq"])] if standard else []
    made = [("logits", fraction, ["batch", "seq", VOCAB])]
    if cached:
        values += [(f"past_key_values.{layer}.{kind}", fraction, shape) for layer in range(LAYERS) for kind in kinds]
        made += [(f"present.{layer}.{kind}", fraction, shape) for layer in range(LAYERS) for kind in kinds]
    proto = helper.make_graph(
        graph.nodes,
        "fused",
        [helper.make_tensor_value_info(*value) for value in values],
        [helper.make_tensor_value_info(*value) for value in made],
        graph.weights,
        value_info=graph.shapes,
    )
    opsets = [helper.make_opsetid("", 23 if standard else 18), helper.make_opsetid(MICROSOFT, 1)]
    folder.mkdir(parents=True)
    onnx.save(helper.make_model(proto, opset_imports=opsets, ir_version=9), folder / "model.onnx")
    return folder / "model.onnx"
