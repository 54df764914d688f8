"""A hooked model of eight nodes, and the same in numpy: embedding, two heads without scores, stream, head.

For tests of plans and rewrites that need hook points and no checkpoint; it keeps no past.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx.numpy_helper import from_array

from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.layers import Attention
from mionnx.graph.metadata import Metadata
from mionnx.graph.sizes import Sizes
from mionnx.rewrite.apply_plan import rewrite
from mionnx.rewrite.plan import Plan

VOCAB, HIDDEN, HEADS = 5, 4, 2
Z, ATTN_OUT, RESID = "blocks.0.attn.hook_z", "blocks.0.hook_attn_out", "blocks.0.hook_resid_post"
TEXT = f"""<ir_version: 10, opset_import: ["" : 21]>
toy (int64[batch, seq] input_ids, int64[batch, total] attention_mask, int64[batch, seq] position_ids)
  => (float[batch, seq, {VOCAB}] logits)
{{
  hook_embed = Gather(W_E, input_ids)
  apart = Constant <value = int64[4] {{0, 0, {HEADS}, {HIDDEN // HEADS}}}> ()
  "{Z}" = Reshape(hook_embed, apart)
  together = Constant <value = int64[3] {{0, 0, {HIDDEN}}}> ()
  flat = Reshape("{Z}", together)
  "{ATTN_OUT}" = MatMul(flat, W_O)
  "{RESID}" = Add(hook_embed, "{ATTN_OUT}")
  hook_logits = MatMul("{RESID}", W_U)
  logits = Identity(hook_logits)
}}"""
WEIGHTS = {
    name: np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)  # whole numbers: sums are exact
    for seed, (name, shape) in enumerate(
        {"W_E": (VOCAB, HIDDEN), "W_O": (HIDDEN, HIDDEN), "W_U": (HIDDEN, VOCAB)}.items()
    )
}
HOOKS = {
    "hook_embed": ["batch", "seq", HIDDEN],
    Z: ["batch", "seq", HEADS, HIDDEN // HEADS],
    ATTN_OUT: ["batch", "seq", HIDDEN],
    RESID: ["batch", "seq", HIDDEN],
    "hook_logits": ["batch", "seq", VOCAB],
}
IDS = np.array([[1, 2, 3], [4, 0, 1]])
Changes = Mapping[str, Callable[[np.ndarray], np.ndarray]]


def toy() -> HookedModel:
    """The hooked model, its weights in the graph."""
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(TEXT))
    proto.graph.initializer.extend(from_array(array, name) for name, array in WEIGHTS.items())
    proto = onnx.shape_inference.infer_shapes(proto)
    sizes = Sizes(1, HEADS, HEADS, HIDDEN // HEADS, HIDDEN, VOCAB)
    return HookedModel(Path("toy"), proto, Metadata("toy", "float32", sizes, HOOKS, [Attention("W_O", True)]))


def reference(changes: Changes | None = None, ids: np.ndarray = IDS) -> dict[str, np.ndarray]:
    """Every hook point's value in numpy, after the changes at it."""
    changed: dict[str, np.ndarray] = {}

    def hook(name: str, value: np.ndarray) -> np.ndarray:
        changed[name] = (changes or {}).get(name, lambda value: value)(value)
        return changed[name]

    embed = hook("hook_embed", WEIGHTS["W_E"][ids])
    z = hook(Z, embed.reshape(*ids.shape, HEADS, -1))
    resid = hook(RESID, embed + hook(ATTN_OUT, z.reshape(embed.shape) @ WEIGHTS["W_O"]))
    hook("hook_logits", resid @ WEIGHTS["W_U"])
    return changed


def run(plan: Plan, outputs: Sequence[str], ids: np.ndarray = IDS, **inputs: np.ndarray) -> list[np.ndarray]:
    """Outputs of the toy rewritten by a plan, in ONNX Runtime; a plan may start at hook points among the inputs."""
    model = toy()
    content, _ = rewrite(model.proto, plan, model.metadata)
    session = onnxruntime.InferenceSession(content)
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
    known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions, **inputs}
    return session.run(outputs, {entry.name: known[entry.name] for entry in session.get_inputs()})
