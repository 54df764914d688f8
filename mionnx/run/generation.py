"""Generation: one prefill, then one token a step from the cache, with a spec's interventions in force at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.bind.spec_rows import SpecRows, differs_by_row, reaches_by_row
from mionnx.errors import HookError, InputError, TokenizerError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.kv_cache import KVCache
from mionnx.inputs.lacking import refuse_without_cache
from mionnx.inputs.layer_cache import LayerCache
from mionnx.inputs.past import choose_past
from mionnx.inputs.prompt_list import read_prompts
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import Past, TokenBatch, count_rows, make_token_batch
from mionnx.inputs.tokens import decode
from mionnx.machine.brief import Brief, count, shape_of, spelled
from mionnx.machine.stored import Stored
from mionnx.machine.typed import typed
from mionnx.rewrite.plan import Outputs
from mionnx.run.batching import AUTO, BatchSize, check_batch_size, fitting, in_batches
from mionnx.run.decoding import Passes, check_steps
from mionnx.run.forward_batches import in_one_pass, takes_padding
from mionnx.run.hook_cache import HookCache
from mionnx.run.hook_functions import HookFunctions, StepFunctions
from mionnx.run.runner import Runner
from mionnx.run.sampling import GrowingTexts, Growth, Sampling, Stopping, refuse_seed, refuse_too_long, stop_texts
from mionnx.run.streamer import Streamer, make_streamer
from mionnx.run.tokenizing import Prompt, takes_encoding
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.view import card

Integers = int | Sequence[int] | None
Streaming = Streamer | Callable[..., Any] | None


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
        cache: keys and values, or state, of everything but the last token of each row, to continue from; None after
            several batches.
        axes: name of a capture -> the names of its axes.
    """

    ids: list[NDArray[np.int64]]
    new_ids: list[NDArray[np.int64]]
    texts: list[str] = field(default_factory=list)
    new_texts: list[str] = field(default_factory=list)
    steps: list[HookCache] = field(default_factory=list)
    cache: Past | None = None
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    INSIDE: ClassVar = (HookCache, KVCache, RWKVState, LayerCache)

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
@typed(leave=["fwd_hooks"])
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
    eos_token_id: Integers = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    seed: int | None = None,
    attention_mask: ArrayLike | None = None,
    cache: Past | None = None,
    streamer: Streaming = None,
    output_logits: bool = False,
    batch_size: BatchSize = AUTO,
    fwd_hooks: HookFunctions = (),
    window: int | None = None,
) -> Generation:
    """Continue prompts, with a spec's interventions in force at every step.

    Parameters are named and mean what they do in transformers' `generate`.

    Args:
        tokens: prompts, as `forward` takes them; ids that are padded must be so on the left.
        hooks: interventions apply to every token, or to absolute positions, to positions counted back from the
            prompt's end, or to the phase "prompt" or "generated"; captures are made at every step.
        max_new_tokens, min_new_tokens: how many tokens a row gets, the end-of-text token included.
        do_sample: sample; otherwise the top token is taken.
        temperature, top_k, top_p: of sampling: divide the logits by this, draw among the k most likely tokens (0: all),
            or among those that reach this probability together.
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
        batch_size: most rows of a pass: a list then runs in batches, those of like length together, and the result has
            no `cache`; "auto": all rows at once, or as many as fit into memory; None: all at once.
        fwd_hooks: pairs of a hook and a Python function, as `run_with_hooks` takes them, called as
            `function(activation, hook=hook)` at every step: with the prompts' positions, [batch, seq, ...], then with
            one new token a step, [batch, 1, ...]. `hook.step` is 0, then 1, 2, ...; `hook.positions` [batch, seq] are
            the columns' positions in the texts, -1 for padding, `hook.rows` the rows' numbers. Rows that have
            ended are in it to the last step.
        window: new tokens read their own position and so many before it, in every layer of attention; the prompt is
            read whole, and keeps its positions. `Intervention.Window` at `hook_scores` cuts other edges too.

    Raises:
        InputError: prompts, cache or parameters that nothing can be generated from.
        HookError, InterventionError: the spec would not take effect as asked, such as at positions in the cache; or a
            function left a result that cannot replace the value.

    Example:
        steer = HookSpec().intervene(HookPoint.ResidPost(2), Intervention.Scale(1.5, positions="generated"))
        model.generate("The capital of France is", steer, max_new_tokens=3).new_texts
    """
    if model.bidirectional:
        refuse_without_cache(model.hooked, "generate")
    stopping = Stopping(max_new_tokens, min_new_tokens, _end_tokens(model, eos_token_id), stop_texts(stop_strings))
    if stopping.strings and not model.has_tokenizer:
        raise TokenizerError(f"{model.hooked.folder} has no tokenizer to find stop_strings with: use eos_token_id")
    sampling = Sampling(do_sample, temperature, top_k, top_p, repetition_penalty)
    if not do_sample and ((temperature, top_k, top_p) != (1.0, 50, 1.0) or seed is not None):
        raise InputError("temperature, top_k, top_p and seed apply to sampling only: give do_sample=True too")
    refuse_seed(seed)
    pad = model.check_token(next(iter(stopping.eos_token_ids), 0) if pad_token_id is None else pad_token_id)
    tokenizer = model.tokenizer if model.has_tokenizer else None
    functions = StepFunctions(model.hooked, fwd_hooks)
    growth, spec = Growth(sampling, stopping, tokenizer, pad, seed), _windowed(model, hooks or HookSpec(), window)
    request = _Request(spec, growth, output_logits, functions if functions.names else None)
    stopping.refuse_unreached(request.spec)
    check_batch_size(batch_size)
    if isinstance(batch_size, int):
        return _in_batches(model, tokens, attention_mask, cache, request, batch_size, streamer)
    batch, past = _prompts(model, model.ids(tokens), attention_mask, cache, stopping)
    # a streamer, captures and logits follow the steps of one batch
    if batch.batch > 1 and streamer is None and not (output_logits or request.spec.captures):
        bound = model.binder.bind(request.spec, Outputs(last=True))
        if not in_one_pass(bound, batch, batch_size, use_cache=True):
            return _in_batches(model, tokens, attention_mask, cache, request, AUTO, streamer)
    return _continued(model, batch, past, request, make_streamer(streamer, tokenizer, batch.batch))


