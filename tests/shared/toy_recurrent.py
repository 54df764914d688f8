"""A hooked model of two recurrent layers in a folder, one of each rule, and the same in numpy, token by token.

For tests that need the open form of a recurrence, its gates and states, and no checkpoint.
"""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.numpy_helper import from_array

from exporters.recurrence.expand import expand
from mionnx.graph.hooked_model import GRAPH
from mionnx.graph.layers import Recurrence
from mionnx.graph.metadata import Metadata
from mionnx.graph.sizes import Sizes
from mionnx.graph.weight_record import describe_export

VOCAB, HIDDEN, HEADS, SIZE = 23, 8, 2, 4
LAYER = """
  q_flat_{i} = MatMul("blocks.{i}.hook_resid_pre", W_Q)
  k_flat_{i} = MatMul("blocks.{i}.hook_resid_pre", W_K)
  v_flat_{i} = MatMul("blocks.{i}.hook_resid_pre", W_V)
  g_flat_{i} = MatMul("blocks.{i}.hook_resid_pre", W_G)
  b_flat_{i} = MatMul("blocks.{i}.hook_resid_pre", W_B)
  q_{i} = Reshape(q_flat_{i}, apart)
  k_{i} = Reshape(k_flat_{i}, apart)
  v_{i} = Reshape(v_flat_{i}, apart)
  g_apart_{i} = Reshape(g_flat_{i}, apart)
  b_apart_{i} = Reshape(b_flat_{i}, apart)
  g_soft_{i} = Softplus(g_apart_{i})
  g_{i} = Neg(g_soft_{i})
  b_{i} = Sigmoid(b_apart_{i})
  y_{i}, "present_state.{i}.state" =
    mionnx.recurrence.Recurrence <layer = {i}> (q_{i}, k_{i}, v_{i}, g_{i}, "past_state.{i}.state"{b})
  y_flat_{i} = Reshape(y_{i}, together)
  "blocks.{i}.hook_attn_out" = MatMul(y_flat_{i}, W_O)
  "blocks.{i}.hook_resid_post" = Add("blocks.{i}.hook_resid_pre", "blocks.{i}.hook_attn_out")
"""
TEXT = """<ir_version: 10, opset_import: ["" : 23, "mionnx.recurrence" : 1]>
recurrent (int64[batch, seq] input_ids, float[batch, 2, 4, 4] "past_state.0.state",
  float[batch, 2, 4, 4] "past_state.1.state")
=> (float[batch, seq, 23] logits, float[batch, 2, 4, 4] "present_state.0.state",
  float[batch, 2, 4, 4] "present_state.1.state")
<int64[4] apart = {{0, 0, 2, -1}}, int64[3] together = {{0, 0, 8}}>
{{
  hook_embed = Gather(W_E, input_ids)
  "blocks.0.hook_resid_pre" = Identity(hook_embed)
  {first}
  "blocks.1.hook_resid_pre" = Identity("blocks.0.hook_resid_post")
  {second}
  hook_logits = MatMul("blocks.1.hook_resid_post", W_U)
  logits = Identity(hook_logits)
}}"""
SHAPES = {
    **dict.fromkeys(("W_Q", "W_K", "W_V", "W_O", "W_G"), (HIDDEN, HIDDEN)),
    "W_E": (VOCAB, HIDDEN),
    "W_B": (HIDDEN, HEADS),
    "W_U": (HIDDEN, VOCAB),
}
WEIGHTS = {
    name: np.random.default_rng(seed).normal(0, 0.4, shape).astype(np.float32)
    for seed, (name, shape) in enumerate(SHAPES.items())
}
STREAM = ["batch", "seq", HIDDEN]
HOOKS = {
    "hook_embed": STREAM,
    **{f"blocks.{i}.hook_{name}": STREAM for i in range(2) for name in ("resid_pre", "attn_out", "resid_post")},
    "hook_logits": ["batch", "seq", VOCAB],
}
RECURRENCES = [
    Recurrence("gated", HEADS, SIZE, SIZE, gates=["write", "decay"]),
    Recurrence("delta", HEADS, SIZE, SIZE, gates=["write", "erase", "decay"]),
]


def write_recurrent(folder: Path) -> Path:
    """Write the hooked model's folder."""
    folder.mkdir()
    proto = onnx.parser.parse_model(TEXT.format(first=LAYER.format(i=0, b=""), second=LAYER.format(i=1, b=", b_1")))
    proto.graph.initializer.extend(from_array(array, name) for name, array in WEIGHTS.items())
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto))
    expand(model)
    proto = ir.serde.serialize_model(model)
    for tensor in proto.graph.initializer:
        if tensor.name in WEIGHTS:  # as in an export, constants stay in the graph
            onnx.external_data_helper.set_external_data(tensor, "weights.bin")
    onnx.save_model(proto, folder / GRAPH)
    proto = onnx.shape_inference.infer_shapes(onnx.load(folder / GRAPH, load_external_data=False))
    digest, files = describe_export(folder, ["weights.bin"], [folder / "weights.bin"], lambda *_: None)
    sizes = Sizes(2, HEADS, HEADS, SIZE, HIDDEN, VOCAB)
    metadata = Metadata(
        "toy_recurrent",
        "float32",
        sizes,
        HOOKS,
        [None, None],
        recurrence=RECURRENCES,
        weights_sha256=digest,
        weight_files=files,
    )
    for key, value in metadata.to_props().items():
        proto.metadata_props.add(key=key, value=value)
    onnx.save_model(proto, folder / GRAPH)
    return folder


def logits_of(ids: NDArray[np.int64], write: float = 1, erase: float = 1, decays: bool = True, at: int = -1) -> NDArray:
    """The logits [seq, vocab] of one text in float64, with factors of what token `at` does to the states."""
    w = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    stream = w["W_E"][ids]
    for rule in ("gated", "delta"):
        state, out = np.zeros((HEADS, SIZE, SIZE)), []
        for t, x in enumerate(stream):
            q, k, v, g = ((x @ w[f"W_{name}"]).reshape(HEADS, SIZE) for name in "QKVG")
            if decays or t != at:
                state = state * np.exp(-np.log1p(np.exp(g)))[..., None]
            u = v * (write if t == at else 1)
            if rule == "delta":
                b = 1 / (1 + np.exp(-(x @ w["W_B"])))[:, None]
                u = b * (u - (erase if t == at else 1) * np.einsum("hk,hkv->hv", k, state))
            state = state + k[..., None] * u[:, None]
            out.append(np.einsum("hk,hkv->hv", q, state).ravel())
        stream = stream + np.array(out) @ w["W_O"]
    return stream @ w["W_U"]
