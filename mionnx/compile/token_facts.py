"""Facts of a call inside a compiled graph: positions of its tokens, and whether it is the prompt's."""

from collections.abc import Sequence
from functools import cached_property, reduce

import numpy as np
from numpy.typing import DTypeLike

from mionnx.graph.axes import KEYS, SEQUENCE_AXES
from mionnx.graph.builder import Builder, Graph, Tensor
from mionnx.graph.report import Report
from mionnx.rewrite.intervene import TOKEN_POSITIONS, among, token_positions

NOWHERE = -2  # no token stands there; padding stands at -1


class TokenFacts:
    """Facts of a call as values of the graph; the nodes of each are added when it is first read."""

    def __init__(
        self,
        graph: Graph,
        report: Report,
        prefix: str = "mionnx.call",
        both: bool = False,
        hidden: Sequence[int | str] = (),
    ) -> None:
        self.graph, self.report, self.both, self.hidden = graph, report, both, hidden
        self.op = Builder(graph, TOKEN_POSITIONS, prefix, report)
        self._windows: dict[str, Tensor] = {}

    @cached_property
    def positions(self) -> Tensor:
        """[batch, seq]: each token's position in its row's text, -1 for padding."""
        tensors = self.graph.tensors()
        # A hooked graph may work out positions already.
        existing = tensors.get(f"{TOKEN_POSITIONS}.of_tokens") or tensors.get(TOKEN_POSITIONS)
        return token_positions(self.graph, self.report) if existing is None else existing

    @cached_property
    def keys(self) -> Tensor:
        """[batch, total]: each key's position in its row's text, past included, -1 for padding."""
        mask = self.graph.tensors()["attention_mask"]
        counted = self.op.Sub(self.op.CumSum(mask, np.array(1)), [1])
        return self.op.Where(self.op.Cast(mask, to=np.bool_), counted, -1, name="keys")

    @cached_property
    def length(self) -> Tensor:
        """[batch, 1]: length of each row's text so far."""
        return self.op.Add(self.op.ReduceMax(self.positions, [1], keepdims=1), 1)

    @cached_property
    def is_prompt(self) -> Tensor:
        """[batch, 1]: whether this call is the prompt's."""
        first = self.op.Cast(self.op.Equal(self.positions, 0), to=np.int32)
        return self.op.Cast(self.op.ReduceMax(first, [1], keepdims=1), to=np.bool_)

    def of_texts(self, axes: Sequence[str]) -> Tensor | None:
        """Entries of a value outside of padding and hidden keys: bool, 1 wide along axes without tokens."""
        # None for a value without such axes, and in a graph without a mask, whose calls have no padding.
        if "attention_mask" not in self.graph.tensors():
            return None
        parts = []
        for at, axis in enumerate(axes):
            if axis in (*SEQUENCE_AXES, KEYS):
                real = self.op.GreaterOrEqual(self.keys if axis == KEYS else self.positions, 0)
                if axis == KEYS and self.hidden:
                    hidden = among(self.op, self.keys, self.op.constant([[*self.hidden]]))
                    real = self.op.And(real, self.op.Not(hidden))
                parts.append(self.op.Unsqueeze(real, [n for n in range(1, len(axes)) if n != at]))
        return reduce(self.op.And, parts) if parts else None

    def window(self, tokens: int, dtype: DTypeLike) -> Tensor:
        """[batch, 1, seq, total]: -inf at keys more than some tokens before a query (or behind), else 0."""
        name = f"window_{tokens}_{np.dtype(dtype)}"
        if name not in self._windows:
            keys = self.op.Unsqueeze(self.keys, [1])
            distances = self.op.Sub(self.op.Unsqueeze(self.positions, [2]), keys)
            far = self.op.Greater(self.op.Abs(distances) if self.both else distances, tokens)
            cut = self.op.Unsqueeze(self.op.And(far, self.op.GreaterOrEqual(keys, 0)), [1])
            masked, visible = (np.array(number, dtype) for number in (-np.inf, 0))
            self._windows[name] = self.op.Where(cut, masked, visible, dtype=dtype, name=name)
        return self._windows[name]

    def chosen(self, prefix: str, positions: Sequence[int | str]) -> Tensor:
        """[batch or 1, n]: absolute positions in this call, NOWHERE for those outside it."""
        op = Builder(self.graph, prefix, prefix, self.report)
        numbers = [position for position in positions if not isinstance(position, str)]
        parts: list[Tensor] = []
        if numbers:
            parts = [op.constant([numbers])]
            if min(numbers) < 0:
                counted = op.Where(self.is_prompt, op.Add(self.length, [numbers]), NOWHERE)
                ahead = op.constant([[number >= 0 for number in numbers]])
                parts = [op.Where(ahead, [numbers], counted, dtype=np.int64)]
        for phase in dict.fromkeys(position for position in positions if isinstance(position, str)):
            real = op.GreaterOrEqual(self.positions, 0)
            now = op.Not(self.is_prompt) if phase == "generated" else self.is_prompt
            parts.append(op.Where(op.And(real, now), self.positions, NOWHERE))
        if len(parts) == 1:
            return parts[0]
        # Numbers are the same for every row, phases are not: both as [batch, n].
        wide = op.Concat(op.Shape(self.positions, start=0, end=1), [1], axis=0)
        return op.Concat(*(op.Expand(part, wide) for part in parts), axis=1)


def replace_input(graph: Graph, variable: Tensor, by: Tensor) -> None:
    """Replace an input by another tensor for all of its readers."""
    graph.inputs = [entry for entry in graph.inputs if entry is not variable]
    for node in [*variable.outputs]:
        node.inputs = [by if entry is variable else entry for entry in node.inputs]
