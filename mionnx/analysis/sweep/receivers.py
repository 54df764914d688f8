"""Receivers of path patching: inputs of attention heads, of recurrent mixers and of MLPs, and the final norm."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mionnx.errors import HookError, InputError, nearest
from mionnx.graph.axes import heads_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import NORMED_STREAM
from mionnx.machine.ranges import listed
from mionnx.spec.limits import indices_of

# Rotated keys receive where there are no others: of latent attention only a part is rotated, then joined to the rest.
INTO_ATTENTION = ("AttnQ", "AttnK", "AttnRotK", "AttnV", "AttnGate")
INTO_MIXER, INTO_MLP, FINAL = "SsmPre", "MlpPre", "FinalNorm"
Receiver = str | HookPoint | tuple[str | HookPoint, int | Iterable[int]]


@dataclass(frozen=True)
class Receivers:
    """Hook points that read a sender's change."""

    # Hook point of a layer -> the heads that receive; None for all, and where a value has no heads.
    heads: dict[str, tuple[int, ...] | None]
    final: bool  # whether the final norm, and so the logits, read it
    parallel: bool  # whether attention and MLP of a layer read the same stream
    layers: int
    normed: bool = False  # whether the stream is normed between additions

    def at(self, stage: int) -> list[str]:
        """The receivers that read the stream at a stage: 2 l is before layer l, 2 l + 1 in its middle."""
        layer, middle = divmod(stage, 2)
        variants: tuple[str, ...] = (INTO_MLP,) if middle else (*INTO_ATTENTION, INTO_MIXER)
        if self.parallel:  # the MLP reads what attention reads
            variants = () if middle else (*INTO_ATTENTION, INTO_MIXER, INTO_MLP)
        names = [str(getattr(HookPoint, variant)(layer)) for variant in variants]
        return [name for name in names if name in self.heads]

    def count(self, layer: int) -> int:
        """Number of receiving hook points of a layer."""
        return len(self.at(2 * layer)) + len(self.at(2 * layer + 1))

    def after(self, stage: int) -> bool:
        """Whether any receiver reads at a stage or later."""
        return self.final or any(map(self.at, range(stage, 2 * self.layers)))


def make_receivers(model: HookedModel, receivers: str | HookPoint | Iterable[Receiver]) -> Receivers:
    """Make receivers from hook points, globs and pairs with heads; see `path_patch`."""
    kinds = (*INTO_ATTENTION, INTO_MIXER, INTO_MLP)
    layers, normed = model.metadata.sizes.num_layers, NORMED_STREAM in model.metadata.exporter
    final = str(getattr(HookPoint, FINAL))
    if normed and final not in model.metadata.hooks:  # normed after its last addition, the head reads the stream itself
        final = str(HookPoint.ResidPost(layers - 1))
    valid = [name for name in model.metadata.hooks if HookPoint.parse(name).variant in kinds or name == final]
    lesser = {lesser_key(model, layer) for layer in range(layers)}
    valid = [name for name in valid if name not in lesser]
    if not model.metadata.attends and str(HookPoint.SsmPre(0)) not in valid:
        raise HookError(f"path patching needs attention heads or mixers; {model.metadata.family} has none")
    inside = [i for i, layer in enumerate(model.metadata.layers) if layer.attention and layer.recurrence]
    if inside and str(HookPoint.SsmOut(inside[0])) in model.metadata.hooks:
        raise HookError(
            "path patching follows one part of a layer to the stream in front of its MLP; in this "
            f"{model.metadata.family} model attention and a mixer of layer {inside[0]} add to it side by side: sweep "
            "over hook_attn_out and hook_ssm_out"
        )
    if inside:
        raise HookError(
            f"path patching follows what parts of layers add to the stream; in this {model.metadata.family} model the "
            f"attention of layer {inside[0]} adds to what its mixer reads: sweep over ssm.hook_shared"
        )
    # MobileBERT's attention adds to a narrower stream inside of its layer
    attending = [HookPoint.AttnOut(i) for i, layer in enumerate(model.metadata.layers) if layer.attention]
    lacking = [str(point) for point in attending if point not in model.metadata.hooks]
    if lacking:
        raise HookError(
            "path patching carries on what attention adds to the stream, and this "
            f"{model.metadata.family} model has no {lacking[0]}"
        )
    heads: dict[str, tuple[int, ...] | None] = {}
    for point, chosen in entries_of("receiver", receivers, "would read what a sender changes"):
        matching = [name for name in valid if fnmatchcase(name, point)]
        if not matching:
            raise HookError(
                f"{point!r} receives nothing; receivers are the inputs hook_q, hook_k, hook_v, attn.hook_gate (or "
                f"ssm.hook_pre) and mlp.hook_pre of a layer, and {final}{nearest(point, valid)}"
            )
        for name in matching:
            both = heads.get(name, ()), _heads(model, name, chosen)  # of two entries for one; None is all of them
            heads[name] = None if None in both else tuple(sorted({head for own in both for head in own or ()}))
    # Where attention and MLP read the same stream, there is none between them.
    parallel = str(HookPoint.ResidMid(0)) not in model.metadata.hooks
    # What the head reads is no input of a layer: `final` tells of it.
    inner = {name: of for name, of in heads.items() if name != final}
    return Receivers(inner, final in heads, parallel, layers, normed)


def lesser_key(model: HookedModel, layer: int) -> str:
    """Of the hook points of a layer's keys, before and behind their rotation, the one that does not receive."""
    plain, rotated = str(HookPoint.AttnK(layer)), str(HookPoint.AttnRotK(layer))
    return plain if plain not in model.metadata.hooks and rotated in model.metadata.hooks else rotated


def entries_of(what: str, request: str | HookPoint | Iterable[Receiver], verb: str) -> list[tuple[str, Any]]:
    """Pairs of a hook point or glob, and the heads chosen there; `what` is a "receiver" or "sender", which `verb`."""
    if isinstance(request, str | HookPoint):
        return [("*" if request == "all" else str(request), None)]
    none = not isinstance(request, Iterable) or getattr(request, "shape", None) == ()  # an array of one number
    entries = [] if none else listed(f"{what}s", request)
    if not entries:
        raise InputError(f"{what}s={request!r}: nothing {verb}; give hook points, or 'all'")
    pairs = [entry if isinstance(entry, tuple) else (entry, None) for entry in entries]
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], str | HookPoint):
            raise InputError(f"a {what} is a hook point, or a pair of one and its heads, got {pair!r}")
    return [(str(point), chosen) for point, chosen in pairs]


def _heads(model: HookedModel, name: str, chosen: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if chosen is None:
        return None
    axes = HookPoint.parse(name).axes or ()
    axis = heads_axis(axes)
    if axis is None:
        raise InputError(f"{name} has no heads to choose from")
    heads = indices_of("heads", chosen)
    count = int(model.axes(HookPoint.parse(name))[axis])
    if max(heads) >= count:
        raise InputError(f"heads {list(heads)} of {name}, which has {count} (0 to {count - 1})")
    return heads
