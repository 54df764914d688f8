"""Experts of families with code of their own for them, which no graph can follow.

An entry of `OWN` says how the stacked weights of a module are read; what is computed from them is in `experts`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from exporters.transformers.attention import Taps, replace_for
from exporters.transformers.experts import compute_experts, grouped

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


OWN: dict[str, Callable[[ExitStack, Taps, nn.Module], None]] = {"DbrxFFN": _dbrx, "Llama4TextMoe": _llama4}


def tap_own_experts(stack: ExitStack, taps: Taps, moe: nn.Module) -> None:
    """Let the experts of such a family be computed in `experts`."""
    tap = OWN.get(type(moe).__name__)
    if tap is not None:
        tap(stack, taps, moe)
