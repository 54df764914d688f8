"""`trace`: the attribution graph of a prompt."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.promoted import top_tokens
from mionnx.analysis.features.transcoder import Floats, Numbers
from mionnx.analysis.features.transcoder_set import OWN_SET, TranscoderSet
from mionnx.analysis.steering.directions import Direction
from mionnx.analysis.tracing.attribution_graph import AttributionGraph
from mionnx.analysis.tracing.influence import influence
from mionnx.analysis.tracing.local_model import LocalModel
from mionnx.analysis.tracing.rows import RESERVED, TRACE_MEMORY, EffectRows
from mionnx.analysis.tracing.sources import Sources
from mionnx.analysis.tracing.targets import Answer, end_of, logits_of, pairs_of
from mionnx.errors import InputError, nearest
from mionnx.inputs.chat_template import load_chat_template
from mionnx.inputs.token_rows import entries_of
from mionnx.machine.memory import format_bytes
from mionnx.machine.progress import Progress, shown
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.typed import typed
from mionnx.rewrite.gradient.way_back import FROZEN_PATTERN
from mionnx.run.prompt import each_of, one_prompt, prompt_text, token_text
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt

MOST_LOGITS, LOGIT_SHARE = 10, 0.95
STEP = 2048  # features that are chosen at a time, where not all become nodes
LABELLED, PROMOTED = 200, 4  # features that have words, and tokens of each
TRACED = (FROZEN_PATTERN, "frozen_norm")
FIRST_TOKENS = ("bos_token", "pad_token", "eos_token")  # what is put in front of a text, the first that there is


@typed(leave=["prompt"])
def trace(
    model: Runner,
    prompt: Prompt,
    transcoders: TranscoderSet | None = None,
    *,
    answer: Answer | None = None,
    versus: int | str | None = None,
    toward: str | Direction | None = None,
    position: int = -1,
    max_features: int | None = None,
    max_logits: int = MOST_LOGITS,
    logit_share: float = LOGIT_SHARE,
    skip: int = 1,
    rules: str = FROZEN_PATTERN,
    memory: int = TRACE_MEMORY,
    progress: bool | None = None,
) -> AttributionGraph | Any:
    """Trace a prompt through the features of transcoders: its attribution graph (Ameisen et al. 2025).

    Effects are those of circuit-tracer: direct, with attention patterns, scales of norms and outputs of MLPs as
    constants of the prompt, on logits before a soft cap. Each feature that is active, each error of a transcoder and
    each token is a source.

    Args:
        prompt: a text, or its ids, or a list of them. In front of a text that does not begin with a special token the
            model's own is put; ids are taken as they are.
        transcoders: a set of them, one for each layer; if left out the one in the model's folder, in "transcoders".
        answer: tokens whose logits are traced; if left out the most probable ones, together of `logit_share`, at most
            `max_logits`. For a list of prompts one token for all, or one for each.
        versus: a token whose logit is taken from each answer's; if left out the mean over the vocabulary is.
        toward: what is traced in the place of logits: a feature by name, "2_17_4", active or not; or a `Direction`, as
            that of a probe, at a residual stream, at what features read, or at the final norm. Tokens behind it lead
            nowhere, and are left out.
        position: at which a direction is read, negative from the end.
        max_features: most features that become nodes: those of the most influence on the logits, found through the
            rows that are known at each step; all of them if left out.
        max_logits: most logits that are traced without an answer.
        logit_share: probability that these have together.
        skip: first positions without features and errors: their activations are those of an attention sink.
        rules: "frozen_norm_pattern", or "frozen_norm": attention patterns are no constants, and effects go through
            queries and keys too, by their derivative.
        memory: about the bytes that a trace may take beside the open model; as many features become nodes as fit.
        progress: see `patch_sweep`.

    Returns:
        the graph; of a list of prompts those of each, a list.

    Raises:
        InputError: no such feature or token, no transcoders, or such as do not fit the model, an encoder, a recurrent
            model, one whose layers read more of earlier ones than the stream (Gemma 4) or whose head transforms the
            final norm's output (ModernBERT's decoder), one that computes in another dtype than float32, a text of
            `skip` tokens or less, or too little memory for any feature.
        HookError: hook points that the model does not have, or a direction that no feature leads to.
        GradientError: an operator without a rule, or heads in one axis with the batch (BLOOM).

    Example:
        graph = model.trace("The capital of France is", TranscoderSet.load("world-llama"))
        graph.top(5)
        model.trace("The capital of France is", toward="2_17_4")  # with the transcoders of the model's own folder
    """
    transcoders = _beside(model) if transcoders is None else transcoders
    for name, number, least in (("max_logits", max_logits, 1), ("skip", skip, 0), ("memory", memory, 1)):
        at_least(name, number, least)
    at_least("logit_share", logit_share, 0)
    at_most("logit_share", logit_share, 1)
    if max_features is not None:
        at_least("max_features", max_features, 1)
    if rules not in TRACED:
        raise InputError(f"rules={rules!r}; one of {', '.join(TRACED)}{nearest(rules, TRACED)}")
    if toward is not None and answer is not None:
        raise InputError("answer= are logits, and toward= is traced in their place: give one of the two")
    if toward is None and position != -1:
        raise InputError(f"position={position} is where a Direction is read: give toward= too")
    if not (answer is None and toward is None) and (max_logits, logit_share) != (MOST_LOGITS, LOGIT_SHARE):
        raise InputError("max_logits= and logit_share= choose logits where neither answer= nor toward= does")
    entries = [*prompt] if isinstance(prompt, np.ndarray) and prompt.ndim > 1 else entries_of(prompt)
    if entries is not None and not len(entries):
        raise InputError("there is no prompt to trace: the array has no rows")
    answers = [answer] if entries is None else each_of(answer, len(entries), "answer")
    limits = max_features, max_logits, logit_share, skip, memory
    graphs = [
        _traced(model, one, transcoders, own, versus, toward, position, limits, rules, progress)
        for one, own in zip([prompt] if entries is None else entries, answers, strict=True)
    ]
    return graphs[0] if entries is None else graphs


def _traced(
    model: Runner,
    prompt: Prompt,
    transcoders: TranscoderSet,
    answer: Answer | None,
    versus: int | str | None,
    toward: str | Direction | None,
    position: int,
    limits: tuple[int | None, int, float, int, int],
    rules: str,
    progress: bool | None,
) -> AttributionGraph:
    """The graph of one prompt."""
    max_features, max_logits, logit_share, skip, memory = limits
    start, ids = time.perf_counter(), _ids(model, prompt)
    pairs, tokens = pairs_of(model, answer, versus), tuple(token_text(model, token) for token in ids.tolist())
    text, end = prompt if isinstance(prompt, str) else prompt_text(model, ids), None
    if toward is not None:
        end, place = end_of(model, transcoders, toward, position, tokens)
        ids, tokens = ids[: place + 1], tokens[: place + 1]
    if len(ids) <= skip:
        raise InputError(f"a text of {len(ids)} tokens, of which the first {skip} have no features (skip=)")
    local = LocalModel(model, transcoders, rules, *(() if end is None else (end.hook, end.layers)))
    try:
        with shown(progress) as show:
            sources = Sources(local, ids.tolist(), skip, memory)
            targets, probabilities = logits_of(sources.logits, pairs, max_logits, logit_share)
            most = _fitting(sources, len(targets), memory)
            directions = local.directions(targets) if end is None else end.vector[None]
            rows = EffectRows(sources, directions, memory)
            chosen, effects = _effects(rows, probabilities, min(max_features or most, most), show)
    finally:
        model.give_back(later=True)
    texts = [" - ".join(token_text(model, one) for one in pair if one >= 0) for pair in targets.tolist()]
    graph = AttributionGraph(
        text,
        tokens,
        ids,
        local.layers,
        transcoders.hook,
        transcoders.hook_out,
        np.stack([sources.layer, sources.position, sources.feature], axis=1)[chosen],
        sources.value[chosen],
        tuple(texts) if end is None else (end.text,),
        targets,
        probabilities,
        effects,
        sources.count,
        transcoders.scan,
        cost={"seconds": time.perf_counter() - start, "bytes": float(sources.bytes + effects.nbytes)},
        skip=skip,
        rules=rules,
    )
    if end is not None:
        graph = replace(graph, toward=end.name, toward_hook=end.hook, toward_vector=end.vector)
    return replace(graph, promotes=_promoted(local, graph))


def _beside(model: Runner) -> TranscoderSet:
    """The transcoders in the model's own folder."""
    folder = Path(model.hooked.folder)
    if not (folder / OWN_SET).is_dir():  # as nnsight's own verb of this name is called
        raise InputError(
            f"trace makes an attribution graph through the features of transcoders, and {folder} has no folder "
            f"{OWN_SET!r}: give a TranscoderSet; what nnsight traces are model.forward(tokens, "
            "HookSpec().capture(...)) and model.run_with_hooks(tokens, [...])"
        )
    return TranscoderSet.load(folder)


