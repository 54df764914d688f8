"""A hybrid of three layers in a folder, and the same in numpy: a recurrence behind a convolution, attention, an MLP.

For tests of rooms that ask a layer what it carries; layer 2 carries nothing.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx.numpy_helper import from_array

from mionnx.graph.hooked_model import GRAPH
from mionnx.graph.layers import Attention, Recurrence
from mionnx.graph.metadata import Metadata
from mionnx.graph.sizes import Sizes
from mionnx.graph.weight_record import describe_export

VOCAB, HIDDEN, HEADS, SIZE, KERNEL = 23, 8, 2, 4, 3
TEXT = """<ir_version: 10, opset_import: ["" : 21]>
hybrid (int64[batch, seq] input_ids, int64[batch, total] attention_mask, int64[batch, seq] position_ids,
  float[batch, 8, 2] "past_state.0.conv", float[batch, 2, 4, 4] "past_state.0.state",
  float[batch, 2, past, 4] "past_key_values.1.key", float[batch, 2, past, 4] "past_key_values.1.value")
=> (float[batch, seq, 23] logits, float[batch, 8, 2] "present_state.0.conv", float[batch, 2, 4, 4]
  "present_state.0.state", float[batch, 2, total, 4] "present.1.key", float[batch, 2, total, 4] "present.1.value")
