"""Parts of the residual stream: hook points, labels and stacks, named as in TransformerLens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import HookError, InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.lacking import refuse_other_than_sums, refuse_several_streams
from mionnx.run.hook_cache import HookCache

MODES = ("all", "mlp", "attn")
Named = list[tuple[str, str]]  # (label, name of a hook point), in the order in which they are added
PosSlice = int | slice | Sequence[int] | None
Labelled = tuple[NDArray[Any], list[str]]


def layer_of(hooked: HookedModel, layer: int | None) -> int:
    """The layer's number; the number of layers stands for the final norm, as do None and -1."""
    count = hooked.metadata.sizes.num_layers
    if layer is None or layer == -1:
        return count
    if not isinstance(layer, int | np.integer) or not 0 <= layer <= count:
        raise InputError(f"no layer {layer!r}: 0 to {count - 1}, and {count}, -1 or None for the end of the stream")
    return int(layer)


def input_of(hooked: HookedModel, layer: int, mlp_input: bool) -> str:
    """The stream's hook point at the input of a layer's attention or MLP, or of the final norm."""
    count = hooked.metadata.sizes.num_layers
    if layer == count:
        if mlp_input:
            raise InputError(f"mlp_input: there is no MLP in layer {count}, which means the end of the stream")
        return str(HookPoint.ResidPost(count - 1))
    if mlp_input and str(HookPoint.MlpOut(layer)) not in hooked.metadata.hooks:
        raise InputError(f"mlp_input: layer {layer} of {hooked.metadata.family} has no MLP")
    middle = str(HookPoint.ResidMid(layer))
    return middle if mlp_input and middle in hooked.metadata.hooks else str(HookPoint.ResidPre(layer))


def additions(hooked: HookedModel, layer: int, mode: str, mlp_input: bool, incl_embeds: bool) -> Named:
    """The outputs added to the stream up to the input of a layer."""
    refuse_other_than_sums(hooked, "a stack of what layers add")
    refuse_several_streams(hooked, "a stack of what layers add")
    if mode not in MODES:
        raise InputError(f"mode {mode!r}; one of {', '.join(MODES)}{nearest(str(mode), MODES)}")
    input_of(hooked, layer, mlp_input)  # refuses an MLP's input at the end of the stream
    parts = [("embed", str(HookPoint.ResidPre(0)))]  # an RWKV norms its embedding before it
    if str(HookPoint.PosEmbed) in hooked.metadata.hooks:
        parts = [("embed", str(HookPoint.Embed)), ("pos_embed", str(HookPoint.PosEmbed))]
    parts = parts if incl_embeds else []
    if mode == "mlp" and layer and not any(str(HookPoint.MlpOut(i)) in hooked.metadata.hooks for i in range(layer)):
        raise InputError(f"mode='mlp': {hooked.metadata.family} has no MLP below layer {layer}; 'attn' has its mixers")
    for i in range(layer):
        parts += [] if mode == "mlp" else _first_half(hooked, i)
        mlp = str(HookPoint.MlpOut(i))  # a layer may have one of the two halves
        parts += [(f"{i}_mlp_out", mlp)] if mode != "attn" and mlp in hooked.metadata.hooks else []
    if mlp_input and mode != "mlp" and str(HookPoint.ResidMid(layer)) in hooked.metadata.hooks:
        parts += _first_half(hooked, layer)
    if not parts:
        raise InputError("a stack of no components would be empty: ask for a later layer, or for the embeddings")
    return parts


def _first_half(hooked: HookedModel, layer: int) -> Named:
    """What attention or a mixer of a layer adds, or both do (Falcon-H1)."""
    outputs = {"attn": str(HookPoint.AttnOut(layer)), "ssm": str(HookPoint.SsmOut(layer))}
    return [(f"{layer}_{kind}_out", name) for kind, name in outputs.items() if name in hooked.metadata.hooks]


def accumulations(hooked: HookedModel, layer: int, incl_mid: bool, mlp_input: bool) -> Named:
    """The streams on the way to the input of a layer."""
    end, parts = input_of(hooked, layer, mlp_input), []
    for i in range(layer + 1):
        if i == hooked.metadata.sizes.num_layers:
            parts.append(("final_post", end))
            continue
        parts.append((f"{i}_pre", str(HookPoint.ResidPre(i))))
        if (incl_mid and i < layer) or (mlp_input and i == layer):
            hooked.axes(HookPoint.ResidMid(i))  # raises where blocks are parallel and have no such point
            parts.append((f"{i}_mid", str(HookPoint.ResidMid(i))))
    return parts


def layers_with_shares(hooked: HookedModel) -> list[int]:
    """The layers whose heads have shares in the stream; none if recurrent, or if each token chooses (JetMoE)."""
    return [i for i in range(hooked.metadata.sizes.num_layers) if str(HookPoint.AttnResult(i)) in hooked.order]


def heads(hooked: HookedModel, layer: int) -> list[str]:
    """The hook points of the heads' shares in the layers before one."""
    refuse_other_than_sums(hooked, "a stack of the heads' shares")
    refuse_several_streams(hooked, "a stack of the heads' shares")
    if not hooked.metadata.attends:
        raise HookError(f"{hooked.metadata.family}: a recurrent model's heads have no shares in the stream")
    if not layer:
        raise InputError("layer 0 reads no head's output: there is nothing to stack")
    names = [str(HookPoint.AttnResult(i)) for i in layers_with_shares(hooked) if i < layer]
    if not names:
        raise HookError(f"{hooked.metadata.family}: no layer before {layer} has heads with shares in the stream")
    return names


def sliced(values: NDArray[Any], pos_slice: PosSlice, axis: int = -2) -> NDArray[Any]:
    """Values at some positions: an integer drops the axis, a slice or a list keeps it."""
    if pos_slice is None:
        return values
    chosen: Any = pos_slice if isinstance(pos_slice, slice | int | np.integer) else list(pos_slice)
    if isinstance(chosen, list) and not chosen:
        raise InputError("pos_slice=[] selects no position")
    index: list[Any] = [slice(None)] * values.ndim
    index[axis] = chosen
    try:
        return values[tuple(index)]
    except IndexError:
        raise InputError(f"position {pos_slice!r} of {values.shape[axis]} (0 to {values.shape[axis] - 1})") from None


def stacked(cache: HookCache, named: Named, pos_slice: PosSlice) -> Labelled:
    """Captures as a stack with their labels: [component, batch, pos, hidden]."""
    return np.stack([sliced(cache.require(name), pos_slice) for _, name in named]), [label for label, _ in named]


def head_stack(cache: HookCache, names: list[str], pos_slice: PosSlice) -> Labelled:
    """The heads' shares as a stack [layer x head, batch, pos, hidden], labelled L0H0, L0H1, ..."""
    # Heads as the first axis, to be concatenated over layers.
    shares = [np.moveaxis(cache.require(name), -2, 0) for name in names]
    layers = [HookPoint.parse(name).layer for name in names]
    labels = [f"L{i}H{head}" for i, share in zip(layers, shares, strict=True) for head in range(len(share))]
    return sliced(np.concatenate(shares), pos_slice), labels
