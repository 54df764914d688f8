"""What the calls of `random_specs.py` come to in float64, a row's whole text at a time, and how far mionnx is from it.

A row is run alone: without padding, without a batch, and as one text, however many calls and steps it came in. Edits
are done entry by entry, at positions of the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoder_reference import Decoder
from encoder_reference import Encoder
from hybrid_reference import Hybrid
from random_specs import MOST_READ, Call, Capture, Edit, Point, Row, points_of, rows_of
from rwkv_loop import Gates, Loop

from mionnx import HookPoint, MIError, MIModel
from mionnx.run.hook_cache import HookCache

Array = np.ndarray
UNMASKED = 1e30  # scores beyond it, on either side, are masked, or were before they were scaled
CLAMPED = -1e19  # scores below it are masked for a clamp
FLOAT32 = np.finfo(np.float32)
SMALLEST = 1e-3  # differences are relative to an array's largest number, or to this
TOLERANCE = 1e-5
# Sums of 64 to 256 products in float32 are 6 to 16 times as far off as values rounded once at each hook point.
OF_ROUNDING = 30
HALF_A_STEP = 2.0**-24  # of float32, relative
DRAWS = 8  # of rounding: one alone may leave a nearly cancelled sum as it is by chance


@dataclass(frozen=True)
class Batch:
    """A call with the texts of its rows: `columns` of its tokens by position, `keys` the columns of all positions."""

    call: Call
    rows: list[Row]
    columns: list[dict[int, int]]
    keys: list[list[int]]
    total: int

    def chosen(self, edit: Edit, index: int) -> list[int] | None:
        """Positions of one row's text that an edit chooses, in the order given; None for all."""
        if edit.positions is None:
            return None
        by_row = isinstance(edit.positions, list) and isinstance(edit.positions[0], list)
        return self.rows[index].resolved(edit.positions[index] if by_row else edit.positions)

    def seen(self, index: int, t: int) -> int:
        """Keys of one row's text in the call, or the step of a generation, that computes a position."""
        row = self.rows[index]
        return max(row.end, t + 1) if self.call.new else row.stop

    def hidden(self, index: int) -> set[int]:
        """Positions of one row's text that the call hides from all layers: what stands there itself is nothing."""
        edits = [state for state in self.call.states if state.layers is None]
        return {t for edit in edits for t in self.rows[index].resolved(list(edit.positions))}

    def ordered(self, edit: Edit, index: int) -> list[int] | None:
        """The same, if values may have an entry for each: as many positions in every row that the edit is for."""
        if edit.positions is None or edit.positions == "generated":
            return None
        rows = range(len(self.rows)) if edit.rows is None else edit.rows
        chosen = {row: self.chosen(edit, row) or [] for row in rows}
        return chosen[index] if len({*map(len, chosen.values())}) == 1 else None


def batches_of(calls: Sequence[Call]) -> list[Batch]:
    """The calls with their texts."""
    found: list[Batch] = []
    for n, (call, rows) in enumerate(zip(calls, rows_of(calls), strict=True)):
        masks = np.concatenate([one.mask for one in calls[: n + 1]], axis=1)
        new = [masks.shape[1] + step for step in range(max(call.new - 1, 0))]
        keys = [[*np.flatnonzero(mask).tolist(), *new] for mask in masks]
        tokens = [np.flatnonzero(mask).tolist() for mask in call.mask]
        columns = [{row.first + i: c for i, c in enumerate(each)} for row, each in zip(rows, tokens, strict=True)]
        found.append(Batch(call, rows, columns, keys, masks.shape[1]))
    return found


