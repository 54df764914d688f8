"""The one recurrence in float64, token by token, and graphs with its nodes as the tracer leaves them.

Reads by name: q, k, v, g, s (the state), of the delta rule b; gates by name: w (write), e (erase), d (whether the state
decays), [batch, seq, heads, 1].
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from exporters.recurrence.expand import expand

Reads = Mapping[str, NDArray[np.float32]]
RULES, BY = ("gated", "delta"), ("head", "key", "number")
GATES = {"w": "state_write", "e": "state_erase", "d": "state_decay"}


def loop(reads: Reads, gates: Reads = {}) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # noqa: B006  # read only
    """y [batch, seq, heads, value], and the states after every token."""
    q, k, v, g, state = (reads[name].astype(np.float64) for name in "qkvgs")
    batch, seq, heads = v.shape[:3]
    one = np.ones((batch, seq, heads, 1))
    write, erase, decays = (gates.get(name, one) for name in "wed")
    ys, states = [], []
    for t in range(seq):
        log = np.where(decays[:, t, :, :, None] != 0, g[:, t] if g.ndim == 5 else g[:, t, :, :, None], 0)
        state = state * np.exp(log)
        u = write[:, t] * v[:, t]
        if "b" in reads:
            u = reads["b"][:, t] * (u - erase[:, t] * np.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        ys.append(np.einsum("bhk,bhkv->bhv", q[:, t], state))
        states.append(state)
    return np.stack(ys, 1), np.stack(states, 1)


def random_reads(
    rule: str,
    by: str,
    seq: int,
    strength: float = 0.1,
    sizes: Sequence[int] = (3, 16, 24),
    batch: int = 2,
    seed: int = 0,
) -> dict[str, NDArray[np.float32]]:
    """Reads of normal numbers, keys of length 1; `strength` is the middle of minus the log decays."""
    random, (heads, key, value), batch = np.random.default_rng(seed), sizes, 2
    decays = {"head": (1,), "key": (key,), "number": (key, value)}[by]
    shapes = {"q": (key,), "k": (key,), "v": (value,), "g": decays}
    reads = {name: random.normal(size=(batch, seq, heads, *shape)) for name, shape in shapes.items()}
    reads["k"] /= np.linalg.norm(reads["k"], axis=-1, keepdims=True)
    reads["g"] = -strength * np.exp(2 * reads["g"])
    reads["s"] = random.normal(size=(batch, heads, key, value))
    if rule == "delta":
        reads["b"] = 2 / (1 + np.exp(-2 * random.normal(size=(batch, seq, heads, 1))))
    return {name: array.astype(np.float32) for name, array in reads.items()}


def random_gates(seq: int, heads: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Gates that silence, steer and leave alone."""
    random = np.random.default_rng(seed)
    choices = {"w": (0, 1, 2.5), "e": (0, 1, 0.5, -1), "d": (0, 1)}
    return {name: random.choice(of, (2, seq, heads, 1)).astype(np.float32) for name, of in choices.items()}


def marked(layers: Mapping[int, Reads]) -> ir.Model:
    """A graph with a node of a recurrence for each layer, its inputs `q.0`, its outputs hook points."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23, "mionnx.recurrence": 1}, name="marked")
    for layer, reads in layers.items():
        inputs = []
        for name in (name for name in "qkvgsb" if name in reads):
            dims = ["batch", *(() if name == "s" else ("seq",)), *reads[name].shape[1 if name == "s" else 2 :]]
            kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(dims)
            inputs.append(ir.Value(name=f"{name}.{layer}", type=kind, shape=shape))
        node = ir.Node("mionnx.recurrence", "Recurrence", inputs, [ir.AttrInt64("layer", layer)], num_outputs=2)
        for value, name, like in zip(node.outputs, ("y", "state"), (inputs[2], inputs[4]), strict=True):
            value.name, value.type, value.shape = f"blocks.{layer}.ssm.hook_{name}", like.type, like.shape
        graph.inputs.extend(inputs)
        graph.outputs.extend(node.outputs)
        graph.append(node)
    return ir.Model(graph, ir_version=10)


def expanded(layers: Mapping[int, Reads]) -> bytes:
    """The same in standard operators."""
    model = marked(layers)
    expand(model)
    return ir.serde.serialize_model(model).SerializeToString()


def opened(model: bytes) -> ort.InferenceSession:
    """A session of one thread."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 3
    return ort.InferenceSession(model, settings)


def fed(layers: Mapping[int, Reads], gates: Mapping[int, Reads] = {}) -> dict[str, NDArray]:  # read only
    """Feeds of `marked`: all reads, and the gates of some layers; of the others they are ones."""
    feeds = {f"{name}.{layer}": array for layer, reads in layers.items() for name, array in reads.items()}
    if gates:
        batch, seq = next(iter(layers.values()))["v"].shape[:2]
        widest = max(reads["v"].shape[2] for reads in layers.values())
        for short, name in GATES.items():
            gate = np.ones((1 + max(layers), batch, seq, widest), np.float32)
            for layer, own in gates.items():
                gate[layer, ..., : own[short].shape[2]] = own[short][..., 0]
            feeds[name] = gate.astype(bool) if short == "d" else gate
    if all("b" not in reads for reads in layers.values()):
        feeds.pop("state_erase", None)
    return feeds


def error(value: NDArray, expected: NDArray[np.float64]) -> float:
    """The largest difference, of the largest number expected."""
    return float(np.abs(value - expected).max() / np.abs(expected).max())
