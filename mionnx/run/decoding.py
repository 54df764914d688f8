"""`Passes`: the passes of a generation through the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.engine.cuda_graphs import padded
from mionnx.engine.engine import Program
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.layer_cache import Value
from mionnx.inputs.past import past_inputs, present_names, present_to_past, take_present
from mionnx.inputs.token_batch import Past, TokenBatch
from mionnx.rewrite.plan import Outputs
from mionnx.run.batching import refuse_too_large
from mionnx.run.call_graph import in_blocks, open_call
from mionnx.run.hook_cache import HookCache
from mionnx.run.hook_functions import StepFunctions
from mionnx.run.open_graphs import OpenGraph, OpenGraphs
from mionnx.run.sampling import GrowingTexts

ROUND = 64  # columns of keys, past and new, are a multiple of this where steps have one shape


class Passes:
    """The passes through the graph: each feeds the results of the one before."""

    def __init__(
        self,
        graphs: OpenGraphs,
        bound: BoundSpec,
        batch: TokenBatch,
        past: Past | None,
        keeps_logits: bool,
        checked: bool = False,
        functions: StepFunctions | None = None,
    ) -> None:
        """Prepare the first pass; `checked` where `check_steps` has seen the spec already."""
        self.functions = functions
        self.program: Program | None = None  # none where functions cut the graph
        self.lent: Mapping[str, str] = {}
        self.prefill: OpenGraph | None = None  # of a long prompt, where it is another one
        cut = functions is not None and HookPoint.Logits.name in functions.names
        all_logits = keeps_logits or bound.touches(HookPoint.Logits) or cut
        self.bound = bound.on(batch).with_outputs(Outputs(last=not all_logits))
        refuse_too_large(self.bound, batch, use_cache=True)
        self.batch, self.keeps_logits = batch, keeps_logits
        if functions is None:
            graph = open_call(graphs, self.bound, batch, present_names(bound.model, True), continues=True)
            self.program = program = graph.program
            self.weights, self.run = program.resident({**bound.weights, **graph.feeds}), program.run_on_device
            self.lent = graph.lent
            prompt = in_blocks(graph.plan, graphs, batch.seq)
            if prompt.blocks:
                self.prefill = replace(graphs.get(prompt), feeds=graph.feeds, lent=graph.lent)
        else:
            self.chain = graphs.chain(self.bound.plan, functions.names)
            self.weights, self.run = bound.weights, self._run_chain
        self.past: dict[str, Value] = past_inputs(bound.model, past, batch)
        self.present_to_past = present_to_past(bound.model)
        self.steady: dict[str, NDArray[Any]] | None = None
        self.rolling: Rolling | None = None
        self.step = 0
        self.caches: list[HookCache] = []
        if not checked:
            check_steps(self.bound, batch, keeps_logits)

    def steps(self, texts: GrowingTexts) -> Iterator[NDArray[Any]]:
        """The logits [batch, vocab] of the last position of every pass."""
        yield self._pass()
        while not texts.finished:
            self.batch, self.step = self.batch.next_step(texts.last), self.step + 1
            yield self._pass()

    def _pass(self) -> NDArray[Any]:
        inputs = self.bound.step_inputs(self.batch, self.past, {**self._values(), **self.weights})
        inputs |= {name: inputs[source] for name, source in self.lent.items()}
        names = self.bound.outputs(True)
        if self.step == 1 and self.program is not None and rolls(self.program, self.bound, self.batch):
            self.rolling = Rolling(self.program, names, inputs, self.present_to_past, self.batch)
            self.past = {}
        if self.rolling is None:
            prefill, self.prefill = self.prefill, None
            if prefill is None:
                results = self.run(names, inputs)
            else:
                results = prefill.run(names, {**inputs, **self.bound.weights})
            self.past = {name: results[present] for present, name in self.present_to_past.items()}
        else:
            results = self.rolling.step(inputs, self.batch)
        logits = np.asarray(results["logits"])
        nodes = [capture.node for capture in self.bound.captures]
        if nodes or self.keeps_logits:
            captured = {node.output: results[node.fetched] for node in nodes}
            layers = self.bound.model.metadata.sizes.num_layers
            self.caches.append(HookCache(logits if self.keeps_logits else None, captured, num_layers=layers))
        return logits[:, -1]

    def _run_chain(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
        assert self.functions is not None
        return self.chain.run(outputs, feeds, partial(self.functions.call, self.bound.model, self.batch, self.step))

    def _values(self) -> dict[str, NDArray[Any]]:
        """Values of interventions; without limits by position, one step's serve all later steps."""
        if self.steady is not None:
            return self.steady
        values = self.bound.values(self.batch)
        if self.step and not any(one.varies_by_step or "seq_k" in edit.axes for edit, one in self.bound.edits):
            self.steady = values
        return values

    def cache(self) -> Past:
        """Keys and values, or the state, after the passes so far."""
        past = self.past if self.rolling is None else self.rolling.past(self.batch)
        results = {present: past[name] for present, name in self.present_to_past.items()}
        cache = take_present(self.bound.model, results, self.batch, True)
        assert cache is not None  # it was asked for
        return cache


