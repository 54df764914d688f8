"""`PatchedCells`: the loop of TransformerLens' patching helpers, run as a sweep.

`patching.get_act_patch_*` calls `run_with_hooks` once for each cell. The first call of a layer tells the cells that
follow; they are rows of one batch, which starts at that layer from the run without a patch, and later calls read
their logits. The setters are TransformerLens' own, and so are the numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from transformer_lens import patching
from transformer_lens.hook_points import HookPoint as TheirHook

from mionnx.analysis.sweep.patched_runs import CALL_TOKENS
from mionnx.errors import MIError
from mionnx.rewrite.plan import Edit
from mionnx.run.segments import EMBEDDING, Arrays, Rows, Segments
from mionnx.spec.kinds import KINDS
from mionnx.transformer_lens.coordinates import Array
from mionnx.transformer_lens.lens_points import LENS_LOGITS, LensPoint
from mionnx.transformer_lens.live_hooks import has_hooks

LOOP = "generic_activation_patch.<locals>.patching_hook"
# What an index holds behind the layer.
AXES: dict[Any, tuple[str, ...]] = {
    patching.layer_pos_patch_setter: ("position",),
    patching.layer_pos_head_vector_patch_setter: ("position", "head"),
    patching.layer_head_vector_patch_setter: ("head",),
    patching.layer_head_pattern_patch_setter: ("head",),
    patching.layer_head_pos_pattern_patch_setter: ("head", "position"),
    patching.layer_head_dest_src_pos_pattern_patch_setter: ("head", "position", "position"),
}
LOGIT_BYTES = 2**27  # of one call


class PatchedCells:
    """The cells of one loop at a time: what was computed ahead, by index."""

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge
        self._tokens: bytes | None = None
        self._streams: dict[int, Arrays] = {}
        self._values: Arrays = {}
        self._of: Any = None  # the hook, the setter and the clean values that the logits below are of
        self._ahead: dict[tuple[int, ...], Array] = {}

    def logits(self, tokens: Any, hooks: Sequence[Any]) -> torch.Tensor | None:
        """The logits of a call of the loop; None where it is none, or the graph cannot be entered there."""
        if len(hooks) != 1 or not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.is_floating_point():
            return None
        name, function = hooks[0]
        if not isinstance(function, partial) or getattr(function.func, "__qualname__", "") != LOOP:
            return None
        setter = inspect.getclosurevars(function.func).nonlocals.get("patch_setter")
        hook = self.bridge.hook_dict.get(name) if isinstance(name, str) else None
        point = None if hook is None else self.bridge.lens_points().get(id(hook))
        index, clean = tuple(map(int, function.keywords["index"])), function.keywords["clean_activation"]
        if setter not in AXES or point is None or not self._enters(point) or clean.requires_grad:
            return None
        if any(map(has_hooks, self.bridge._hook_registry.values())):
            return None
        try:
            segments = self.bridge.engine.opened(Segments.of_sweep)
        except MIError:  # a model on which no sweep runs
            return None
        stamp = (
            tokens.numpy().tobytes(),
            tuple(tokens.shape),
            point,
            setter,
            id(clean),
            clean._version,
            torch.is_grad_enabled(),
        )
        if self._of != stamp:
            self._of, self._ahead = stamp, {}
        if index not in self._ahead:
            self._compute(segments, tokens.numpy(), point, hook, setter, clean, index)
        return torch.from_numpy(self._ahead.pop(index))

    def _enters(self, point: LensPoint) -> bool:
        """Whether a row can start at the layer of a point, its change being that of values there."""
        coordinates = self.bridge.coordinates
        folded_pattern = point.kind == "pattern" and coordinates.values
        with_mean = coordinates.stream and hasattr(self.bridge, "embed_ln")
        return point.replaces and point.name.startswith("blocks.") and not folded_pattern and not with_mean

    def _compute(
        self,
        segments: Segments,
        ids: Array,
        point: LensPoint,
        hook: TheirHook,
        setter: Any,
        clean: torch.Tensor,
        index: tuple[int, ...],
    ) -> None:
        layer, before = point.layer, self._base(segments, ids, point)
        cells = [*self._cells(before, point, AXES[setter], index)]
        batch, seq = ids.shape
        row = batch * seq
        most = max(1, min(CALL_TOKENS // row, LOGIT_BYTES // (4 * row * self.bridge.engine.vocab_size)))
        cells = cells[:most]
        shown = self.bridge.coordinates.show(point, before)
        after = [self._patched(point, hook, setter, clean, shown, before, cell) for cell in cells]
        rows = Rows(np.tile(ids, (len(cells), 1)))
        stream = {name: np.concatenate([value] * len(cells)) for name, value in self._streams[layer].items()}
        edits = self._edits(point, np.concatenate(after), np.concatenate([before] * len(cells)))
        for number in range(layer, segments.layers):
            stream, _ = segments.layer(number, rows, stream, edits if number == layer else None)
        logits = self.bridge.coordinates.show(LENS_LOGITS, segments.logits(rows, stream, last=False))
        for number, cell in enumerate(cells):
            self._ahead[cell] = logits[number * batch : (number + 1) * batch].copy()

    def _base(self, segments: Segments, ids: Array, point: LensPoint) -> Array:
        """The value of the run without a patch; its streams are kept for the loop."""
        if self._tokens != (key := ids.tobytes()):
            self._tokens, self._streams, self._values = key, {}, {}
            stream, rows = Arrays(), Rows(ids)
            for layer in range(EMBEDDING, segments.layers):
                stream, _ = segments.layer(layer, rows, stream)
                self._streams[layer + 1] = stream
        if point.source not in self._values:
            stream = self._streams[point.layer]
            values = stream if point.source in stream else None
            if values is None:
                _, values = segments.layer(point.layer, Rows(ids), stream, ends=(point.source,))
            self._values = {point.source: values[point.source]}
        return self._values[point.source]

    @staticmethod
    def _cells(value: Array, point: LensPoint, axes: tuple[str, ...], index: tuple[int, ...]) -> Iterator[Any]:
        """The index and those that follow it in the same layer."""
        seq = value.shape[2] if value.ndim == 4 and point.kind != "z" else value.shape[1]
        heads = value.shape[2] if point.kind == "z" else value.shape[1]
        sizes = {"position": seq, "head": heads}
        for cell in product(*(range(sizes[axis]) for axis in axes)):
            if cell >= index[1:]:
                yield (index[0], *cell)

    def _patched(
        self,
        point: LensPoint,
        hook: TheirHook,
        setter: Any,
        clean: torch.Tensor,
        shown: Array,
        before: Array,
        cell: Any,
    ) -> Array:
        value = torch.from_numpy(shown.copy())
        turned = value if hook.hook_conversion is None else hook.hook_conversion.convert(value)
        left = setter(turned, [*cell], clean)
        left = left if hook.hook_conversion is None else hook.hook_conversion.revert(left)
        return self.bridge.coordinates.back(point, left.numpy().reshape(shown.shape), before)

    def _edits(self, point: LensPoint, after: Array, before: Array) -> dict[Edit, Arrays]:
        """The interventions that put a value in, and take away where the stream goes on without it."""
        hooks = self.bridge.engine.hook_dict
        put = Edit(point.source, KINDS["replace"], 0, hooks[point.source].axes or ())
        edits = {put: {put.value_input: after}}
        # The loop's own hook writes into the stream where torch keeps no graph, and into a copy where it does.
        if point.lands and torch.is_grad_enabled():
            away = Edit(point.lands, KINDS["add"], 0, hooks[point.lands].axes or ())
            edits[away] = {away.value_input: before - after}
        return edits
