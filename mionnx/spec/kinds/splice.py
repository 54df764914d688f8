"""`Intervention.Splice`: a small ONNX model in place of the activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from mionnx.errors import HookError
from mionnx.graph.fragment import Fragment, Source
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import spelled
from mionnx.spec.kinds.kind import Array, Change, Kind, Operators
from mionnx.spec.limits import Limits, checked


@dataclass(frozen=True)
class Splice(Kind):
    """Replace the activation by what a small ONNX model computes from it."""

    name = "splice"
    values = ()
    spelling = None
    has_fragment = True

    @classmethod
    def make(cls, fragment: Source, *, reads: HookPoint | str | None = None, **limits: Unpack[Limits]) -> Change:
        """Replace the value by what a small ONNX model computes from it.

        See `mionnx.graph.fragment`.

        Values of it whose names begin with `hook_` become hook points, `{hook}.{name}`, which can be captured and
        intervened on in the same spec. Its weights are fed at every call, so that fragments that differ in them share
        one graph. A fragment sees the padding of a batch: one that mixes tokens (a mean over the text) reads it.

        Args:
            fragment: a file, the bytes of one, or a model, with one input and one output of the value's shape.
            reads: an earlier hook point; its value is the fragment's second input.
            positions, heads, rows, experts, neurons: limits of its output; it is computed everywhere.

        Raises:
            InterventionError: a model that is no fragment.
            ModelError: a file that is missing, corrupt or unsafe.

        Example:
            Intervention.Splice("sae.onnx", positions=-1)
        """
        if reads is not None and not isinstance(reads, HookPoint | str):
            raise HookError(f"splice: reads={spelled(reads)} is no hook point")
        source = None if reads is None else str(reads)
        return Change(cls.name, fragment=Fragment.of(fragment), reads=source, **checked(limits))

    @property
    def stored_values(self) -> tuple[str, ...]:
        return ("value",)

    def stored(self, change: Change) -> dict[str, Array]:
        if change.fragment is None:
            raise ValueError("a splice has a fragment")
        return {"value": np.frombuffer(change.fragment.to_bytes(), np.uint8)}

    def restored(self, tensors: Mapping[str, Array], reads: str | None, **limits: Any) -> Change:
        proto = tensors["value"]
        if proto.dtype != np.uint8 or proto.ndim != 1:
            raise ValueError("a fragment is the bytes of an ONNX model, uint8 [n]")
        return self.make(proto.tobytes(), reads=reads, **limits)

    def nodes(self, op: Operators, x: Any) -> Any:
        return op.fragment(x)

    def reference(self, x: Array, fragment: Fragment, *reads: Array) -> Array:
        """Run the fragment in onnx's reference evaluator; `reads` is the value of its second input."""
        return fragment.evaluate(x, *reads)
