"""`attribute`: a logit, or the difference of two, as the sum of what each component adds to it directly."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.attribution import decompose
from mionnx.analysis.attribution.attribution import Attribution, Attributions
from mionnx.analysis.attribution.frozen_norms import FrozenNorms, reads_through, sums_have_names
from mionnx.analysis.attribution.linear_parts import LinearParts
from mionnx.analysis.attribution.residual_stack import decomposition_hooks, norm_before
from mionnx.bind.logit_selection import Logits
from mionnx.errors import InputError, ModelError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.lacking import refuse_other_than_sums, refuse_several_streams, refuse_without_vocabulary
from mionnx.inputs.token_batch import Place
from mionnx.machine.decimals import decimal
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.hook_cache import HookCache
from mionnx.run.metric_place import index_read, place_of
from mionnx.run.prompt import PromptText, each_of, is_list, texts_of, token_of, token_text
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt, warn_of_spelling
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import Tokens

Vector = NDArray[np.float64]
BEHIND = (HookPoint.FinalNorm, HookPoint.Logits)
SLACK = {4: 1e-5, 2: 2e-2, 8: 1e-5}  # bytes of a float -> what sums may miss, relative to the sum of all sizes
ROUNDED = 2e-2  # the same where products round what they read to 8 bits


@overload
def attribute(
    model: Runner,
    prompt: str,
    answer: int | str | None = None,
    versus: int | str | None = None,
    *,
    position: Place | None = None,
    hooks: HookSpec | None = None,
    batch_size: BatchSize = AUTO,
) -> Attribution: ...
@overload
def attribute(
    model: Runner,
    prompt: Prompt,
    answer: Tokens = None,
    versus: Tokens = None,
    *,
    position: Place | None = None,
    hooks: HookSpec | None = None,
    batch_size: BatchSize = AUTO,
) -> Any: ...
@typed()
def attribute(
    model: Runner,
    prompt: Prompt,
    answer: Tokens = None,
    versus: Tokens = None,
    *,
    position: Place | None = None,
    hooks: HookSpec | None = None,
    batch_size: BatchSize = AUTO,
) -> Attribution | Attributions:
    """Decompose a logit, or one token's lead over another, into direct contributions.

    The parts are the embeddings, every head, the rest of the attention outputs (biases), the MLPs, and the biases of
    the final norm and the head. Heads go through a norm behind the attention (Gemma 2) as through the final one.
    Where the stream is normed after each addition (BERT), a part goes through all norms behind it, each held at the
    actual stream's scale; "norm_bias" has the biases of all these norms. Through a transform in the head (masked
    language models, ModernBERT's decoder) it goes by RelP's rule (`x f(x)` takes f for constant). Where a quantised
    head rounds what it reads to 8 bits, the parts add up to within that rounding, some 1 %.

    Args:
        prompt: one text, or ids; or a list of them.
        answer: by id or text; the top token if left out; one for all prompts of a list, or one for each.
        versus: the token that the answer's lead is over; None for the answer's logit itself; for a list as `answer`.
        position: at which the token is predicted, negative from the end; if left out the last, and of a masked language
            model that of the text's one "mask".
        hooks: interventions to run the prompt with; one on the stream itself is no component, and an error, and so
            is one at `hook_final_norm` or `hook_logits`, where all components have been added up.
        batch_size: prompts of one pass, those of like length together; "auto": as many as run well and fit into memory.

    Returns:
        the contributions; of a list those of each prompt, as a sequence with mean, standard error, figure and page.

    Raises:
        InputError: no such position or token, or captures among the hooks, or interventions behind the stream.
        ModelError: the contributions do not add up to the model's own logit.

    Example:
        lead = model.attribute("The capital of France is", "Paris", versus="Berlin")
        lead.top(3), lead.heads[3]  # the largest contributions, and those of layer 3's heads
        many = model.attribute(["The capital of France is", "The capital of Peru is"], ["Paris", "Lima"])
        many.values, many.sem, many.by_pair.shape  # (prompts, component)
    """
    if not sums_have_names(model.hooked):
        refuse_other_than_sums(model.hooked, "attribution")
    refuse_without_vocabulary(model.hooked, "attribution")
    refuse_several_streams(model.hooked, "attribution")
    texts, place = texts_of(model, prompt), place_of(model.hooked, position)
    places = [_index(model, text, place) for text in texts]
    sides = [each_of(answer, len(texts), "answer"), each_of(versus, len(texts), "versus")]
    pairs = [[None if token is None else token_of(model, token) for token in pair] for pair in zip(*sides, strict=True)]

    frozen = FrozenNorms(model, hooks, len(texts)) if reads_through(model) else None

    def read(row: int, cache: HookCache) -> Attribution:
        for what, tokens in zip(("answer", "versus"), sides, strict=True):
            warn_of_spelling(model, what, tokens[row], cache.output()[0, 0])
        column = 0 if isinstance(place, int) else places[row]
        if frozen is not None:
            return _through_norms(frozen, texts[row], places[row], column, cache, *pairs[row])
        return _attribution(model, texts[row], places[row], column, cache, *pairs[row])

    points = [request.what for request in decomposition_hooks(model).captures] if frozen is None else frozen.points
    spec, logits = _spec(points, place, hooks), Logits(positions=place)
    request = ListRequest([text.ids for text in texts], spec, batch_size, logits=logits)
    results = map_rows(model, request, read, "attribution")
    model.give_back(later=True)
    return Attributions(tuple(results)) if is_list(model, prompt) else results[0]


def _index(model: Runner, text: PromptText, place: Place | None) -> int:
    """The index in a text at which its logits are read."""
    return text.place(place) if isinstance(place, int) else int(index_read(model.hooked, place, text.ids) or 0)


def _attribution(
    model: Runner, text: PromptText, index: int, column: int, cache: HookCache, answer: int | None, against: int | None
) -> Attribution:
    """The contributions at an index of a text, whose captures stand in a column of the cache."""
    logits = cache.output()[0, 0]
    chosen = int(logits.argmax()) if answer is None else answer
    if chosen == against:
        raise InputError(f"answer and versus are both token {chosen}: their difference is 0")
    parts, unembedding = _components(model, cache, column), model.opened(LinearParts)
    # With a soft cap the model's logits are no sum; those before the cap are.
    uncapped = unembedding.uncapped(logits, cache[_end(model)][0, column])
    values = _contributions(model, np.stack(list(parts.values())), column, cache, chosen, against)
    logit = float(uncapped[chosen] - (0 if against is None else uncapped[against]))
    _refuse_gap(model, values, logit)
    return Attribution(
        [*parts, "final_norm_bias", "head_bias"],
        values,
        model.num_heads if decompose.layers_with_shares(model.hooked) else 0,
        model.num_layers,
        logit,
        unembedding.head.capped,
        token_text(model, chosen),
        None if against is None else token_text(model, against),
        text.tokens,
        index,
    )


def _end(model: Runner) -> HookPoint:
    return HookPoint.ResidPost(model.num_layers - 1)


def _spec(points: list[Any], place: Place | None, hooks: HookSpec | None) -> HookSpec:
    """Captures of all components of the stream at one position; at all where each text has its own."""
    spec = HookSpec().extend(hooks or HookSpec())
    if spec.captures:
        raise InputError("the hooks of an attribution are interventions: what it captures are its own components")
    for point in BEHIND:
        if spec.has_intervention_at(point):
            raise InputError(f"an intervention at {point} comes behind the stream, and changes no component of it")
    positions = place if isinstance(place, int) else None
    return spec.capture(points, positions=positions)


def _through_norms(
    frozen: FrozenNorms,
    text: PromptText,
    index: int,
    column: int,
    cache: HookCache,
    answer: int | None,
    against: int | None,
) -> Attribution:
    """The same of a stream that is normed after each addition."""
    model, logits = frozen.model, cache.output()[0, 0].astype(np.float64)
    chosen = int(logits.argmax()) if answer is None else answer
    if chosen == against:
        raise InputError(f"answer and versus are both token {chosen}: their difference is 0")
    logit = float(logits[chosen] - (0 if against is None else logits[against]))
    parts = _components(model, cache, column, frozen.additions)
    labels, values = frozen.contributions(parts, cache, column, text.ids, index, (chosen, against), logit)
    _refuse_gap(model, values, logit)
    return Attribution(
        labels,
        values,
        model.num_heads if decompose.layers_with_shares(model.hooked) else 0,
        model.num_layers,
        logit,
        False,
        token_text(model, chosen),
        None if against is None else token_text(model, against),
        text.tokens,
        index,
    )


def _components(
    model: Runner, cache: HookCache, column: int, named: decompose.Named | None = None
) -> dict[str, Vector]:
    """Label -> what it adds to the stream, [hidden], in order."""
    parts: dict[str, Vector] = {}
    apart = decompose.layers_with_shares(model.hooked)
    for label, name in named or decompose.additions(model.hooked, model.num_layers, "all", False, True):
        value = cache[name][0, column].astype(np.float64)
        layer = HookPoint.parse(name).layer or 0
        if label.endswith("_attn_out") and layer in apart:
            shares = _head_shares(model, cache, layer, column)
            parts |= {f"L{layer}H{head}": share for head, share in enumerate(shares)}
            # What is no head's: the output's bias, which belongs to the layer.
            parts[f"{layer}_attn_bias"] = value - shares.sum(axis=0)
        else:
            parts[label] = value
    return parts


def _head_shares(model: Runner, cache: HookCache, layer: int, column: int) -> Vector:
    """[head, hidden]: each head's share of the stream, behind the attention's norm if any."""
    shares = cache[HookPoint.AttnResult(layer)][0, column]
    graphs = model.opened(LinearParts)
    if layer not in graphs.output_norms:
        return shares.astype(np.float64)
    # All output norms are one graph, opened once, rather than one graph a layer.
    beside = tuple(graphs.output_norms.values())
    norm = graphs.linear(graphs.output_norms[layer], shares.sum(axis=0, keepdims=True), beside)
    return norm.apply(shares[:, None])[:, 0]


def _contributions(
    model: Runner, stack: Vector, column: int, cache: HookCache, answer: int, versus: int | None
) -> Vector:
    here = slice(column, column + 1)
    norm, unembedding = norm_before(model, cache, model.num_layers, False, here), model.opened(LinearParts)
    direction, offset = unembedding.directions(np.array(answer)), unembedding.offset(answer)
    if versus is not None:
        direction, offset = direction - unembedding.directions(np.array(versus)), offset - unembedding.offset(versus)
    projected = norm.project(stack[:, None, None], direction)[:, 0, 0]
    return np.concatenate([projected, [norm.bias @ direction, offset]])


def _refuse_gap(model: Runner, values: Vector, logit: float) -> None:
    slack = ROUNDED if model.hooked.rounds_activations else SLACK[np.dtype(model.hooked.dtype(_end(model))).itemsize]
    gap = abs(float(values.sum()) - logit)
    # Relative to the sum of all sizes, since large contributions of both signs may cancel; `not <=` refuses NaN too.
    if not gap <= slack * max(1.0, float(np.abs(values).sum())):
        raise ModelError(
            f"{model.hooked.metadata.family}: the components contribute {decimal(values.sum(), 5)}, and the logit is "
            f"{decimal(logit, 5)}: something else is added to the stream, or an intervention changes the stream itself"
        )
