"""Random specs on random batches, as plain data that both mionnx and the references of `spec_reference.py` read.

Whatever the randomness comes from, a seed or hypothesis, it is a `random.Random`. What is drawn is nearly always valid;
the rest is for mionnx to refuse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import onnx

from mionnx import HookPoint, HookSpec, Intervention, MIModel, StateKnockoutSpec, StateSteeringSpec
from mionnx.graph.layers import TERMS

Array = np.ndarray
VOCAB, LONGEST = 101, 14
MOST_READ = 1e4  # by a splice: the lowest score in a pattern is beyond float32 once it is squared in a norm


@dataclass(frozen=True)
class Point:
    """A hook point: its name, the names of its axes, and their sizes or names."""

    name: str
    axes: tuple[str, ...]
    dims: tuple[int | str, ...]

    @property
    def derived(self) -> bool:
        return HookPoint.parse(self.name).derived

    @property
    def short(self) -> str:
        return self.name.rpartition("hook_")[2]

    def axis(self, *names: str) -> int | None:
        return next((n for n, name in enumerate(self.axes) if name in names), None)

    @property
    def heads(self) -> int | None:
        return self.axis("n_heads", "n_kv_heads")

    @property
    def seq(self) -> int | None:
        return self.axis("seq", "seq_q")


@dataclass(frozen=True)
class Edit:
    """One intervention: what is given to mionnx, and nothing that mionnx has made of it."""

    point: Point
    kind: str
    values: tuple[Any, ...] = ()
    positions: Any = None
    heads: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    reads: str | None = None

    @property
    def intervention(self) -> Intervention:
        limits = {"positions": self.positions, "heads": self.heads, "rows": self.rows}
        make = getattr(Intervention, "".join(word.title() for word in self.kind.split("_")))
        if self.kind == "splice":
            return make(_fragment(self.point, self.values[0], self.reads is not None), reads=self.reads, **limits)
        return make(*self.values, **limits)


@dataclass(frozen=True)
class StateEdit:
    """Tokens' writes to a recurrent state, scaled, or knocked out where there is no scale.

    In no layers by number: the tokens are hidden from all layers, states, convolutions and attention.
    """

    positions: tuple[int | str, ...]
    layers: tuple[int, ...] | None
    terms: tuple[str, ...] = TERMS
    scale: float | None = None
    heads: tuple[int, ...] | None = None

    def add_to(self, spec: HookSpec) -> None:
        made = StateKnockoutSpec() if self.scale is None else StateSteeringSpec(self.scale)
        made = made.positions(self.positions)
        made = made if self.layers is None else made.layers(self.layers)
        made.terms = [*self.terms]
        if self.scale is None:
            spec.set_state_knockout(made)
        else:
            spec.set_state_steering(made if self.heads is None else made.heads(self.heads))


@dataclass(frozen=True)
class Capture:
    """One value to read."""

    point: Point
    before: bool = False
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return f"{self.point.name}.before" if self.before else self.point.name


@dataclass(frozen=True)
class Call:
    """One pass, or with `new` a generation: tokens, and what is read and changed in it."""

    ids: Array  # [batch, seq]
    mask: Array  # [batch, seq]
    prompts: tuple[int, ...] | None = None
    new: int = 0
    logits: bool = True
    edits: Sequence[Edit] = ()
    states: Sequence[StateEdit] = ()
    captures: Sequence[Capture] = ()

    @property
    def spec(self) -> HookSpec:
        spec = HookSpec()
        for capture in self.captures:
            spec.capture(capture.point.name, capture.before, positions=capture.positions, heads=capture.heads)
        for edit in self.edits:
            spec.intervene(edit.point.name, edit.intervention)
        for state in self.states:
            state.add_to(spec)
        return spec


@dataclass(frozen=True)
class Row:
    """A row's text in one call: positions `first` to `stop` are computed, negative ones count from `end`."""

    first: int
    stop: int
    end: int

    def resolved(self, positions: Any) -> list[int]:
        """Positions counted from the text's start, in the order given, each once."""
        if isinstance(positions, str):
            inside = range(self.end) if positions == "prompt" else range(self.end, self.stop)
            return [at for at in inside if self.first <= at < self.stop]
        found: list[int] = []
        for one in [positions] if isinstance(positions, int | str) else positions:
            found += self.resolved(one) if isinstance(one, str) else [one + self.end if one < 0 else one]
        return list(dict.fromkeys(found))


