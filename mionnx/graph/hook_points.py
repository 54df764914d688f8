"""The vocabulary of hook points: their variants, names and axes.

This table is the only place in which the names are written. A hook point's string is the name of the value in the ONNX
graph. Names and shapes follow the hook point reference (TransformerLens names, batch first); where TransformerLens
means something else by a name, this table decides.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar

from mionnx.errors import HookError

RESIDUAL = ("batch", "seq", "hidden")
QUERY = ("batch", "n_heads", "seq", "head_dim")
KEY = ("batch", "n_kv_heads", "seq", "head_dim")
SCORES = ("batch", "n_heads", "seq_q", "seq_k")
NEURONS = ("batch", "seq", "d_mlp")
HEADS = ("batch", "seq", "n_heads", "head_dim")
EFFECTIVE = ("batch", "n_heads", "seq_q", "seq_src")

# variant -> (name, axes), in the order in which a forward pass reaches them
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Embed": ("hook_embed", RESIDUAL),
    "PosEmbed": ("hook_pos_embed", RESIDUAL),
    "ResidPre": ("blocks.{i}.hook_resid_pre", RESIDUAL),
    "AttnQ": ("blocks.{i}.attn.hook_q", QUERY),
    "AttnK": ("blocks.{i}.attn.hook_k", KEY),
    "AttnRotQ": ("blocks.{i}.attn.hook_rot_q", QUERY),
    "AttnRotK": ("blocks.{i}.attn.hook_rot_k", KEY),
    "AttnV": ("blocks.{i}.attn.hook_v", KEY),
    "AttnScores": ("blocks.{i}.attn.hook_scores", SCORES),
    "AttnPattern": ("blocks.{i}.attn.hook_pattern", SCORES),
    "AttnZ": ("blocks.{i}.attn.hook_z", HEADS),
    "AttnResult": ("blocks.{i}.attn.hook_result", ("batch", "seq", "n_heads", "hidden")),
    "RwkvR": ("blocks.{i}.rwkv.hook_r", HEADS),
    "RwkvK": ("blocks.{i}.rwkv.hook_k", HEADS),
    "RwkvV": ("blocks.{i}.rwkv.hook_v", HEADS),
    "RwkvA": ("blocks.{i}.rwkv.hook_a", HEADS),
    "RwkvB": ("blocks.{i}.rwkv.hook_b", HEADS),
    "RwkvDecay": ("blocks.{i}.rwkv.hook_decay", HEADS),
    "RwkvWkv": ("blocks.{i}.rwkv.hook_wkv", HEADS),
    "RwkvState": ("blocks.{i}.rwkv.hook_state", ("batch", "n_heads", "key_dim", "value_dim")),
    "RwkvStates": ("blocks.{i}.rwkv.hook_states", ("batch", "seq", "n_heads", "key_dim", "value_dim")),
    "RwkvEffectiveAttn": ("blocks.{i}.rwkv.hook_effective_attn", EFFECTIVE),
    "RwkvEffectiveAttnRaw": ("blocks.{i}.rwkv.hook_effective_attn_raw", EFFECTIVE),
    "AttnOut": ("blocks.{i}.hook_attn_out", RESIDUAL),
    "ResidMid": ("blocks.{i}.hook_resid_mid", RESIDUAL),
    "MlpPre": ("blocks.{i}.mlp.hook_pre", RESIDUAL),
    "MlpGate": ("blocks.{i}.mlp.hook_gate", NEURONS),
    "MlpUp": ("blocks.{i}.mlp.hook_up", NEURONS),
    "MlpAct": ("blocks.{i}.mlp.hook_act", NEURONS),
    "MlpPost": ("blocks.{i}.mlp.hook_post", RESIDUAL),
    "MlpOut": ("blocks.{i}.hook_mlp_out", RESIDUAL),
    "ResidPost": ("blocks.{i}.hook_resid_post", RESIDUAL),
    "FinalNorm": ("hook_final_norm", RESIDUAL),
    "Logits": ("hook_logits", ("batch", "seq", "vocab")),
}

# Hook points that no value of the graph carries: variant -> the one after which it can be computed. Capture only.
DERIVED = {
    "AttnResult": "AttnZ",
    "RwkvStates": "RwkvState",
    "RwkvEffectiveAttn": "RwkvState",
    "RwkvEffectiveAttnRaw": "RwkvState",
}
# Derived values so large that a pattern like "*" does not mean them; one that names them does.
ON_REQUEST = frozenset({"RwkvStates", "RwkvEffectiveAttn", "RwkvEffectiveAttnRaw"})

_LAYERED = re.compile(r"blocks\.(0|[1-9][0-9]{0,8})\.(.+)")


@dataclass(frozen=True)
class HookPoint:
    """A named location in a model's forward pass.

    Made by variant (`HookPoint.AttnPattern(5)`, `HookPoint.Embed`, `HookPoint.Custom("my.value")`) or from a string
    (`HookPoint.parse("blocks.5.attn.hook_pattern")`); `str()` gives the string back. Every function of mionnx that
    takes a hook point takes either form.

    Attributes:
        variant: the name of the variant, a key of the hook point table, or "Custom".
        layer: the 0-based layer, None for hook points outside the blocks.
        name: the string, which is the name of the value in the ONNX graph.
    """

    variant: str
    layer: int | None
    name: str

    Embed: ClassVar["HookPoint"]
    PosEmbed: ClassVar["HookPoint"]
    ResidPre: ClassVar[Callable[[int], "HookPoint"]]
    AttnQ: ClassVar[Callable[[int], "HookPoint"]]
    AttnK: ClassVar[Callable[[int], "HookPoint"]]
    AttnRotQ: ClassVar[Callable[[int], "HookPoint"]]
    AttnRotK: ClassVar[Callable[[int], "HookPoint"]]
    AttnV: ClassVar[Callable[[int], "HookPoint"]]
    AttnScores: ClassVar[Callable[[int], "HookPoint"]]
    AttnPattern: ClassVar[Callable[[int], "HookPoint"]]
    AttnZ: ClassVar[Callable[[int], "HookPoint"]]
    AttnResult: ClassVar[Callable[[int], "HookPoint"]]
    RwkvR: ClassVar[Callable[[int], "HookPoint"]]
    RwkvK: ClassVar[Callable[[int], "HookPoint"]]
    RwkvV: ClassVar[Callable[[int], "HookPoint"]]
    RwkvA: ClassVar[Callable[[int], "HookPoint"]]
    RwkvB: ClassVar[Callable[[int], "HookPoint"]]
    RwkvDecay: ClassVar[Callable[[int], "HookPoint"]]
    RwkvWkv: ClassVar[Callable[[int], "HookPoint"]]
    RwkvState: ClassVar[Callable[[int], "HookPoint"]]
    RwkvStates: ClassVar[Callable[[int], "HookPoint"]]
    RwkvEffectiveAttn: ClassVar[Callable[[int], "HookPoint"]]
    RwkvEffectiveAttnRaw: ClassVar[Callable[[int], "HookPoint"]]
    AttnOut: ClassVar[Callable[[int], "HookPoint"]]
    ResidMid: ClassVar[Callable[[int], "HookPoint"]]
    MlpPre: ClassVar[Callable[[int], "HookPoint"]]
    MlpGate: ClassVar[Callable[[int], "HookPoint"]]
    MlpUp: ClassVar[Callable[[int], "HookPoint"]]
    MlpAct: ClassVar[Callable[[int], "HookPoint"]]
    MlpPost: ClassVar[Callable[[int], "HookPoint"]]
    MlpOut: ClassVar[Callable[[int], "HookPoint"]]
    ResidPost: ClassVar[Callable[[int], "HookPoint"]]
    FinalNorm: ClassVar["HookPoint"]
    Logits: ClassVar["HookPoint"]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        if self.variant == "Custom":
            return f"HookPoint.Custom({self.name!r})"
        return f"HookPoint.{self.variant}" + ("" if self.layer is None else f"({self.layer})")

    @property
    def axes(self) -> tuple[str, ...] | None:
        """The names of the value's axes, in order; None for a `Custom` hook point."""
        return None if self.variant == "Custom" else VARIANTS[self.variant][1]

    @property
    def short(self) -> str:
        """What follows `hook_` in the name: `pattern`, `resid_post`; the whole name of a `Custom` hook point."""
        return self.name.rpartition("hook_")[2]

    @property
    def derived(self) -> bool:
        """Whether the value is computed on request from another one, and can therefore only be captured."""
        return self.variant in DERIVED

    @property
    def on_request(self) -> bool:
        """Whether a pattern has to name it to mean it: large and computed for the capture alone, or in a splice."""
        return self.variant in ON_REQUEST or self.variant == "Custom"

    @staticmethod
    def Custom(name: str) -> "HookPoint":
        """A hook point outside the table: one that a splice brings; refused where there is no value of this name."""
        return HookPoint("Custom", None, name)

    @staticmethod
    def parse(name: "str | HookPoint") -> "HookPoint":
        """The hook point of a string. An unknown string is `Custom`; a `HookPoint` is returned as it is."""
        return name if isinstance(name, HookPoint) else _parsed(name)