def _promoted(local: LocalModel, graph: AttributionGraph) -> dict[str, tuple[str, ...]]:
    """The tokens that features of most influence raise most, through the final norm and the unembedding."""
    few, names = len(graph.features), graph.sources
    best = np.argsort(-graph.influence()[:few], kind="stable")[:LABELLED]
    if not len(best):
        return {}
    rows = np.stack([local.written(layer, feature) for layer, _, feature in graph.features[best].tolist()])
    tops = top_tokens(local.model, rows, PROMOTED)
    words = {token: token_text(local.model, token) for token in {*tops.ravel().tolist()}}
    return {names[i]: tuple(words[token] for token in top) for i, top in zip(best.tolist(), tops.tolist(), strict=True)}


def _ids(model: Runner, prompt: Prompt) -> NDArray[np.int64]:
    """A prompt's ids, a text's with a special token in front."""
    ids = one_prompt(model, prompt)
    if not isinstance(prompt, str):
        return ids
    words = load_chat_template(model.hooked.folder, "").tokens
    tokenizer: Any = model.tokenizer  # that of a model with attention
    special = {name: tokenizer.token_to_id(word) for name, word in words.items()}
    first = next((special[name] for name in FIRST_TOKENS if special.get(name) is not None), None)
    if first is None or ids[0] in special.values():
        return ids
    return np.concatenate([[first], ids])