def points_of(model: MIModel) -> list[Point]:
    """The hook points of a model that the references have, in the order in which a pass reaches them."""
    left_out = "RwkvEffectiveAttn"  # only `hybrid_reference.py` has effective attention
    points = [point for point in model.hook_points() if not point.variant.startswith(left_out)]
    return [Point(point.name, tuple(point.axes or ()), tuple(model.hooked.axes(point))) for point in points]


def draw(model: MIModel, rng: Random) -> list[Call]:
    """Random calls of a model."""
    facts = model.hooked.metadata
    states = [i for i, layer in enumerate(facts.layers) if layer.recurrence and layer.recurrence.gates]
    hides = facts.carries_state and not facts.shifts_tokens
    return Draw(rng, points_of(model), states, facts.state_gates, facts.bidirectional, hides).all_calls()


def rows_of(calls: Sequence[Call]) -> list[list[Row]]:
    """Per call, each row's text in it."""
    found, lengths = [], np.zeros(len(calls[0].ids), int)
    for call in calls:
        after = lengths + call.mask.sum(axis=1)
        ends = after if call.prompts is None else call.prompts
        stops = after + max(call.new - 1, 0)
        found.append([Row(*map(int, one)) for one in zip(lengths, stops, ends, strict=True)])
        lengths = after
    return found


@dataclass
class Draw:
    """Draws the calls of one model."""

    rng: Random
    points: Sequence[Point]
    states: Sequence[int] = ()  # the layers with a state, or a convolution alone
    terms: Sequence[str] = ()  # of what tokens do to it: RWKV-6 removes nothing, other models shift no tokens
    both: bool = False  # an encoder: one call, and every token reads every other
    hides: bool = False  # a hybrid: tokens can be hidden from all layers, and padding may stand between tokens
    calls: list[Call] = field(default_factory=list)

    @property
    def attends(self) -> bool:
        """Whether a later call reads keys of earlier ones: those of a hidden token are padding's."""
        return any(point.short == "scores" for point in self.points)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def some(self, items: Sequence[Any], most: int = 99) -> list[Any]:
        """A few of them, at least one, in random order."""
        return self.rng.sample([*items], self.rng.randint(1, min(len(items), most)))

    def numbers(self, shape: Sequence[int], scale: float = 0.5) -> Array:
        return np.random.default_rng(self.rng.getrandbits(32)).normal(0, scale, shape).astype(np.float32)

    def all_calls(self) -> list[Call]:
        """One call, or several of which each continues the one before; the last may be a generation."""
        batch = self.rng.randint(1, 3)
        if self.both:
            self.calls.append(self.tokens(batch))
            self.calls[-1] = self.with_spec(self.calls[-1], True)
            return self.calls
        before = self.rng.randint(2, 4) if self.hides and self.chance(0.25) else int(self.chance(0.35))
        for last in [*[False] * before, True]:
            call = self.tokens(batch)
            if last and self.chance(0.15):
                call = self.generation(call)
            elif self.chance(0.3):
                call = self.with_prompts(call)
            self.calls.append(call)
            if last or self.chance(0.5):
                self.calls[-1] = self.with_spec(call, last)
        return self.calls

    def tokens(self, batch: int) -> Call:
        """Texts, of unequal length in half of the batches, with padding on either side."""
        longest = LONGEST // 2 if self.calls else LONGEST - 4
        if self.states and not self.calls and self.chance(0.1):
            longest = 20  # beyond 15 tokens the recurrence takes its chunked form
        longest = self.rng.randint(1, longest)
        lengths = [longest] * batch
        if self.chance(0.5):
            lengths = [self.rng.randint(1, longest) for _ in lengths]
        width = max(lengths) + (self.rng.randint(0, 2) if self.chance(0.2) else 0)
        ids = np.array([[self.rng.randrange(3, VOCAB) for _ in range(width)] for _ in lengths])
        mask = np.zeros_like(ids)
        for row, length in enumerate(lengths):
            start = self.rng.choice([0, width - length, self.rng.randint(0, width - length)])
            mask[row, start : start + length] = 1
            if self.hides and length > 1 and self.chance(0.2):
                mask[row, [start + n for n in self.some(range(length), min(3, length - 1))]] = 0
        return Call(ids, mask)

    def generation(self, call: Call) -> Call:
        """The same texts, padded on the left, and a number of new tokens."""
        lengths = call.mask.sum(axis=1)
        width = max(lengths)
        mask = np.array([[int(column >= width - length) for column in range(width)] for length in lengths])
        return Call(call.ids[:, :width], mask, new=self.rng.randint(2, 4))

    def with_prompts(self, call: Call) -> Call:
        """Where the prompt of each text ends: one number, or one for each row."""
        rows = rows_of([*self.calls, call])[-1]
        ends = [self.rng.randint(1 if self.chance(0.1) else row.first + 1, row.stop) for row in rows]
        return Call(call.ids, call.mask, tuple([min(ends)] * len(ends) if self.chance(0.3) else ends))

    def with_spec(self, call: Call, last: bool) -> Call:
        drawn = DrawSpec(self, call, rows_of([*self.calls[:-1], call])[-1])
        edits = drawn.edits()
        states = [drawn.state() for _ in range(self.rng.randint(1, 2))] if self.states and self.chance(0.4) else []
        if self.hides and (last or not self.attends) and self.chance(0.15):
            states.append(drawn.hidden())
        captures = drawn.captures()
        logits = not last or bool(call.new) or not captures or not self.chance(0.05)
        return Call(call.ids, call.mask, call.prompts, call.new, logits, edits, states, captures)


