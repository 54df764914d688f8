"""Corruptions by interventions on the command line: noise, or a saved spec."""

from pathlib import Path
from typing import Any

import typer

from mionnx.analysis.sweep.noise import Noise
from mionnx.spec.hook_spec import HookSpec

REPEATS = 10  # draws of noise, if nothing is said


def corruption(
    noise: str | None, repeats: int | None, seed: int | None, spec: Path | None, already: bool
) -> dict[str, Any]:
    """The argument `corrupted` of these options; nothing where they are left out.

    Args:
        noise, repeats, seed, spec: the options.
        already: whether there is a corrupted text.

    Raises:
        BadParameter: several corruptions, or options of noise without any.
        SpecFileError: no spec in the file.
    """
    if already + (noise is not None) + (spec is not None) > 1:
        raise typer.BadParameter("a corrupted prompt, --noise and --corrupted-spec: give one of them")
    if noise is not None:
        return {"corrupted": Noise(noise, seed=seed or 0, repeats=repeats or REPEATS)}
    if repeats is not None or seed is not None:
        raise typer.BadParameter("--repeats and --seed are of --noise (--seed of --ablate resample too)")
    return {} if spec is None else {"corrupted": HookSpec.load(spec)}
