"""What a compiled graph can tell of the call that it is run in: which token stands where, whether it is the prompt."""

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.graph.builder import Builder
from mionnx.graph.report import Report
from mionnx.rewrite.intervene import TOKEN_POSITIONS, token_positions

NOWHERE = -2  # no token stands there; padding stands at -1


class TokenFacts:
    """What a graph can tell of a call; worked out once, where it is needed."""

    def __init__(self, graph: gs.Graph, report: Report) -> None:
        self.graph, self.report = graph, report
        self.build = Builder(graph, TOKEN_POSITIONS, "mionnx.call", report)
        self._known: dict[str, gs.Tensor] = {}

    @property
    def positions(self) -> gs.Tensor:
        """[batch, seq]: each token's position in its row's text, -1 for padding."""
        if "positions" not in self._known:
            found = self.graph.tensors().get(f"{TOKEN_POSITIONS}.of_tokens") or self.graph.tensors().get(
                TOKEN_POSITIONS
            )
            self._known["positions"] = found if found is not None else token_positions(self.graph, self.report)
        return self._known["positions"]

    @property
    def length(self) -> gs.Tensor:
        """[batch, 1]: how many tokens each row's text has by now."""
        if "length" not in self._known:
            last = self.build.node("ReduceMax", [self.positions, self.build.ints("axis", 1)], "last", keepdims=1)
            self._known["length"] = self.build.node("Add", [last, self.build.constant("one", 1, np.int64)], "length")
        return self._known["length"]

    @property
    def is_prompt(self) -> gs.Tensor:
        """[batch, 1]: whether this call is the prompt's."""
        if "is_prompt" not in self._known:
            first = self.build.node(
                "Equal", [self.positions, self.build.constant("zero", 0, np.int64)], "first", dtype=np.bool_
            )
            numbers = self.build.node("Cast", [first], "firsts", np.int32, to=6)
            found = self.build.node("ReduceMax", [numbers, self.build.ints("across", 1)], "any_first", keepdims=1)
            self._known["is_prompt"] = self.build.node("Cast", [found], "is_prompt", np.bool_, to=9)
        return self._known["is_prompt"]

    def chosen(self, prefix: str, positions: Sequence[int | str]) -> gs.Tensor:
        """[batch or 1, n]: the absolute positions that are meant in this call, NOWHERE for those that are not in it."""
        build = Builder(self.graph, prefix, prefix, self.report)
        numbers = [position for position in positions if not isinstance(position, str)]
        parts: list[gs.Tensor] = []
        nowhere = build.constant("nowhere", NOWHERE, np.int64)
        if numbers:
            table = build.constant("table", [numbers], np.int64)
            parts.append(table)
            if min(numbers) < 0:
                ahead = build.constant("ahead", [[number >= 0 for number in numbers]], np.bool_)
                counted = build.node("Add", [self.length, table], "counted")
                there = build.node("Where", [self.is_prompt, counted, nowhere], "there", np.int64)
                parts = [build.node("Where", [ahead, table, there], "absolute", np.int64)]
        for phase in dict.fromkeys(position for position in positions if isinstance(position, str)):
            real = build.node(
                "GreaterOrEqual", [self.positions, build.constant("zero", 0, np.int64)], f"{phase}.real", dtype=np.bool_
            )
            now = self.is_prompt
            if phase == "generated":
                now = build.node("Not", [now], "generated.now")
            both = build.node("And", [real, now], f"{phase}.both")
            parts.append(build.node("Where", [both, self.positions, nowhere], f"{phase}.at", np.int64))
        if len(parts) == 1:
            return parts[0]
        rows = build.node("Shape", [self.positions], "rows", np.int64, start=0, end=1)
        wide = build.node("Concat", [rows, build.ints("one", 1)], "wide", axis=0)
        spread = [build.node("Expand", [part, wide], f"spread.{i}", np.int64) for i, part in enumerate(parts)]
        return build.node("Concat", spread, "all", np.int64, axis=1)


def replace_input(graph: gs.Graph, variable: gs.Tensor, by: gs.Tensor) -> None:
    """Let every reader of an input read something else."""
    graph.inputs = [entry for entry in graph.inputs if entry is not variable]
    for node in [*variable.outputs]:
        node.inputs = [by if entry is variable else entry for entry in node.inputs]
