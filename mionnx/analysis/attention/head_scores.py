"""`head_scores`: how strongly each head behaves like a previous-token, duplicate-token or induction head.

A random sequence is repeated: in the second half, token i has occurred at i - period. The kinds, as induction heads
were described (Olsson et al. 2022, "In-context Learning and Induction Heads") and as TransformerLens' head detector has
them:

* previous_token: attends to i - 1;
* duplicate_token: attends to i - period, where the same token stood;
* induction: attends to i - period + 1, to what followed it there.

A sink is a head that attends to the first position, whatever stands there: first_token, if it is asked for (Gu et al.
2024, arXiv:2410.10781, call a share above 0.3 one).

Heads of an encoder read both sides, and what follows a token tells nothing new: next_token attends to i + 1,
first_token to the first position ([CLS]), separator to the last ([SEP]); induction is no kind of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape

from mionnx.analysis.attention.attention_patterns import pattern_point
from mionnx.analysis.attention.massive import Massive, about_sinks, massive_in, merged, streams_after
from mionnx.bind.hook_index import index_hooks
from mionnx.errors import HookError, InputError, InterventionError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_rows import read_array
from mionnx.inputs.tokens import encode
from mionnx.machine import memory
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.progress import shown
from mionnx.machine.ranges import at_least, listed
from mionnx.machine.typed import typed
from mionnx.run.nan_logits import numbers
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.view import Columns, HeatMap, Shown, Table, View, long_form, readable

TITLES = {
    "previous_token": "Previous token",
    "duplicate_token": "Duplicate token",
    "induction": "Induction",
    "next_token": "Next token",
    "first_token": "First token",
    "separator": "Separator",
}
TARGETS = {
    "previous_token": "the token before",
    "duplicate_token": "the same token, a period ago",
    "induction": "what followed the same token",
    "next_token": "the token behind",
    "first_token": "the first position",
    "separator": "the last position",
}
HEAD_KINDS = ("previous_token", "duplicate_token", "induction")
FIRST_TOKEN = "first_token"
DECODER_KINDS = (*HEAD_KINDS, FIRST_TOKEN)
ENCODER_KINDS = ("previous_token", "next_token", "duplicate_token", "first_token", "separator")
CAPTURED = 2**26  # bytes of patterns that are held at once, where one row takes less


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class HeadScores(Shown):
    """Attention scores of heads on random repeated sequences.

    Attributes:
        values: [kind, layer, head], float64: mean attention, from 0 to 1, of the second half's tokens to the targets
            of the kind; NaN in the recurrent layers of a hybrid.
        chance: score of uniform attention to all positions.
        period: tokens of a sequence.
        massive: with "first_token", massive activations of the streams, (layer, position, feature, number), see
            `mionnx.analysis.attention.massive`.
    """

    kinds: tuple[str, ...]
    values: NDArray[np.float64]
    chance: float
    period: int
    batch: int
    model: str
    massive: list[Massive] = field(default_factory=list)

    frame_height = 640  # pixels of the page in a notebook

    def __getitem__(self, kind: str) -> NDArray[np.float64]:
        """The scores of one kind, [layer, head].

        Raises:
            InputError: a kind that was not asked for.
        """
        if kind not in self.kinds:
            raise InputError(f"no scores of {kind!r}; kinds: {', '.join(self.kinds)}{nearest(kind, self.kinds)}")
        return self.values[self.kinds.index(kind)]

    def top(self, kind: str, k: int = 5) -> list[tuple[int, int, float]]:
        """The k heads that score highest, as (layer, head, score), highest first.

        Raises:
            InputError: a kind that was not asked for, or another k than 1 to the number of heads.
        """
        scores = self[kind]
        most = int(np.isfinite(scores).sum())
        if not 1 <= k <= most:
            raise InputError(f"the top {k} of {most} heads")
        order = np.argsort(-scores, axis=None, kind="stable")[:k]
        places = [divmod(int(at), scores.shape[1]) for at in order]
        return [(layer, head, float(scores[layer, head])) for layer, head in places]

    @property
    def _heads(self) -> int:
        """Number of heads with a score."""
        return int(np.isfinite(self.values[0]).sum())

    def _facts(self) -> Iterator[str]:
        yield from (self.model, count(self.values.shape[1], "layer"), count(self.values.shape[2], "head"))
        yield f"chance {decimal(self.chance, 3)}"

    def _lines(self) -> Iterator[str]:
        for kind in self.kinds:
            best = self.top(kind, min(4, self._heads))
            yield f"{TITLES[kind]:>15}  " + "  ".join(
                f"{layer}.{head} {decimal(score, 3)}" for layer, head, score in best
            )

    def view(self) -> View:
        """One heat map a kind: a row a layer, a column a head; and the heads that score highest."""
        _, layers, heads = self.values.shape
        axes = {"layer": [*map(str, range(layers))], "head": [*map(str, range(heads))]}
        maps = [
            HeatMap(
                axes,
                {"mean attention": scores},
                {"mean attention": 1.0},
                diverging=False,
                hover={"attends to": TARGETS[kind]},
                marked=[place[:2] for place in self.top(kind, min(3, self._heads))],
                heading=TITLES[kind],
                note=f"attends to {TARGETS[kind]}",
            )
            for kind, scores in zip(self.kinds, self.values, strict=True)
        ]
        about = (
            f"{count(self.batch, 'random sequence')} of {self.period} tokens, each repeated once. A head that attends "
            f"to all positions alike scores {readable(self.chance)}."
        )
        if FIRST_TOKEN in self.kinds:
            about += f" {about_sinks(self[FIRST_TOKEN], self.massive)}"
        return View(f"Heads of {self.model}", [maps, self.table(8)], meaning=about)

    def table(self, k: int = 5) -> Table:
        """Table of the highest scores of each kind."""
        most = min(k, self._heads)
        titles = (TITLES[kind] for kind in self.kinds)
        caption = f"mean attention; chance is {decimal(self.chance, 3)}"
        styles = {TITLES[kind]: "token" for kind in self.kinds}
        note = "layer.head, and its mean attention"
        page = {"heading": "The heads that score highest", "note": note, "styles": styles}
        table = Table(*titles, title=f"{escape(self.model)}: layer.head", caption=caption, on_page=page)
        for heads in zip(*(self.top(kind, most) for kind in self.kinds), strict=True):
            table.add_row(*(f"{layer}.{head}  {decimal(score, 3)}" for layer, head, score in heads))
        return table

    def _columns(self) -> Columns:
        _, layers, heads = self.values.shape
        axes = {"kind": self.kinds, "layer": range(layers), "head": range(heads)}
        return long_form(axes, {"score": self.values})


@typed(leave=["token_ids"])
def head_scores(
    model: Runner,
    kinds: str | Sequence[str] = HEAD_KINDS,
    *,
    batch: int = 8,
    period: int = 24,
    seed: int = 0,
    token_ids: Iterable[int] | None = None,
    hooks: HookSpec | None = None,
    progress: bool | None = None,
) -> HeadScores:
    """Score heads as previous-token, duplicate-token and induction heads.

    A score is the mean attention on random repeated sequences, see `mionnx.analysis.attention.head_scores`. Rows run
    in batches small enough for 64 MiB of patterns. An RWKV model is scored by its effective attention.

    Args:
        kinds: kinds of heads, in the order of the result; by default all that the model can have but sinks, which are
            "first_token"; the result then has massive activations too.
        batch: number of sequences.
        period: tokens of a sequence, before it is repeated.
        seed: a number that determines the sequences.
        token_ids: the ids to draw from; by default all but special tokens.
        hooks: interventions that hold in every row alike.
        progress: see `patch_sweep`.

    Raises:
        InterventionError: `hooks` means some of the rows, or has another value for each.
        InputError: an unknown kind, sequences too long for the model, or too few tokens to draw from.
        HookError: `hooks` captures something, or the model has no attention patterns.

    Example:
        scores = model.head_scores(batch=4)
        scores.top("induction", 3)  # [(layer, head, score)]
    """
    valid = ENCODER_KINDS if model.bidirectional else DECODER_KINDS
    chosen = check_kinds(valid if model.bidirectional and tuple(kinds) == HEAD_KINDS else kinds, valid)
    sequences = _draw(model, token_ids, batch, period, seed)
    points = _pattern_hooks(model)
    spec = HookSpec().extend(hooks or HookSpec())
    _refuse_row_hooks(model, spec)
    for point in points:
        # Queries of the second half alone: in the first no token has occurred before.
        spec.capture(point, positions=sequences.queries)
    streams = streams_after(model, range(model.num_layers)) if FIRST_TOKEN in chosen else {}
    if streams:
        spec.capture([*streams.values()])
    # patterns grow with the square of the length: few rows at a time
    rows = max(1, CAPTURED // model.estimate(spec, 1, sequences.ids.shape[1]).total)
    layers = [point.layer or 0 for point in points]
    totals = np.full((len(chosen), model.num_layers, int(model.hooked.axes(points[0])[1])), np.nan)
    totals[:, layers] = 0
    done, massive = 0, list[Massive]()
    with shown(progress) as show:
        show("attention patterns", 0, batch)
        for ids in (sequences.ids[at : at + rows] for at in range(0, batch, rows)):
            cache = numbers(model.forward(ids, spec, logits=False))
            for layer, point in zip(layers, points, strict=True):
                totals[:, layer] += [attention_to(kind, cache[point], sequences) for kind in chosen]
            massive = merged(massive, massive_in({layer: cache[name] for layer, name in streams.items()}))
            done += len(ids)
            show("attention patterns", done, batch)
    del cache  # the last patterns, before memory is given back
    model.give_back(later=True)
    return HeadScores(chosen, totals / batch, sequences.chance, period, batch, model.hooked.name, massive)


def _refuse_row_hooks(model: Runner, spec: HookSpec) -> None:
    """Refuse captures, and interventions that depend on the row."""
    if spec.captures:
        raise HookError("hooks of head_scores are interventions: it captures what it needs itself")
    hooks = index_hooks(spec, model.hooked)
    for point, one in hooks.interventions:
        own = isinstance(one.positions, tuple) and any(isinstance(entry, tuple) for entry in one.positions)
        rank = len(hooks.axes(point))
        # A value with all axes may have another entry for each row.
        each = any(value.ndim == rank and len(value) > 1 for value in one.values)
        if own or each or one.rows is not None:
            raise InterventionError(
                f"{one.kind} at {point} says something of each row: head_scores draws its rows and runs them in "
                "batches, and the hooks must hold for all of them alike"
            )


def _pattern_hooks(model: Runner) -> list[HookPoint]:
    metadata = model.hooked.metadata
    make = pattern_point(model)
    points = [make(i) for i, layer in enumerate(metadata.layers) if layer.attention or not metadata.attends]
    missing = [point for point in points if point not in model.hook_points()]
    if missing:
        raise HookError(f"the model has no hook point {missing[0].name!r}: its heads cannot be scored")
    return points


def _draw(model: Runner, tokens: Iterable[int] | None, batch: int, period: int, seed: int) -> RepeatedSequences:
    prefix, special = special_tokens(model)
    suffix = _behind(model) if model.bidirectional else []
    if tokens is None:
        candidates = np.setdiff1d(np.arange(model.vocab_size), special)
    else:
        if not isinstance(tokens, Iterable):
            raise InputError(f"token_ids={tokens!r}: the ids to draw from are integers, [count]")
        ids = read_array("token_ids", tokens if hasattr(tokens, "__len__") else listed("token_ids", tokens))
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InputError(f"token_ids={tokens!r}: the ids to draw from are integers, [count]")
        candidates = np.unique([model.check_token(token) for token in ids]).astype(np.int64)
    sequences = repeat_sequences(candidates, prefix, batch, period, seed, suffix, both=model.bidirectional)
    limit = model.hooked.metadata.sizes.max_positions
    if limit is not None and sequences.ids.shape[1] > limit:
        length = sequences.ids.shape[1]
        raise InputError(f"period={period}: {length} tokens, but the model has positions for {limit} only")
    return sequences


def special_tokens(model: Runner) -> tuple[list[int], NDArray[np.int64]]:
    """Ids that the tokenizer puts before every text, and ids of all special tokens."""
    ends = model.hooked.end_tokens()
    if not model.has_tokenizer:
        return [], np.array(ends, np.int64)
    decoder = getattr(model.tokenizer, "get_added_tokens_decoder", None)  # a World tokenizer adds none
    special = [token for token, entry in decoder().items() if entry.special] if decoder else []
    # Any text shows which tokens come before it.
    encoded = encode(model.tokenizer, "a")
    marked = zip(encoded.ids, getattr(encoded, "special_tokens_mask", ()), strict=False)
    return [token for token, _ in takewhile(itemgetter(1), marked)], np.array([*ends, *special], np.int64)


def _behind(model: Runner) -> list[int]:
    """Ids that the tokenizer puts behind every text."""
    if not model.has_tokenizer:
        return []
    encoded = encode(model.tokenizer, "a")
    marked = [*zip(encoded.ids, getattr(encoded, "special_tokens_mask", ()), strict=False)]
    return [token for token, _ in takewhile(itemgetter(1), reversed(marked))][::-1]


@dataclass(frozen=True)
class RepeatedSequences:
    """Random sequences, each repeated once, behind a prefix.

    Attributes:
        ids: [batch, prefix + 2 period + suffix].
        period: tokens of one sequence, all different.
        prefix: number of tokens before the first.
        both: whether queries read keys behind them too.
    """

    ids: NDArray[np.int64]
    period: int
    prefix: int
    both: bool = False

    @property
    def queries(self) -> range:
        """The positions of the second half."""
        return range(self.prefix + self.period, self.prefix + 2 * self.period)

    @property
    def chance(self) -> float:
        """Score of uniform attention to all positions."""
        if self.both:
            return 1 / self.ids.shape[1]
        # A query at position p sees p + 1 keys.
        return float(np.mean([1 / (position + 1) for position in self.queries]))


def repeat_sequences(
    candidates: NDArray[np.int64],
    prefix: Sequence[int],
    batch: int,
    period: int,
    seed: int,
    suffix: Sequence[int] = (),
    both: bool = False,
) -> RepeatedSequences:
    """Draw random sequences and repeat each of them once, between the ids of a prefix and of a suffix."""
    for name, value, least in (("batch", batch, 1), ("period", period, 2), ("seed", seed, 0)):
        at_least(name, value, least)
    if period > len(candidates):
        raise InputError(f"period={period}, and there are {len(candidates)} tokens to draw from, each once a sequence")
    # 8 bytes an id: the two halves, and the row that they are joined to.
    if (size := batch * (len(prefix) + 2 * period) * 16) > memory.available():
        raise InputError(f"batch={batch}: the sequences alone need {memory.format_bytes(size)}, more than is free")
    random = np.random.default_rng(seed)
    # No token twice in a period, so that each has one earlier place.
    once = np.stack([random.permutation(candidates)[:period] for _ in range(batch)])
    start = np.tile(np.array(prefix, np.int64), (batch, 1))
    end = np.tile(np.array(suffix, np.int64), (batch, 1))
    return RepeatedSequences(np.concatenate([start, once, once, end], axis=1), period, len(prefix), both)


def check_kinds(kinds: Sequence[str], valid: Sequence[str] = HEAD_KINDS) -> tuple[str, ...]:
    """Check names of kinds."""
    names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for kind in names:
        if kind not in valid:
            raise InputError(f"no kind of head {kind!r}; the kinds are {', '.join(valid)}{nearest(kind, valid)}")
    if not names or len({*names}) != len(names):
        raise InputError(f"kinds of heads must be different ones of {', '.join(valid)}, got {list(names)}")
    return names


def attention_to(kind: str, pattern: NDArray[np.floating], sequences: RepeatedSequences) -> NDArray[np.float64]:
    """Mean attention of each head to the targets of a kind, summed over rows: [n_heads].

    Args:
        pattern: [batch, n_heads, period, seq]: attention of the queries of the second half.
    """
    last, queries, at = sequences.ids.shape[1] - 1, np.array(sequences.queries), np.arange(sequences.period)
    targets = {
        "previous_token": queries - 1,
        "duplicate_token": queries - sequences.period,
        "induction": queries - sequences.period + 1,
        "next_token": np.minimum(queries + 1, last),
        "first_token": 0 * queries,
        "separator": 0 * queries + last,
    }
    seen = pattern[:, :, at, targets[kind]]  # [batch, n_heads, period]
    return seen.mean(axis=-1, dtype=np.float64).sum(axis=0)