<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}, int64[1] far = {1000000},
 int64[4] apart = {0, 0, 2, 4}, int64[3] together = {0, 0, 8}, int64 first = {0}, int64 step = {1},
 float half = {0.5}, float nothing = {0.0}, float hidden_key = {-1e9}>
{
  hook_embed = Gather(W_E, input_ids)
  "blocks.0.hook_resid_pre" = Identity(hook_embed)
  seq_length = Shape <start = 1, end = 2> (input_ids)
  total_length = Shape <start = 1, end = 2> (attention_mask)
  back = Neg(seq_length)
  own_mask = Slice(attention_mask, back, far, one)
  real = Cast <to = 1> (own_mask)
  real_tokens = Unsqueeze(real, two)
  projected = MatMul("blocks.0.hook_resid_pre", W_X)
  unpadded = Mul(projected, real_tokens)
  new_columns = Transpose <perm = [0, 2, 1]> (unpadded)
  columns = Concat <axis = 2> ("past_state.0.conv", new_columns)
  minus_two = Neg(two)
  "present_state.0.conv" = Slice(columns, minus_two, far, two)
  end_1 = Add(seq_length, one)
  end_2 = Add(seq_length, two)
  shifted_0 = Slice(columns, zero, seq_length, two)
  shifted_1 = Slice(columns, one, end_1, two)
  shifted_2 = Slice(columns, two, end_2, two)
  tap_0 = Mul(shifted_0, C_0)
  tap_1 = Mul(shifted_1, C_1)
  tap_2 = Mul(shifted_2, C_2)
  taps_01 = Add(tap_0, tap_1)
  convolved = Add(taps_01, tap_2)
  mixed = Transpose <perm = [0, 2, 1]> (convolved)
  q_flat = MatMul(mixed, W_Q)
  k_flat = MatMul(mixed, W_K)
  v_all = MatMul(mixed, W_V)
  v_flat = Mul(v_all, real_tokens)
  q_apart = Reshape(q_flat, apart)
  k_apart = Reshape(k_flat, apart)
  v_apart = Reshape(v_flat, apart)
  q = Transpose <perm = [0, 2, 1, 3]> (q_apart)
  k_turned = Transpose <perm = [0, 2, 3, 1]> (k_apart)
  v = Transpose <perm = [0, 2, 1, 3]> (v_apart)
  products = MatMul(q, k_turned)
  causal = Trilu <upper = 0> (products)
  y_new = MatMul(causal, v)
  y_old = MatMul(q, "past_state.0.state")
  y = Add(y_new, y_old)
  written = MatMul(k_turned, v)
  "present_state.0.state" = Add("past_state.0.state", written)
  y_turned = Transpose <perm = [0, 2, 1, 3]> (y)
  y_flat = Reshape(y_turned, together)
  "blocks.0.hook_attn_out" = MatMul(y_flat, W_O)
  "blocks.0.hook_resid_post" = Add("blocks.0.hook_resid_pre", "blocks.0.hook_attn_out")
  "blocks.1.hook_resid_pre" = Identity("blocks.0.hook_resid_post")
  queries = MatMul("blocks.1.hook_resid_pre", W_Q1)
  keys_flat = MatMul("blocks.1.hook_resid_pre", W_K1)
  values_flat = MatMul("blocks.1.hook_resid_pre", W_V1)
  queries_apart = Reshape(queries, apart)
  keys_apart = Reshape(keys_flat, apart)
  values_apart = Reshape(values_flat, apart)
  "blocks.1.attn.hook_q" = Transpose <perm = [0, 2, 1, 3]> (queries_apart)
  "blocks.1.attn.hook_k" = Transpose <perm = [0, 2, 1, 3]> (keys_apart)
  "blocks.1.attn.hook_v" = Transpose <perm = [0, 2, 1, 3]> (values_apart)
  "present.1.key" = Concat <axis = 2> ("past_key_values.1.key", "blocks.1.attn.hook_k")
  "present.1.value" = Concat <axis = 2> ("past_key_values.1.value", "blocks.1.attn.hook_v")
  keys_turned = Transpose <perm = [0, 1, 3, 2]> ("present.1.key")
  dots = MatMul("blocks.1.attn.hook_q", keys_turned)
  scaled = Mul(dots, half)
  end = Squeeze(total_length)
  begin_1 = Sub(total_length, seq_length)
  begin = Squeeze(begin_1)
  at_key = Range(first, end, step)
  at_query = Range(begin, end, step)
  query_column = Unsqueeze(at_query, one)
  before = LessOrEqual(at_key, query_column)
  mask_bool = Cast <to = 9> (attention_mask)
  mask_1 = Unsqueeze(mask_bool, one)
  mask_2 = Unsqueeze(mask_1, one)
  visible = And(before, mask_2)
  bias = Where(visible, nothing, hidden_key)
  "blocks.1.attn.hook_scores" = Add(scaled, bias)
  "blocks.1.attn.hook_pattern" = Softmax <axis = -1> ("blocks.1.attn.hook_scores")
  read = MatMul("blocks.1.attn.hook_pattern", "present.1.value")
  "blocks.1.attn.hook_z" = Transpose <perm = [0, 2, 1, 3]> (read)
  z_flat = Reshape("blocks.1.attn.hook_z", together)
  "blocks.1.hook_attn_out" = MatMul(z_flat, W_O1)
  "blocks.1.hook_resid_post" = Add("blocks.1.hook_resid_pre", "blocks.1.hook_attn_out")
  "blocks.2.hook_resid_pre" = Identity("blocks.1.hook_resid_post")
  "blocks.2.mlp.hook_pre" = Identity("blocks.2.hook_resid_pre")
  neurons = MatMul("blocks.2.mlp.hook_pre", W_UP)
  "blocks.2.mlp.hook_act" = Relu(neurons)
  "blocks.2.hook_mlp_out" = MatMul("blocks.2.mlp.hook_act", W_DOWN)
  "blocks.2.hook_resid_post" = Add("blocks.2.hook_resid_pre", "blocks.2.hook_mlp_out")
  hook_logits = MatMul("blocks.2.hook_resid_post", W_U)
  logits = Identity(hook_logits)
}"""
SHAPES = {
    "W_E": (VOCAB, HIDDEN),
    **{f"C_{i}": (HIDDEN, 1) for i in range(KERNEL)},
    **dict.fromkeys(("W_X", "W_Q", "W_K", "W_V", "W_O", "W_Q1", "W_K1", "W_V1", "W_O1"), (HIDDEN, HIDDEN)),
    "W_UP": (HIDDEN, 12),
    "W_DOWN": (12, HIDDEN),
    "W_U": (HIDDEN, VOCAB),
}
WEIGHTS = {
    name: np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)
    for seed, (name, shape) in enumerate(SHAPES.items())
}
STREAM, HEADS_FIRST = ["batch", "seq", HIDDEN], ["batch", HEADS, "seq", SIZE]
HOOKS = {
    "hook_embed": STREAM,
    "blocks.0.hook_resid_pre": STREAM,
    "blocks.0.hook_attn_out": STREAM,
    "blocks.0.hook_resid_post": STREAM,
    "blocks.1.hook_resid_pre": STREAM,
    **{f"blocks.1.attn.hook_{name}": HEADS_FIRST for name in "qkv"},
    "blocks.1.attn.hook_scores": ["batch", HEADS, "seq_q", "seq_k"],
    "blocks.1.attn.hook_pattern": ["batch", HEADS, "seq_q", "seq_k"],
    "blocks.1.attn.hook_z": ["batch", "seq", HEADS, SIZE],
    "blocks.1.hook_attn_out": STREAM,
    "blocks.1.hook_resid_post": STREAM,
    "blocks.2.hook_resid_pre": STREAM,
    "blocks.2.mlp.hook_pre": STREAM,
    "blocks.2.mlp.hook_act": ["batch", "seq", 12],
    "blocks.2.hook_mlp_out": STREAM,
    "blocks.2.hook_resid_post": STREAM,
    "hook_logits": ["batch", "seq", VOCAB],
}
RECURRENCE = Recurrence("gated", HEADS, SIZE, SIZE, channels=HIDDEN, kernel=KERNEL)


def write_hybrid(folder: Path) -> Path:
    """Write the hooked model's folder."""
    folder.mkdir()
    proto = onnx.parser.parse_model(TEXT)
    proto.graph.initializer.extend(from_array(array, name) for name, array in WEIGHTS.items())
    onnx.save_model(proto, folder / GRAPH, save_as_external_data=True, location="weights.bin", size_threshold=20)
    proto = onnx.shape_inference.infer_shapes(onnx.load(folder / GRAPH, load_external_data=False))
    sizes = Sizes(3, HEADS, HEADS, SIZE, HIDDEN, VOCAB)
    digest, files = describe_export(folder, ["weights.bin"], [folder / "weights.bin"], lambda *_: None)
    metadata = Metadata(
        "toy_hybrid",
        "float32",
        sizes,
        HOOKS,
        [None, Attention("W_O1", True), None],
        recurrence=[RECURRENCE, None, None],
        weights_sha256=digest,
        weight_files=files,
    )
    for key, value in metadata.to_props().items():
        proto.metadata_props.add(key=key, value=value)
    onnx.save_model(proto, folder / GRAPH)
    return folder