@dataclass
class Text:
    """One row of the calls: its values at every hook point, after the edits.

    `values[name]` and `values[name.before]` have positions along the hook point's sequence axis; `states` are those at
    the end of calls and steps, by name and by the length of the text then. With a `rounding`, every value at a hook
    point is moved by up to half a step of float32: what then differs is what float32 cannot tell.
    """

    points: dict[str, Point]
    batches: Sequence[Batch]
    index: int
    rounding: np.random.Generator | None = None
    values: dict[str, Array] = field(default_factory=dict)
    states: dict[tuple[str, int], Array] = field(default_factory=dict)

    def see(self, name: str, value: Array, at: Sequence[int]) -> Array:
        """A hook point's value at some positions, edited."""
        if self.rounding is not None:
            value = value * (1 + self.rounding.uniform(-HALF_A_STEP, HALF_A_STEP, value.shape))
        self.values[f"{name}.before"] = value
        for batch in self.batches:
            for edit in batch.call.edits:
                if edit.point.name == name and (edit.rows is None or self.index in edit.rows):
                    value = self.edited(value, edit, batch, at)
        self.values[name] = value
        return value

    def edited(self, value: Array, edit: Edit, batch: Batch, at: Sequence[int]) -> Array:
        value, point, row, chosen = value.copy(), edit.point, batch.rows[self.index], batch.chosen(edit, self.index)
        inside = [t for t in at if row.first <= t < row.stop and (chosen is None or t in chosen)]
        heads = [None] if point.heads is None else edit.heads or range(int(point.dims[point.heads]))
        hidden = batch.hidden(self.index)
        for t in inside:
            keys = [key for key in range(batch.seen(self.index, t)) if key not in hidden]
            for head in heads:
                where: dict[int | None, Any] = {point.seq: at.index(t), point.heads: head}
                where[len(point.axes) - 1] = keys if point.axes[-1] == "seq_k" else slice(None)
                entry = tuple(where.get(axis, slice(None)) for axis in range(1, len(point.axes)))
                given = [self.given(one, edit, batch, t, head, n) for n, one in enumerate(edit.values)]
                if point.axes[-1] == "seq_k":
                    given = [one if np.ndim(one) == 0 or one.shape[-1] == 1 else one[..., keys] for one in given]
                read = None if edit.reads is None else self.read(edit.reads, t)[entry]
                value[entry] = changed(edit, value[entry], given, read)
        return in_float32(value) if point.short == "scores" else value

    def read(self, name: str, t: int) -> Array:
        """What a splice reads at a position: of states the one behind it, as a layer runs whole before the next."""
        return self.states[name, t + 1] if (name, t + 1) in self.states else self.values[name]

    def given(self, value: Any, edit: Edit, batch: Batch, t: int, head: int | None, number: int) -> Any:
        """The part of a value that belongs to one position and head."""
        if value is None or edit.kind in ("project_out", "splice") or (edit.kind == "low_rank" and number < 2):
            return value
        if edit.kind == "knockout":
            return self.cut(value, edit, batch, t, head)
        value, point = np.asarray(value, np.float64), edit.point
        value = value.reshape((1,) * (len(point.axes) - value.ndim) + value.shape)
        entry: list[Any] = [slice(None)] * value.ndim
        entry[0] = along(len(value), edit.rows, self.index, self.index)
        if point.heads is not None:
            entry[point.heads] = along(value.shape[point.heads], edit.heads, head, head)
        if point.seq is not None:
            ordered, column = batch.ordered(edit, self.index), batch.columns[self.index].get(t)
            entry[point.seq] = along(value.shape[point.seq], ordered, t, column)
        value = value[tuple(entry)]
        if point.axes[-1] == "seq_k" and value.shape[-1] > 1:
            return value[batch.keys[self.index][: batch.seen(self.index, t)]]
        return value

    def cut(self, mask: Array, edit: Edit, batch: Batch, t: int, head: int | None) -> Array:
        """[stop]: what a knockout adds to one query's scores; the mask's rows and columns are positions of the text."""
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        row, (rows, heads, queries, keys) = batch.rows[self.index], mask.shape
        ordered = None if isinstance(edit.positions, str) else batch.ordered(edit, self.index)
        lengths = [one.stop for one in batch.rows]
        limited = [lengths[n] for n in (range(len(lengths)) if edit.rows is None else edit.rows)]
        query = t - row.first
        if ordered is not None and queries == len(ordered):
            query = ordered.index(t)
        elif batch.call.new or queries in (max(lengths), max(limited), batch.total):
            query = t
        query = 0 if queries == 1 else query
        found = np.zeros(row.stop)
        if query < queries:
            line = mask[along(rows, edit.rows, self.index, self.index), along(heads, edit.heads, head, head), query]
            found[: len(line) if keys > 1 else None] = line[: row.stop]
        return found[: batch.seen(self.index, t)]