def rolls(program: Program, bound: BoundSpec, batch: TokenBatch) -> bool:
    """Whether the steps from here on can be calls of one shape."""
    if not program.rolls or bound.model.metadata.carries_state or batch.final_lengths is None:
        return False
    # What has an axis of keys is another shape at every step, and its columns are those of the text.
    axes = [*(edit.axes for edit, _ in bound.edits), *(capture.node.axes for capture in bound.captures)]
    return not any("seq_k" in one for one in axes)


class Rolling:
    """The steps of one generation, from its second pass on, as calls of one shape."""

    def __init__(
        self,
        program: Program,
        outputs: Sequence[str],
        inputs: Mapping[str, Any],
        present_to_past: Mapping[str, str],
        batch: TokenBatch,
    ) -> None:
        assert batch.final_lengths is not None  # as `rolls` says
        left = int((batch.final_lengths - batch.lengths).max())
        self.columns = -(-(batch.total + left) // ROUND) * ROUND
        self.names = {*present_to_past.values()}
        past = {name: padded(np.asarray(inputs[name]), self.columns - 1) for name in self.names}
        self.cache = program.rolling(outputs, {**self._others(inputs, batch), **past}, present_to_past)
        self.inputs = program.inputs
        finalize(self, self.cache.free.append, self.cache)

    def _others(self, inputs: Mapping[str, Any], batch: TokenBatch) -> dict[str, NDArray[Any]]:
        """The inputs besides the past, the mask padded as that is."""
        mask = np.zeros((batch.batch, self.columns), np.int64)
        mask[:, self.columns - batch.total :] = inputs["attention_mask"]  # which may hide some tokens
        others = {name: np.asarray(value) for name, value in inputs.items() if name not in self.names}
        return {**others, "attention_mask": mask}

    def step(self, inputs: Mapping[str, Any], batch: TokenBatch) -> dict[str, NDArray[Any]]:
        others = self._others(inputs, batch)
        return self.cache.step({name: value for name, value in others.items() if name in self.inputs})

    def past(self, batch: TokenBatch) -> dict[str, NDArray[Any]]:
        """Keys and values after the steps so far: input -> array."""
        return self.cache.past(batch.total)


def check_steps(bound: BoundSpec, batch: TokenBatch, keeps_logits: bool) -> None:
    """Refuse what would not fit a later step, or has no effect in any, before the first."""
    final_lengths = batch.final_lengths
    if final_lengths is not None and (final_lengths > batch.lengths).any():
        bound.values(batch.next_step(np.zeros(batch.batch, np.int64)))
    # A generation reads the logits of the prompt's last position and of all after it.
    ends = batch.lengths if final_lengths is None else final_lengths
    positions = {row: range(int(batch.lengths[row]) - 1, int(end)) for row, end in enumerate(ends)}
    bound.refuse_idle(batch, True, None if keeps_logits else positions)
