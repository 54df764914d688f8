"""`Settings`: everything that determines the activations of a harvest, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mionnx.analysis.features.network import ranking
from mionnx.analysis.features.sae import SAE
from mionnx.analysis.harvest.formats import check_format
from mionnx.analysis.harvest.rows import Positions, integers
from mionnx.bind.bound_spec import BoundSpec
from mionnx.errors import HookError, InputError
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, check_batch_size
from mionnx.spec.hook_choice import Hooks
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

HARVEST_DTYPES = ("float32", "float16", "bfloat16")
TOP_FEATURES = 32  # features of a token, if nothing is said


@typed(leave=["positions"])
@dataclass(frozen=True)
class Settings:
    """Settings of a harvest; `harvest` says what each of them means."""

    context: int | None = None
    packed: bool = False
    separator: int | str | None = None
    positions: Positions | None = None
    dtype: str | None = None
    format: str = "safetensors"
    sae: SAE | None = None
    k: int | None = None
    batch_size: int | str = AUTO
    shard_bytes: int = 2**28
    column: str | None = None

    def __post_init__(self) -> None:
        at_least("shard_bytes", self.shard_bytes, 1)
        check_batch_size(self.batch_size)
        if self.context is not None or self.packed:
            at_least("context (tokens of a window)", self.context or 0, 1)
        # Windows of which only some tokens are written have no longer one length.
        check_format(self.format, self.dtype, self.packed and self.positions is None)
        if self.dtype is not None and self.dtype not in HARVEST_DTYPES:
            raise InputError(f"dtype={self.dtype!r}; one of {', '.join(HARVEST_DTYPES)}")
        if self.k is not None and self.sae is None:
            raise InputError("k= is how many features of an autoencoder are written: give sae=")
        numbered = not (self.positions is None or isinstance(self.positions, str) or callable(self.positions))
        if numbered and not isinstance(self.positions, int):
            # Kept as a list: what gives its numbers once would have none left for the texts.
            object.__setattr__(self, "positions", integers(self.positions))  # refuses what is no integer
            if not self.positions:
                raise InputError("positions=[]: no token of any text would be written")

    @property
    def features(self) -> int | None:
        """Features of a token that are written; None without an autoencoder."""
        return None if self.sae is None else TOP_FEATURES if self.k is None else self.k

    def record(self, separator: int | None) -> dict[str, Any]:
        by = self.positions
        # A function's code cannot be compared: a harvest goes on where the name is the same.
        named = by if by is None or isinstance(by, int | str) else getattr(by, "__qualname__", None) or integers(by)
        same = ("context", "packed", "dtype", "format", "batch_size", "shard_bytes")
        hook = None if self.sae is None else self.sae.config.hook
        own = {"sae_hook": hook, "separator": separator, "positions": named, "k": self.features}
        return {**own, **{name: getattr(self, name) for name in same}}


def capturing(points: Hooks | None, hooks: HookSpec | None) -> HookSpec:
    """A spec in force that captures further hook points."""
    if isinstance(points, HookSpec):
        raise HookError("points= are names of hook points, globs or functions of the name; a HookSpec goes in hooks=")
    spec = HookSpec().extend(hooks or HookSpec())
    return spec if points is None else spec.capture(points)


def exact_spec(points: Hooks | None, hooks: HookSpec | None, settings: Settings) -> HookSpec:
    """The spec of the passes, whose values keep their dtype; one that `harvest` cannot write is refused."""
    spec = capturing(points, hooks)
    if spec.gradients or spec.metric is not None:
        raise InputError("harvest writes captures; a spec with gradients or a metric has no place there")
    if any(request.positions is not None for request in spec.captures):
        raise InputError("positions of a capture: give positions= to harvest, which counts them in each row")
    if any(request.dtype is not None for request in spec.captures):
        raise InputError("dtype of a capture: give dtype= to harvest, which is that of all fractions")
    if settings.sae is None:
        if not spec.captures:
            raise HookError("nothing to harvest: points=None names no hook point")
        return spec
    return _with_features(spec, settings.sae, settings.features or 0)


def _with_features(spec: HookSpec, sae: SAE, k: int) -> HookSpec:
    """A spec with an autoencoder's features in place of the value that it reads."""
    where = sae.config.hook
    if not where:
        raise HookError("the SAE's file does not say what it reads: SAE.load(path, hook='blocks.3....')")
    at_least("k", k, 1)
    if k > sae.d_sae:
        raise InputError(f"k={k} of {sae.d_sae} features")
    # Its features are written in its place.
    spec.captures = [request for request in spec.captures if str(request) != where]
    inputs = {"k": np.array([k]), "followed": np.array([0])}
    spec.intervene(where, Intervention.Splice(ranking(sae.config, sae.weights, inputs)))
    return spec.capture([f"{where}.hook_top_ids", f"{where}.hook_top_values"])


def cast_spec(spec: HookSpec, bound: BoundSpec, dtype: str | None) -> HookSpec:
    """The same passes, whose graph casts fractions to a dtype; None leaves them their own."""
    same = HookSpec().extend(spec)
    same.captures = []
    for one in bound.captures:
        cast = None if one.dtype.kind in "iub" else dtype
        same.captures.append(replace(one.request, what=one.node.hook, dtype=cast))
    return same
