"""Rewrite: values derived from the recurrence of state-space and delta-rule mixers, which only their capture brings in.

They are those of `rwkv_derived`, of S_t = exp(g_t) S_(t-1) + k_t (x) u_t, y_t = q_t S_t (u_t is w_t v_t, of the delta
rule b_t (w_t v_t - e_t k_t exp(g_t) S_(t-1))), on what the model's own recurrence reads, gates included.

Where each number of the state has a decay of its own (Mamba; the values of its heads, mostly of one, are the channels),
effective attention differs from channel to channel: these stand in the place of heads.
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.errors import ModelError
from mionnx.graph.builder import Builder
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.io_names import STATE
from mionnx.graph.metadata import Metadata
from mionnx.graph.report import Report

FLOAT = np.dtype(np.float32)
TO_THE_END = np.iinfo(np.int64).max


def mixer_states(op: Builder, point: HookPoint, tensors: Mapping[str, gs.Tensor], metadata: Metadata) -> gs.Variable:
    """Add the nodes of `hook_states`: [batch, seq, n_heads, key_dim, value_dim], float32."""
    mixer = _Mixer(op, point, tensors, metadata)
    start = tensors[f"{STATE.past}.{point.layer}.{STATE.parts[1]}"]
    return mixer.scan(start, {**mixer.writes, "v": op.Unsqueeze(mixer.value("written_v"), [-2])})


def raw_mixer_attention(
    op: Builder, point: HookPoint, tensors: Mapping[str, gs.Tensor], metadata: Metadata
) -> gs.Variable:
    """Add the nodes of `hook_effective_attn_raw`: [batch, n_heads or channels, seq_q, seq_src], float32."""
    return _Mixer(op, point, tensors, metadata).weights()


def mixer_attention(op: Builder, point: HookPoint, tensors: Mapping[str, gs.Tensor], metadata: Metadata) -> gs.Variable:
    """Add the nodes of `hook_effective_attn`: [batch, n_heads or channels, seq_q, seq_src], float32."""
    positive = op.Relu(_Mixer(op, point, tensors, metadata).weights())
    total = op.ReduceSum(positive, [-1], keepdims=1)
    # a row without a positive weight divides 0 by this, and stays 0
    return op.Div(positive, op.Max(total, op.constant(np.finfo(np.float32).tiny, np.float32)))


def scan_tokens(op: Builder, start: gs.Tensor, vectors: Mapping[str, gs.Tensor], body: gs.Graph) -> gs.Variable:
    """What the body of a recurrence gives for each token of some vectors, along their axis 1."""
    axes = [1] * len(vectors)
    _, scanned = op.Scan(
        start,
        *vectors.values(),
        outputs=2,
        dtype=FLOAT,
        body=body,
        num_scan_inputs=len(vectors),
        scan_input_axes=axes,
        scan_output_axes=[1],
    )
    return scanned


class _Mixer:
    """One layer's recurrence, step by step, on the values that the model's own reads."""

    def __init__(self, op: Builder, point: HookPoint, tensors: Mapping[str, gs.Tensor], metadata: Metadata) -> None:
        self.op, self.point, self.tensors = op, point, tensors
        self.by_number = metadata.decays_by_number(point.layer or 0)
        self.channels = metadata.axis_sizes(point)["n_heads"]  # of effective attention

    def value(self, name: str) -> gs.Tensor:
        """A value of the layer's mixer in float32, in which the recurrence is computed."""
        name = f"blocks.{self.point.layer}.ssm.{name}"
        if name not in self.tensors:
            raise ModelError(f"{self.point}: the graph has no value {name!r}, export the model again")
        value = self.tensors[name]
        return value if value.dtype == FLOAT else self.op.Cast(value, to=np.float32)

    @cached_property
    def writes(self) -> dict[str, gs.Tensor]:
        """What the body reads of a token besides its value: columns, rows and numbers of [batch, seq, n_heads, ...]."""
        op, decay = self.op, self.op.Exp(self.value("kept_log_decay"))
        read = {"d": decay if self.by_number else op.Unsqueeze(decay, [-1])}
        read["k"] = op.Unsqueeze(self.value("hook_k"), [-1])
        if f"blocks.{self.point.layer}.ssm.hook_write" in self.tensors:
            read["b"] = op.Unsqueeze(op.Mul(self.value("hook_write"), self.real), [-1])
            read["e"] = op.Unsqueeze(op.Mul(self.value("erase_gate"), self.real), [-1])  # as long as the text
        return read

    @cached_property
    def real(self) -> gs.Tensor:
        """[batch, seq, 1, 1]: 1 for tokens, 0 for padding, which writes nothing."""
        op, mask = self.op, self.tensors["attention_mask"]
        first = op.Sub(op.Shape(mask, start=1, end=2), op.Shape(self.tensors["input_ids"], start=1, end=2))
        tokens = op.Slice(mask, first, [TO_THE_END], [1])
        return op.Unsqueeze(op.Cast(tokens, to=np.float32), [2, 3])

    def weights(self) -> gs.Variable:
        """[batch, n_heads or channels, seq_q, seq_src]: the recurrence from an empty state on the identity."""
        op, keys = self.op, self.value("hook_k")
        tokens = op.Range(0, op.Squeeze(op.Shape(keys, start=1, end=2)), 1)
        unit = op.Cast(op.Equal(op.Unsqueeze(tokens, [1]), tokens), to=np.float32)  # a row a token
        own = op.Mul(self.value("write_gate"), self.real)  # [batch, seq, n_heads, 1]
        vectors = {**self.writes, "v": op.Unsqueeze(op.Mul(own, op.Unsqueeze(unit, [0, 2])), [-2])}
        vectors["q"] = op.Unsqueeze(self.value("hook_q"), [-2])
        if self.by_number:  # [batch, seq, n_heads, value, key, 1]: a column of decays for each channel
            decays = op.Unsqueeze(op.Transpose(vectors.pop("d"), perm=[0, 1, 2, 4, 3]), [-1])
            vectors = {"d": decays, **{name: op.Unsqueeze(one, [3]) for name, one in vectors.items()}}
        # [batch, n_heads, key, seq_src], or of channels [batch, n_heads, value, key, seq_src], zeros
        shapes = [op.Gather(vectors[name], 0, axis=1) for name in ("d", "k", "v")]
        empty = op.Expand(op.constant([0], np.float32), op.Shape(op.Mul(op.Mul(*shapes[:2]), shapes[2])))
        weights = op.Squeeze(self.scan(empty, vectors), [-2])
        if self.by_number:
            weights = op.Reshape(weights, [0, 0, self.channels, -1])
        return op.Transpose(weights, perm=[0, 2, 1, 3])

    def scan(self, start: gs.Tensor, vectors: Mapping[str, gs.Tensor]) -> gs.Variable:
        """What the body gives for each token, along axis 1."""
        return scan_tokens(self.op, start, vectors, self._body([*vectors]))

    def _body(self, names: list[str]) -> gs.Graph:
        """The body of the scan: one token's state, and its output; the state itself where nothing reads it."""
        prefix = f"{self.op.prefix}.body"
        before, *read = (gs.Variable(f"{prefix}.{name}", dtype=FLOAT) for name in ("before", *names))
        at = dict(zip(names, read, strict=True))
        body = gs.Graph(inputs=[before, *read], name=prefix, opset=self.op.graph.opset)
        op = Builder(body, prefix, prefix, Report())
        decayed = op.Mul(at["d"], before)
        written = at["v"]
        if "b" in at:
            stored = op.MatMul(op.Transpose(at["k"], perm=[0, 1, 3, 2]), decayed)
            written = op.Mul(at["b"], op.Sub(written, op.Mul(at["e"], stored)))
        state = op.Add(decayed, op.Mul(at["k"], written), name="after")
        result = op.MatMul(at["q"], state, name="out") if "q" in at else op.Identity(state, name="state")
        body.outputs = [state, result]
        return body
