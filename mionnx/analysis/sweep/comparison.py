"""`Comparison`: two runs, the metric of both, and which of them is patched; as pairs of token rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import getdoc, signature
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.corruption import Corruption, Noise, corrupt
from mionnx.analysis.sweep.grid import Grid, Places, Positions, find_places, make_grid
from mionnx.analysis.sweep.metric import Measure, Metric, MetricRequest
from mionnx.errors import InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import Place
from mionnx.machine.brief import Brief, spelled
from mionnx.machine.typed import typed
from mionnx.run.metric_place import index_read
from mionnx.run.prompt import Ids, prompt_text, token_text, typed_prompts
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec

PATCHINGS = ("denoising", "noising")
ENTRY = re.compile(r"(?m)^    ([a-z_, ]+): .*(?:\n {8}.*)*")  # of the arguments or attributes in a docstring
Corrupted = Prompt | HookSpec | Sequence[HookSpec] | Noise
Verb = TypeVar("Verb", bound=Callable[..., Any])


@typed(leave=["clean", "corrupted", "answer", "versus", "positions"])
@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Brief):
    """Two runs to compare, for every verb of patching, ablation and attribution.

    A verb takes it where its clean prompt stands, and its own defaults for fields that are None. A field that the verb
    does not have is refused.

    Attributes:
        clean, corrupted: prompts, one or as many of each; the two of a pair have the same number of tokens. Instead of
            a prompt, `corrupted` may be interventions on the clean one: a `HookSpec`, one a prompt, several for a
            single prompt, or `Noise`, whose repeats are averaged (of a single prompt they are the pairs).
        metric: "logit_diff" (of answer and versus), "logit", "probability", "log_probability", "rank" (0 is the top
            token) of the answer, "kl" (KL divergence from the clean run, in nats), or a function: logits [rows, vocab]
            -> [rows], which may take the index of the pair as a second argument. Of an encoder's labels the same; of a
            span head "span", the start's logit plus the end's of the answer; of an embedding model "cosine" and "dot".
        answer, versus: tokens or labels, as numbers or texts, one for all pairs or one a pair. By default the top token
            of the clean prompt, and of the corrupted one. Of "cosine" and "dot", versus is the text or the embedding
            that is compared with; of "span", answer is a part of the clean text, or (first, last) of its tokens.
        patching: "denoising" puts clean values into the corrupted run, "noising" corrupted ones into the clean run.
        position: the position whose logits are read; patches behind it have no effect. By default the last; of a masked
            language model that of the one "mask". Of an encoder patches at all positions have one.
        positions: names for the entries of the axis "position": each an index, a string of the clean prompt, which
            stands for all of its tokens together, or a list with one for each pair; so pairs of different lengths
            have an axis in common: `{"subject": ["France", "New Zealand"], "last": -1}`. By default all positions.

    Raises:
        InputError: an unknown metric or direction of patching, or tokens that the metric does not read.

    Example:
        comparison = Comparison("The capital of France is", "The capital of Italy is", answer="Paris", versus="Rome")
        model.patch_sweep(comparison, hook="z").top(3), model.circuit(comparison).faithfulness
    """

    clean: Prompt
    corrupted: Corrupted | None = None
    metric: Measure | None = None
    answer: Any = None
    versus: Any = None
    patching: str | None = None
    position: Place | None = None
    positions: Positions | None = None

    def __post_init__(self) -> None:
        if self.patching not in (None, *PATCHINGS):
            advice = nearest(str(self.patching), PATCHINGS)
            raise InputError(f"patching={self.patching!r}; {' or '.join(PATCHINGS)}{advice}")
        _ = self.request  # refuses a wrong metric here, not at the first run

    @property
    def request(self) -> MetricRequest:
        """The metric with its tokens."""
        return MetricRequest("logit_diff" if self.metric is None else self.metric, self.answer, self.versus)

    def on(self, model: Runner) -> Pairs:
        """Tokenize the prompts, and pair their positions; without corrupted ones each runs alone."""
        rows, names = typed_prompts(model, self.clean), None
        clean = [ids for ids, _ in rows]
        reading = _Reading(model, self.position, [types for _, types in rows])
        places: Sequence[Places | None] = [None] * len(clean)
        if self.positions is not None:
            places = find_places(model, self.clean, clean, self.positions)
            names = tuple(self.positions)
        repeats, patching = 1, self.patching or "denoising"
        if self.corrupted is None:
            patching, bases = "ablation", clean
            about = quote(model, clean[0])
            pairs = [
                reading.pair(number, ids, None, place)
                for number, (ids, place) in enumerate(zip(clean, places, strict=True))
            ]
        elif (specs := _specs(model, self.clean, self.corrupted, len(clean))) is not None:
            if not model.hooked.metadata.reads_whole and any(
                len(until(self.position, ids)) < len(ids) for ids in clean
            ):
                raise InputError(
                    f"position={self.position!r}: a prompt that a spec corrupts is read at its last token, from which "
                    "the spec's positions count; cut the prompt there"
                )
            each = enumerate(zip(clean, places, specs, strict=True))
            pairs = [
                reading.pair(number, ids, ids, place, corrupt(model, spec, ids, reading.at(ids)))
                for number, (ids, place, own) in each
                for spec in own
            ]
            bases, repeats = [pair.base for pair in pairs], len(specs[0])
            first, second = quote(model, clean[0]), f"{quote(model, clean[0])} under {spelled(self.corrupted)}"
            about = " into ".join([first, second] if patching == "denoising" else [second, first])
        else:
            others_rows = typed_prompts(model, cast(Prompt, self.corrupted))
            corrupted = [ids for ids, _ in others_rows]
            _refuse_unlike(clean, corrupted)
            reading.refuse_other_types([types for _, types in others_rows])
            bases, others = (corrupted, clean) if patching == "denoising" else (clean, corrupted)
            pairs = [
                reading.pair(number, base, other, place)
                for number, (base, other, place) in enumerate(zip(bases, others, places, strict=True))
            ]
            about = f"{quote(model, others[0])} into {quote(model, bases[0])}"
        more = f" and {len(clean) - 1} more" if len(clean) > 1 else ""
        request = self.request.resolved(model, self.clean, len(clean))
        return Pairs(pairs, bases, request.for_repeats(repeats), patching, about + more, names, repeats)


class _Reading:
    """Where a comparison reads each of its prompts."""

    def __init__(self, model: Runner, position: Place | None, types: Sequence[Ids | None]) -> None:
        self.model, self.position, self.types = model, position, types

    def at(self, ids: Ids) -> int | None:
        """The index that is read in a text that is read whole; None where prompts end there."""
        return index_read(self.model.hooked, self.position, ids) if self.model.hooked.metadata.reads_whole else None

    def pair(
        self, number: int, base: Ids, other: Ids | None, places: Places | None, corruption: Corruption | None = None
    ) -> Pair:
        """One pair, its prompts cut behind the position that is read, unless they are read whole."""
        if not self.model.hooked.metadata.reads_whole:
            other = None if other is None else until(self.position, other)
            return Pair(until(self.position, base), other, places, corruption)
        at = self.at(base)
        if other is not None and self.at(other) != at:
            raise InputError(f"pair {number}: the two prompts are read at positions {at} and {self.at(other)}")
        return Pair(base, other, places, corruption, at, self.types[number], reads_whole=True)

    def refuse_other_types(self, types: Sequence[Ids | None]) -> None:
        """Refuse corrupted prompts whose two texts meet at another token."""
        for number, (own, other) in enumerate(zip(self.types, types, strict=True)):
            if (own is None) != (other is None) or (
                own is not None and other is not None and not np.array_equal(own, other)
            ):
                raise InputError(
                    f"pair {number}: the two texts of the clean prompt and of the corrupted differ in length"
                )


@dataclass(frozen=True)
class Pair:
    """One prompt or pair of prompts; a decoder's ends at the position whose logits are read.

    Attributes:
        base: [seq]: the run that is patched.
        other: [seq]: the run that is patched in; None for an ablation.
        corruption: interventions that make the corrupted run of a prompt that is both.
        at: the position that is read of a text that is read whole; None where a text has one row of numbers.
        types: [seq]: which of two texts a token belongs to.
        reads_whole: whether the text is read whole, and each position may change all others.
    """

    base: Ids
    other: Ids | None = None
    places: Places | None = None
    corruption: Corruption | None = None
    at: int | None = None
    types: Ids | None = None
    reads_whole: bool = False

    @property
    def first(self) -> int:
        """The first position whose values can differ; 0 for an ablation, a spec, or a text that is read whole."""
        alone = self.other is None or self.corruption is not None or self.reads_whole
        # Interventions may change every position, and without a second run any position may be ablated.
        return 0 if alone else int(np.flatnonzero(self.base != self.other)[0])


@dataclass(frozen=True)
class Pairs:
    """A comparison as token rows."""

    pairs: list[Pair]  # those of one prompt follow each other, `repeats` of them, by draws or specs
    bases: list[Ids]  # [seq] of each pair's patched prompt, not cut at the position that is read
    metric: MetricRequest
    patching: str  # "denoising", "noising" or "ablation"
    about: str  # a line for pictures
    names: tuple[str, ...] | None = None  # names of positions; None where each stands for itself
    repeats: int = 1

    def __post_init__(self) -> None:
        for number, pair in enumerate(self.pairs):
            # Equal up to the position read: no cell could have an effect, and `first` would find no position.
            if pair.other is not None and pair.corruption is None and np.array_equal(pair.base, pair.other):
                raise InputError(f"pair {number}: the clean and the corrupted prompt are the same up to what is read")

    def __len__(self) -> int:
        return len(self.pairs)

    def of_texts(self, verb: str) -> Pairs:
        """The same pairs; a prompt that is corrupted by interventions is refused."""
        if self.pairs[0].corruption is not None:
            raise InputError(f"{verb} takes a corrupted text; patch_sweep takes a spec as well")
        return self

    def ordered(self, base: Any, other: Any) -> tuple[Any, Any]:
        """Values of the patched run and of the other, as those of the clean and the corrupted run."""
        return (other, base) if self.patching == "denoising" else (base, other)

    def bind(self, model: Runner, number: int, base: NDArray[Any], other: NDArray[Any]) -> Metric:
        """The metric of one pair, by the logits [vocab] of its two runs."""
        clean, corrupted = self.ordered(base, other)
        alone = self.pairs[number].other is None
        return self.metric.bind(model, number, len(self), clean, None if alone else corrupted)

    def reads(self, model: Runner, number: int, base: Any, other: Any) -> dict[str, Any]:
        """The tokens or the reference that the gradient of one pair's metric reads; see `bind`."""
        return self.metric.reads(model, number, len(self), *self.ordered(base, other))

    def grid(
        self, model: Runner, hook: str | HookPoint, over: str | Iterable[str], layers: Iterable[int] | None
    ) -> Grid:
        """The cells of a sweep over a hook point; see `make_grid`."""
        lengths = {len(ids) for ids in self.bases}
        seq = lengths.pop() if len(lengths) == 1 else None
        return make_grid(model.hooked, hook, over, layers, seq, self.pairs[0].places)

    def labels(self, model: Runner, grid: Grid) -> dict[str, list[str]]:
        """Names of the entries of a grid's axes; a position is named by its tokens, or as `positions=` names it."""
        tokens = [_tokens_there(model, ids) for ids in zip(*self.bases, strict=False)]
        labels = {name: list(map(str, range(size))) for name, size in zip(grid.over, grid.sizes, strict=True)}
        positions = tokens if self.names is None else [*self.names]
        named = {"layer": [str(layer) for layer in grid.layers], "position": positions, "source": tokens}
        return labels | {name: named[name] for name in grid.over if name in named}


