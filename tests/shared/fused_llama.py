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

    def __init__(self, seed: int, router: str | None) -> None:
        self.router = router
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

    def mixture(self, name: str, normed: str) -> str:
        """Experts inside of one operator, that reads the router's logits as [batch * seq, experts]."""
        logits = self.product(f"{name}.router", normed, HIDDEN, EXPERTS)
        shape = ["batch", "seq", EXPERTS]
        self.shapes.append(helper.make_tensor_value_info(logits, TensorProto.FLOAT, shape))
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


def write(folder: Path, seed: int = 0, router: str | None = None) -> Path:
    """Write the file.

    Args:
        folder: a new one.
        seed: of its weights.
        router: of a mixture of experts, what its logits go through before experts are chosen, if not empty; None for
            dense MLPs.
    """
    graph = _Graph(seed, router)
    stream = graph.node("Gather", [graph.weight("embedding", VOCAB, HIDDEN), "input_ids"], ["embedded"])
    lengths, tables = graph.lengths(), graph.tables()
    inputs = [stream, graph.weight("first.norm", HIDDEN, mean=1)]
    normed = graph.node("SimplifiedLayerNormalization", inputs, ["first.normed"], axis=-1, epsilon=1e-5)
    for layer in range(LAYERS):
        stream, branch = graph.block(layer, stream, normed, lengths, tables)
        stream, normed = graph.skip(f"layers.{layer}.post", stream, branch)
    graph.node("MatMul", [normed, graph.weight("head", HIDDEN, VOCAB)], ["logits"])
    kinds, integer, fraction = ("key", "value"), TensorProto.INT64, TensorProto.FLOAT
    shape = ["batch", KV_HEADS, "past", WIDTH]
    values = [("input_ids", integer, ["batch", "seq"]), ("attention_mask", integer, ["batch", "total"])]
    values += [(f"past_key_values.{layer}.{kind}", fraction, shape) for layer in range(LAYERS) for kind in kinds]
    made = [("logits", fraction, ["batch", "seq", VOCAB])]
    made += [(f"present.{layer}.{kind}", fraction, shape) for layer in range(LAYERS) for kind in kinds]
    proto = helper.make_graph(
        graph.nodes,
        "fused",
        [helper.make_tensor_value_info(*value) for value in values],
        [helper.make_tensor_value_info(*value) for value in made],
        graph.weights,
        value_info=graph.shapes,
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
    folder.mkdir(parents=True)
    onnx.save(helper.make_model(proto, opset_imports=opsets, ir_version=9), folder / "model.onnx")
    return folder / "model.onnx"