def along(size: int, limit: Sequence[Any] | None, wanted: Any, index: Any) -> Any:
    """Which entry along an axis belongs to an index: the only one, the one in the order given, or its own."""
    if size == 1:
        return 0
    return limit.index(wanted) if limit is not None and size == len(limit) else index


def changed(edit: Edit, old: Array, given: Sequence[Any], read: Array | None) -> Array:
    """Part of an activation after an edit."""
    if edit.kind in ("add", "knockout"):
        return old + given[0]
    if edit.kind == "scale":
        with np.errstate(invalid="ignore"):  # a knocked out score times 0
            scaled = old * given[0]
        return np.maximum(scaled, FLOAT32.min) if edit.point.short == "scores" else scaled
    if edit.kind == "replace":
        return np.broadcast_to(given[0], old.shape)
    if edit.kind == "clamp":
        low, high = (np.inf * sign if one is None else one for one, sign in zip(given, (-1, 1), strict=True))
        masked = old < CLAMPED if edit.point.short == "scores" else False
        return np.where(masked, old, np.minimum(np.maximum(old, low), high))
    if edit.kind == "project_out":
        directions = np.atleast_2d(given[0]).astype(np.float64)
        return old - np.linalg.lstsq(directions.T, old.T, rcond=None)[0].T @ directions
    if edit.kind == "low_rank":
        read, write = (np.asarray(one, np.float64) for one in given[:2])
        return old + (np.einsum("...w,kw->...k", old, read) + given[2]) @ write
    if edit.kind == "splice":
        half = 0 if read is None else read.clip(-MOST_READ, MOST_READ) / 2
        return old * given[0].astype(np.float64) + np.tanh(old) + half
    assert edit.kind == "zero"
    return np.zeros_like(old)


def in_float32(value: Array) -> Array:
    """Infinities in place of numbers beyond float32: a masked score scaled up is one in mionnx."""
    return np.where(np.abs(value) > FLOAT32.max, np.copysign(np.inf, value), value)


