"""Rewrite: values derived from an RWKV recurrence, which only their capture brings in.

1. `hook_states` is the recurrence run again, one token an iteration, giving the state after every token.
2. `hook_effective_attn_raw` is the recurrence run from an empty state with the identity for values: its output at a
   query is the weight with which each source token's value enters, gates and interventions included, because it reads
   what the model's own recurrence reads. Times the values it gives the recurrence's output, apart from what the state
   before this call contributes.
3. `hook_effective_attn` is max(raw, 0), each row divided by its sum; a row without a positive weight stays 0.

Of RWKV-4 the channels stand for heads, whose key and value have size 1; of its state each row is a number of a channel.
"""

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.graph.builder import Builder
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.io_names import SHIFTED_STATE
from mionnx.graph.metadata import Metadata
from mionnx.graph.report import Report
from mionnx.rewrite.ssm_derived import scan_tokens

# In the order in which the body reads them: (name of the value, whether it is a column vector there).
_PER_TOKEN = {
    "k": ("written_k", True),
    "v": ("hook_v", False),
    "d": ("kept_decay", True),
    "a": ("hook_a", False),
    "b": ("erased_b", True),
    "r": ("hook_r", False),
}


def states(op: Builder, point: HookPoint, tensors: Mapping[str, gs.Tensor], metadata: Metadata) -> gs.Variable:
    """Add the nodes of `hook_states`: [batch, seq, n_heads, key_dim, value_dim], float32."""
    return _Recurrence(op, point, tensors).states()


def raw_effective_attention(
    op: Builder, point: HookPoint, tensors: Mapping[str, gs.Tensor], metadata: Metadata
) -> gs.Variable:
    """Add the nodes of `hook_effective_attn_raw`: [batch, n_heads, seq_q, seq_src], float32."""
    return _Recurrence(op, point, tensors).effective()


def effective_attention(
    op: Builder, point: HookPoint, tensors: Mapping[str, gs.Tensor], metadata: Metadata
) -> gs.Variable:
    """Add the nodes of `hook_effective_attn`: [batch, n_heads, seq_q, seq_src], float32."""
    positive = op.Relu(_Recurrence(op, point, tensors).effective())
    total = op.ReduceSum(positive, [-1], keepdims=1)
    # a row without a positive weight divides 0 by this, and stays 0
    return op.Div(positive, op.Max(total, op.constant(np.finfo(np.float32).tiny, np.float32)))


