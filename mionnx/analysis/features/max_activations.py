"""`max_activations`: dashboards of features from a harvest: texts that excite them most, histogram, tokens promoted."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.dashboards import FeatureDashboards
from mionnx.analysis.features.promoted import top_tokens
from mionnx.analysis.features.sae import SAE
from mionnx.analysis.features.transcoder import Floats, Numbers, Transcoder
from mionnx.analysis.features.transcoder_files import of_encoder
from mionnx.analysis.features.transcoder_set import NORMED_INPUT, TranscoderSet
from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.harvest.manifest import HARVEST_MANIFEST
from mionnx.analysis.weights.weights import weights
from mionnx.errors import HookError, InputError, SpecFileError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.lacking import SUMMED
from mionnx.machine.files import write_atomic
from mionnx.machine.progress import shown
from mionnx.machine.ranges import at_least, index_within
from mionnx.machine.typed import typed
from mionnx.run.prompt import token_text
from mionnx.run.runner import Runner

AT_ONCE = 2**14  # tokens whose activations are in memory at once
STATE_FORMAT = 3  # raise it when a state holds something else
SAVED = 32  # pieces behind which the state is written
LOWEST, OCTAVES, QUARTERS = -8, 16, 4  # of the histogram: from 2^-8, 16 octaves in quarters
TOKENS = 8  # raised and lowered, of each feature


@dataclass
class Seen:
    """What is known of some features behind some tokens, all [features, ...]."""

    best: Floats  # the largest activations, one of a text
    places: Numbers  # their tokens
    texts: Numbers  # and their texts; -1 for none
    histogram: Numbers
    count: Numbers
    total: NDArray[np.float64]
    tokens: int = 0

    @classmethod
    def nothing(cls, features: int, most: int) -> Seen:
        """That of no tokens."""
        best, places = np.zeros((features, most), np.float32), np.zeros((features, most), np.int64)
        return cls(
            best,
            places,
            places - 1,
            np.zeros((features, OCTAVES * QUARTERS), np.int64),
            np.zeros(features, np.int64),
            np.zeros(features),
        )

    def add(self, acts: Floats, texts: Numbers) -> None:
        """Take activations [tokens, features] of the next tokens in, each of a text [tokens]."""
        most, acts = self.best.shape[1], acts.T
        begins = np.flatnonzero(np.diff(texts, prepend=texts[0] - 1))
        largest, own = np.maximum.reduceat(acts, begins, axis=1), np.cumsum(np.isin(np.arange(len(texts)), begins)) - 1
        numbers = np.where(acts == largest[:, own], self.tokens + np.arange(len(texts)), np.iinfo(np.int64).max)
        places = np.minimum.reduceat(numbers, begins, axis=1)  # of equal ones the first
        # The text that goes on from the tokens before keeps one place.
        again = self.texts == texts[0]
        older = (self.best * again).max(axis=1) >= largest[:, 0]
        largest[:, 0] = np.where(older, 0, largest[:, 0])
        earlier = np.where(again & ~older[:, None], 0, self.best)
        best, places = np.concatenate([earlier, largest], axis=1), np.concatenate([self.places, places], axis=1)
        named = np.concatenate([self.texts, np.broadcast_to(texts[begins], largest.shape)], axis=1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :most]
        self.best, self.places, self.texts = (np.take_along_axis(one, order, 1) for one in (best, places, named))
        feature, token = np.nonzero(acts > 0)
        bins = np.clip((np.log2(acts[feature, token]) - LOWEST) * QUARTERS, 0, OCTAVES * QUARTERS - 1).astype(np.int64)
        np.add.at(self.histogram, (feature, bins), 1)
        self.count += (acts > 0).sum(axis=1)
        self.total += acts.sum(axis=1, dtype=np.float64)
        self.tokens += acts.shape[1]


@dataclass(frozen=True)
class LayerFeatures:
    """Some features of one layer, and the harvested values that they are of."""

    hook: str
    coder: Transcoder
    scale: Floats | None  # what the value is divided by
    numbers: Numbers
    names: tuple[str, ...] = field(default=())
    writes: bool = True  # whether to the stream, which the unembedding reads

    def acts(self, values: NDArray[Any]) -> Floats:
        """Activations [tokens, features] of harvested values [tokens, d_in]."""
        x = np.asarray(values, np.float32)
        return self.coder.values(x if self.scale is None else x / self.scale, self.numbers)


@typed(InputError, leave=["coders"])
def max_activations(
    model: Runner,
    activations: Activations,
    coders: SAE | TranscoderSet,
    features: Sequence[int | str],
    *,
    k: int = 8,
    before: int = 16,
    after: int = 4,
    path: str | Path | None = None,
    progress: bool | None = None,
) -> FeatureDashboards:
    """Show what features stand for: the texts that excite them most, how often they are active, tokens they raise.

    One pass over harvested values, a piece at a time.

    Args:
        activations: a harvest of the hook point that the features read, all positions of each text.
        coders: an SAE of ReLU or JumpReLU features, or a set of transcoders.
        features: of an SAE numbers; of transcoders "layer_feature", or nodes of an attribution graph, whose positions
            are left out.
        k: texts of each feature.
        before, after: tokens of a text that are shown before and behind the one with the largest activation.
        path: where the state is kept on the way; a pass that was interrupted goes on from there.
        progress: see `patch_sweep`.

    Raises:
        InputError: no features, one that is not there, or features of a kind that is active by comparison with others.
        HookError: a hook point that was not harvested, or whose values are no vectors of the features' width.
        SpecFileError: a state of another pass in `path`.

    Example:
        seen = model.harvest(texts, "blocks.*.mlp.hook_pre", "activations")
        found = [node for node, _ in graph.top(20) if node[0].isdigit()]  # no errors, no tokens
        model.max_activations(seen, transcoders, found).save("features.html")
    """
    for name, number, least in (("k", k, 1), ("before", before, 0), ("after", after, 0)):
        at_least(name, number, least)
    layers = [*_layers(model, coders, features)]
    for one in layers:
        shape, width = activations[one.hook].shape, one.coder.encoder.shape[1]
        if shape[1:] != (width,):
            raise HookError(f"{one.hook} has values {[*shape[1:]]}, and the features read vectors [{width}]")
    key, state = _identity(activations, layers, k), None if path is None else Path(path)
    total = activations.tokens
    seen = _resumed(state, key) or [Seen.nothing(len(one.numbers), min(k, total)) for one in layers]
    with shown(progress) as show:
        for piece, begin in enumerate(range(seen[0].tokens, total, AT_ONCE), start=1):
            for one, so_far in zip(layers, seen, strict=True):
                values = one.acts(activations[one.hook][begin : begin + AT_ONCE])
                so_far.add(values, np.asarray(activations.text_index[begin : begin + AT_ONCE]).astype(np.int64))
            show("tokens", min(begin + AT_ONCE, total), total)
            if state is not None and piece % SAVED == 0:
                _save(state, key, seen)
    if state is not None:
        _save(state, key, seen)
    return _dashboards(model, activations, layers, seen, before, after)


def _layers(model: Runner, coders: SAE | TranscoderSet, features: Sequence[int | str]) -> Iterator[LayerFeatures]:
    """The features of each layer, in the order of the layers."""
    if isinstance(features, str) or not len(features):
        raise InputError(f"features={features!r}: a list of numbers, or of names as '2_17'")
    if isinstance(coders, SAE):
        numbers = [*dict.fromkeys(coders.number_of(one) for one in features)]
        coder, names = of_encoder(coders), tuple(map(str, numbers))
        writes = coder.decoder.shape[-1] == model.hidden_size and _in_stream(model, HookPoint.parse(coders.hook))
        yield LayerFeatures(coders.config.hook, coder, None, np.array(numbers), names, writes)
        return
    if not isinstance(coders, TranscoderSet):
        raise InputError(f"coders are an SAE or a TranscoderSet, got a {type(coders).__name__}")
    chosen: dict[int, dict[int, None]] = {}
    for name in features:
        parts = str(name).split("_")
        if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
            raise InputError(f'{name!r} names no feature of transcoders: "layer_feature", as "1_230"; errors are none')
        layer = index_within("layer", int(parts[0]), len(coders))
        number = index_within("feature", int(parts[1]), coders.layer(layer).features)
        chosen.setdefault(layer, {})[number] = None
    for layer, numbers_of in sorted(chosen.items()):
        if coders.layer(layer).k:
            raise InputError("top-k features are active by comparison with all others: harvest(..., sae=) ranks them")
        normed = coders.hook == NORMED_INPUT
        hook = f"blocks.{layer}.mlp.hook_pre" if normed else coders.hook.format(layer)
        scale = np.asarray(weights(model).reader.read("ln2_w", layer), np.float32) if normed else None
        names = tuple(f"{layer}_{number}" for number in numbers_of)
        yield LayerFeatures(hook, coders.layer(layer), scale, np.array([*numbers_of]), names)


def _in_stream(model: Runner, point: HookPoint) -> bool:
    """Whether a hook point has the residual stream, or what is added to it."""
    if point.layer is None:
        return str(point) == str(HookPoint.Embed)
    if str(point) == str(HookPoint.MlpPost(point.layer)):  # what is added, where no norm comes between
        return not weights(model).graph.has_norm("ln2_post", point.layer)
    return str(point) in [str(getattr(HookPoint, kind)(point.layer)) for kind in SUMMED]


def _dashboards(
    model: Runner,
    activations: Activations,
    layers: Sequence[LayerFeatures],
    seen: Sequence[Seen],
    before: int,
    after: int,
) -> FeatureDashboards:
    windows: list[tuple[str, ...]] = []
    values, of, peaks = list[Floats](), list[int](), list[int]()
    raised: list[tuple[str, ...]] = []
    lowered: list[tuple[str, ...]] = []
    texts, ids = activations.text_index, activations.token_ids
    words: dict[int, str] = {}
    for one, so_far in zip(layers, seen, strict=True):
        for place in range(len(one.numbers)):
            rows_of = zip(so_far.best[place], so_far.texts[place].tolist(), so_far.places[place].tolist(), strict=True)
            for text, token in [(text, token) for value, text, token in rows_of if value > 0]:
                low, high = max(0, token - before), min(activations.tokens, token + after + 1)
                near = low + np.flatnonzero(np.asarray(texts[low:high]) == text)
                windows.append(tuple(_word(model, words, one_id) for one_id in ids[near].tolist()))
                alone = LayerFeatures(one.hook, one.coder, one.scale, one.numbers[[place]])
                values.append(alone.acts(activations[one.hook][near])[:, 0])
                of.append(len(raised) + place)
                peaks.append(int(np.flatnonzero(near == token)[0]))
        rows = np.asarray(one.coder.decoder[one.numbers], np.float32).sum(axis=1)
        for ends, sign in ((raised, 1), (lowered, -1)):
            tops = top_tokens(model, sign * rows, TOKENS).tolist() if one.writes else [[]] * len(rows)
            ends += [tuple(_word(model, words, token) for token in top) for top in tops]
    count, total = (np.concatenate([getattr(one, name) for one in seen]) for name in ("count", "total"))
    return FeatureDashboards(
        tuple(name for one in layers for name in one.names),
        tuple(one.hook for one in layers for _ in one.names),
        activations.tokens,
        count,
        np.concatenate([one.best[:, 0] for one in seen]),
        (total / np.maximum(count, 1)).astype(np.float32),
        2.0 ** (LOWEST + np.arange(OCTAVES * QUARTERS + 1) / QUARTERS),
        np.concatenate([one.histogram for one in seen]),
        tuple(windows),
        _side_by_side(values),
        np.array(of, np.int64),
        np.array(peaks, np.int64),
        tuple(raised),
        tuple(lowered),
    )


def _word(model: Runner, words: dict[int, str], token: int) -> str:
    if token not in words:
        words[token] = token_text(model, token)
    return words[token]


# the state of a pass


def _identity(activations: Activations, layers: Sequence[LayerFeatures], k: int) -> str:
    manifest = (activations.folder / HARVEST_MANIFEST).read_bytes()
    facts = [STATE_FORMAT, hashlib.sha256(manifest).hexdigest(), k, [one.names for one in layers]]
    for one in layers:
        rows = [np.asarray(one.coder.encoder[one.numbers], np.float32), one.coder.bias[one.numbers]]
        rows += [] if one.coder.threshold is None else [one.coder.threshold[one.numbers]]
        facts.append([hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest() for row in rows])
    return json.dumps(facts)


def _save(path: Path, key: str, seen: Sequence[Seen]) -> None:
    arrays = {f"{i}.{name}": value for i, one in enumerate(seen) for name, value in vars(one).items()}
    file = io.BytesIO()
    np.savez(file, identity=np.array(key), **arrays)
    write_atomic(path, file.getvalue())


def _resumed(path: Path | None, key: str) -> list[Seen] | None:
    if path is None or not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: Mapping[str, Any] = dict(file)
    except (OSError, ValueError, EOFError) as error:
        raise SpecFileError(f"{path} is no state of max_activations: {error}") from error
    if str(arrays.get("identity")) != key:
        raise SpecFileError(f"{path} is the state of another pass, over other activations or features: give a new path")
    count = len({name.partition(".")[0] for name in arrays}) - 1
    names = [*vars(Seen.nothing(1, 1))]
    seen = [Seen(**{name: arrays[f"{i}.{name}"] for name in names}) for i in range(count)]
    for one in seen:
        one.tokens = int(one.tokens)
    return seen


def _side_by_side(windows: Sequence[Floats]) -> Floats:
    """Values of windows, [windows, the longest one], NaN behind the end of each."""
    rows = np.full((len(windows), max(map(len, windows), default=0)), np.nan, np.float32)
    for row, window in zip(rows, windows, strict=True):
        row[: len(window)] = window
    return rows