def logits_of(ids: np.ndarray) -> np.ndarray:
    """The logits [seq, vocab] of one text, token by token, in float64."""
    w = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    stream, state = w["W_E"][ids], np.zeros((HEADS, SIZE, SIZE))
    columns = np.concatenate([np.zeros((KERNEL - 1, HIDDEN)), stream @ w["W_X"]])
    added = []
    for t in range(len(ids)):
        mixed = sum(columns[t + i] * w[f"C_{i}"][:, 0] for i in range(KERNEL))
        q, k, v = ((mixed @ w[name]).reshape(HEADS, SIZE) for name in ("W_Q", "W_K", "W_V"))
        state = state + k[:, :, None] * v[:, None, :]
        added.append((q[:, None] @ state).ravel() @ w["W_O"])
    stream = stream + np.array(added)
    q, k, v = (np.moveaxis((stream @ w[name]).reshape(-1, HEADS, SIZE), 1, 0) for name in ("W_Q1", "W_K1", "W_V1"))
    scores = np.where(np.tri(len(ids), dtype=bool), q @ np.moveaxis(k, 1, 2) / 2, -np.inf)
    pattern = np.exp(scores - scores.max(-1, keepdims=True))
    z = (pattern / pattern.sum(-1, keepdims=True)) @ v
    stream = stream + np.moveaxis(z, 0, 1).reshape(len(ids), -1) @ w["W_O1"]
    return (stream + np.maximum(stream @ w["W_UP"], 0) @ w["W_DOWN"]) @ w["W_U"]
