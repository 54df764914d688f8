"""Generation: one prefill, then one token a step from the cache, with a spec's interventions in force at every step.

A step knows its tokens' absolute positions, and the graph selects by position, so that decoding with the cache equals
one pass over the whole text. Keys, values and states stay where the engine computed them between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.errors import HookError, InputError, TokenizerError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.kv_cache import KVCache
from mionnx.inputs.past import choose_past, past_inputs, present_names, present_to_past, take_present
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import Past, TokenBatch, count_rows, make_token_batch
from mionnx.inputs.value import Value
from mionnx.machine.brief import Brief, count, shape_of, spelled
from mionnx.machine.stored import Stored
from mionnx.machine.typed import typed
from mionnx.rewrite.plan import Outputs
from mionnx.run.accuracy import Rounding, generates_rounded
from mionnx.run.fused_plan import with_fused
from mionnx.run.graph_pool import GraphPool
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.run.sampling import Sampling, refuse_seed
from mionnx.run.stopping import Stopping, refuse_too_long, stop_texts
from mionnx.run.streamer import Decoder, Streamer, make_streamer
from mionnx.run.tokenizing import Prompt, takes_encoding
from mionnx.spec.hook_spec import HookSpec
from mionnx.view import card


@dataclass(repr=False)
@typed(InputError)
class Generation(Brief, Stored):
    """Continued prompts, and what was captured on the way; `save` writes .safetensors.

    Attributes:
        ids: per row the prompt and its continuation, padding left out, [seq]; a given cache's tokens are not in it.
        new_ids: per row the continuation, [new].
        texts, new_texts: the same as text, special tokens left out; empty if the model has no tokenizer.
        steps: per step what was captured: first the prompts', then one token a step, [batch, 1, ...]. Empty if the
            spec captures nothing and no logits were asked for.
        cache: keys and values, or state, of everything but the last token of each row, to continue from.
        axes: name of a capture -> the names of its axes.
    """

    ids: list[NDArray[np.int64]]
    new_ids: list[NDArray[np.int64]]
    texts: list[str] = field(default_factory=list)
    new_texts: list[str] = field(default_factory=list)
    steps: list[HookCache] = field(default_factory=list)
    cache: Past | None = None
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    INSIDE: ClassVar = (HookCache, KVCache, RWKVState)

    def _facts(self) -> Iterator[str]:
        yield count(len(self.ids), "row")
        yield count(max((len(row) for row in self.new_ids), default=0), "new token")
        if self.steps:
            yield f"{count(len(self.steps[0]), 'capture')} at {count(len(self.steps), 'step')}"

    def _lines(self) -> Iterator[str]:
        for text in self.new_texts:
            yield f"new text {text!r}"
        if not self.new_texts:
            yield from (f"new ids {spelled(row.tolist())}" for row in self.new_ids)

    def _repr_html_(self) -> str:
        prompts = [text.removesuffix(new) for text, new in zip(self.texts, self.new_texts, strict=True)]
        rows = [(f"row {i}", *pair) for i, pair in enumerate(zip(prompts, self.new_texts, strict=True))]
        ids = [] if rows else [(f"row {i}", "new ids ", spelled(row.tolist())) for i, row in enumerate(self.new_ids)]
        names = [(name, shape_of(value), "") for name, value in (self.steps[-1] if self.steps else {}).items()]
        return card(repr(self), [*rows, *ids, *names])

    def captured(self, hook: HookPoint | str) -> NDArray[Any]:
        """A capture of all steps, concatenated along its sequence axis.

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


@takes_encoding
@typed()
def generate(
    model: Runner,
    tokens: Prompt,
    hooks: HookSpec | None = None,
    *,
    max_new_tokens: int = 20,
    min_new_tokens: int = 0,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    seed: int | None = None,
    attention_mask: ArrayLike | None = None,
    cache: Past | None = None,
    streamer: Streamer | Callable[..., Any] | None = None,
    output_logits: bool = False,
) -> Generation:
    """Continue prompts, with a spec's interventions in force at every step.

    Parameters are named and mean what they do in transformers' `generate`.

    Args:
        tokens: prompts, as `forward` takes them; ids that are padded must be so on the left.
        hooks: interventions apply to every token, or to absolute positions, to positions counted back from the
            prompt's end, or to the phase "prompt" or "generated"; captures are made at every step.
        max_new_tokens, min_new_tokens: how many tokens a row gets, the end-of-text token included.
        do_sample: sample; otherwise the top token is taken. `temperature`, `top_k` (0: all) and `top_p` apply
            to sampling only.
        repetition_penalty: above 1 makes tokens that stand in the text less likely.
        eos_token_id: tokens that end a row; the checkpoint's own if left out, none if empty.
        pad_token_id: what rows that have ended are fed; it never appears in the result.
        stop_strings: end a row when its new text contains one of these.
        seed: of the sampling; the same seed gives the same tokens, whatever else is in the batch.
        attention_mask: [batch, seq], 1 for tokens and 0 for padding.
        cache: of a prefix (`HookCache.kv_cache`, `HookCache.state`, `Generation.cache`); one of a single row serves
            several prompts.
        streamer: told of every token: an object with `put(ids)` and `end()`, such as `TextStreamer`; or, for one text,
            a function of each new piece of text, or of each new token's id and text.
        output_logits: keep all logits, as `Generation.steps[i].output()`.

    Raises:
        InputError: prompts, cache or parameters that nothing can be generated from.
        HookError, InterventionError: the spec would not take effect as asked, such as at positions in the cache.

    Example:
        steer = HookSpec().intervene(HookPoint.ResidPost(2), Intervention.Scale(1.5, positions="generated"))
        model.generate("The capital of France is", steer, max_new_tokens=3).new_texts
    """
    stopping = Stopping(max_new_tokens, min_new_tokens, _end_tokens(model, eos_token_id), stop_texts(stop_strings))
    if stopping.strings and not model.has_tokenizer:
        raise TokenizerError(f"{model.hooked.folder} has no tokenizer to find stop_strings with: use eos_token_id")
    sampling = Sampling(do_sample, temperature, top_k, top_p, repetition_penalty)
    if not do_sample and ((temperature, top_k, top_p) != (1.0, 50, 1.0) or seed is not None):
        raise InputError("temperature, top_k, top_p and seed apply to sampling only: give do_sample=True too")
    refuse_seed(seed)
    pad = model._known(next(iter(stopping.eos_token_ids), 0) if pad_token_id is None else pad_token_id)
    batch, past = _prompts(model, tokens, attention_mask, cache, stopping)
    stopping.refuse_unreached(hooks or HookSpec())
    tokenizer = model.tokenizer if model.has_tokenizer else None
    stream = make_streamer(streamer, tokenizer, batch.batch)
    own = model.opened(Rounding) if generates_rounded(model.hooked, model.options) else model
    passes = _Passes(own.variants, own.binder.bind(hooks or HookSpec()), batch, past, output_logits)
    texts = _Texts(batch, sampling, stopping, tokenizer, pad, seed)
    if stream is not None:
        stream.put(batch.input_ids)
    for logits in passes.steps(texts):
        chosen = texts.take(logits)
        if stream is not None:
            stream.put(chosen)
    if stream is not None:
        stream.end()
    return texts.result(passes)