class Reference:
    """A checkpoint in float64, and the hook points of the model that mionnx has made of it."""

    def __init__(self, network: Decoder | Loop, model: MIModel) -> None:
        self.network, self.points = network, {point.name: point for point in points_of(model)}

    def text(
        self, batches: Sequence[Batch], index: int, ids: list[int], rounding: np.random.Generator | None = None
    ) -> Text:
        """One row, run whole."""
        text = Text(self.points, batches, index, rounding)
        if isinstance(self.network, Loop):
            self._loop(self.network, text, ids)
        elif isinstance(self.network, Hybrid):
            self._hybrid(self.network, text, ids)
        else:
            at = range(len(ids))
            keys = [one.seen(index, t) for one in batches for t in range(one.rows[index].first, one.rows[index].stop)]
            self.network.run(ids, lambda name, value: torch.from_numpy(text.see(name, value.numpy(), at)), keys)
        return text

    def _loop(self, loop: Loop, text: Text, ids: list[int]) -> None:
        """RWKV, token by token; a state is edited where a call or a step ends."""
        kept: dict[str, list[Array]] = {}
        states = None
        for start, stop in _steps(text.batches, text.index):

            def edit(name: str, t: int, value: Array, start: int = start) -> Array:
                seen = text.see(name, value[None], [start + t])[0]
                for one in (name, f"{name}.before"):
                    kept.setdefault(one, []).append(text.values[one][0])
                return seen

            loop.run(ids[start:stop], self._gates(loop, text, start, stop), edit, states)
            states = loop.states
            for layer, state in enumerate(states):
                name = f"blocks.{layer}.rwkv.hook_state"
                state[1] = text.see(name, state[1], [stop - 1])
                text.states |= {(one, stop): text.values[one] for one in (name, f"{name}.before")}
        text.values |= {name: np.stack(values) for name, values in kept.items()}

    def _hybrid(self, hybrid: Hybrid, text: Text, ids: list[int]) -> None:
        """A hybrid, layer by layer; a state is edited where a call or a step ends."""

        def ended(name: str, state: torch.Tensor, stop: int) -> torch.Tensor:
            state = text.see(name, state.numpy(), [stop - 1])
            text.states |= {(one, stop): text.values[one] for one in (name, f"{name}.before")}
            return torch.from_numpy(state)

        def see(name: str, value: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(text.see(name, value.numpy(), range(len(ids))))

        rows = [(one, one.rows[text.index]) for one in text.batches]
        keys = [batch.seen(text.index, t) for batch, row in rows for t in range(row.first, row.stop)]
        steps = [*_steps(text.batches, text.index)]
        hidden = np.zeros((len(ids), len(ids)), bool)
        for batch, row in rows:
            hidden[row.first : row.stop, [t for t in batch.hidden(text.index) if t < row.stop]] = True
        captured = [one.point for batch in text.batches for one in batch.call.captures]
        weighed = {HookPoint.parse(point.name).layer for point in captured if point.axes[-1] == "seq_src"}
        gates = self._gates(hybrid, text, 0, len(ids))
        hybrid.text(ids, see, keys, gates, steps, ended, torch.from_numpy(hidden), weighed)

    def _gates(self, loop: Loop | Hybrid, text: Text, start: int, stop: int) -> Gates:
        own = [one for one in self.points.values() if one.heads is not None and ".attn." not in one.name]  # of a state
        heads = int(own[0].dims[own[0].heads or 0])
        gates = Gates.ones(loop.layers, stop - start, heads)
        for batch in text.batches:
            for state in sorted(batch.call.states, key=lambda one: one.scale is None):  # a knockout wins
                row = batch.rows[text.index]
                at = [t - start for t in row.resolved(list(state.positions)) if row.first <= t < row.stop]
                at = [t for t in at if 0 <= t < stop - start]
                chosen = range(heads) if state.heads is None else state.heads
                layers = range(loop.layers) if state.layers is None else state.layers
                for term in state.terms:
                    if term in ("write", "erase"):
                        getattr(gates, term)[np.ix_(layers, at, chosen)] *= state.scale or 0
                    else:
                        getattr(gates, term.removeprefix("token_"))[np.ix_(layers, at)] = False
        return gates


def _steps(batches: Sequence[Batch], index: int) -> Iterator[tuple[int, int]]:
    """Where a row's text is run in pieces: its calls, and the steps of a generation."""
    for batch in batches:
        row = batch.rows[index]
        yield row.first, (row.end if batch.call.new else row.stop)
        if batch.call.new:
            yield from ((t, t + 1) for t in range(row.end, row.stop))


@dataclass
class Outcome:
    """What became of a spec: the message of a refusal, or the worst difference and where it is.

    Where that is above the tolerance, `rounding` is how far the reference is from itself at most, in several draws, if
    every value at a hook point is moved by half a step of float32: a spec may leave so little of an activation that
    float32 cannot tell it.
    """

    refused: str | None = None
    worst: float = 0.0
    where: str = ""
    rounding: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.refused is None and self.worst <= max(TOLERANCE, OF_ROUNDING * self.rounding)


@dataclass
class Comparison:
    """Arrays of mionnx beside those of texts of the reference, row by row, each with its name."""

    texts: list[Text]
    seen: list[tuple[str, Sequence[Array], Sequence[Array]]] = field(default_factory=list)

    def see(self, what: str, found: Sequence[Array], expected: Sequence[Array]) -> None:
        """One array, row by row."""
        self.seen.append((what, found, expected))

    def apart(self) -> list[float]:
        """How far each array is from the reference's."""
        return [apart(*one) for one in self.seen]

    def rounded(self, other: "Comparison", number: int) -> float:
        """How far the part of the texts that one array was compared with is from the same part of other texts."""
        (what, _, expected), (_, _, again) = self.seen[number], other.seen[number]
        return apart(what, again, expected)

    def cache(self, cache: HookCache, batch: Batch, at: Sequence[Sequence[int]], columns: Sequence[Any]) -> None:
        """What one pass has returned, of tokens at these positions of each row, which stand in these columns."""
        if batch.call.logits:
            shown = [_shown(batch, *each) for each in zip(range(len(at)), at, columns, strict=True)]
            expected = [text.values["hook_logits"][each] for text, (each, _) in zip(self.texts, shown, strict=True)]
            self.see("logits", [row[each] for row, (_, each) in zip(cache.output(), shown, strict=True)], expected)
        for capture in batch.call.captures:
            value = cache[capture.name]
            rows = [self.row(capture, n, batch, value[n], at[n], columns[n]) for n in range(len(value))]
            self.see(f"{capture.name}", [found for found, _ in rows], [expected for _, expected in rows])

    def row(
        self, capture: Capture, n: int, batch: Batch, value: Array, at: Sequence[int], columns: Any
    ) -> tuple[Array, Array]:
        """One row of a capture, as mionnx and as the reference have it."""
        point, text = capture.point, self.texts[n]
        name = point.name if point.derived else capture.name
        expected = text.states[name, at[-1] + 1] if point.seq is None else text.values[name]
        if point.heads is not None and capture.heads is not None:
            expected = expected.take(capture.heads, point.heads - 1)
        if point.axes[-1] == "seq_src":  # of the tokens of this pass
            value, expected = value.take(columns, -1), expected.take(at, -1)
        if point.seq is not None:
            if capture.positions is not None:
                at = batch.rows[n].resolved(list(capture.positions))
                columns = range(len(capture.positions))
            at, columns = _shown(batch, n, at, columns)
            value, expected = value.take(columns, point.seq - 1), expected.take(at, point.seq - 1)
        if point.axes[-1] == "seq_k":
            keys = batch.keys[n][: value.shape[-1]]
            keys = [key for key in keys if key < value.shape[-1]]
            value, expected = value[..., keys], expected[..., : len(keys)]
        return value, expected


def _shown(batch: Batch, n: int, at: Sequence[int], columns: Sequence[int]) -> tuple[list[int], list[int]]:
    """Positions and columns of one row without those of hidden tokens."""
    pairs = [(t, column) for t, column in zip(at, columns, strict=True) if t not in batch.hidden(n)]
    return [t for t, _ in pairs], [column for _, column in pairs]


def check(model: MIModel, reference: Reference, calls: Sequence[Call]) -> Outcome:
    """Run calls in mionnx and in the reference.

    Raises:
        AssertionError: another text, or other masked scores.
        Exception: whatever mionnx raises that is no MIError.
    """
    batches, past, results = batches_of(calls), None, []
    try:
        for n, call in enumerate(calls):
            results.append(_run(model, call, past, last=n + 1 == len(calls)))
            cache = results[-1] if not call.new else results[-1].cache
            if n + 1 < len(calls):
                past = cache if call.new else cache.state if model.hooked.metadata.carries_state else cache.kv_cache
    except MIError as error:
        return Outcome(refused=f"{type(error).__name__}: {error}")
    comparison = _compared(reference, batches, results)
    off = comparison.apart()
    if not off:
        return Outcome()
    at = int(np.argmax(off))
    outcome = Outcome(worst=off[at], where=comparison.seen[at][0])
    if outcome.worst > TOLERANCE:
        draws = [_compared(reference, batches, results, np.random.default_rng(seed)) for seed in range(DRAWS)]
        outcome.rounding = max(comparison.rounded(draw, at) for draw in draws)
    return outcome


def _compared(
    reference: Reference, batches: Sequence[Batch], results: Sequence[Any], rounding: np.random.Generator | None = None
) -> Comparison:
    """The results beside the reference's texts."""
    ids = _ids([batch.call for batch in batches], results)
    comparison = Comparison([reference.text(batches, row, one, rounding) for row, one in enumerate(ids)])
    for batch, result in zip(batches, results, strict=True):
        at, columns = [[*each] for each in batch.columns], [[*each.values()] for each in batch.columns]
        if not batch.call.new:
            comparison.cache(result, batch, at, columns)
            continue
        for step, cache in enumerate(result.steps):
            if step:
                at, columns = [[row.end + step - 1] for row in batch.rows], [[0] for _ in at]
            comparison.cache(cache, batch, at, columns)
        if rounding is None:
            _check_greedy(comparison.texts, batch, result.ids)
    return comparison


def apart(what: str, found: Sequence[Array], expected: Sequence[Array]) -> float:
    """The largest difference of some arrays, relative to the largest number of all that are expected.

    Raises:
        AssertionError: other shapes, or other scores that are masked.
    """
    largest, difference = SMALLEST, 0.0
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, (what, one.shape, other.shape)
        usual = np.abs(other) < UNMASKED  # not where it is NaN
        assert np.array_equal(np.abs(one) < UNMASKED, usual), what
        assert np.array_equal(np.sign(one[~usual]), np.sign(other[~usual]), equal_nan=True), what
        if usual.any():
            difference = max(difference, float(np.abs(one[usual] - other[usual]).max()))
            largest = max(largest, float(np.abs(other[usual]).max()))
    return difference / largest


def _run(model: MIModel, call: Call, past: Any, last: bool) -> Any:
    if call.new:
        return model.generate(
            call.ids,
            call.spec,
            attention_mask=call.mask,
            cache=past,
            max_new_tokens=call.new,
            eos_token_id=[],
            output_logits=True,
        )
    prompts = call.prompts if call.prompts is None or len({*call.prompts}) > 1 else call.prompts[0]
    options = {"attention_mask": call.mask, "cache": past, "prompt_length": prompts, "logits": call.logits}
    return model.forward(call.ids, call.spec, use_cache=not last, **options)


def _ids(calls: Sequence[Call], results: Sequence[Any]) -> list[list[int]]:
    """Each row's text, but for a generation's last token, which is not run."""
    found: list[list[int]] = [[] for _ in calls[0].ids]
    for call, result in zip(calls, results, strict=True):
        for n, text in enumerate(found):
            text += call.ids[n][call.mask[n] == 1].tolist()
            text += result.new_ids[n][:-1].tolist() if call.new else []
    return found


def _check_greedy(texts: Sequence[Text], batch: Batch, ids: Sequence[Array]) -> None:
    """The new tokens are those with the largest logits, or nearly."""
    for index, (text, row, found) in enumerate(zip(texts, batch.rows, ids, strict=True)):
        for n in range(batch.call.new):
            if row.end - 1 + n in batch.hidden(index):
                continue
            logits = text.values["hook_logits"][row.end - 1 + n]
            assert logits[found[row.end - row.first + n]] >= logits.max() - 1e-4 * np.abs(logits).max()


def decoder(folder: Path, model: MIModel) -> Reference:
    """The reference of a checkpoint in transformers' layout."""
    return Reference(Decoder.of(folder), model)


def hybrid(folder: Path, model: MIModel) -> Reference:
    """The reference of a hybrid in transformers' layout."""
    return Reference(Hybrid.of(folder), model)


def encoder(folder: Path, model: MIModel) -> Reference:
    """The reference of a masked language model in transformers' layout."""
    return Reference(Encoder.of(folder), model)


def recurrent(version: int, tensors: dict[str, Any], model: MIModel) -> Reference:
    """The reference of an RWKV-4, 6 or 7 under BlinkDL's names."""
    doubles = {name: tensor.numpy().astype(np.float64) for name, tensor in tensors.items()}
    return Reference(Loop(doubles, version), model)