def compares(verb: Verb) -> Verb:
    """Let a verb take a `Comparison` where its clean prompt stands, and add the fields to its docstring."""
    parameters = [*signature(verb).parameters]
    first, words = parameters[1], [field.name for field in fields(Comparison)]
    shared = [name for name in words if name in parameters]

    @wraps(verb)
    def call(*arguments: Any, **named: Any) -> Any:
        comparison = arguments[1] if len(arguments) > 1 else named.get(first)
        if isinstance(comparison, Comparison):
            if twice := {*parameters[2 : len(arguments)], *named} & {*words} - {first}:
                raise InputError(
                    f"{verb.__name__}({min(twice)}=) stands beside a Comparison, which has the prompts and the metric: "
                    "change these there, and give other arguments by name"
                )
            # A field with its default counts as not given: the verb's own default holds.
            set_fields = {
                field.name: value
                for field in fields(Comparison)[1:]
                if (value := getattr(comparison, field.name)) is not None and value is not field.default
            }
            if unread := [name for name in set_fields if name not in shared]:
                raise InputError(f"{verb.__name__} reads no {unread[0]}: leave it out of the Comparison")
            named |= set_fields
            if len(arguments) > 1:
                arguments = arguments[0], comparison.clean, *arguments[2:]
            else:
                named[first] = comparison.clean
        # `corrupted` is the third argument of every such verb; the list is padded, since it may not be among
        # `arguments`.
        if "corrupted" in shared and named.get("corrupted", [*arguments, None, None, None][2]) is None:
            raise InputError(f"{verb.__name__} compares two runs: give corrupted=, a prompt of as many tokens")
        return verb(*arguments, **named)

    text = getdoc(verb) or ""
    own = {name for entry in ENTRY.finditer(text) for name in entry[1].split(", ")}
    missing = [
        entry[0]
        for entry in ENTRY.finditer(getdoc(Comparison) or "")
        # The verb's own sentence on an argument comes before the one of `Comparison`.
        if (names := {*entry[1].split(", ")}) & {*shared} and not names & own
    ]
    call.__doc__ = text.replace("Args:\n", "\n".join(["Args:", *missing, ""]), 1)
    return cast(Verb, call)