@dataclass
class DrawSpec:
    """Draws the spec of one call."""

    draw: Draw
    call: Call
    rows: list[Row]

    def __post_init__(self) -> None:
        self.rng, self.chance, self.some = self.draw.rng, self.draw.chance, self.draw.some
        calls = [*self.draw.calls[:-1], self.call]
        self.total = sum(one.ids.shape[1] for one in calls)

    def edits(self) -> list[Edit]:
        """A few interventions, some of them at one hook point."""
        # numbers of experts are replaced by others, and take no other kind
        points = [point for point in self.draw.points if not point.derived and point.short != "expert_indices"]
        found: list[Edit] = []
        for _ in range(self.rng.randint(0 if self.draw.states else 1, 4)):
            again = found and self.chance(0.25)
            edit = self.edit(self.rng.choice(found).point if again else self.rng.choice(points))
            overwrites = edit.kind in ("replace", "zero") and not self.chance(0.1)  # what comes before may be lost
            found.insert(0 if overwrites else len(found), edit)
        return found

    def kinds(self, point: Point) -> list[str]:
        kinds = ["add", "scale", "zero", "replace", "clamp"]
        if point.axes[-1] != "seq_k":  # keys are no features, which always is refused
            kinds += ["project_out", "low_rank"]
        if point.short == "scores":
            kinds += ["knockout"] * 4
        return [*kinds, "splice"] if self.chance(0.3) else kinds

    def edit(self, point: Point) -> Edit:
        kind, heads, rows, positions = self.rng.choice(self.kinds(point)), None, None, None
        if self.chance(0.4):
            rows = tuple(self.some(range(len(self.rows))))
        if point.heads is not None and self.chance(0.5):
            heads = tuple(self.some(range(int(point.dims[point.heads]))))
        if point.seq is not None and self.chance(0.7):
            positions = self.positions(range(len(self.rows)) if rows is None else rows)
        limited = Edit(point, kind, (), positions, heads, rows)
        reads = self.reads(point) if kind == "splice" else None
        return Edit(point, kind, self.values(limited), positions, heads, rows, reads)

    def reads(self, point: Point) -> str | None:
        """An earlier hook point of the same shape, for a splice to read."""
        earlier = self.draw.points[: self.draw.points.index(point)]
        same = [one.name for one in earlier if one.dims == point.dims and not one.derived]
        return self.rng.choice(same) if same and self.chance(0.5) else None

    def positions(self, rows: Sequence[int]) -> Any:
        """A phase, a list for all rows, or one for each."""
        if self.chance(0.2):
            return self.rng.choice(["prompt", "generated"] if self.call.prompts or self.call.new else ["prompt"])
        found = self.of_rows([self.rows[row] for row in rows])
        if not found or self.chance(0.3):
            return [self.of_rows([row]) for row in self.rows]
        return found[0] if len(found) == 1 and self.chance(0.5) else found

    def of_rows(self, rows: Sequence[Row], most: int = 5) -> list[int]:
        """Positions that are computed in each of these rows, in random order, negative ones among them, none twice."""
        first, stop = max(row.first for row in rows), min(row.stop for row in rows)
        back = min(row.end - row.first for row in rows)
        candidates = [*range(first, stop), *range(-back, 0)]
        if self.chance(0.01):
            candidates = [*range(-3, 6)]  # some of which lie outside of some row, or in its past
        found: list[int] = []
        for one in self.some(candidates, most) if candidates else []:
            if all(len(row.resolved([*found, one])) > len(found) for row in rows):
                found.append(one)
        return found

    def count(self, edit: Edit) -> int | None:
        """How many positions an edit chooses, if that is one number in all rows and has an order."""
        if edit.positions is None or edit.positions == "generated":
            return None
        rows = range(len(self.rows)) if edit.rows is None else edit.rows
        by_row = isinstance(edit.positions, list) and isinstance(edit.positions[0], list)
        chosen = {len(self.rows[row].resolved(edit.positions[row] if by_row else edit.positions)) for row in rows}
        return chosen.pop() if len(chosen) == 1 else None

    def values(self, edit: Edit) -> tuple[Any, ...]:
        if edit.kind == "zero":
            return ()
        if edit.kind == "knockout":
            return (self.mask(edit),)
        width = edit.point.dims[-1]
        if edit.kind == "splice":
            return (self.draw.numbers([width if isinstance(width, int) else 1]),)
        if edit.kind == "project_out":
            shape = [int(width)] if self.chance(0.5) else [self.rng.randint(1, 2), int(width)]
            return (self.draw.numbers(shape, 1.0),)
        if edit.kind == "low_rank":
            k = self.rng.randint(1, 2)
            read, write = self.draw.numbers([k, int(width)], 0.2), self.draw.numbers([k, int(width)], 0.2)
            offset = np.resize(self.value(edit), k)
            if self.chance(0.7):
                sizes = [self.size(edit, axis, False) for axis in range(len(edit.point.axes) - 1)]
                offset = self.draw.numbers([*sizes, k])
            return read, write, offset
        if edit.kind == "clamp":
            low = self.value(edit)
            high = np.max(low) + self.draw.numbers(np.shape(low) if self.chance(0.5) else ()) ** 2
            return (None, high) if self.chance(0.2) else (low, None) if self.chance(0.2) else (low, high)
        return (self.value(edit),)

    def value(self, edit: Edit) -> Array | float:
        """Numbers with one entry for all, one for each chosen, or one for each index, along each axis."""
        whole = edit.kind == "replace" and not self.call.new and (edit.positions, edit.heads, edit.rows) == (None,) * 3
        shape = [self.size(edit, axis, whole) for axis in range(len(edit.point.axes))]
        while not whole and shape and shape[0] == 1 and self.chance(0.7):
            shape = shape[1:]
        value = self.draw.numbers(shape)
        return value if shape else float(value)

    def size(self, edit: Edit, axis: int, whole: bool) -> int:
        name, point = edit.point.axes[axis], edit.point
        sizes = {"batch": len(self.rows), "seq": self.call.ids.shape[1], "seq_k": self.total}
        full = sizes.get(name.replace("_q", ""), point.dims[axis])
        if whole:
            return int(full)
        given = {0: edit.rows and len(edit.rows), point.heads: edit.heads and len(edit.heads)}
        given[point.seq] = self.count(edit)
        if self.call.new and name in ("seq", "seq_q", "seq_k"):
            full = 1  # another step has other tokens
        if name not in ("batch", "seq", "seq_q", "seq_k", "n_heads", "n_kv_heads"):
            return int(full) if self.chance(0.8) else 1
        return self.rng.choice([1, int(full), given.get(axis) or 1])

    def mask(self, edit: Edit) -> Array:
        """Edges to earlier keys, by positions of each row's own text."""
        rows = range(len(self.rows)) if edit.rows is None else edit.rows
        longest = max(self.rows[row].stop for row in rows)
        here = max(self.rows[row].stop - self.rows[row].first for row in rows)
        queries = self.rng.choice([1, longest, longest, longest, *([here] if not self.call.new else [])])
        if edit.positions is not None and isinstance(edit.positions, list) and self.chance(0.4):
            queries = self.count(edit) or longest
        heads = self.rng.choice([1, int(edit.point.dims[1]), len(edit.heads or [0])])
        batch = self.rng.choice([1, len(self.rows), len(edit.rows or [0])])
        shape = (batch, heads, queries, longest)
        cut = np.random.default_rng(self.rng.getrandbits(32)).random(shape) < self.rng.choice([0.15, 0.4])
        if self.draw.both:
            cut[..., np.arange(queries), np.arange(queries)] &= self.chance(0.2)
        elif queries == longest:  # of its own key at times, of which some query may have no other
            cut &= np.tri(longest, k=-int(self.chance(0.8)), dtype=bool)
        else:
            cut[..., -1 - longest // 2 :] = False
        mask = np.where(cut, -np.inf, 0).astype(np.float32)
        return mask[0, 0] if batch == heads == 1 and self.chance(0.5) else mask

    def state(self) -> StateEdit:
        positions: list[Any] = self.of_rows(self.rows)
        if not positions or self.chance(0.2):
            positions = [self.rng.choice(["prompt", "generated"] if self.call.prompts or self.call.new else ["prompt"])]
        layers = tuple(self.some(self.draw.states))
        steered = [term for term in self.draw.terms if term in ("write", "erase")]
        if not steered or self.chance(0.5):
            terms = tuple(self.some(self.draw.terms))
            return StateEdit(tuple(positions), layers, terms)
        heads = int(next(point.dims[point.heads] for point in self.draw.points if point.heads is not None))
        chosen = tuple(self.some(range(heads))) if self.chance(0.5) else None
        scale = self.rng.choice([0.0, 0.5, 2.0, -1.0])
        return StateEdit(
            tuple(positions),
            layers,
            tuple(self.some(steered)),
            scale,
            chosen,
        )

    def hidden(self) -> StateEdit:
        """Tokens hidden from all layers."""
        positions: list[Any] = self.of_rows(self.rows, 3)
        if not positions or self.chance(0.1):
            positions = ["generated" if self.call.new else "prompt"]
        return StateEdit(tuple(positions), None)

    def captures(self) -> list[Capture]:
        found: dict[str, Capture] = {}
        for _ in range(self.rng.randint(0, 4)):
            edited = [edit.point for edit in self.call.edits]
            capture = self.capture(self.rng.choice([*self.draw.points, *edited]))
            found.setdefault(capture.name, capture)
        return list(found.values())

    def capture(self, point: Point) -> Capture:
        positions = heads = None
        if point.heads is not None and self.chance(0.3):
            heads = tuple(self.some(range(int(point.dims[point.heads]))))
        if point.seq is not None and not self.call.new and self.chance(0.3):
            positions = tuple(self.of_rows(self.rows)) or None
        return Capture(point, not point.derived and self.chance(0.25), positions, heads)


def _fragment(point: Point, weight: Array, reads: bool) -> onnx.ModelProto:
    """x * weight + tanh(x), and half of what it reads, which of masked scores is cut off."""
    dims = ", ".join(str(dim) for dim in point.dims)
    given = f"float[{dims}] x" + f", float[{dims}] r" * reads
    last = f"""least = Constant<value = float {{{-MOST_READ}}}>() most = Constant<value = float {{{MOST_READ}}}>()
        c = Clip(r, least, most) half = Constant<value = float {{0.5}}>() h = Mul(c, half)
        s = Add(p, t) y = Add(s, h)"""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 23]> fragment ({given}) => (float[{dims}] y) {{
        p = Mul(x, w) t = Tanh(x) {last if reads else "y = Add(p, t)"} }}"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return proto