class _Recurrence:
    """One layer's recurrence, step by step, on the values that the model's own reads."""

    def __init__(self, op: Builder, point: HookPoint, tensors: Mapping[str, gs.Tensor]) -> None:
        self.op, self.layer, self.tensors = op, point.layer, tensors
        where = f"blocks.{point.layer}.rwkv"
        self.bonus = tensors.get(f"{where}.bonus")
        self.total = tensors.get(f"{where}.total")  # of the weights of RWKV-4
        self.values = {
            short: (tensors[f"{where}.{name}"], column)
            for short, (name, column) in _PER_TOKEN.items()
            if f"{where}.{name}" in tensors
        }
        if self.total is not None:
            self.exponent = tensors[f"{where}.exponent"]
            self.values["r"] = (tensors[f"{where}.read"], False)
            self.values = {short: (self._by_channel(one), column) for short, (one, column) in self.values.items()}
            self.bonus, self.total = (self._by_channel(one) for one in (self.bonus, self.total))

    def _by_channel(self, value: gs.Tensor) -> gs.Variable:
        """[batch, seq, 1, channels] as [batch, seq, channels, 1]."""
        return self.op.Transpose(value, perm=[0, 1, 3, 2])

    def states(self) -> gs.Variable:
        """[batch, seq, n_heads, key, value]: the state after each token."""
        self.values.pop("r")  # without a receptance the body gives states
        _, wkv, _ = SHIFTED_STATE.layer_inputs(self.layer or 0)  # the state before this call, between two token shifts
        op, start = self.op, self.tensors[wkv]
        if self.total is not None:  # [batch, channels, 1, 2], numerators and denominators
            start = op.Transpose(op.Slice(start, [0], [2], [2]), perm=[0, 3, 1, 2])
            value = self.values["v"][0]
            ones = op.Expand(op.constant([1], np.float32), op.Shape(value))
            self.values["v"] = (op.Concat(value, ones, axis=3), False)
        vectors = self._vectors()
        states = scan_tokens(op, start, vectors, self._body([*vectors]))
        if self.total is None:
            return states
        rows, zero = op.Transpose(states, perm=[0, 1, 3, 4, 2]), op.constant(0, np.float32)
        nothing = op.Equal(op.Slice(rows, [1], [2], [3]), zero)  # an empty state is zeros
        return op.Concat(rows, op.Where(nothing, zero, op.Unsqueeze(self.exponent, [3])), axis=3)

    def effective(self) -> gs.Variable:
        """[batch, n_heads, seq_q, seq_src]."""
        op, keys = self.op, self.values["k"][0]
        unit = self._unit_values(keys)
        vectors = {**self._vectors(), "v": unit}
        # [batch, n_heads, key, seq_src], zeros: one key's vector times one row of the unit values, times 0
        first_key, first_row = op.Gather(vectors["k"], 0, axis=1), op.Gather(unit, 0, axis=1)
        empty = op.Expand(op.constant([0], np.float32), op.Shape(op.Mul(first_key, first_row)))
        weights = scan_tokens(op, empty, vectors, self._body([*vectors]))  # [batch, seq_q, n_heads, 1, seq_src]
        # RWKV-6 reads the state before the token: the token's own value enters by this bonus alone
        if self.bonus is not None:
            weights = op.Add(weights, op.Mul(op.Unsqueeze(self.bonus, [4]), unit))
        if self.total is not None:
            weights = op.Div(weights, op.Unsqueeze(self.total, [4]))
        return op.Transpose(op.Squeeze(weights, [3]), perm=[0, 2, 1, 3])

    def _unit_values(self, keys: gs.Tensor) -> gs.Variable:
        """[1, seq, 1, 1, seq]: the identity, a row a token."""
        op = self.op
        tokens = op.Range(0, op.Squeeze(op.Shape(keys, start=1, end=2)), 1)
        equal = op.Equal(op.Unsqueeze(tokens, [1]), tokens)
        return op.Unsqueeze(op.Cast(equal, to=np.float32), [0, 2, 3])

    def _vectors(self) -> dict[str, gs.Variable]:
        """Inputs of the body as columns or rows: [batch, seq, n_heads, head_dim, 1] or transposed."""
        return {
            short: self.op.Unsqueeze(value, [-1 if column else -2]) for short, (value, column) in self.values.items()
        }

    def _body(self, names: list[str]) -> gs.Graph:
        """The body of the scan: one token's state, and its output."""
        prefix = f"{self.op.prefix}.body"
        before, *read = (gs.Variable(f"{prefix}.{name}", dtype=np.dtype(np.float32)) for name in ("before", *names))
        at = dict(zip(names, read, strict=True))
        body = gs.Graph(inputs=[before, *read], name=prefix, opset=self.op.graph.opset)
        op = Builder(body, prefix, prefix, Report())
        # S' = diag(d) S + k v^T; RWKV-7 also takes away what is stored for a key: + b (a S)
        state = op.Add(op.Mul(at["d"], before), op.Mul(at["k"], at["v"]), name="sum")
        if "a" in at:
            state = op.Add(state, op.Mul(at["b"], op.MatMul(at["a"], before)), name="after")
        if "r" in at:  # RWKV-6 reads the state before its token, RWKV-7 the one after
            result = op.MatMul(at["r"], state if "a" in at else before, name="out")
        else:
            result = op.Identity(state, name="state")
        body.outputs = [state, result]
        return body
