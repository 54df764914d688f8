"""`logit_lens`: residual streams read as predictions of the next token, and all logits of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.lens.lens_result import LensResult
from mionnx.analysis.lens.reader import LensReader
from mionnx.analysis.lens.readout import Lens
from mionnx.errors import HookError, InputError, ModelError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.typed import refusal, typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.hook_cache import HookCache
from mionnx.run.nan_logits import ON_NAN, has_nan
from mionnx.run.prompt import PromptText, is_list, is_stream, streams_of, texts_of, token_of
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
        batch_size: most prompts of a pass, those of like length together; "auto": as many as run well and fit into
            memory; None: all at once.

    Returns:
        a `LensResult` for a prompt, a list of them for a list; [(token id, probability)] for a residual; a list of
        these for several.

    Raises:
        InputError: NaN, another width, or a k, position, token or layer that does not exist.
        HookError: points that the model does not have.

    Example:
        lens = model.logit_lens("The capital of France is", k=3)
        [lens.spell(token) for token, _ in lens.best(-1, -1)]  # the last layer's top tokens at the last position
    """
    if hooks is not None and not isinstance(hooks, HookSpec):
        hint = "; k=5 asks for five tokens, layers=[5] for a layer" if isinstance(hooks, int) else ""
        raise InputError(refusal("hooks", HookSpec | None, hooks) + hint)
    if is_stream(source):
        unread = hooks is layers is positions is None and batch_size == AUTO
        if not (unread and points == "resid_post" and len(token_ids) == 0):
            raise InputError(
                "hooks, layers, positions, points, tokens and batch_size apply to a prompt, not to a residual"
            )
        return read_vectors(model, source, k)
    texts = texts_of(model, source)
    indices = [_indices(text, positions) for text in texts]
    names = _stream_names(model, layers, points)
    captured = [*names, _last_stream(model)]
    tracked = [token_of(model, token) for token in token_ids]

    def read(row: int, cache: HookCache) -> LensResult:
        streams = _streams(model, texts[row], hooks, captured, cache)
        return _lens_result(model, texts[row], names, indices[row], streams, tracked, k)

    spec = _capturing(hooks, captured, positions)
    results = map_rows(model, ListRequest([text.ids for text in texts], spec, batch_size, logits=False), read, "lens")
    model.give_back(later=True)
    return results if is_list(model, source) else results[0]


def _lens_result(
    model: Runner,
    text: PromptText,
    names: list[str],
    indices: list[int],
    streams: NDArray[Any],
    tracked: list[int],
    k: int,
) -> LensResult:
    reader = LensReader(model, streams)
    last = reader.last()
    if has_nan(last.top):
        raise ModelError(f"logits are NaN and the streams are not: {ON_NAN}, in the final norm or the head")
    answers = last.top_ids[0, :, 0]
    followed = np.column_stack([answers, *(np.full(len(indices), token) for token in tracked)])
    pieces = [text.tokens[index] for index in indices]
    readout = reader.read(followed, k)
    return LensResult(names, indices, pieces, readout, answers, tracked, reader.spell, reader.known, reader.read)


def _capturing(hooks: HookSpec | None, names: list[str], positions: int | Sequence[int] | None) -> HookSpec:
    """The spec of a lens: these streams, at these positions of each text."""
    spec = HookSpec().extend(hooks or HookSpec())
    if spec.captures:
        raise InputError("the hooks of a lens are interventions: what it captures are its own streams")
    for name in dict.fromkeys(names):
        spec.capture(name, positions=positions)
    return spec


def _streams(
    model: Runner, text: PromptText, hooks: HookSpec | None, names: list[str], cache: HookCache
) -> NDArray[Any]:
    """The streams of these names, [names, positions, hidden]."""
    streams = np.stack([cache[name][0] for name in names])
    if has_nan(streams):
        model.forward(text.ids, hooks)  # an error that names the first hook point
        raise ModelError(f"streams of the lens have NaN where the logits have none: {ON_NAN}")
    return streams


def _last_stream(model: Runner) -> str:
    return str(HookPoint.ResidPost(model.num_layers - 1))


def _stream_names(model: Runner, layers: Sequence[int] | None, points: str | Sequence[str]) -> list[str]:
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
    """The positions to read, counted from the start."""
    if positions is None:
        return list(range(len(text)))
    numbers: Iterable[int] = [int(positions)] if isinstance(positions, int | np.integer) else positions
    indices = [text.place(position) for position in numbers]
    if not indices:
        raise InputError("a lens of no positions would be empty")
    return indices


def read_vectors(model: Runner, residual: ArrayLike, k: int) -> list[Any]:
    """The top tokens of a residual [hidden], or of several [n, hidden], read by the lens.

    Raises:
        InputError: another shape, NaN, or a k that does not exist.
    """
    streams = streams_of(residual, model.hidden_size)
    if streams.ndim > 2:
        raise InputError(f"residual is {list(streams.shape)}; it must be [hidden] or [n, hidden]")
    rows = streams.reshape(-1, model.hidden_size)
    readout = model.opened(Lens).read(rows, rows[None], np.empty((len(rows), 0), np.int64), k)
    scored = [_scored(*pair) for pair in zip(readout.top_ids[0], np.exp(readout.top[0]), strict=True)]
    return scored[0] if streams.ndim == 1 else scored


def _scored(ids: NDArray[np.int64], values: NDArray[Any]) -> Scored:
    return list(zip(ids.tolist(), values.tolist(), strict=True))


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