def _windowed(model: Runner, spec: HookSpec, tokens: int | None) -> HookSpec:
    """The spec, and a window of attention at every layer that reads further."""
    if tokens is None:
        return spec
    metadata = model.hooked.metadata
    windows = {i: metadata.window(i) for i, layer in enumerate(metadata.layers) if layer.attention}
    wider = {layer for layer, window in windows.items() if window is None or window > tokens + 1}
    points = [point for point in model.hook_points() if point.variant == "AttnScores" and point.layer in wider]
    if not points:
        family = metadata.family
        raise InputError(f"window={tokens}: no layer of this {family} model has attention that reads further back")
    return HookSpec().extend(spec).intervene(points, Intervention.Window(tokens, positions="generated"))


@dataclass(frozen=True)
class _Request:
    """The arguments of a generation."""

    spec: HookSpec
    growth: Growth
    output_logits: bool
    functions: StepFunctions | None = None
    rows: list[int] | None = None  # the numbers of the prompts in their list; None for all of it
    checked: bool = False  # whether `check_steps` has seen the spec on the whole list


def _continued(
    model: Runner, batch: TokenBatch, past: Past | None, request: _Request, stream: Streamer | None = None
) -> Generation:
    """Continue the prompts of one batch."""
    rows = range(batch.batch) if request.rows is None else request.rows
    functions = None if request.functions is None else request.functions.of_rows(rows)
    bound = model.binder.bind(request.spec, cuts=() if functions is None else functions.names)
    passes = Passes(model.variants, bound, batch, past, request.output_logits, request.checked, functions)
    texts = GrowingTexts(batch, request.growth, rows)
    if stream is not None:
        stream.put(batch.input_ids)
    for logits in passes.steps(texts):
        chosen = texts.take(logits)
        if stream is not None:
            stream.put(chosen)
    model.watch_memory()
    if stream is not None:
        stream.end()
    axes = {capture.node.hook: capture.node.axes for capture in passes.bound.captures}
    generation = _generation_of(texts.prompts, texts.new, request.growth)
    return replace(generation, steps=passes.caches, cache=passes.cache(), axes=axes)


