"""Rewrite: values derived from an RWKV recurrence, which only their capture brings in.

1. `hook_states` is the recurrence run again, one token an iteration, giving the state after every token.
2. `hook_effective_attn_raw` is the recurrence run from an empty state with the identity for values: its output at a
   query is the weight with which each source token's value enters, gates and interventions included, because it reads
   what the model's own recurrence reads. Times the values it gives the recurrence's output, apart from what the state
   before this call contributes.
3. `hook_effective_attn` is max(raw, 0), each row divided by its sum; a row without a positive weight stays 0.
"""

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.graph.builder import Builder
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.io_names import STATE

# In the order in which the body reads them: (name of the value, whether it is a column vector there).
_PER_TOKEN = {
    "k": ("written_k", True),
    "v": ("hook_v", False),
    "d": ("kept_decay", True),
    "a": ("hook_a", False),
    "b": ("erased_b", True),
    "r": ("hook_r", False),
}


def derive(build: Builder, point: HookPoint, tensors: Mapping[str, gs.Tensor]) -> gs.Variable:
    """The nodes of one derived value.

    Args:
        build: at the hook point.
        point: hook_states, hook_effective_attn or hook_effective_attn_raw of a layer.
        tensors: the values of the graph.
    """
    out = gs.Variable(point.name, dtype=np.dtype(np.float32), shape=list(point.axes or ()))
    scan = _Recurrence(build, point, tensors)
    if point.variant == "RwkvStates":
        return scan.states(out)
    raw = scan.effective(out if point.variant == "RwkvEffectiveAttnRaw" else None)
    return raw if point.variant == "RwkvEffectiveAttnRaw" else _share(build, raw, out)


class _Recurrence:
    """One layer's recurrence, step by step, on the values that the model's own reads."""

    def __init__(self, build: Builder, point: HookPoint, tensors: Mapping[str, gs.Tensor]) -> None:
        self.build, self.layer, self.tensors = build, point.layer, tensors
        where = f"blocks.{point.layer}.rwkv"
        self.bonus = tensors.get(f"{where}.bonus")
        self.values = {
            short: (tensors[f"{where}.{name}"], column)
            for short, (name, column) in _PER_TOKEN.items()
            if f"{where}.{name}" in tensors
        }

    def states(self, out: gs.Variable) -> gs.Variable:
        """[batch, seq, n_heads, key, value]: the state after each token."""
        self.values.pop("r")
        _, wkv, _ = STATE.layer_inputs(self.layer or 0)
        return self._scan(self.tensors[wkv], self._vectors(), out)

    def effective(self, out: gs.Variable | None) -> gs.Variable:
        """[batch, n_heads, seq_q, seq_src]."""
        build, keys = self.build, self.values["k"][0]
        unit = self._unit_values(keys)
        vectors = {**self._vectors(), "v": unit}
        # [batch, n_heads, key, seq_src], zeros: one key's vector times one row of the unit values, times 0
        first = build.node("Gather", [vectors["k"], build.constant("first", 0, np.int64)], "first_key", axis=1)
        row = build.node("Gather", [unit, build.constant("first_row", 0, np.int64)], "first_unit", axis=1)
        outer = build.node("Mul", [first, row], "outer")
        empty = build.node("Expand", [self._zero(), build.node("Shape", [outer], "extent", np.int64)], "empty")
        weights = self._scan(empty, vectors, None)  # [batch, seq_q, n_heads, 1, seq_src]
        if self.bonus is not None:
            own = build.node("Unsqueeze", [self.bonus, build.ints("bonus_axis", 4)], "bonus")
            own = build.node("Mul", [own, unit], "own")
            weights = build.node("Add", [weights, own], "with_own")
        flat = build.node("Squeeze", [weights, build.ints("row_axis", 3)], "by_query")
        return build.node("Transpose", [flat], "raw", out=out, perm=[0, 2, 1, 3])

    def _zero(self) -> gs.Constant:
        return self.build.constant("zero", [0], np.float32)

    def _unit_values(self, keys: gs.Tensor) -> gs.Variable:
        """[1, seq, 1, 1, seq]: the identity, a row a token."""
        build = self.build
        seq = build.node("Shape", [keys], "seq", np.int64, start=1, end=2)
        count = build.node("Squeeze", [seq], "count")
        one, start = build.constant("one", 1, np.int64), build.constant("start", 0, np.int64)
        at = build.node("Range", [start, count, one], "at")
        rows = build.node("Unsqueeze", [at, build.ints("rows_axis", 1)], "rows")
        equal = build.node("Equal", [rows, at], "equal", np.bool_)
        unit = build.node("Cast", [equal], "identity", np.float32, to=1)
        return build.node("Unsqueeze", [unit, build.ints("unit_axes", 0, 2, 3)], "unit")

    def _vectors(self) -> dict[str, gs.Variable]:
        """What the body reads, as column or row vectors: [batch, seq, n_heads, head_dim, 1] or [..., 1, head_dim]."""
        return {
            short: self.build.node(
                "Unsqueeze", [value, self.build.ints(f"{short}_axis", -1 if column else -2)], f"{short}_vector"
            )
            for short, (value, column) in self.values.items()
        }

    def _scan(self, start: gs.Tensor, vectors: dict[str, gs.Variable], out: gs.Variable | None) -> gs.Variable:
        body = self._body(list(vectors))
        last = gs.Variable(f"{self.build.prefix}.last", dtype=np.dtype(np.float32))
        return self.build.node(
            "Scan",
            [start, *vectors.values()],
            "scanned",
            dtype=np.float32,
            out=out,
            before=[last],
            body=body,
            num_scan_inputs=len(vectors),
            scan_input_axes=[1] * len(vectors),
            scan_output_axes=[1],
        )

    def _body(self, names: list[str]) -> gs.Graph:
        """One token: the state after it, and what is read from that."""
        prefix, nodes = f"{self.build.prefix}.body", []

        def node(op: str, inputs: list[gs.Variable], step: str) -> gs.Variable:
            result = gs.Variable(f"{prefix}.{step}", dtype=np.dtype(np.float32))
            nodes.append(gs.Node(op, f"{prefix}.{step}:{op}", {}, inputs, [result]))
            return result

        before = gs.Variable(f"{prefix}.before", dtype=np.dtype(np.float32))
        at = {name: gs.Variable(f"{prefix}.{name}", dtype=np.dtype(np.float32)) for name in names}
        state = node("Add", [node("Mul", [at["d"], before], "kept"), node("Mul", [at["k"], at["v"]], "written")], "sum")
        if "a" in at:
            read = node("MatMul", [at["a"], before], "read")
            state = node("Add", [state, node("Mul", [at["b"], read], "erased")], "after")
        if "r" not in at:
            result = node("Identity", [state], "state")
        else:
            # RWKV-6 reads the state before its token, RWKV-7 the one after
            result = node("MatMul", [at["r"], state if "a" in at else before], "out")
        return gs.Graph(nodes, [before, *at.values()], [state, result], name=prefix, opset=self.build.graph.opset)


def _share(build: Builder, raw: gs.Variable, out: gs.Variable) -> gs.Variable:
    positive = build.node("Relu", [raw], "positive")
    total = build.node("ReduceSum", [positive, build.ints("over", -1)], "total", keepdims=1)
    least = build.constant("least", np.finfo(np.float32).tiny, np.float32)
    return build.node("Div", [positive, build.node("Max", [total, least], "divisor")], "share", out=out)
