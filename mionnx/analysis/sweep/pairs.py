"""Pairs of runs that a patching sweep compares: two texts, or a text with and without interventions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mionnx.analysis.sweep.corruption import Corruption, corrupt
from mionnx.analysis.sweep.grid import Places
from mionnx.analysis.sweep.noise import Noise
from mionnx.analysis.sweep.places import Positions, find_places
from mionnx.analysis.sweep.prompts import and_more, quote, refuse_unlike, until
from mionnx.errors import InputError
from mionnx.machine.brief import spelled
from mionnx.run.prompt import Ids, prompt_ids
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec

Corrupted = Prompt | HookSpec | Sequence[HookSpec] | Noise


@dataclass(frozen=True)
class Pair:
    """One prompt or pair of prompts; it ends at the position whose logits are read.

    Attributes:
        base: [seq]: the run that is patched.
        other: [seq]: the run that is patched in; None for an ablation.
        places: the token positions under each name, if positions are named.
        corruption: interventions that make the corrupted run of a prompt that is both.
    """

    base: Ids
    other: Ids | None = None
    places: Places | None = None
    corruption: Corruption | None = None

    @property
    def first(self) -> int:
        """The first position at which the prompts differ; 0 for an ablation or a spec."""
        alone = self.other is None or self.corruption is not None
        return 0 if alone else int(np.flatnonzero(self.base != self.other)[0])


@dataclass(frozen=True)
class PatchedPairs:
    """The pairs of a patching sweep.

    Attributes:
        pairs: the pairs; those of one prompt follow each other.
        bases: [seq] of each pair's patched prompt, whole.
        about: a line for pictures.
        repeats: pairs of each prompt, by draws or specs.
    """

    pairs: list[Pair]
    bases: list[Ids]
    about: str
    repeats: int = 1


def make_pairs(
    model: Runner, clean: Prompt, corrupted: Corrupted, denoising: bool, at: int, positions: Positions | None
) -> PatchedPairs:
    """Make the pairs of a patching sweep; arguments as for `patch_sweep`.

    Raises:
        InputError: prompts, specs or positions that do not fit together.
        InterventionError: a spec that does not fit its prompt, or that changes nothing that is read.
    """
    good = prompt_ids(model, clean)
    places: Sequence[Places | None] = [None] * len(good)
    if positions is not None:
        places = find_places(model, clean, good, positions)
    if (specs := _specs(model, clean, corrupted, len(good))) is not None:
        return _under_specs(model, good, corrupted, specs, places, denoising, at)
    bad = prompt_ids(model, corrupted)  # type: ignore[arg-type]
    refuse_unlike(good, bad)
    bases, others = (bad, good) if denoising else (good, bad)
    rows = zip(bases, others, places, strict=True)
    pairs = [Pair(until(at, base), until(at, other), place) for base, other, place in rows]
    return PatchedPairs(pairs, bases, f"{quote(model, others[0])} into {quote(model, bases[0])}{and_more(bases)}")


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


def _under_specs(
    model: Runner,
    good: list[Ids],
    corrupted: Any,
    specs: list[list[HookSpec]],
    places: Sequence[Places | None],
    denoising: bool,
    at: int,
) -> PatchedPairs:
    """Pairs of a prompt with itself, under each of its specs."""
    if any(len(until(at, ids)) < len(ids) for ids in good):
        raise InputError(
            f"position={at!r}: a prompt that a spec corrupts is read at its last token, from which the spec's "
            "positions count; cut the prompt there"
        )
    pairs = [
        Pair(ids, ids, place, corrupt(model, spec, ids))
        for ids, place, own in zip(good, places, specs, strict=True)
        for spec in own
    ]
    first = quote(model, good[0])
    under = f"{first} under {spelled(corrupted)}"
    about = f"{first} into {under}" if denoising else f"{under} into {first}"
    return PatchedPairs(pairs, [pair.base for pair in pairs], about + and_more(good), len(specs[0]))
