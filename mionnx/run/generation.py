"""Generation: one prefill, then one token a step from the cache, with a spec's interventions in force at every step.

A step knows its tokens' absolute positions, and the graph selects by position, so that decoding with the cache gives
what one pass over the whole text gives. Keys, values and states stay where the provider computed them between steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.bind import plan
from mionnx.bind.rwkv_gates import gates_of
from mionnx.errors import HookError, InputError, InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs import past
from mionnx.inputs.token_batch import (
    Past,
    TokenBatch,
    count_rows,
    make_token_batch,
)
from mionnx.rewrite.plan import Outputs
from mionnx.run.hook_cache import HookCache
from mionnx.run.sampling import Sampling
from mionnx.spec.hook_spec import HookSpec

if TYPE_CHECKING:
    from mionnx.run.runner import Runner

Arrays = dict[str, NDArray[Any]]


class Streamer(Protocol):
    """What is told of every token as it is chosen; transformers' streamers have the same methods."""

    def put(self, value: NDArray[np.int64]) -> None:
        """The prompts' ids [batch, seq] first, then each step's new ids [batch]."""

    def end(self) -> None:
        """No more tokens follow."""


@dataclass(frozen=True)
class Stopping:
    """When a row ends.

    Attributes:
        max_new_tokens: at the latest after so many tokens.
        min_new_tokens: not by an end-of-text token before so many.
        eos_token_ids: after one of these tokens, which is kept.
        strings: when the new text contains one of these; the token that completes it is kept.
    """

    max_new_tokens: int
    min_new_tokens: int
    eos_token_ids: tuple[int, ...]
    strings: tuple[str, ...]


@dataclass
class Generation:
    """What `generate` made.

    Attributes:
        ids: per row the prompt and its continuation, padding left out, [seq]; a given cache's tokens are not in it.
        new_ids: per row the continuation, [new].
        texts, new_texts: the same as texts, special tokens left out; empty if the model has no tokenizer.
        steps: per step what was captured: first the prompts', then one token a step, [batch, 1, ...]. Empty if the
            spec captures nothing and no logits were asked for.
        cache: what came of everything but the last token of each row: `generate` or `forward` can go on from it.
        axes: name of a capture -> the names of its axes.
    """

    ids: list[NDArray[np.int64]]
    new_ids: list[NDArray[np.int64]]
    texts: list[str] = field(default_factory=list)
    new_texts: list[str] = field(default_factory=list)
    steps: list[HookCache] = field(default_factory=list)
    cache: Past | None = None
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def captured(self, hook: HookPoint | str) -> NDArray[Any]:
        """A capture of all steps, joined along its sequence axis.

        Raises:
            HookError: it was not captured, or its shape changes from step to step (scores, patterns): see `steps`.
        """
        point = HookPoint.parse(hook)
        axes = self.axes.get(point.name, point.axes or ())
        if not self.steps:
            raise HookError(f"{point} was not captured: no capture was asked for")
        parts = [step.require(point) for step in self.steps]
        if "seq" not in axes:
            raise HookError(f"{point} has the axes {list(axes)}, which steps do not share: see `steps`")
        return np.concatenate(parts, axis=axes.index("seq"))


def generate(
    model: "Runner",
    tokens: Any,
    spec: HookSpec,
    sampling: Sampling,
    stopping: Stopping,
    *,
    pad_token_id: int,
    seed: int | None,
    attention_mask: ArrayLike | None,
    cache: Past | None,
    streamer: Streamer | None,
    logits: bool,
) -> Generation:
    """See `MIModel.generate`."""
    before, rows = past.choose(model.hooked, cache, None), count_rows(tokens)
    if before is not None and before.batch == 1 < rows:
        before = before.repeat(rows)  # a prefix of one row serves all prompts
    call = make_token_batch(tokens, attention_mask, before, model.hooked.metadata.sizes)
    _refuse_right_padding(call)
    _refuse_too_long(call, stopping, model.hooked.metadata.sizes.max_positions)
    call = replace(call, prompt_lengths=call.lengths, final_lengths=call.lengths + stopping.max_new_tokens - 1)
    _refuse_unreached(spec, stopping)
    run, texts = _Run(model, spec, call, before, logits), _Texts(call, sampling, stopping, model, pad_token_id, seed)
    if streamer:
        streamer.put(call.input_ids)
    for last in run.steps(texts):
        chosen = texts.take(last)
        if streamer:
            streamer.put(chosen)
    if streamer:
        streamer.end()
    return texts.result(run)


def _refuse_right_padding(call: TokenBatch) -> None:
    if not call.real[:, -1].all():
        row = int(np.argmin(call.real[:, -1]))
        raise InputError(f"row {row} is padded on the right: generation continues at the end, so pad on the left")


def _refuse_too_long(call: TokenBatch, stopping: Stopping, limit: int | None) -> None:
    longest = int(call.lengths.max()) + stopping.max_new_tokens - 1  # the last token is never read
    if limit is not None and longest > limit:
        raise InputError(
            f"max_new_tokens={stopping.max_new_tokens} after {int(call.lengths.max())} tokens, but the model has "
            f"positions for {limit} only"
        )


def _refuse_unreached(spec: HookSpec, stopping: Stopping) -> None:
    """With one new token nothing generated is ever read."""
    phases: list[Any] = [edit.positions for _, edit in spec.interventions]
    phases += [position for state in (*spec.state_knockouts, *spec.state_steerings) for position in state.positions_]
    if any(isinstance(phase, str) and phase == "generated" for phase in phases) and stopping.max_new_tokens == 1:
        raise InterventionError(
            "an intervention in the phase 'generated' would do nothing: with max_new_tokens=1 no new token is read"
        )


