"""`LensPass`: one forward pass of a bridge on the engine, with hooks that store and hooks that act.

Hooks that only store what they see get it after the pass; others cut the graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformer_lens.hook_points import HookPoint as TheirHook

from mionnx.errors import HookError, InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.spec.hook_spec import HookSpec
from mionnx.transformer_lens.coordinates import Array
from mionnx.transformer_lens.lens_points import LENS_LOGITS, SILENT, WITHOUT_GRADIENT, LensPoint, bypassed
from mionnx.transformer_lens.live_hooks import Live, deaf, goes_back, has_hooks
from mionnx.transformer_lens.token_values import OF_TOKENS
from mionnx.transformer_lens.way_back import WayBack


class LensPass:
    """One pass: its tokens, its hooks, and what they changed."""

    def __init__(self, bridge: Any, ids: Array, mask: Array | None, spec: HookSpec) -> None:
        self.bridge, self.ids, self.mask, self.spec = bridge, ids, mask, spec
        self._live = self._hooks()
        self._waits: dict[str, Array] = {}  # what hooks change elsewhere, by where it lands
        self._means: list[tuple[int, bool, Array]] = []  # of the stream: order, whether it replaces, mean
        self._first_mean = self._mean_of_embedding()
        self._sums: dict[str, Array] = {}  # by the z of a changed pattern
        self._kept: dict[tuple[str, str, str], Array] = {}  # what hooks store, by what it is
        self._logits = LENS_LOGITS
        self._edits = any(not one.stores for one in self._live)
        alive = self._edits or any(goes_back(one.hook) for one in self._live)
        self.back = WayBack(bridge, ids, mask, spec) if alive and torch.is_grad_enabled() else None

    def _hooks(self) -> list[Live]:
        """Points with hooks, in execution order; refuses those that nothing here can serve."""
        registry = self.bridge._hook_registry
        live = {id(hook): (getattr(hook, "name", name) or name, hook) for name, hook in registry.items()
                if has_hooks(hook)}  # fmt: skip
        live = {key: pair for key, pair in live.items() if self.bridge._gated_hook_reason(pair[0]) is None}
        beyond = bypassed(self.bridge.cfg)
        points = ((key, point) for key, point in self.bridge.lens_points().items() if not point.name.endswith(beyond))
        served = [Live.of(point, live.pop(key)[1]) for key, point in points if key in live]
        # Hooks inside a module in a point's place are called by it.
        inner = tuple(f"{name}." for name, hook in registry.items() if not isinstance(hook, TheirHook))
        live = {key: pair for key, pair in live.items() if not pair[0].startswith(inner)}
        if nowhere := deaf(served, live.values(), (*SILENT, *beyond)):
            raise HookError(f"{', '.join(nowhere[:6])}: the graph has no such value, and hooks there could do nothing")
        if left := {name for name, _ in live.values() if not name.endswith((*SILENT, *beyond))} | {
            one.point.name
            for one in served
            if not one.point.goes_back and goes_back(one.hook) and one.point.kind not in WITHOUT_GRADIENT
        }:
            self.bridge.warn_once(left)
        return served

    def run(self, stop: int | None, logits: bool, past: Any = None, use_cache: bool = False) -> tuple[Any, Any]:
        """Run the graph: the logits as a tensor, or the stream before a layer; and what a next pass goes on from."""
        for number, one in enumerate(self._live):
            if one.stops:  # its exception ends the pass
                self._live, logits = self._live[: number + 1], False
                break
        layers = self.bridge.engine.num_layers
        end = None if stop is None else HookPoint.ResidPost(stop - 1) if stop else HookPoint.ResidPre(0)
        if stop is not None:
            stream = LensPoint(f"blocks.{stop}.hook_in", str(end), "stream")
            self._live = [one for one in self._live if self._reached(one.point, stop, layers)]
        cuts = {one.point.source for one in self._live if not self._stores(one)}
        # What is stored of a value that hooks change is what their order says.
        acting = [one for one in self._live if one.point.source in cuts]
        read = [one for one in self._live if one.point.source not in cuts]
        every, into = self.bridge._wanted  # of a whole cache
        values, output, past = self._run(acting, [*read, *every], end, logits and stop is None, past, use_cache)
        arrays = {source: np.asarray(values[source]) for source in {one.point.source for one in [*read, *every]}}
        for one in read:
            self._see(one, arrays[one.point.source], sharing=True)
        for one in every:
            into[id(one.hook)] = torch.from_numpy(self._once(one.point, arrays[one.point.source]))
        if end is not None:
            value = np.asarray(values[str(end)])
            return self._tensor(stream, value, self._order(stream)), None
        return None if output is None else self._tensor(self._logits, output, 0), past

    @staticmethod
    def _reached(point: LensPoint, stop: int, layers: int) -> bool:
        inside = point.name.startswith("blocks.")
        return point.layer < stop if inside else not point.name.startswith(("ln_final", "unembed"))

    def _stores(self, one: Live) -> bool:
        return one.stores and not (self._edits and (goes_back(one.hook) or one.keeps))

    def _run(self, acting: list[Live], read: list[Live], end: Any, logits: bool, past: Any, use_cache: bool) -> Any:
        engine = self.bridge.engine
        sources = [*dict.fromkeys([*(one.point.source for one in read), *([str(end)] if end is not None else [])])]
        spec = self.bridge.capturing(sources) if not self.spec.interventions else HookSpec().extend(self.spec)
        if sources and self.spec.interventions:
            spec.capture(sources)
        if not acting:
            if not (sources or logits or use_cache):
                return {}, None, None
            cache = engine.forward(
                self.ids, spec, attention_mask=self.mask, logits=logits or use_cache, cache=past, use_cache=use_cache
            )
            return cache, cache.output() if logits else None, cache.past
        functions = [(source, self._function(source, acting)) for source in self._cuts(acting)]
        options: dict[str, Any] = {
            "return_type": "logits" if logits else None,
            "attention_mask": self.mask,
            "hooks": self.spec,
            "cache": past,
        }
        if self.back is not None:
            self.back.past = past
        if not (sources or use_cache):
            return {}, engine.run_with_hooks(self.ids, functions, **options), None
        output, cache = engine.run_with_cache(self.ids, sources, fwd_hooks=functions, use_cache=use_cache, **options)
        return cache, output, cache.past

    def _cuts(self, acting: list[Live]) -> list[str]:
        """The hook points at which functions are called: those of the hooks, and where their changes land."""
        points = [one.point for one in acting]
        cuts = {point.source: None for point in points}
        for point in points:
            cuts |= dict.fromkeys(place for place, _ in point.landings)
            if point.kind == "pattern" and self.bridge.coordinates.values:
                cuts[point.beside] = None
        return [*cuts]

    def _function(self, source: str, acting: list[Live]) -> Any:
        here = [one for one in acting if one.point.source == source]

        def call(value: Array, hook: Any) -> Array:
            if source in self._waits:
                value = value + self._waits.pop(source)
            if source in self._sums:
                layer = HookPoint.parse(source).layer or 0
                lacking = self.bridge.coordinates.missing(layer, self._sums.pop(source)).astype(value.dtype)
                self._change(source, lacking)
                value = value + lacking
            for one in here:
                value = self._act(one, value)
            return value

        return call

    def _act(self, one: Live, value: Array) -> Array:
        """The value after the hooks of one point."""
        point = one.point
        shown, result, same = self._see(one, value)
        after = np.asarray(result.detach().numpy()).reshape(shown.shape)
        if np.array_equal(after, shown):
            return value
        if not point.acts:
            raise HookError(
                f"a hook changed {point.name}, which is computed of {point.source} and which nothing reads here"
            )
        coordinates = self.bridge.coordinates
        self._note_mean(point, after, same)
        if not point.replaces:
            for place, weights in point.landings:
                self._land(place, coordinates.landed(point, after, shown, weights))
            return value
        new = coordinates.back(point, after, value)
        change = new - value
        # TransformerLens' branches read the stream itself: what a hook writes in place is written to that.
        if point.lands and not same:
            self._land(point.lands, -change)
        if point.kind == "logits":
            self._logits = LENS_LOGITS._replace(kind="changed logits")
        if point.kind == "pattern" and coordinates.values:
            self._sums[point.beside] = after.sum(axis=-1)
        self._change(point.source, change)
        return new

    def _land(self, name: str, change: Array) -> None:
        self._waits[name] = self._waits.get(name, np.float32(0)) + change
        self._change(name, change)

    def _change(self, name: str, change: Array) -> None:
        if self.back is not None:
            self.back.changes[name] = self.back.changes.get(name, np.float32(0)) + change

    def _note_mean(self, point: LensPoint, after: Array, same: bool) -> None:
        """Keep the mean that a hook gave the stream: with centred weights, only hooks can."""
        if self.bridge.coordinates.stream and point.kind in ("stream", "part", "every row", "result"):
            added = after.sum(axis=2) if point.kind == "result" else after
            replaces = point.kind == "stream"
            if replaces and point.lands and not same:  # what one branch reads
                return
            self._means.append((self._order(point), replaces, added.mean(axis=-1, keepdims=True)))

    def _order(self, point: LensPoint) -> int:
        return self.bridge.engine.hooked.order[point.source]

    def _mean(self, order: int) -> Any:
        mean: Any = self._first_mean
        for at, replaces, own in self._means:
            if at <= order:
                mean = own if replaces else mean + own
        return mean

    def _mean_of_embedding(self) -> Any:
        """What a stream of centred weights has as its mean: that of a normed embedding, which no centring takes out."""
        if not (self.bridge.coordinates.stream and hasattr(self.bridge, "embed_ln")):
            return np.float32(0)
        cache = self.bridge.engine.forward(self.ids, HookSpec().capture("hook_embed"), logits=False)
        return np.asarray(cache["hook_embed"]).mean(axis=-1, keepdims=True)

    def _see(self, one: Live, value: Array, sharing: bool = False) -> tuple[Array, Any, bool]:
        """Call the hooks of a point: what they saw, what they left, whether that is the same tensor.

        Args:
            sharing: the hooks store it, so that names of one value have one array, as in TransformerLens.
        """
        point, hook = one.point, one.hook
        shown = self._once(point, value) if sharing else self._shown(point, value)
        back = self.back if point.goes_back and (goes_back(hook) or not self._stores(one)) else None
        seen = shown if sharing else shown.copy()
        tensor = torch.from_numpy(seen) if back is None else back.node(point, seen, value)
        result = hook(tensor)
        if back is not None:
            back.tensors.append(result)
        return shown, result, result.data_ptr() == tensor.data_ptr()

    def _once(self, point: LensPoint, value: Array) -> Array:
        key = (point.kind, point.source, point.norm)
        if key not in self._kept:
            shown = self._shown(point, value)
            self._kept[key] = shown if shown.flags.writeable else shown.copy()
        return self._kept[key]

    def _shown(self, point: LensPoint, value: Array) -> Array:
        if point.kind in OF_TOKENS:
            return OF_TOKENS[point.kind](self.bridge, self.ids, self.mask, point)
        shown = self.bridge.coordinates.show(point, value, self._mean(self._order(point)))
        rows = len(self.ids)
        if point.kind == "every row" and len(shown) != rows:
            shown = np.repeat(shown, rows, axis=0)
        return shown

    def _tensor(self, point: LensPoint, value: Array, order: int) -> torch.Tensor:
        shown = self.bridge.coordinates.show(point, value, self._mean(order))
        if self.back is None or not self.back.tensors:
            return torch.from_numpy(np.array(shown))
        return self.back.node(point, np.array(shown), value)


def check_mask(mask: Any, ids: Array) -> Array | None:
    """A mask as the engine takes it, [batch, seq] of 0 and 1."""
    if mask is None:
        return None
    array = np.asarray(mask.detach().cpu() if isinstance(mask, torch.Tensor) else mask)
    if array.ndim != 2:
        raise InputError(f"attention_mask {list(array.shape)}: it is [batch, seq], 1 for tokens, 0 for padding")
    return array.astype(np.int64)


def warn(names: Iterable[str]) -> None:
    """Say which hook points the graph lacks."""
    listed = sorted(names)
    warnings.warn(
        f"{len(listed)} hook points are not served by this graph, and no cache has them: {', '.join(listed[:8])}",
        stacklevel=2,
    )