def _generation_of(prompts: Sequence[NDArray[np.int64]], added: Sequence[Sequence[int]], growth: Growth) -> Generation:
    """Prompts and what was added to them, as ids and as text."""
    new = [np.array(row, np.int64) for row in added]
    ids = [np.concatenate(pair) for pair in zip(prompts, new, strict=True)]
    if growth.tokenizer is None:
        return Generation(ids, new)
    texts, new_texts = ([decode(growth.tokenizer, row.tolist()) for row in rows] for rows in (ids, new))
    return Generation(ids, new, texts, new_texts)


def _in_batches(
    model: Runner,
    tokens: Prompt,
    attention_mask: ArrayLike | None,
    cache: Past | None,
    request: _Request,
    batch_size: int | str,
    streamer: Any,
) -> Generation:
    """Continue a list of prompts in batches; see `generate`."""
    bound = model.binder.bind(request.spec, Outputs(last=True))
    if streamer is not None:
        raise InputError("streamer= follows the rows of one batch step by step: leave out batch_size=")
    if bound.captures or request.output_logits:
        raise InputError(
            "captures and logits of a generation are those of its steps, which batches do not share: leave out "
            "batch_size=, or give the finished texts to forward, `forward(made.ids, spec, prompt_length=[...], "
            "batch_size=...)`, which has the same values"
        )
    past, stopping, hooked = choose_past(model.hooked, cache, None), request.growth.stopping, model.hooked
    shared = past if past is not None and past.batch == 1 else None
    ids = model.ids(tokens)
    prompts = read_prompts(ids, attention_mask, None if shared is not None else past, hooked)
    full, by_row = None, differs_by_row(bound)
    if checked := by_row or reaches_by_row(bound):
        full, _ = _prompts(model, ids, attention_mask, cache, stopping)
        bound.values(full)
        check_steps(bound, full, False)
        full = full if by_row else None

    def run(rows: list[int]) -> list[list[int]]:
        ids, mask, own = prompts.part(rows)
        batch, before = _prompts(model, ids, mask, own if shared is None else shared, stopping)
        spec = request.spec if full is None else SpecRows(bound, full).of(rows, batch.seq)
        part = replace(request, spec=spec, rows=rows, checked=checked)
        return [row.tolist() for row in _continued(model, batch, before, part).new_ids]

    seen = prompts.seen + stopping.max_new_tokens
    fit, padded = fitting(bound, seen, True), takes_padding(hooked)
    new = in_batches(prompts.lengths, batch_size, run, stage="generate", padded=padded, fitting=fit)
    return _generation_of(prompts.ids, new, request.growth)


def _end_tokens(model: Runner, token_ids: Integers) -> tuple[int, ...]:
    tokens = model.hooked.end_tokens() if token_ids is None else token_ids
    return tuple(model.check_token(token) for token in ([tokens] if isinstance(tokens, int) else tokens))


def _prompts(
    model: Runner, tokens: Any, attention_mask: ArrayLike | None, cache: Past | None, stopping: Stopping
) -> tuple[TokenBatch, Past | None]:
    """The token batch of the first pass, and what it continues from."""
    past = choose_past(model.hooked, cache, None)
    rows = count_rows(tokens)
    if past is not None and past.batch == 1 < rows:
        past = past.repeat(rows)  # a prefix of one row serves all prompts
    batch = make_token_batch(tokens, attention_mask, past, model.hooked)
    if not batch.real[:, -1].all():
        row = int(np.argmin(batch.real[:, -1]))
        raise InputError(f"row {row} is padded on the right: generation continues at the end, so pad on the left")
    refuse_too_long("max_new_tokens", stopping.max_new_tokens, batch, model.hooked.metadata)
    final_lengths = batch.lengths + stopping.max_new_tokens - 1
    past_lengths = batch.lengths - batch.real.sum(axis=1)
    return replace(batch, prompt_lengths=batch.lengths, final_lengths=final_lengths, past_lengths=past_lengths), past
