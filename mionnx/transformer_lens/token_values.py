"""Values that tokens alone tell: ids, positions, rows of the embedding, the cosines of positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mionnx.transformer_lens.coordinates import Array
from mionnx.transformer_lens.lens_points import LensPoint


def _ids(bridge: Any, ids: Array, mask: Array | None, point: LensPoint) -> Array:
    return ids


def positions(ids: Array, mask: Array | None) -> NDArray[np.int64]:
    """The position of each token in its text, [batch, seq]."""
    if mask is None:
        return np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
    return np.maximum(np.cumsum(mask, axis=1) - 1, 0)


def _positions(bridge: Any, ids: Array, mask: Array | None, point: LensPoint) -> Array:
    return positions(ids, mask)[:1]


def _rotary(part: int) -> Any:
    def of(bridge: Any, ids: Array, mask: Array | None, point: LensPoint) -> Array:
        module, kinds = bridge.rotary_emb.original_component, getattr(bridge.original_model.config, "layer_types", ())
        one = torch.zeros(1, ids.shape[1], 1)
        places = torch.from_numpy(positions(ids, mask)[:1])
        if not hasattr(module, "layer_types"):
            return module(one, places)[part].numpy()
        # Gemma 3 rotates by the kind of a layer; outside the layers, what its loop over kinds ends with
        kind = kinds[point.layer] if point.name.startswith("blocks.") else [*set(kinds)][-1]
        return module(one, places, kind)[part].numpy()

    return of


def _rows(kind: str = "") -> Any:
    def of(bridge: Any, ids: Array, mask: Array | None, point: LensPoint) -> Array:
        rows = torch.from_numpy(bridge.coordinates.weights.W_E[ids].astype(np.float32))
        centred = rows - rows.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + bridge.cfg.eps).sqrt()
        return {"scale": scale, "normalized": centred / scale}.get(kind, rows).numpy()

    return of


# Values that tokens alone tell.
OF_TOKENS: dict[str, Any] = {
    "ids": _ids, "positions": _positions, "cos": _rotary(0), "sin": _rotary(1),
    "rows": _rows(), "scale of rows": _rows("scale"), "normalized of rows": _rows("normalized"),
}  # fmt: skip
