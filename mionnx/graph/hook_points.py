"""`HookPoint` and the table of hook points: variants, names, axes, and how derived ones are computed.

The body of `HookPoint` is the table, and the only place in which the names are written. They are those of
TransformerLens, batch first; where TransformerLens means something else by a name, this table decides.
"""

import operator
import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Literal

from mionnx.errors import HookError, nearest

RESIDUAL = ("batch", "seq", "hidden")
QUERY = ("batch", "n_heads", "seq", "head_dim")
QUERY_LATENT = ("batch", "seq", "q_rank")
KEY_VALUE_LATENT = ("batch", "seq", "kv_rank")
KEY_SHAPE = ("batch", "n_kv_heads", "seq", "head_dim")
SCORES = ("batch", "n_heads", "seq_q", "seq_k")
NEURONS = ("batch", "seq", "d_mlp")
HEADS_SHAPE = ("batch", "seq", "n_heads", "head_dim")
ROUTED = ("batch", "seq", "n_experts")
CHOSEN_SHAPE = ("batch", "seq", "n_chosen")
RESULT = ("batch", "seq", "n_heads", "hidden")
STATE_SHAPE = ("batch", "n_heads", "key_dim", "value_dim")
STATES = ("batch", "seq", "n_heads", "key_dim", "value_dim")
MIXER_HEADS = ("batch", "seq", "n_heads", "value_dim")
MIXER_KEYS = ("batch", "seq", "n_heads", "key_dim")
LAST_STATES = ("RwkvState", "SsmState")  # variants of the state after the last token, which only a next call reads
EFFECTIVE = ("batch", "n_heads", "seq_q", "seq_src")

# no leading zeros: one hook point has one name
_LAYERED = re.compile(r"blocks\.(0|[1-9][0-9]{0,8})\.(.+)")


@dataclass(eq=False)
class Variant:
    """One row of the table of hook points.

    Attributes:
        group: the part of a layer that it belongs to; an RWKV's time mixing counts as attention.
        derived_from: the variant after which it can be computed. No value of the graph carries a derived hook point: it
            is computed for its capture alone, and can only be captured.
        instead: the variant to intervene at where this one is derived.
        on_request: whether it is so large that a pattern like "*" does not mean it; one that names it does.
    """

    template: str
    axes: tuple[str, ...]
    group: Literal["stream", "attention", "mlp"] | None = None
    derived_from: str | None = None
    instead: str | None = None
    on_request: bool = False
    name: str = field(init=False)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        VARIANTS[name] = self  # the class body of `HookPoint` fills the table, in its order


class Layered(Variant):
    """A row of a hook point that every layer has: `HookPoint.AttnPattern(5)`."""

    def __call__(self, layer: int) -> "HookPoint":
        """The hook point of one 0-based layer."""
        try:
            if isinstance(layer, bool):
                raise TypeError
            number = operator.index(layer)
        except TypeError:
            raise HookError(f"HookPoint.{self.name}: a layer is an integer, got {reprlib.repr(layer)}") from None
        if number < 0:
            raise HookError(f"HookPoint.{self.name}: layers are counted from 0, got {number}")
        return HookPoint(self.name, number, self.template.format(i=number))


class Single(Variant):
    """A row of a hook point that a model has once: `HookPoint.Embed`."""

    def __get__(self, instance: object, owner: type["HookPoint"]) -> "HookPoint":
        return HookPoint(self.name, None, self.template)


VARIANTS: dict[str, Variant] = {}  # in the order in which a forward pass reaches them