class _Run:
    """The passes through the graph: each feeds the results of the one before."""

    def __init__(self, model: "Runner", spec: HookSpec, call: TokenBatch, before: Past | None, logits: bool) -> None:
        self.model, self.spec, self.call, self.keeps_logits = model, spec, call, logits
        own_logits = [str(point) for point, _ in spec.interventions]
        own_logits += [want.hook for want in plan.plan_of(spec, model.hooked).captures]
        whole = logits or str(HookPoint.Logits) in own_logits
        self.compiled = model.compile_graph(spec, Outputs(last=not whole))
        self.captured = {want.output: want.fetched for want in self.compiled.plan.captures}
        self.axes = {want.hook: want.axes for want in self.compiled.plan.captures}
        self.weights = self.compiled.program.resident(plan.weights_of(spec, self.compiled.plan))
        self.memory: dict[str, Any] = past.past_inputs(model.hooked, before, call)
        self.carried = past.present_to_past(model.hooked)
        self.parts = plan.parts_of(plan.captures_of(spec, model.hooked), call, model.hooked)
        self.steady: Arrays | None = None
        self.decoding = False
        self.caches: list[HookCache] = []
        self._check_every_step()

    def _check_every_step(self) -> None:
        """What would not fit a later step is refused before the first one runs."""
        horizon = self.call.final_lengths
        if horizon is not None and (horizon > self.call.lengths).any():
            step = self.call.following(np.zeros(self.call.batch, np.int64))
            plan.values_of(self.spec, self.compiled.plan, step, self.model.hooked)

    def steps(self, texts: "_Texts") -> Iterator[NDArray[Any]]:
        """The logits [batch, vocab] of the last position of every pass."""
        yield self._pass()
        while not texts.finished:
            self.call, self.decoding = self.call.following(texts.last), True
            yield self._pass()

    def _pass(self) -> NDArray[Any]:
        hooked = self.model.hooked
        feeds = {**self.call.feeds(), **self.memory}
        feeds |= {**self._values(), **self.weights, **self.parts}
        feeds |= gates_of(self.spec, self.call, hooked.metadata)
        outputs = ["logits", *self.captured.values(), *self.carried]
        found = self.compiled.program.run_on_device(outputs, feeds)
        self.memory = {name: found[output] for output, name in self.carried.items()}
        logits = np.asarray(found["logits"])
        if self.captured or self.keeps_logits:
            kept = logits if self.keeps_logits else None
            self.caches.append(HookCache(kept, {name: found[output] for name, output in self.captured.items()}))
        return logits[:, -1]

    def _values(self) -> Arrays:
        """The values of interventions; where no position limits them, those of one new token are those of all."""
        if self.steady is not None:
            return self.steady
        values = plan.values_of(self.spec, self.compiled.plan, self.call, self.model.hooked)
        if self.decoding and not any(one.varies_by_step for _, one in self.spec.interventions):
            self.steady = values
        return values

    def cache(self) -> Past:
        """What the passes so far leave."""
        found = {output: self.memory[name] for output, name in self.carried.items()}
        kv_cache, state = past.take_present(self.model.hooked, found, self.call, True)
        carried = state if kv_cache is None else kv_cache
        assert carried is not None  # a call that keeps its past has one of the two
        return carried


class _Texts:
    """The texts as they grow."""

    def __init__(
        self, call: TokenBatch, sampling: Sampling, stopping: Stopping, model: "Runner", pad: int, seed: int | None
    ) -> None:
        self.sampling, self.stopping, self.model, self.pad = sampling, stopping, model, pad
        self.prompts = [row[real] for row, real in zip(call.input_ids, call.real, strict=True)]
        self.new: list[list[int]] = [[] for _ in self.prompts]
        self.ended = [False] * len(self.prompts)
        self.last = np.zeros(len(self.prompts), np.int64)
        seeds = np.random.SeedSequence(seed).spawn(len(self.prompts))
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
            self.ended[row] = self._ends(new)
        return self.last.copy()

    def _choose(self, logits: NDArray[np.float64], row: int) -> int:
        if np.isnan(logits).any():
            raise InputError(f"the logits of row {row} have NaN after {len(self.new[row])} new tokens")
        if len(self.new[row]) < self.stopping.min_new_tokens:
            logits[list(self.stopping.eos_token_ids)] = -np.inf
        text = np.concatenate([self.prompts[row], np.array(self.new[row], np.int64)])
        return self.sampling.choose(logits, text, self.random[row])

    def _ends(self, new: list[int]) -> bool:
        if len(new) >= self.stopping.max_new_tokens or new[-1] in self.stopping.eos_token_ids:
            return True
        if not self.stopping.strings:
            return False
        text = self.model.tokenizer.decode(new, skip_special_tokens=False)
        return any(string in text for string in self.stopping.strings)

    def result(self, run: _Run) -> Generation:
        """Everything together."""
        new = [np.array(one, np.int64) for one in self.new]
        ids = [np.concatenate(pair) for pair in zip(self.prompts, new, strict=True)]
        made = Generation(ids, new, steps=run.caches, cache=run.cache(), axes=run.axes)
        if self.model.has_tokenizer:
            made.texts = [self.model.tokenizer.decode(row.tolist()) for row in ids]
            made.new_texts = [self.model.tokenizer.decode(row.tolist()) for row in new]
        return made