def _specs(model: Runner, clean: Prompt, corrupted: Any, count: int) -> list[list[HookSpec]] | None:
    """The specs of each prompt; None for a corruption by texts."""
    if isinstance(corrupted, Noise):
        return corrupted.specs(model, clean)
    if isinstance(corrupted, HookSpec):
        return [[corrupted]] * count
    if not isinstance(corrupted, list | tuple) or not any(isinstance(one, HookSpec) for one in corrupted):
        return None
    if not all(isinstance(one, HookSpec) for one in corrupted):
        raise InputError("corrupted= is a list of specs and of something else")
    if count == 1:
        return [[*corrupted]]
    if len(corrupted) != count:
        raise InputError(f"{count} clean prompts and {len(corrupted)} specs: give one spec for all, or one a prompt")
    return [[one] for one in corrupted]


def _refuse_unlike(clean: Sequence[Ids], corrupted: Sequence[Ids]) -> None:
    if len(clean) != len(corrupted):
        raise InputError(f"{len(clean)} clean prompts and {len(corrupted)} corrupted ones: they come in pairs")
    for pair, (one, other) in enumerate(zip(clean, corrupted, strict=True)):
        if len(one) != len(other):
            raise InputError(
                f"pair {pair}: the clean prompt has {len(one)} tokens, the corrupted one {len(other)}; positions can "
                "be patched only where they correspond"
            )


def until(position: Place | None, prompt: Ids) -> Ids:
    """Cut a prompt behind the position whose logits are read."""
    position = -1 if position is None else position
    if not isinstance(position, int | np.integer) or not -len(prompt) <= position < len(prompt):
        raise InputError(f"position={position!r}: the prompt has {len(prompt)} tokens (0 to {len(prompt) - 1})")
    return prompt[: int(position) % len(prompt) + 1]


def _tokens_there(model: Runner, ids: Iterable[np.integer]) -> str:
    """The tokens of all prompts at a position: "France", "France/Germany", "France/Germany/…"."""
    first, *others = [token_text(model, int(token)) for token in dict.fromkeys(ids)]
    return "/".join([first, *others[:1], *(["…"] if len(others) > 1 else [])])


def quote(model: Runner, ids: Ids) -> str:
    """A prompt in quotes, cut after 60 characters; its ids if the model has no tokenizer."""
    text = prompt_text(model, ids)
    return repr(text if len(text) <= 60 else text[:57] + "...")