def _end_tokens(model: Runner, given: int | Sequence[int] | None) -> tuple[int, ...]:
    tokens = model.hooked.end_tokens() if given is None else given
    return tuple(model._known(token) for token in ([tokens] if isinstance(tokens, int) else tokens))


def _prompts(
    model: Runner, prompt: Prompt, attention_mask: ArrayLike | None, cache: Past | None, stopping: Stopping
) -> tuple[TokenBatch, Past | None]:
    """The token batch of the first pass, and what it continues from."""
    tokens, past = model._ids(prompt), choose_past(model.hooked, cache, None)
    rows, sizes = count_rows(tokens), model.hooked.metadata.sizes
    if past is not None and past.batch == 1 < rows:
        past = past.repeat(rows)  # a prefix of one row serves all prompts
    batch = make_token_batch(tokens, attention_mask, past, sizes)
    if not batch.real[:, -1].all():
        row = int(np.argmin(batch.real[:, -1]))
        raise InputError(f"row {row} is padded on the right: generation continues at the end, so pad on the left")
    refuse_too_long("max_new_tokens", stopping.max_new_tokens, batch, model.hooked.metadata)
    final_lengths = batch.lengths + stopping.max_new_tokens - 1
    past_lengths = batch.lengths - batch.real.sum(axis=1)
    return replace(batch, prompt_lengths=batch.lengths, final_lengths=final_lengths, past_lengths=past_lengths), past


class _Passes:
    """The passes through the graph: each feeds the results of the one before."""

    def __init__(
        self, pool: GraphPool, bound: BoundSpec, batch: TokenBatch, past: Past | None, keeps_logits: bool
    ) -> None:
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
        self._check_every_step()
        self.bound.refuse_idle(batch, True, None if keeps_logits else _read_positions(batch))

    def _check_every_step(self) -> None:
        """Refuse what would not fit a later step before the first one runs."""
        final_lengths = self.batch.final_lengths
        if final_lengths is not None and (final_lengths > self.batch.lengths).any():
            self.bound.values(self.batch.next_step(np.zeros(self.batch.batch, np.int64)))

    def steps(self, texts: _Texts) -> Iterator[NDArray[Any]]:
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


def _read_positions(batch: TokenBatch) -> dict[int, range]:
    """Row -> positions whose logits a generation reads: the prompt's last and all after it."""
    ends = batch.lengths if batch.final_lengths is None else batch.final_lengths
    return {row: range(int(batch.lengths[row]) - 1, int(end)) for row, end in enumerate(ends)}


class _Texts:
    """The rows of text while they grow."""

    def __init__(
        self,
        batch: TokenBatch,
        sampling: Sampling,
        stopping: Stopping,
        tokenizer: Decoder | None,
        pad: int,
        seed: int | None,
    ) -> None:
        self.sampling, self.stopping, self.tokenizer, self.pad = sampling, stopping, tokenizer, pad
        self.prompts = [row[real] for row, real in zip(batch.input_ids, batch.real, strict=True)]
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
            self.ended[row] = self.stopping.ends(new, self.tokenizer)
        return self.last.copy()

    def _choose(self, logits: NDArray[np.float64], row: int) -> int:
        if np.isnan(logits).any():
            raise InputError(f"the logits of row {row} have NaN after {len(self.new[row])} new tokens")
        if len(self.new[row]) < self.stopping.min_new_tokens:
            logits[list(self.stopping.eos_token_ids)] = -np.inf
        text = np.concatenate([self.prompts[row], np.array(self.new[row], np.int64)])
        return self.sampling.choose(logits, text, self.random[row])

    def result(self, passes: _Passes) -> Generation:
        """The texts, captures and cache together."""
        new = [np.array(row, np.int64) for row in self.new]
        ids = [np.concatenate(pair) for pair in zip(self.prompts, new, strict=True)]
        axes = {capture.node.hook: capture.node.axes for capture in passes.bound.captures}
        generation = Generation(ids, new, steps=passes.caches, cache=passes.cache(), axes=axes)
        if self.tokenizer is not None:
            generation.texts = [self.tokenizer.decode(row.tolist()) for row in ids]
            generation.new_texts = [self.tokenizer.decode(row.tolist()) for row in new]
        return generation
