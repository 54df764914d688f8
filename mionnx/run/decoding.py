"""`Passes`: the passes of a generation through the graph, each on the results of the one before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.past import past_inputs, present_names, present_to_past, take_present
from mionnx.inputs.token_batch import Past, TokenBatch
from mionnx.inputs.value import Value
from mionnx.rewrite.plan import Outputs
from mionnx.run.fused_plan import with_fused
from mionnx.run.graph_pool import GraphPool
from mionnx.run.growing_texts import GrowingTexts
from mionnx.run.hook_cache import HookCache


class Passes:
    """The passes through the graph: each feeds the results of the one before."""

    def __init__(
        self,
        pool: GraphPool,
        bound: BoundSpec,
        batch: TokenBatch,
        past: Past | None,
        keeps_logits: bool,
        checked: bool = False,
    ) -> None:
        """Prepare the first pass; `checked` where `check_steps` has seen the spec with more rows than these."""
        all_logits = keeps_logits or bound.touches(HookPoint.Logits)
        self.bound = bound.with_outputs(Outputs(last=not all_logits))
        self.batch, self.keeps_logits = batch, keeps_logits
        names = present_names(bound.model, True)
        plan = with_fused(self.bound.plan, bound.model, pool.options, batch, names, continues=True)
        self.program = pool.get(plan).program
        self.weights = self.program.resident(bound.weights)
        self.past: dict[str, Value] = past_inputs(bound.model, past, batch)
        self.present_to_past = present_to_past(bound.model)
        self.steady: dict[str, NDArray[Any]] | None = None
        self.decoding = False
        self.caches: list[HookCache] = []
        if not checked:
            check_steps(self.bound, batch, keeps_logits)

    def steps(self, texts: GrowingTexts) -> Iterator[NDArray[Any]]:
        """The logits [batch, vocab] of the last position of every pass."""
        yield self._pass()
        while not texts.finished:
            self.batch, self.decoding = self.batch.next_step(texts.last), True
            yield self._pass()

    def _pass(self) -> NDArray[Any]:
        inputs = self.bound.step_inputs(self.batch, self.past, {**self._values(), **self.weights})
        results = self.program.run_on_device(self.bound.outputs(True), inputs)
        self.past = {name: results[present] for present, name in self.present_to_past.items()}
        logits = np.asarray(results["logits"])
        nodes = [capture.node for capture in self.bound.captures]
        if nodes or self.keeps_logits:
            captured = {node.output: results[node.fetched] for node in nodes}
            layers = self.bound.model.metadata.sizes.num_layers
            self.caches.append(HookCache(logits if self.keeps_logits else None, captured, num_layers=layers))
        return logits[:, -1]

    def _values(self) -> dict[str, NDArray[Any]]:
        """Values of interventions; without limits by position, one step's serve all later steps."""
        if self.steady is not None:
            return self.steady
        values = self.bound.values(self.batch)
        if self.decoding and not any(one.varies_by_step or "seq_k" in edit.axes for edit, one in self.bound.edits):
            self.steady = values
        return values

    def cache(self) -> Past:
        """Keys and values, or the state, after the passes so far."""
        results = {present: self.past[name] for present, name in self.present_to_past.items()}
        kv_cache, state = take_present(self.bound.model, results, self.batch, True)
        cache = state if kv_cache is None else kv_cache
        assert cache is not None  # a pass that keeps its past has one of the two
        return cache


def check_steps(bound: BoundSpec, batch: TokenBatch, keeps_logits: bool) -> None:
    """Refuse what would not fit a later step, or has no effect in any, before the first one runs.

    Raises:
        InterventionError: see `BoundSpec.values`, `BoundSpec.refuse_idle`.
    """
    final_lengths = batch.final_lengths
    if final_lengths is not None and (final_lengths > batch.lengths).any():
        bound.values(batch.next_step(np.zeros(batch.batch, np.int64)))
    bound.refuse_idle(batch, True, None if keeps_logits else _read_positions(batch))


def _read_positions(batch: TokenBatch) -> dict[int, range]:
    """Row -> positions whose logits a generation reads: the prompt's last and all after it."""
    ends = batch.lengths if batch.final_lengths is None else batch.final_lengths
    return {row: range(int(batch.lengths[row]) - 1, int(end)) for row, end in enumerate(ends)}
