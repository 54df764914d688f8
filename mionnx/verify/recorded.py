"""Recorded runs: values of one machine, compared on another."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mionnx.errors import HookError, InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.machine.brief import count
from mionnx.machine.memory import format_bytes
from mionnx.verify.compare import ComparisonSettings, Side
from mionnx.verify.recorded_values import RecordedValues


def as_recorded(
    recording: RecordedValues,
    calls: Sequence[TokenBatch],
    names: list[str],
    prompts: Sequence[str],
    model: HookedModel,
    settings: ComparisonSettings,
) -> tuple[list[TokenBatch], list[str], Sequence[str], ComparisonSettings]:
    """Take prompts, hook points and positions from a recorded run.

    A request that contradicts it is refused.
    """
    facts = recording.facts
    ids = [np.array(row, np.int64) for row in facts["prompts"]]
    if calls and [call.input_ids.tolist() for call in calls] != facts["prompts"]:
        raise InputError(f"these prompts are not those of {recording.path}: leave them out to use the recorded ones")
    missing = [name for name in facts["names"] if name not in model.order]
    if missing:
        raise HookError(
            f"{recording.path} has {missing[0]!r}, and this {model.metadata.family} model has no such hook point"
        )
    chosen = [name for name in facts["names"] if name in names]
    absent = [name for name in names if name not in facts["names"]]
    if absent:
        raise HookError(f"{absent[0]} was not recorded in {recording.path}; it has {', '.join(facts['names'])}")
    batches = [make_token_batch(row, None, None, model.metadata.sizes) for row in ids]
    greedy = min(settings.greedy, facts["count"])
    if greedy < settings.greedy:
        settings.notes.append(f"{greedy} tokens were chosen after each prompt when it was recorded, and are here")
    positions = facts["positions"]
    if settings.positions is not None and list(settings.positions) != positions:
        raise InputError(
            f"{recording.path} has positions {positions or 'all'}: leave them out to use the recorded ones"
        )
    return batches, chosen, list(facts["texts"]), replace(settings, greedy=greedy, positions=positions)


def other_machine(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """List the differences of two environments, a note each."""
    notes = []
    for what in sorted({*there, *here} - {"versions", "options", "runtime", "features"}):
        if there.get(what) != here.get(what):
            notes.append(f"recorded with another {what}: {there.get(what)}, here {here.get(what)}")
    for name in sorted({*there["versions"], *here["versions"]}):
        versions = [one["versions"].get(name, "none") for one in (there, here)]
        if versions[0] != versions[1]:
            notes.append(f"recorded with {name} {versions[0]}, here {versions[1]}")
    missing = [sorted({*one["features"]} - {*other["features"]}) for one, other in ((there, here), (here, there))]
    if any(missing):
        notes.append(f"processor features only there: {' '.join(missing[0])}; only here: {' '.join(missing[1])}")
    return notes


def keep(
    side: Side,
    path: Path,
    prompts: Sequence[str],
    hashed: dict[str, str],
    where: dict[str, Any],
    settings: ComparisonSettings,
) -> str:
    """Write a side's values, with all facts that a comparison needs.

    Returns:
        a line on what was written.
    """
    assert side.recording is not None
    facts = {
        "title": side.title,
        "texts": list(prompts),
        "prompts": [call.input_ids.tolist() for call in side.graph.calls],
        "names": side.graph.names,
        "positions": None if settings.positions is None else list(settings.positions),
        "count": settings.greedy,
        "dtype": side.dtype,
        "greedy": [ids.tolist() for ids in side.greedy],
        "hashes": hashed,
        "environment": where,
    }
    side.recording.keep(path, facts)
    return _written(side, path, settings)


def _written(side: Side, path: Path, settings: ComparisonSettings) -> str:
    names, size = side.graph.names, format_bytes(path.stat().st_size)
    points = names[0] if len(names) == 1 else f"{len(names)} hook points from {names[0]} to {names[-1]}"
    where = "" if settings.positions is None else f", positions {', '.join(map(str, settings.positions))} only"
    chosen = f", {count(settings.greedy, 'greedy token')} after each" if settings.greedy else ""
    return f"wrote {path}, {size}: {side.title} at {points}, {count(len(side.graph.calls), 'prompt')}{where}{chosen}"
