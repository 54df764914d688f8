"""`Passes`: the passes of a generation through the graph; `GrowingTexts`: its rows of text while they grow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.engine.engine import Program
from mionnx.engine.rolling_cache import padded
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.past import past_inputs, present_names, present_to_past, take_present
from mionnx.inputs.token_batch import Past, TokenBatch
from mionnx.inputs.tokens import Decoder
from mionnx.inputs.value import Value
from mionnx.rewrite.plan import Outputs
from mionnx.run.call_graph import open_call
from mionnx.run.function_results import apply_functions
from mionnx.run.hook_cache import HookCache
from mionnx.run.hook_functions import Hook, HookFunction, Where, register
from mionnx.run.open_graphs import OpenGraphs
from mionnx.run.pass_memory import refuse_too_large
from mionnx.run.sampling import Sampling
from mionnx.run.segment_chain import SegmentChain
from mionnx.run.stopping import Stopping

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
        cuts, logits = () if functions is None else functions.names, HookPoint.Logits
        all_logits = keeps_logits or bound.touches(logits) or logits.name in cuts
        self.bound = bound.on(batch).with_outputs(Outputs(last=not all_logits))
        refuse_too_large(self.bound, batch, use_cache=True)
        self.batch, self.keeps_logits = batch, keeps_logits
        if functions is None:
            graph = open_call(graphs, self.bound, batch, present_names(bound.model, True), continues=True)
            self.program = program = graph.program
            self.weights, self.run = program.resident({**bound.weights, **graph.feeds}), program.run_on_device
            self.lent = graph.lent
        else:
            chain = graphs.chain(self.bound.plan, functions.names)
            self.weights, self.run = bound.weights, partial(self._segments, chain, functions)
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
            results = self.run(names, inputs)
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

    def _segments(
        self, chain: SegmentChain, functions: StepFunctions, outputs: Sequence[str], inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        return chain.run({*outputs}, inputs, partial(functions.call, self.bound.model, self.batch, self.step))

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
        kv_cache, state = take_present(self.bound.model, results, self.batch, True)
        cache = state if kv_cache is None else kv_cache
        assert cache is not None  # a pass that keeps its past has one of the two
        return cache


def rolls(program: Program, bound: BoundSpec, batch: TokenBatch) -> bool:
    """Whether the steps from here on can be calls of one shape.

    What has an axis of keys is another shape at every step, and its columns are those of the text.
    """
    if not program.rolls or bound.model.metadata.recurrent or batch.final_lengths is None:
        return False
    axes = [*(edit.axes for edit, _ in bound.edits), *(capture.node.axes for capture in bound.captures)]
    return not any("seq_k" in one for one in axes)


class Rolling:
    """The steps of one generation, from its second pass on.

    Args:
        outputs: names to fetch, those of the next past among them.
        inputs: of the first such step.
        present_to_past: output -> the input that takes it.
    """

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
        mask[:, self.columns - batch.total :] = batch.attention_mask
        others = {name: np.asarray(value) for name, value in inputs.items() if name not in self.names}
        return {**others, "attention_mask": mask}

    def step(self, inputs: Mapping[str, Any], batch: TokenBatch) -> dict[str, NDArray[Any]]:
        """Run one step: output -> array, without the past."""
        others = self._others(inputs, batch)
        return self.cache.step({name: value for name, value in others.items() if name in self.inputs})

    def past(self, batch: TokenBatch) -> dict[str, NDArray[Any]]:
        """Keys and values after the steps so far: input -> array."""
        return self.cache.past(batch.total)


class StepFunctions:
    """Python functions at hook points, called at every step of a generation."""

    def __init__(self, model: HookedModel, fwd_hooks: Iterable[tuple[Where, HookFunction]]) -> None:
        self.functions = register(model, fwd_hooks)
        self.names = tuple(self.functions)
        self._hooks = {name: Hook(HookPoint.parse(name)) for name in self.names}

    def of_rows(self, rows: Sequence[int]) -> StepFunctions:
        """The same functions for a batch of these rows of a list."""
        functions = copy(self)
        functions._hooks = {name: replace(hook, rows=tuple(rows)) for name, hook in self._hooks.items()}
        return functions

    def call(self, model: HookedModel, batch: TokenBatch, step: int, name: str, value: NDArray[Any]) -> NDArray[Any]:
        """The value at a hook point after its functions."""
        hook = replace(self._hooks[name], step=step, positions=batch.token_positions)
        return apply_functions(model, batch, hook, self.functions[name], value)


def check_steps(bound: BoundSpec, batch: TokenBatch, keeps_logits: bool) -> None:
    """Refuse what would not fit a later step, or has no effect in any, before the first."""
    final_lengths = batch.final_lengths
    if final_lengths is not None and (final_lengths > batch.lengths).any():
        bound.values(batch.next_step(np.zeros(batch.batch, np.int64)))
    bound.refuse_idle(batch, True, None if keeps_logits else _read_positions(batch))


def _read_positions(batch: TokenBatch) -> dict[int, range]:
    """Row -> positions whose logits a generation reads: the prompt's last and all after it."""
    ends = batch.lengths if batch.final_lengths is None else batch.final_lengths
    return {row: range(int(batch.lengths[row]) - 1, int(end)) for row, end in enumerate(ends)}


@dataclass(frozen=True)
class Growth:
    """The way in which texts grow.

    Attributes:
        pad: the token that rows which have ended are fed.
        seed: of the sampling; None for another one at every call.
    """

    sampling: Sampling
    stopping: Stopping
    tokenizer: Decoder | None
    pad: int
    seed: int | None


class GrowingTexts:
    """The rows of text while they grow."""

    def __init__(self, batch: TokenBatch, growth: Growth, rows: Sequence[int]) -> None:
        """Begin with prompts; `rows` are their numbers, by which a seed tells them apart."""
        self.sampling, self.stopping, self.tokenizer = growth.sampling, growth.stopping, growth.tokenizer
        self.pad = growth.pad
        self.prompts = [row[real] for row, real in zip(batch.input_ids, batch.real, strict=True)]
        self.new: list[list[int]] = [[] for _ in self.prompts]
        self.ended = [False] * len(self.prompts)
        self.last = np.zeros(len(self.prompts), np.int64)
        seeds = [np.random.SeedSequence(growth.seed, spawn_key=(row,)) for row in rows]
        self.random = [np.random.default_rng(one) for one in seeds]

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self.ended)

    def take(self, logits: NDArray[Any]) -> NDArray[np.int64]:
        """Choose a token for every row that has not ended; the others get padding."""
        for row, (new, ended) in enumerate(zip(self.new, self.ended, strict=True)):
            if ended:
                self.last[row] = self.pad
                continue
            token = self._choose(logits[row].astype(np.float64), row)
            new.append(token)
            self.last[row] = token
            self.ended[row] = self.stopping.ends(new, self.tokenizer)
        return self.last.copy()

    def _choose(self, logits: NDArray[np.float64], row: int) -> int:
        if np.isnan(logits).any():
            raise InputError(f"the logits of row {row} have NaN after {len(self.new[row])} new tokens")
        if len(self.new[row]) < self.stopping.min_new_tokens:
            logits[list(self.stopping.eos_token_ids)] = -np.inf
        penalised = self.sampling.repetition_penalty != 1
        text = [*self.prompts[row].tolist(), *self.new[row]] if penalised else []
        return self.sampling.choose(logits, np.array(text, np.int64), self.random[row])