@dataclass(frozen=True, eq=False)
class HookPoint:
    """A named location in a model's forward pass.

    Made by variant (`HookPoint.AttnPattern(5)`, `HookPoint.Embed`, `HookPoint.Custom("my.value")`) or from a string
    (`HookPoint("blocks.5.attn.hook_pattern")`, or `HookPoint.parse`, which takes a `HookPoint` too); `str()` gives the
    string back. Every function of mionnx that takes a hook point takes either form, and a hook point equals its string.

    Attributes:
        variant: the name of the variant, a key of the hook point table, or "Custom".
        layer: the 0-based layer, None for hook points outside the blocks.
        name: the string, which is the name of the value in the ONNX graph.
    """

    variant: str
    layer: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name and self.variant != "Custom":  # a string alone
            vars(self).update(vars(self._of_string()))

    def _of_string(self) -> "HookPoint":
        point, row = HookPoint.parse(self.variant), VARIANTS.get(str(self.variant))
        # HookPoint("AttnPattern", 5) looks like a call of the dataclass' fields: the spelling of the variant is named
        if self.layer is not None or row is not None:
            layer = "" if isinstance(row, Single) else f"({self.layer or 0})"
            spelling = f"HookPoint({self.variant!r})" if row is None else f"HookPoint.{row.name}{layer}"
            raise HookError(f"HookPoint takes a hook point's whole name alone: write {spelling}")
        return point

    def __eq__(self, other: object) -> bool:
        if isinstance(other, HookPoint):
            return self.name == other.name
        return self.name == other if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)  # as its string: either finds what stands under the other

    Embed = Single("hook_embed", RESIDUAL)
    PosEmbed = Single("hook_pos_embed", RESIDUAL)
    TokenTypeEmbed = Single("hook_token_type_embed", RESIDUAL)
    ResidPre = Layered("blocks.{i}.hook_resid_pre", RESIDUAL, "stream")
    AttnQLatent = Layered("blocks.{i}.attn.hook_q_latent", QUERY_LATENT, "attention")
    AttnKvLatent = Layered("blocks.{i}.attn.hook_kv_latent", KEY_VALUE_LATENT, "attention")
    AttnQ = Layered("blocks.{i}.attn.hook_q", QUERY, "attention")
    AttnK = Layered("blocks.{i}.attn.hook_k", KEY_SHAPE, "attention")
    AttnRotQ = Layered("blocks.{i}.attn.hook_rot_q", QUERY, "attention")
    AttnRotK = Layered("blocks.{i}.attn.hook_rot_k", KEY_SHAPE, "attention")
    AttnV = Layered("blocks.{i}.attn.hook_v", KEY_SHAPE, "attention")
    AttnScores = Layered("blocks.{i}.attn.hook_scores", SCORES, "attention")
    AttnPattern = Layered("blocks.{i}.attn.hook_pattern", SCORES, "attention")
    AttnGate = Layered("blocks.{i}.attn.hook_gate", ("batch", "seq", "n_heads", "n_gates"), "attention")
    AttnZ = Layered("blocks.{i}.attn.hook_z", HEADS_SHAPE, "attention")
    AttnResult = Layered("blocks.{i}.attn.hook_result", RESULT, "attention", derived_from="AttnZ", instead="AttnZ")
    RwkvR = Layered("blocks.{i}.rwkv.hook_r", HEADS_SHAPE, "attention")
    RwkvK = Layered("blocks.{i}.rwkv.hook_k", HEADS_SHAPE, "attention")
    RwkvV = Layered("blocks.{i}.rwkv.hook_v", HEADS_SHAPE, "attention")
    RwkvA = Layered("blocks.{i}.rwkv.hook_a", HEADS_SHAPE, "attention")
    RwkvB = Layered("blocks.{i}.rwkv.hook_b", HEADS_SHAPE, "attention")
    RwkvDecay = Layered("blocks.{i}.rwkv.hook_decay", HEADS_SHAPE, "attention")
    RwkvWkv = Layered("blocks.{i}.rwkv.hook_wkv", HEADS_SHAPE, "attention")
    RwkvState = Layered("blocks.{i}.rwkv.hook_state", STATE_SHAPE, "attention")
    RwkvStates = Layered(
        "blocks.{i}.rwkv.hook_states", STATES, "attention", "RwkvState", instead="RwkvK", on_request=True
    )
    RwkvEffectiveAttn = Layered(
        "blocks.{i}.rwkv.hook_effective_attn", EFFECTIVE, "attention", "RwkvState", instead="RwkvK", on_request=True
    )
    RwkvEffectiveAttnRaw = Layered(
        "blocks.{i}.rwkv.hook_effective_attn_raw", EFFECTIVE, "attention", "RwkvState", instead="RwkvK", on_request=True
    )
    SsmShared = Layered("blocks.{i}.ssm.hook_shared", RESIDUAL, "attention")
    SsmPre = Layered("blocks.{i}.ssm.hook_pre", RESIDUAL, "attention")
    SsmConv = Layered("blocks.{i}.ssm.hook_conv", ("batch", "seq", "channels"), "attention")
    SsmDt = Layered("blocks.{i}.ssm.hook_dt", ("batch", "seq", "n_steps"), "attention")
    SsmQ = Layered("blocks.{i}.ssm.hook_q", MIXER_KEYS, "attention")
    SsmK = Layered("blocks.{i}.ssm.hook_k", MIXER_KEYS, "attention")
    SsmV = Layered("blocks.{i}.ssm.hook_v", MIXER_HEADS, "attention")
    SsmWrite = Layered("blocks.{i}.ssm.hook_write", ("batch", "seq", "n_heads", "strength"), "attention")
    SsmLogDecay = Layered("blocks.{i}.ssm.hook_log_decay", ("batch", "seq", "n_heads", "n_decays"), "attention")
    SsmY = Layered("blocks.{i}.ssm.hook_y", MIXER_HEADS, "attention")
    SsmState = Layered("blocks.{i}.ssm.hook_state", STATE_SHAPE, "attention")
    SsmStates = Layered("blocks.{i}.ssm.hook_states", STATES, "attention", "SsmState", instead="SsmV", on_request=True)
    SsmEffectiveAttn = Layered(
        "blocks.{i}.ssm.hook_effective_attn", EFFECTIVE, "attention", "SsmState", instead="SsmV", on_request=True
    )
    SsmEffectiveAttnRaw = Layered(
        "blocks.{i}.ssm.hook_effective_attn_raw", EFFECTIVE, "attention", "SsmState", instead="SsmV", on_request=True
    )
    SsmZ = Layered("blocks.{i}.ssm.hook_z", MIXER_HEADS, "attention")
    SsmOut = Layered("blocks.{i}.hook_ssm_out", RESIDUAL, "attention")
    AttnOut = Layered("blocks.{i}.hook_attn_out", RESIDUAL, "attention")
    ResidMidSum = Layered("blocks.{i}.hook_resid_mid_sum", RESIDUAL, "stream")
    ResidMid = Layered("blocks.{i}.hook_resid_mid", RESIDUAL, "stream")
    MlpPre = Layered("blocks.{i}.mlp.hook_pre", RESIDUAL, "mlp")
    MlpRouterLogits = Layered("blocks.{i}.mlp.hook_router_logits", ROUTED, "mlp")
    MlpExpertIndices = Layered("blocks.{i}.mlp.hook_expert_indices", CHOSEN_SHAPE, "mlp")
    MlpExpertWeights = Layered("blocks.{i}.mlp.hook_expert_weights", CHOSEN_SHAPE, "mlp")
    MlpExpertGate = Layered("blocks.{i}.mlp.hook_expert_gate", (*CHOSEN_SHAPE, "d_expert"), "mlp")
    MlpExpertUp = Layered("blocks.{i}.mlp.hook_expert_up", (*CHOSEN_SHAPE, "d_expert"), "mlp")
    MlpExpertAct = Layered("blocks.{i}.mlp.hook_expert_act", (*CHOSEN_SHAPE, "d_expert"), "mlp")
    MlpExpertOut = Layered("blocks.{i}.mlp.hook_expert_out", (*CHOSEN_SHAPE, "hidden"), "mlp")
    MlpGate = Layered("blocks.{i}.mlp.hook_gate", NEURONS, "mlp")
    MlpUp = Layered("blocks.{i}.mlp.hook_up", NEURONS, "mlp")
    MlpAct = Layered("blocks.{i}.mlp.hook_act", NEURONS, "mlp")
    MlpPost = Layered("blocks.{i}.mlp.hook_post", RESIDUAL, "mlp")
    MlpOut = Layered("blocks.{i}.hook_mlp_out", RESIDUAL, "mlp")
    ResidPostSum = Layered("blocks.{i}.hook_resid_post_sum", RESIDUAL, "stream")
    ResidPost = Layered("blocks.{i}.hook_resid_post", RESIDUAL, "stream")
    FinalNorm = Single("hook_final_norm", RESIDUAL)
    MlmHead = Single("mlm_head.hook_out", ("batch", "seq", "d_mlm"))
    Pooler = Single("pooler.hook_out", ("batch", "d_pooler"))
    Pooled = Single("hook_pooled", ("batch", "d_pooled"))
    Embedding = Single("hook_embedding", ("batch", "d_embedding"))
    ClassLogits = Single("hook_class_logits", ("batch", "labels"))
    TokenLogits = Single("hook_token_logits", ("batch", "seq", "labels"))
    SpanLogits = Single("hook_span_logits", ("batch", "seq", "ends"))
    Logits = Single("hook_logits", ("batch", "seq", "vocab"))

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        if self.variant == "Custom":
            return f"HookPoint.Custom({self.name!r})"
        return f"HookPoint.{self.variant}" + ("" if self.layer is None else f"({self.layer})")

    @property
    def _row(self) -> Variant | None:
        return VARIANTS.get(self.variant)  # None for a `Custom` one

    @property
    def axes(self) -> tuple[str, ...] | None:
        """The names of the value's axes, in order; None for a `Custom` hook point."""
        row = self._row
        return row.axes if row else None

    @property
    def short(self) -> str:
        """The name after `hook_`, such as `pattern`; the whole name of a `Custom` hook point."""
        return self.name.rpartition("hook_")[2]

    @property
    def group(self) -> str | None:
        """The part of a layer that it belongs to: "stream", "attention", "mlp"; None elsewhere."""
        return self._row.group if self._row else None

    @property
    def derived(self) -> bool:
        """Whether the value is computed for its capture alone; it cannot be intervened at."""
        row = self._row
        return row is not None and row.derived_from is not None

    @property
    def source(self) -> "HookPoint":
        """The hook point that a derived one is computed from; else the hook point itself."""
        return self._beside(self._row.derived_from) if self._row and self.derived else self

    @property
    def instead(self) -> "HookPoint":
        """The hook point to intervene at in place of a derived one; else the hook point itself."""
        return self._beside(self._row.instead) if self._row and self.derived else self

    @property
    def on_request(self) -> bool:
        """Whether "*" leaves it out: large and computed for its capture alone, or in a splice."""
        return self._row is None or self._row.on_request

    def derivations(self) -> list["HookPoint"]:
        """The hook points that are derived from this one."""
        return [self._beside(row.name) for row in VARIANTS.values() if row.derived_from == self.variant]

    def _beside(self, variant: str | None) -> "HookPoint":
        point = getattr(HookPoint, variant or self.variant)
        return point if self.layer is None else point(self.layer)

    @staticmethod
    def Custom(name: str) -> "HookPoint":
        """A hook point outside the table, which a splice brings; checked when a spec is used.

        Raises:
            HookError: the name is no text.
        """
        if not isinstance(name, str):
            raise HookError(f"a hook point's name is a text, got {type(name).__name__} {reprlib.repr(name):.60}")
        return HookPoint("Custom", None, name)

    @staticmethod
    def parse(name: "str | HookPoint") -> "HookPoint":
        """Parse a string; an unknown one is `Custom`. A `HookPoint` is returned as it is.

        Raises:
            HookError: something else.
        """
        if isinstance(name, HookPoint):
            return name
        if not isinstance(name, str):
            raise HookError(
                f"a hook point is a HookPoint or its name, got {type(name).__name__} {reprlib.repr(name):.60}"
            )
        return _parsed(name)