def _fitting(sources: Sources, logits: int, memory: int) -> int:
    """The most features whose rows fit into memory, beside what the prompt and a call take."""
    rest = (memory - sources.bytes) * (1 - RESERVED) / np.dtype(np.float32).itemsize
    if rest >= (sources.count + logits) * sources.size:
        return sources.count
    # n rows of all sources, and in the end those of n features and the other sources
    b = sources.size + sources.size - sources.count + logits
    most = int((-b + np.sqrt(b * b + 4 * max(rest - logits * b, 0))) / 2)
    if most < 1:
        raise InputError(
            f"{sources.count:,} active features of {len(sources.ids)} tokens take {format_bytes(sources.bytes)}, and "
            f"memory={memory:,} leaves no room for effects: give more, or a shorter text"
        )
    return min(most, sources.count)


def _effects(rows: EffectRows, weights: NDArray[np.float64], most: int, show: Progress) -> tuple[Numbers, Floats]:
    """The features that become nodes, and the effects on them and on the logits."""
    sources, logits = rows.sources, len(weights)
    count, size, total = sources.count, sources.size, most + logits
    every = -1 - np.arange(logits)
    table = np.zeros((total, size), np.float32)
    if most == count:
        rows.compute(np.concatenate([np.arange(count), every]), table, partial(_report, show, 0, total))
        return np.arange(count), table
    # the last rows are the logits', as in a graph of all features
    rows.compute(every, table[most:])
    owner, done, seen = np.empty(most, np.int64), 0, np.zeros(count, bool)
    while done < most:
        part, places = owner[:done], np.concatenate([np.arange(done), np.arange(most, total)])
        own = influence(table, sources.layer[part], part, np.concatenate([np.zeros(done), weights]), places)[:count]
        ranked = np.argsort(-own, kind="stable")
        queue = ranked[~seen[ranked]][: min(STEP, most - done)]
        rows.compute(queue, table[done : done + len(queue)], partial(_report, show, logits + done, total))
        owner[done : done + len(queue)], seen[queue] = queue, True
        done += len(queue)
    chosen, order = np.flatnonzero(seen), np.argsort(owner)
    columns = np.concatenate([chosen, np.arange(count, size)])
    return chosen, table[np.ix_([*order, *range(most, total)], columns)]


def _report(show: Progress, before: int, total: int, rows: int) -> None:
    show("rows of effects", before + rows, total)