def layer_of(name: str) -> int | None:
    """The layer that a hook point's name says, also of one that a splice brings; None outside the blocks."""
    match = _LAYERED.fullmatch(name)
    return int(match[1]) if match else None


@lru_cache(maxsize=2**14)
def _parsed(name: str) -> HookPoint:
    match = _LAYERED.fullmatch(name)
    template = f"blocks.{{i}}.{match[2]}" if match else name
    variant = _by_template().get(template)
    if variant is None:
        return HookPoint.Custom(name)
    return HookPoint(variant, int(match[1]) if match else None, name)


@cache
def _by_template() -> dict[str, str]:
    return {template: variant for variant, (template, _) in VARIANTS.items()}


def _layered(variant: str, template: str) -> staticmethod:
    def make(layer: int) -> HookPoint:
        try:
            number = operator.index(layer)
        except TypeError:
            raise HookError(f"HookPoint.{variant}: a layer is an integer, got {layer!r}") from None
        if number < 0:
            raise HookError(f"HookPoint.{variant}: layers are counted from 0, got {number}")
        return HookPoint(variant, number, template.format(i=number))

    make.__name__ = make.__qualname__ = variant
    make.__doc__ = f"`{template}`, axes {list(VARIANTS[variant][1])}, of one 0-based layer."
    return staticmethod(make)


for _variant, (_template, _axes) in VARIANTS.items():
    _member = _layered(_variant, _template) if "{i}" in _template else HookPoint(_variant, None, _template)
    setattr(HookPoint, _variant, _member)


def short_names() -> dict[str, list[str]]:
    """Short name -> the templates that end in it: `{"pattern": ["blocks.{i}.attn.hook_pattern"], ...}`."""
    found: dict[str, list[str]] = {}
    for template, _ in VARIANTS.values():
        found.setdefault(template.rpartition("hook_")[2], []).append(template)
    return found