def nearest_hook(name: str, names: Iterable[str]) -> str:
    """End of an error message for a missing hook point: the layers, or the nearest name."""
    names = [*names]
    match = _LAYERED.fullmatch(name)
    if match and match[2] in LENS_NEAR:
        ours, said = LENS_NEAR[match[2]]
        return f"; that is a name of TransformerLens: here is blocks.{match[1]}.{ours}, {said}"
    layers, layer = {number for one in names if (number := layer_of(one)) is not None}, layer_of(name)
    # a layer that is not there: the valid range says more than the nearest name
    if layer is not None and layers and layer not in layers:
        return f"; layers are {min(layers)} to {max(layers)}"
    return nearest(name, names)


def layer_of(name: str) -> int | None:
    """Layer number in a hook point's name, splices' included; None outside the blocks."""
    match = _LAYERED.fullmatch(name)
    return int(match[1]) if match else None


def by_layer(names: Iterable[str]) -> list[str]:
    """Sort names of hook points by layer, embeddings first; stable within a layer."""

    def place(name: str) -> float:
        if (layer := layer_of(name)) is not None:
            return layer
        return -1 if _parsed(name).variant in ("Embed", "PosEmbed", "TokenTypeEmbed") else inf

    return sorted(names, key=place)


# TransformerLens' names of recurrent mixers whose values are ours, number for number: `linear_attn` of its gated delta
# nets, `mixer` of its state-space models, `mamba` of Falcon-H1. Of each a variant of ours.
LENS_NAMES = {
    **dict.fromkeys(("linear_attn.hook_in", "mixer.hook_in", "mamba.hook_in"), "SsmPre"),
    "linear_attn.hook_v": "SsmV",
    "linear_attn.hook_recurrence_out": "SsmY",
    "linear_attn.hook_ssm_state": "SsmStates",
}
# Others are values beside ours, of another shape, or by their layer one of two: the name here, and what sets it apart.
MIXER_OUT = "hook_attn_out", "of a mixer that is alone in its layer; beside attention it is hook_ssm_out"
LENS_NEAR = {
    **{f"{mixer}.hook_{out}": MIXER_OUT for mixer in ("linear_attn", "mixer") for out in ("out", "ssm_out")},
    **dict.fromkeys(("linear_attn.hook_q", "linear_attn.hook_ssm_C"), ("ssm.hook_q", "after norm and scale, by head")),
    **dict.fromkeys(("linear_attn.hook_k", "linear_attn.hook_ssm_B"), ("ssm.hook_k", "after norm, by head")),
    **dict.fromkeys(("linear_attn.hook_beta", "linear_attn.hook_ssm_write"), ("ssm.hook_write", "[.., n_heads, 1]")),
    **dict.fromkeys(
        ("linear_attn.hook_log_decay", "linear_attn.hook_ssm_decay"), ("ssm.hook_log_decay", "[.., n_heads, 1]")
    ),
    "attn.hook_q_gate": ("attn.hook_gate", "by head"),
    "linear_attn.hook_gate_input": ("ssm.hook_z", "behind the gate and its norm"),
    "mixer.hook_conv": ("ssm.hook_conv", "after its activation"),
    "mamba.hook_out": ("hook_ssm_out", "behind its factor"),
    "mixer.hook_ssm_dt": ("ssm.hook_dt", "after softplus"),
    "mixer.hook_ssm_write": ("ssm.hook_v", "k (x) v is what is written"),
    "mixer.hook_ssm_state": ("ssm.hook_states", "[.., key, value]"),
}
_BY_TEMPLATE = {row.template: variant for variant, row in VARIANTS.items()}


@lru_cache(maxsize=2**14)
def _parsed(name: str) -> HookPoint:
    match = _LAYERED.fullmatch(name)
    variant = _BY_TEMPLATE.get(f"blocks.{{i}}.{match[2]}" if match else name, "Custom")
    if match and variant == "Custom" and match[2] in LENS_NAMES:
        named: HookPoint = getattr(HookPoint, LENS_NAMES[match[2]])(int(match[1]))
        return named
    return HookPoint(variant, int(match[1]) if match and variant != "Custom" else None, name)


def short_names() -> dict[str, list[str]]:
    """Short name -> templates: `{"pattern": ["blocks.{i}.attn.hook_pattern"], ...}`."""
    templates: dict[str, list[str]] = {}
    for row in VARIANTS.values():
        templates.setdefault(row.template.rpartition("hook_")[2], []).append(row.template)
    return templates
