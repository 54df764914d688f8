"""`fit_lens`: the Jacobian lens of a model, from the gradients of texts; and what is had of it without a fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.harvest.texts import Source
from mionnx.analysis.jacobian_lens.jacobian_lens import FITTED_ON, JacobianLens, unembedding_rows
from mionnx.analysis.jacobian_lens.lens_texts import Ids, LensTexts, source_layers
from mionnx.analysis.jacobian_lens.pullback import Pullback, stream
from mionnx.errors import InputError, ModelError
from mionnx.graph.own_version import own_version
from mionnx.machine.progress import Progress, shown
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.stored import Stored
from mionnx.machine.typed import typed
from mionnx.run.nan_logits import ON_NAN
from mionnx.run.prompt import streams_of
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.metric import check_rules

SKIP, TOKENS, ROWS = 16, 128, 16
MOST_ROWS = 4096
EVERY = 20.0  # seconds between two writings of what is done
ESTIMATORS = {"gradient": "jacobian_lens", "relp": "relevance_lens"}
STEP = 1e-2  # of the stream's norm, by which central differences move it
Numbers = NDArray[np.float64]


@dataclass
class LensProgress(Stored):
    """What a fit has summed so far, which another call goes on from."""

    settings: dict[str, Any]
    read: int  # texts, short ones too
    digest: str  # of their tokens
    count: int  # texts that count
    total: Numbers  # [layers, hidden, hidden], the sum over texts
    half: Numbers  # the same over every second text


@typed(leave=["texts"])
def fit_lens(
    model: Runner,
    texts: Source,
    *,
    layers: Sequence[int] | None = None,
    rules: str = "gradient",
    skip: int = SKIP,
    max_tokens: int = TOKENS,
    rows: int = ROWS,
    corpus: str = "",
    resume: str | Path | None = None,
    column: str | None = None,
    progress: bool | None = None,
) -> JacobianLens:
    """Fit a Jacobian lens: the mean derivative of the last residual stream by that of each layer.

    J = mean over texts of (1 / |V|) sum over t in V of the sum over t' in V, t' >= t, of dh_last[t'] / dh[t], where V
    leaves out the first `skip` positions and the last (Gurnee et al. 2026). A text takes as many backward passes as the
    stream is wide: for SmolLM2-135M two minutes of two cores, for a hundred texts three hours. `lens_vectors` gives
    the directions of a few tokens, and `lens_transport` J h of a few vectors, for a small part of that, and
    `JacobianLens.load` reads lenses that others have published.

    Args:
        texts: a list of texts or ids, an iterator, or a file or folder as `harvest` takes it; a hundred are usable.
        layers: layers to fit; all but the last if left out.
        rules: "gradient", or "relp": propagation rules in place of derivatives, which make a relevance lens; see
            `HookSpec.set_metric`.
        skip: first positions that do not count: attention sinks.
        max_tokens: of a text; the rest is cut off.
        rows: backward passes at a time.
        corpus: name of the texts, for the lens' provenance.
        resume: a file that holds what is done; a call with the same settings, and the same texts or more behind them,
            goes on from it.
        column: of tables and JSON lines, the one with the texts.
        progress: see `patch_sweep`.

    Returns:
        a lens; its `cosines` compare the fits of every second text with those of the others.

    Raises:
        InputError: no text that is long enough, no such layer, a file of another fit, an encoder.
        GradientError: an operator without a rule.

    Example:
        lens = model.fit_lens(texts, resume="fit.safetensors")
        model.logit_lens("The capital of France is", lens=lens)
    """
    check_rules(rules)
    at_least("rows", rows, 1)
    at_most("rows", rows, MOST_ROWS)
    chosen, source = source_layers(model, layers), LensTexts(model, texts, column, skip, max_tokens)
    back, width = Pullback(model, chosen, rules), model.hidden_size
    settings = _provenance(model, rules, corpus, source)
    done = _resumed(resume, {**settings, "layers": chosen}, (len(chosen), width, width))
    keep = _Writing(done, resume)
    texts_left = _behind(source, done)
    total_rows = source.source.count * width  # rows of all texts; 0 where their number is not known
    try:
        with shown(progress) as show:
            for ids in texts_left:
                before = done.count * width
                part = _of_text(back, ids, source.positions(ids), rows, partial(_show, show, before, total_rows))
                done.total += part
                if done.count % 2 == 0:
                    done.half += part
                done.count, done.read, done.digest = done.count + 1, source.read, source.digest
                keep.sometimes()
    finally:
        keep.now()
        model.give_back(later=True)
    if not done.count:
        raise InputError("no text that is long enough: a lens of nothing")
    return JacobianLens(
        dict(zip(chosen, done.total / done.count, strict=True)),
        n_prompts=done.count,
        metadata={**settings, "n_prompts": done.count},
        cosines=_cosines(chosen, done),
    )


def _show(show: Progress, before: int, total: int, rows: int) -> None:
    show("lens", before + rows, total)


def _of_text(back: Pullback, ids: Ids, at: Ids, rows: int, show: Callable[[int], None]) -> Numbers:
    """J of one text, [layers, hidden, hidden]."""
    width = back.model.hidden_size
    unit, parts = np.eye(width, dtype=np.float32), []
    for begin in range(0, width, rows):
        parts.append(back.rows(ids, unit[begin : begin + rows], at).astype(np.float64))
        show(min(begin + rows, width))
    matrices = np.concatenate(parts, axis=1)
    if not np.isfinite(matrices).all():
        raise ModelError(f"gradients of a text of {len(ids)} tokens are NaN or infinite: {ON_NAN}")
    return matrices


def _provenance(model: Runner, rules: str, corpus: str, texts: LensTexts) -> dict[str, Any]:
    hooked = model.hooked
    return {
        "model": hooked.name,
        "family": hooked.metadata.family,
        FITTED_ON: hooked.weights_sha256,
        "fit_dtype": hooked.metadata.dtype,
        "estimator": ESTIMATORS.get(rules, f"jacobian_lens ({rules})"),
        "rules": rules,
        "corpus": corpus,
        "target_layer": model.num_layers - 1,
        "max_seq_len": texts.max_tokens,
        "skip_first_positions": texts.skip,
        "mionnx": own_version(),
        "exporter": {str(key): str(value) for key, value in hooked.metadata.exporter.items()},
    }


def _resumed(path: str | Path | None, settings: dict[str, Any], shape: tuple[int, ...]) -> LensProgress:
    """What another call has summed; nothing where there is no file."""
    if path is None or not Path(path).exists():
        return LensProgress(settings, 0, "", 0, np.zeros(shape), np.zeros(shape))
    done = LensProgress.load(path)
    if done.settings != settings or done.total.shape != shape:
        keys = [key for key in settings if done.settings.get(key) != settings[key]]
        raise InputError(f"{path} holds another fit, which differs in {', '.join(keys) or 'its shapes'}: not resumed")
    return done


def _behind(texts: LensTexts, done: LensProgress) -> Iterator[Ids]:
    """The texts behind those that are done, which must be the same."""
    if not done.read:
        yield from texts
        return
    first, digest = done.read, done.digest
    for ids in texts:
        if texts.read <= first:
            if texts.read == first and texts.digest != digest:
                break
            continue
        yield ids
    if texts.read < first or (texts.read == first and texts.digest != digest):
        raise InputError(f"the file to resume from holds a fit of {first} texts that are not the first of these")


class _Writing:
    """Writes what is done, from time to time."""

    def __init__(self, done: LensProgress, path: str | Path | None) -> None:
        self.done, self.path = done, path
        self.count, self.last = done.count, time.monotonic()

    def sometimes(self) -> None:
        if time.monotonic() - self.last > EVERY:
            self.now()

    def now(self) -> None:
        if self.path is not None and self.done.count > self.count:
            self.done.save(self.path)
            self.count, self.last = self.done.count, time.monotonic()


def _cosines(layers: Sequence[int], done: LensProgress) -> Mapping[int, float]:
    """Cosine of the sums over every second text and over the others; nothing of a single text."""
    if done.count < 2:
        return {}
    one, two = done.half, done.total - done.half
    lengths = [np.sqrt((part**2).sum(axis=(1, 2))) for part in (one, two)]
    return dict(zip(layers, ((one * two).sum(axis=(1, 2)) / (lengths[0] * lengths[1])).tolist(), strict=True))


@typed(leave=["texts"])
def lens_vectors(
    model: Runner,
    texts: Source,
    token_ids: Sequence[int | str],
    *,
    layers: Sequence[int] | None = None,
    rules: str = "gradient",
    skip: int = SKIP,
    max_tokens: int = TOKENS,
    column: str | None = None,
    progress: bool | None = None,
) -> dict[int, NDArray[np.float32]]:
    """The directions of a few tokens in the streams of all layers, J^T W_U[:, token], without a fit.

    One backward pass a token and text, where a fit takes as many as the stream is wide: the same numbers as
    `fit_lens(texts).token_vectors`.

    Args:
        token_ids: tokens, by id or text.
        texts, layers, rules, skip, max_tokens, column, progress: see `fit_lens`.

    Returns:
        layer -> float32 [tokens, hidden].

    Raises:
        InputError: no such token or layer, no text that is long enough, an encoder.

    Example:
        vectors = model.lens_vectors(texts, ["France", "Japan"])
        swap = Subspace(vectors[2]).swap()
    """
    check_rules(rules)
    chosen, source = source_layers(model, layers), LensTexts(model, texts, column, skip, max_tokens)
    back, numbers = Pullback(model, chosen, rules), unembedding_rows(model, token_ids)
    total, count = np.zeros((len(chosen), *numbers.shape)), 0
    with shown(progress) as show:
        for ids in source:
            at = source.positions(ids)
            blocks = [numbers[begin : begin + ROWS] for begin in range(0, len(numbers), ROWS)]
            total += np.concatenate([back.rows(ids, block, at) for block in blocks], axis=1)
            count += 1
            show("lens vectors", count, source.source.count)
    model.give_back(later=True)
    if not count:
        raise InputError("no text that is long enough: directions of nothing")
    return dict(zip(chosen, (total / count).astype(np.float32), strict=True))


@typed(leave=["texts"])
def lens_transport(
    model: Runner,
    texts: Source,
    vectors: ArrayLike,
    layer: int,
    *,
    step: float = STEP,
    skip: int = SKIP,
    max_tokens: int = TOKENS,
    column: str | None = None,
    progress: bool | None = None,
) -> NDArray[np.float32]:
    """J h of a few vectors without a fit and without gradients, on models of any dtype, int4 too.

    Two forward passes a vector and text: the stream of the layer is moved by the vector to both sides, at all positions
    that count at once (central differences).

    Args:
        vectors: [hidden] or [n, hidden], of the layer's stream.
        layer: the layer that they are of.
        step: size of the move, as a share of the stream's median norm. In a mixture of experts a choice that flips
            within it is no derivative, and may outweigh all others: compare a smaller one, or `fit_lens`.
        texts, skip, max_tokens, column, progress: see `fit_lens`.

    Returns:
        float32, of the shape of the vectors: what they are in the last stream.

    Raises:
        InputError: a vector of zeros, another width, NaN, no such layer, no text that is long enough.

    Example:
        model.logit_lens(model.lens_transport(texts, direction, layer=2))
    """
    directions = streams_of(vectors, model.hidden_size, "vectors").astype(np.float64)
    rows = directions.reshape(-1, model.hidden_size)
    lengths = np.linalg.norm(rows, axis=1)
    if directions.ndim > 2 or not lengths.all():
        raise InputError(f"vectors {list(directions.shape)} must be [hidden] or [n, hidden], and none of zeros")
    if not 0 < step < 1:
        raise InputError(f"step={step}: a share of the stream's norm, above 0 and below 1")
    (layer,), source = source_layers(model, [layer]), LensTexts(model, texts, column, skip, max_tokens)
    name, last = stream(layer), stream(model.num_layers - 1)
    total, count = np.zeros(rows.shape), 0
    with shown(progress) as show:
        for ids in source:
            at = source.positions(ids)
            clean = model.forward(ids[None], HookSpec().capture(name), logits=False)[name][0, at].astype(np.float64)
            sizes = step * np.median(np.linalg.norm(clean, axis=-1)) / lengths
            for i, row in enumerate(rows):
                moves = np.zeros((2, len(ids), len(row)), np.float32)
                moves[0, at], moves[1, at] = sizes[i] * row, -sizes[i] * row
                spec = HookSpec().intervene(name, Intervention.Add(moves)).capture(last)
                moved = model.forward(np.repeat(ids[None], 2, axis=0), spec, logits=False)[last].astype(np.float64)
                total[i] += (moved[0] - moved[1])[at].sum(axis=0) / (2 * sizes[i] * len(at))
            count += 1
            show("lens transport", count, source.source.count)
    if not count:
        raise InputError("no text that is long enough")
    return (total / count).reshape(directions.shape).astype(np.float32)
