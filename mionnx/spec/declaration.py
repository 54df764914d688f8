"""Declarations of spec files, read into a spec."""

from typing import Any, TypeVar

import numpy as np

from mionnx.spec.intervention import Intervention, find_kind
from mionnx.spec.metric import MetricSpec
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec

Spec = TypeVar("Spec", bound=Any)  # a `HookSpec`, which imports this file


def _hook(entry: dict[str, Any]) -> str:
    if not isinstance(entry["hook"], str):
        raise ValueError(f"hook must be a name or a glob, got {entry['hook']!r}")
    return entry["hook"]


def fill(spec: Spec, declaration: dict[str, Any], tensors: dict[str, np.ndarray]) -> Spec:
    """Register what a declaration says; the tensors it uses are removed from `tensors`."""
    for what, ask in (("captures", spec.capture), ("gradients", spec.gradient)):
        for entry in declaration.get(what, []):
            if not isinstance(entry["before"], bool):
                raise ValueError(f"before must be true or false, got {entry['before']!r}")
            limits = {name: entry[name] for name in ("positions", "heads", "dtype") if name in entry}
            ask(_hook(entry), before=entry["before"], **limits)
    for entry in declaration.get("metric", []):
        held = [name for name in tensors if name.startswith("metric.")]
        arrays = {name.removeprefix("metric."): tensors.pop(name) for name in held}
        spec.metric = MetricSpec.from_entry(entry, arrays)
    for n, entry in enumerate(declaration["interventions"]):
        names = find_kind(entry["kind"]).stored_values
        values = {name: tensors.pop(f"interventions.{n}.{name}") for name in names}
        spec.intervene(_hook(entry), Intervention.from_entry(entry, values))
    for entry in declaration.get("state_knockouts", []):
        spec.set_state_knockout(StateKnockoutSpec.from_entry(entry))
    for entry in declaration.get("state_steerings", []):
        spec.set_state_steering(StateSteeringSpec.from_entry(entry))
    return spec
