"""Experts of families with code of their own for them, which no graph can follow.

An entry of `OWN` says how the stacked weights of a module are read; what is computed from them is in `experts`.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from exporters.transformers.attention import Taps, replace_for
from exporters.transformers.experts import compute_experts, grouped

SPARE = re.compile(r"\.mlp\.experts\.(\d+)\.")  # the number of an expert, in the name of its weights
PLAIN = {"has_bias": False, "has_gate": True, "is_concatenated": True, "has_post_expert_norm": False}


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


def _llama4(stack: ExitStack, taps: Taps, moe: Any) -> None:
    """Compute Llama 4's chosen experts; each weight is applied to what its expert reads."""
    own = moe.experts
    weights = {"gate_up_proj": own.gate_up_proj, "down_proj": own.down_proj, "is_transposed": True}
    experts = SimpleNamespace(**PLAIN, **weights, _apply_gate=_gated(own.act_fn))

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden_states.reshape(-1, moe.hidden_dim)
        scores, logits = moe.router(hidden)
        index = torch.topk(logits, moe.top_k, dim=1)[1]
        routed = compute_experts(taps, experts, hidden, index, scores.gather(1, index), weigh_inputs=True)
        return moe.shared_expert(hidden) + routed, logits

    replace_for(stack, moe, "forward", forward)


def _dbrx(stack: ExitStack, taps: Taps, moe: Any) -> None:
    """Compute DBRX's chosen experts, stacked along two axes, gate and up apart."""
    own = moe.experts.mlp
    gate, up, down = (
        weight.view(own.moe_num_experts, own.ffn_hidden_size, own.hidden_size) for weight in (own.w1, own.v1, own.w2)
    )

    def first(pairs: Tensor, chosen: Tensor) -> Tensor:
        return torch.cat([grouped(pairs, weight, chosen, rows=False) for weight in (gate, up)], dim=-1)

    experts = SimpleNamespace(
        **PLAIN, first=first, down_proj=down, is_transposed=True, _apply_gate=_gated(own.activation_fn)
    )

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return compute_experts(taps, experts, hidden.flatten(0, 1), index, weights).reshape(hidden.shape)

    replace_for(stack, moe.experts, "forward", forward)


def _jetmoe(stack: ExitStack, taps: Taps, moe: Any) -> None:
    """Compute JetMoE's chosen experts."""
    weights = {"gate_up_proj": moe.input_linear.weight, "down_proj": moe.output_linear.weight}
    experts = SimpleNamespace(**PLAIN, **weights, is_transposed=False, _apply_gate=_gated(moe.activation))

    def forward(given: Tensor) -> Tensor:
        hidden = given.reshape(-1, given.shape[-1])
        index, weights = moe.router(hidden)
        return compute_experts(taps, experts, hidden, index, weights).reshape(given.shape) + moe.bias

    best(stack, moe.router)
    replace_for(stack, moe, "forward", forward)


def _longcat(stack: ExitStack, taps: Taps, moe: Any) -> None:
    """Compute LongCat's chosen experts; those without weights give back what they read."""
    own = moe.experts
    spare = len(own.gate_up_proj) > own.num_routed_experts  # not in a graph: see `drop_spare`
    first = own.gate_up_proj[: own.num_routed_experts] if spare else own.gate_up_proj
    weights = {"gate_up_proj": first, "down_proj": own.down_proj, "is_transposed": False}
    apart = {"_apply_gate": _gated(own.act_fn), "identities_from": own.num_routed_experts}
    experts = SimpleNamespace(**PLAIN, **weights, **apart)

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return compute_experts(taps, experts, hidden, index, weights)

    replace_for(stack, own, "forward", forward)


def drop_spare(model: nn.Module) -> None:
    """Drop the weights of LongCat's experts that have none: they are stacked, and never read."""
    for experts in model.modules():
        if type(experts).__name__ == "LongcatFlashExperts" and experts.gate_up_proj is not None:
            experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[: experts.num_routed_experts])


def identities_from(config: Any) -> int | None:
    """The number of LongCat's first expert without weights; None where each has some."""
    return config.n_routed_experts if getattr(config, "zero_expert_num", None) else None


def is_spare(name: str, config: Any) -> bool:
    """Whether a checkpoint's tensor is one of those that `drop_spare` drops."""
    found, first = SPARE.search(name), identities_from(config)
    return found is not None and first is not None and int(found[1]) >= first


def best(stack: ExitStack, router: Any) -> None:
    """Let JetMoE's router give the chosen experts, best first, and their weights.

    Both are [n, n_chosen].
    """

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits, index = _largest(router.layer(hidden).float(), router.top_k)
        return index, torch.softmax(logits, dim=1).type_as(hidden)

    replace_for(stack, router, "forward", forward)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the largest numbers of each row; of equal ones the first.

    ONNX does so, torch leaves it open.
    """
    if torch.compiler.is_exporting():
        return scores.topk(count, dim=1)
    values, index = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :count], index[:, :count]


def mix_heads(stack: ExitStack, experts: Any) -> None:
    """Let JetMoE's projections of queries and of heads' outputs be `grouped` products.

    Each token chooses its own.
    """

    def project(given: Tensor) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
        hidden = given.reshape(-1, given.shape[-1])
        index, weights = experts.router(hidden)
        pairs = hidden.unsqueeze(1).expand(-1, experts.top_k, -1).reshape(-1, hidden.shape[-1])
        made = grouped(pairs, experts.input_linear.weight, index.reshape(-1), rows=False)
        return made.reshape(*given.shape[:2], experts.top_k, -1), None, (index, weights)

    def merge(z: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
        index, weights = chosen
        made = grouped(z.reshape(-1, z.shape[-1]), experts.output_linear.weight, index.reshape(-1), rows=False)
        added = (made * weights.reshape(-1, 1)).reshape(*z.shape[:3], -1).sum(dim=2)
        return added + experts.bias

    best(stack, experts.router)
    replace_for(stack, experts, "map", project)
    replace_for(stack, experts, "reduce", merge)


OWN: dict[str, Callable[[ExitStack, Taps, nn.Module], None]] = {
    "DbrxFFN": _dbrx,
    "JetMoeMoE": _jetmoe,
    "Llama4TextMoe": _llama4,
    "LongcatFlashMoE": _longcat,
}


def tap_own_experts(stack: ExitStack, taps: Taps, moe: nn.Module) -> None:
    """Let the experts of such a family be computed in `experts`."""
    tap = OWN.get(type(moe).__name__)
    if tap is not None:
        tap(stack, taps, moe)
