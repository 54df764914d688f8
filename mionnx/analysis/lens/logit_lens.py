"""`logit_lens`: residual streams read as predictions of the next token; tokens followed from layer to layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.jacobian_lens.jacobian_lens import JacobianLens
from mionnx.analysis.lens.lens_result import LOGIT_LENS, LensResult
from mionnx.analysis.lens.readout import Lens, LensReader
from mionnx.errors import HookError, InputError, ModelError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.lacking import refuse_without_vocabulary
from mionnx.inputs.token_batch import Place
from mionnx.inputs.token_rows import IDS
from mionnx.machine.typed import refusal, typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.hook_cache import HookCache
from mionnx.run.metric_place import index_read
from mionnx.run.nan_logits import ON_NAN, has_nan
from mionnx.run.prompt import PromptText, is_list, is_stream, one_text, streams_of, texts_of, token_of
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec

Scored = list[tuple[int, float]]  # token ids with a probability, cosine or logit each, in descending order
STREAMS = ("resid_pre", "resid_mid", "resid_post")


@overload
def logit_lens(model: Runner, source: NDArray[np.floating[Any]], *, k: int = 10) -> list[Any]: ...  # type: ignore[overload-overlap]
@overload
def logit_lens(
    model: Runner,
    source: str,
    hooks: HookSpec | None = None,
    *,
    k: int = 10,
    layers: Sequence[int] | None = None,
    positions: int | Sequence[int] | None = None,
    points: str | Sequence[str] = "resid_post",
    token_ids: Sequence[int | str] = (),
    batch_size: BatchSize = AUTO,
    lens: JacobianLens | None = None,
) -> LensResult: ...
@overload
def logit_lens(
    model: Runner,
    source: Prompt,
    hooks: HookSpec | None = None,
    *,
    k: int = 10,
    layers: Sequence[int] | None = None,
    positions: int | Sequence[int] | None = None,
    points: str | Sequence[str] = "resid_post",
    token_ids: Sequence[int | str] = (),
    batch_size: BatchSize = AUTO,
    lens: JacobianLens | None = None,
) -> Any: ...
@typed(leave=["hooks"])
def logit_lens(
    model: Runner,
    source: Any,
    hooks: HookSpec | None = None,
    *,
    k: int = 10,
    layers: Sequence[int] | None = None,
    positions: int | Sequence[int] | None = None,
    points: str | Sequence[str] = "resid_post",
    token_ids: Sequence[int | str] = (),
    batch_size: BatchSize = AUTO,
    lens: JacobianLens | None = None,
) -> LensResult | list[Any]:
    """Read residual streams with the model's own final norm, head, soft cap and softmax.

    All of it happens inside a graph that returns the k largest probabilities and those of chosen tokens, in blocks:
    [layers, seq, vocab] is never held.

    Args:
        source: a prompt (a text, `Tokens` or integer ids); a list of them; or, as floats, a residual [hidden] or
            several [n, hidden], which the other arguments but `k` do not apply to.
        hooks: interventions to run the prompt with.
        k: how many of the most likely tokens.
        layers: layers to read; all if left out.
        positions: positions to read, negative ones from the end; all if left out.
        points: streams of a layer: "resid_post", "resid_pre", "resid_mid", or several of these.
        token_ids: further tokens, by id or text, to follow through the layers.
        batch_size: as for `forward`.
        lens: linear maps from the layers' streams to the last one's, which stand before the head; the layers are then
            the lens' own, and the last. See `fit_lens` and `JacobianLens.load`.

    Returns:
        a `LensResult` for a prompt, a list of them for a list; [(token id, probability)] for a residual; a list of
        these for several.

    Raises:
        InputError: NaN, another width, a k, position, token or layer that does not exist, or the lens of another model.
        HookError: points that the model does not have.

    Example:
        lens = model.logit_lens("The capital of France is", k=3)
        [lens.spell(token) for token, _ in lens.best(-1, -1)]  # the last layer's top tokens at the last position
    """
    if hooks is not None and not isinstance(hooks, HookSpec):
        hint = "; k=5 asks for five tokens, layers=[5] for a layer" if isinstance(hooks, int) else ""
        raise InputError(refusal("hooks", HookSpec | None, hooks) + hint)
    if is_stream(source):
        unread = hooks is layers is positions is lens is None and batch_size == AUTO
        if not (unread and points == "resid_post" and len(token_ids) == 0):
            raise InputError(
                "hooks, layers, positions, points, tokens, lens and batch_size apply to a prompt, not to a residual: "
                "JacobianLens.transport maps one"
            )
        return _read_vectors(model, source, k)
    texts = texts_of(model, source)
    indices = [_indices(text, positions) for text in texts]
    names = stream_names(model, layers, points) if lens is None else _mapped_names(model, lens, layers, points)
    # The stream after the last layer is the reference of divergences and tells the answers.
    captured = [*names, str(HookPoint.ResidPost(model.num_layers - 1))]
    tracked = [token_of(model, token) for token in token_ids]
    spec = HookSpec().extend(hooks or HookSpec())
    if spec.captures:
        raise InputError("the hooks of a lens are interventions: what it captures are its own streams")
    spec.capture([*dict.fromkeys(captured)], positions=positions)

    def read(row: int, cache: HookCache) -> LensResult:
        streams = np.stack([_mapped(lens, name, cache[name][0]) for name in captured])
        if has_nan(streams):
            model.forward(texts[row].ids, hooks)  # an error that names the first hook point
            raise ModelError(f"streams of the lens have NaN where the logits have none: {ON_NAN}")
        return _lens_result(texts[row], names, indices[row], LensReader(model, streams), tracked, k, title)

    title = LOGIT_LENS if lens is None else lens.title
    results = map_rows(model, ListRequest([text.ids for text in texts], spec, batch_size, logits=False), read, "lens")
    model.give_back(later=True)
    return results if is_list(model, source) else results[0]


def _lens_result(
    text: PromptText, names: list[str], indices: list[int], reader: LensReader, tracked: list[int], k: int, title: str
) -> LensResult:
    # The answers come first, since their probabilities are read at every point.
    last = reader.last()
    if has_nan(last.top):
        raise ModelError(f"logits are NaN and the streams are not: {ON_NAN}, in the final norm or the head")
    answers = last.top_ids[0, :, 0]
    followed = np.column_stack([answers, *(np.full(len(indices), token) for token in tracked)])
    pieces = [text.tokens[index] for index in indices]
    readout = reader.read(followed, k)
    functions = (reader.spell, reader.token_id, reader.read)
    return LensResult(names, indices, pieces, readout, answers, tracked, *functions, title=title)


def _mapped_names(
    model: Runner, lens: JacobianLens, layers: Sequence[int] | None, points: str | Sequence[str]
) -> list[str]:
    """The streams that a lens maps, and the last one, which is read as it is."""
    lens.check(model)
    if points not in ("resid_post", lens.reads):
        raise HookError(f"points={points!r}: the lens reads {lens.reads}, and the last resid_post as it is")
    last = model.num_layers - 1
    chosen = [*lens.layers, last] if layers is None else layers
    missing = [layer for layer in chosen if layer not in (*lens.layers, last)]
    if missing:
        raise InputError(f"the lens has no layer {missing[0]!r}; it has {lens.layers}, and {last} is read as it is")
    names = stream_names(model, [layer for layer in chosen if layer in lens.layers], lens.reads) if lens.layers else []
    return [*names, str(HookPoint.ResidPost(last))] if last in chosen and last not in lens.layers else names


def _mapped(lens: JacobianLens | None, name: str, stream: NDArray[Any]) -> NDArray[Any]:
    """A stream as the head reads it."""
    point = HookPoint.parse(name)
    if lens is None or point.short != lens.reads or point.layer not in lens.matrices:
        return stream
    return lens.transport(stream, point.layer).astype(stream.dtype, copy=False)


def stream_names(model: Runner, layers: Sequence[int] | None, points: str | Sequence[str]) -> list[str]:
    """The hook points of the requested residual streams, in execution order."""
    kinds = [points] if isinstance(points, str) else list(points)
    for point in kinds:
        if point not in STREAMS:
            raise HookError(f"no residual stream {point!r}; one of {', '.join(STREAMS)}{nearest(point, STREAMS)}")
    chosen = range(model.num_layers) if layers is None else layers
    missing = [layer for layer in chosen if layer not in range(model.num_layers)]
    if missing:
        raise InputError(f"no layer {missing[0]!r}: the model has layers 0 to {model.num_layers - 1}")
    names = [f"blocks.{layer}.hook_{point}" for layer in sorted({*chosen}) for point in STREAMS if point in kinds]
    for name in names:
        model.hooked.axes(HookPoint.parse(name))  # refuses what the model does not have
    if not names:
        raise InputError("no layer or no point to read")
    return names


def _indices(text: PromptText, positions: int | Sequence[int] | None) -> list[int]:
    if positions is None:
        return list(range(len(text)))
    numbers: Iterable[int] = [int(positions)] if isinstance(positions, int | np.integer) else positions
    indices = [text.place(position) for position in numbers]
    if not indices:
        raise InputError("a lens of no positions would be empty")
    return indices


def _read_vectors(model: Runner, residual: ArrayLike, k: int) -> list[Any]:
    """The top tokens of a residual [hidden], or of several [n, hidden], read by the lens."""
    streams = streams_of(residual, model.hidden_size)
    if streams.ndim > 2:
        raise InputError(f"residual is {list(streams.shape)}; it must be [hidden] or [n, hidden]")
    rows = streams.reshape(-1, model.hidden_size)
    readout = model.opened(Lens).read(rows, rows[None], np.empty((len(rows), 0), np.int64), k)
    tops = zip(readout.top_ids[0].tolist(), np.exp(readout.top[0]).tolist(), strict=True)
    scored = [list(zip(ids, shares, strict=True)) for ids, shares in tops]
    return scored[0] if streams.ndim == 1 else scored


@typed()
def project_to_vocab(model: Runner, residual: ArrayLike) -> NDArray[Any]:
    """All logits of residual streams, read as the last layer's: final norm, head, soft cap.

    Args:
        residual: [..., hidden].

    Returns:
        [..., vocab], all of them at once; for the last layer's `hook_resid_post`, the model's own logits.
        `logit_lens` gives the top tokens without holding all logits.

    Raises:
        InputError: another width, or NaN.

    Example:
        stream = model.forward("The capital of France is", HookSpec().capture("blocks.2.hook_resid_post"))
        model.project_to_vocab(stream["resid_post", 2]).shape  # (1, seq, vocab)
    """
    streams = streams_of(residual, model.hidden_size)
    logits = model.opened(Lens).logits_of(streams.reshape(1, -1, model.hidden_size))
    return logits.reshape(*streams.shape[:-1], model.vocab_size)


@typed()
def track_token_at(model: Runner, residual: ArrayLike, token: int | str) -> float:
    """The probability of a token, a residual [hidden] read as the last layer's.

    Raises:
        InputError: another width, NaN, or no such token.

    Example:
        cache = model.forward("The capital of France is", HookSpec().capture("blocks.3.hook_resid_post"))
        model.track_token_at(cache["resid_post", 3][0, -1], "Paris")
    """
    streams = streams_of(residual, model.hidden_size).reshape(-1, model.hidden_size)
    if len(streams) != 1:
        raise InputError(f"residual is {list(np.shape(residual))}; it must be [hidden]")
    readout = model.opened(Lens).read(streams, streams[None], np.array([[token_of(model, token)]]), 1)
    return float(np.exp(readout.log_probs[0, 0, 0]))


@typed()
def track_token(
    model: Runner,
    prompt: Prompt,
    token: int | str,
    *,
    position: Place | None = None,
    hooks: HookSpec | None = None,
    lens: JacobianLens | None = None,
) -> NDArray[np.float32]:
    """The probability of a token after each layer, [layers], at one position of a prompt.

    By default the last position, of a masked language model that of the text's one mask; through a lens after each of
    its layers and the last.
    `logit_lens(prompts, token_ids=[token], positions=-1)` follows it in a list.

    Raises:
        InputError: several prompts, or no such token or position.

    Example:
        model.track_token("The capital of France is", "Paris")  # float32 [n_layers]
    """
    result = _lens_at(model, prompt, position, hooks, k=1, token_ids=[token], lens=lens)
    # Column 0 is the answer's, 1 the token's.
    return np.exp(result.readout.log_probs[:, 0, 1])


@typed()
def track_race(
    model: Runner,
    source: Prompt | Mapping[int, ArrayLike],
    k: int = 5,
    *,
    position: Place | None = None,
    hooks: HookSpec | None = None,
) -> dict[int, Scored]:
    """The top tokens of each layer at one position.

    Args:
        source: a prompt, or {layer: residual [hidden]}, which `position` and `hooks` do not apply to.
        position: of the prompt, negative from its end; if left out the last, or a masked language model's one "mask".
        hooks: interventions to run the prompt with.

    Returns:
        {layer: [(token id, probability)]}.

    Raises:
        InputError: several prompts, NaN, another width, or a k or position that does not exist.

    Example:
        model.track_race("The capital of France is", k=3)[2]  # the top three after layer 2
    """
    # A batch of ids from a tokenizer is a mapping too.
    if isinstance(source, Mapping) and IDS not in source:
        if not source or position is not None or hooks is not None:
            raise InputError("track_race takes a prompt, or {layer: residual} with nothing but k")
        rows = [streams_of(residual, model.hidden_size, f"layer {layer}") for layer, residual in source.items()]
        return dict(zip(map(int, source), _read_vectors(model, np.stack(rows), k), strict=True))
    lens = _lens_at(model, source, position, hooks, k=k)
    # The points are one a layer, in order.
    return {layer: lens.best(layer, 0) for layer in range(model.num_layers)}


def _lens_at(
    model: Runner, prompt: Prompt, position: Place | None, hooks: HookSpec | None, **options: Any
) -> LensResult:
    """The lens at the position of a prompt where the head is read."""
    refuse_without_vocabulary(model.hooked, "the logit lens")
    ids = one_text(model, prompt).ids
    return logit_lens(model, ids, hooks, positions=index_read(model.hooked, position, ids), **options)
