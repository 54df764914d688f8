"""Hook points of mixtures of experts: the router's logits, its choice, and what each chosen expert computes.

transformers keeps the weights of a layer's experts in stacked parameters and computes them in a function that can be
registered (`ExpertsInterface`). The one here computes the same, a hook point at each step. Only tokens that chose an
expert are multiplied with its weights: `grouped` is one node of the traced graph, which `expand_grouped` turns into
standard operators.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from exporters.transformers.attention import Calls, Taps, replace_for, taps_of
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint

EXPERTS_FUNCTION = "mionnx"
GROUPED_DOMAIN, GROUPED = "mionnx.experts", "GroupedMatMul"
# What transformers' modules call a layer's router, and the MLP that every token goes through besides.
ROUTER_NAMES, SHARED = ("gate", "router"), ("shared_expert", "shared_experts", "shared_mlp")
SPARE = re.compile(r"\.mlp\.experts\.(\d+)\.")  # the number of an expert, in the name of its weights


def grouped(x: Tensor, weight: Tensor, chosen: Tensor, rows: bool, partial: bool = False) -> Tensor:
    """Multiply each row by the matrix of its index: [n, in] -> [n, out]; `partial`: one beyond the stack gives zero."""
    out = weight.shape[2 if rows else 1]
    if torch.compiler.is_exporting():
        shape = (x.shape[0], out)
        operands: Any = (x, weight, chosen)
        name = f"{GROUPED_DOMAIN}::{GROUPED}"
        attributes: Any = {"rows": int(rows), "partial": int(partial)}
        return torch.onnx.ops.symbolic(name, operands, attributes, dtype=x.dtype, shape=shape, version=1)
    if x.is_meta:
        matrices = weight.index_select(0, chosen)
        return torch.bmm(x.unsqueeze(1), matrices if rows else matrices.transpose(1, 2)).squeeze(1)
    products = x.new_zeros(len(x), out)
    for expert in chosen[chosen < len(weight)].unique().tolist() if partial else chosen.unique().tolist():
        here = chosen == expert
        products[here] = x[here] @ (weight[expert] if rows else weight[expert].T)
    return products


def compute_experts(
    taps: Taps, experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, weigh_inputs: bool = False
) -> Tensor:
    """Compute the chosen experts of every token, weigh and add them: [batch * seq, hidden]."""
    # `index` and `weights` are [batch * seq, n_chosen]; `weigh_inputs`: weights are applied to what experts read, and
    # not to what they give.
    tokens = *taps.tokens, index.shape[-1]
    index = taps.at(HookPoint.MlpExpertIndices(taps.layer), index.reshape(tokens))
    weights = taps.at(HookPoint.MlpExpertWeights(taps.layer), weights.reshape(tokens))
    pairs = hidden.unsqueeze(1).expand(-1, tokens[-1], -1).reshape(-1, hidden.shape[-1])
    inputs = pairs * weights.reshape(-1, 1) if weigh_inputs else pairs
    outputs = _experts_of(taps, experts, inputs, index.reshape(-1), tokens).unflatten(0, tokens)
    outputs = (outputs if weigh_inputs else outputs * weights.unsqueeze(-1)).to(hidden.dtype)
    return taps.at(HookPoint.MlpExpertOut(taps.layer), outputs).sum(dim=2).reshape(hidden.shape)


def _experts_of(taps: Taps, experts: Any, pairs: Tensor, chosen: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """The output of each pair of a token and an expert that it chose, [n, hidden]."""
    rows, biased = experts.is_transposed, experts.has_bias
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    own_first = getattr(experts, "first", None)
    inner = own_first(pairs, chosen) if own_first else _product(experts, name, pairs, chosen, rows, biased)
    act = tap_neurons(taps, inner, tokens, experts)
    outputs = _product(experts, "down_proj", act, chosen, rows, biased)
    if _partial(experts):
        outputs = torch.where((chosen >= experts.identities_from).unsqueeze(1), pairs, outputs)
    return experts.post_expert_norm(outputs) if experts.has_post_expert_norm else outputs


def _product(experts: Any, name: str, x: Tensor, chosen: Tensor, rows: bool, biased: bool) -> Tensor:
    product = grouped(x, getattr(experts, name), chosen, rows, _partial(experts))
    return product + getattr(experts, f"{name}_bias")[chosen] if biased else product


def _partial(experts: Any) -> bool:
    """Whether some experts have no weights and give back what they read."""
    return getattr(experts, "identities_from", None) is not None


def tap_neurons(taps: Taps, inner: Tensor, tokens: tuple[int, ...], experts: Any) -> Tensor:
    """Tap the neurons of chosen experts; returns what the down projection reads."""

    def at(point: HookPoint, value: Tensor) -> Tensor:
        return taps.at(point, value.unflatten(0, tokens)).flatten(0, 2)

    if not experts.has_gate:
        act = experts.act_fn(at(HookPoint.MlpExpertUp(taps.layer), inner))
        return at(HookPoint.MlpExpertAct(taps.layer), act)
    beside = experts.is_concatenated
    gate, up = inner.chunk(2, dim=-1) if beside else (inner[..., ::2], inner[..., 1::2])
    gate, up = at(HookPoint.MlpExpertGate(taps.layer), gate), at(HookPoint.MlpExpertUp(taps.layer), up)
    both = torch.cat([gate, up], dim=-1) if beside else torch.stack([gate, up], dim=-1).flatten(-2)
    return at(HookPoint.MlpExpertAct(taps.layer), experts._apply_gate(both))


def in_order(func: Any, args: Any, options: Any) -> Any:
    """Give the best experts in the order of their scores, where a router leaves the order open."""
    return func(*args, **({**options, "sorted": True} if func in (torch.topk, Tensor.topk) else options))


def _tap_logits(taps: Taps) -> Calls:
    """Tap the logits of a router: the first linear map that it computes."""
    seen = False

    def answer(func: Any, args: Any, options: Any) -> Any:
        nonlocal seen
        result = func(*args, **options)
        if seen or func is not nn.functional.linear:
            return result
        seen = True
        logits = result.reshape(*taps.tokens, result.shape[-1])
        return taps.at(HookPoint.MlpRouterLogits(taps.layer), logits).reshape(result.shape)

    return Calls(answer)


def _forward(experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts in transformers' calling convention."""
    return compute_experts(taps_of(experts), experts, hidden, index, weights)


ExpertsInterface.register(EXPERTS_FUNCTION, _forward)


def find_experts(block: nn.Module) -> nn.Module | None:
    """The module around the router and experts of a block; None in a dense block."""

    def stacked(module: nn.Module) -> bool:  # transformers computes it in a function that can be registered
        return hasattr(module, "is_transposed") and hasattr(module, "has_gate")

    for parent in block.modules():
        own = type(parent).__name__ in OWN or any(map(stacked, parent.children()))
        if (
            own and parent is not block
        ):  # the block itself has experts beside an MLP (Gemma 4), whose neurons are tapped
            return parent
    return None


def tap_router(stack: ExitStack, taps: Taps, parent: nn.Module) -> None:
    """Tap the router beside a layer's experts, by the names that transformers has for it."""
    routers = [getattr(parent, name) for name in ROUTER_NAMES if isinstance(getattr(parent, name, None), nn.Module)]
    if len(routers) != 1:
        raise ExportError(f"{type(parent).__name__} has no router by the name of {' or '.join(ROUTER_NAMES)}")
    forward = routers[0].forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with _tap_logits(taps):
            return forward(*args, **kwargs)

    replace_for(stack, routers[0], "forward", inside)


def shared_expert(parent: nn.Module) -> nn.Module | None:
    """The MLP of all tokens beside the experts, if there is one."""
    return next((module for name in SHARED if (module := getattr(parent, name, None)) is not None), None)


def _gated(activation: Callable[[Tensor], Tensor], **parts: Any) -> SimpleNamespace:
    """Experts with a gate and without biases, as transformers' stacked ones have their attributes."""

    def apply(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return activation(gate) * up

    usual = {"has_bias": False, "has_gate": True, "is_concatenated": True, "has_post_expert_norm": False}
    return SimpleNamespace(**usual, _apply_gate=apply, **parts)


def _llama4(stack: ExitStack, taps: Taps, moe: Any) -> None:
    """Compute Llama 4's chosen experts; each weight is applied to what its expert reads."""
    own = moe.experts
    experts = _gated(own.act_fn, gate_up_proj=own.gate_up_proj, down_proj=own.down_proj, is_transposed=True)

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

    experts = _gated(own.activation_fn, first=first, down_proj=down, is_transposed=True)

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return compute_experts(taps, experts, hidden.flatten(0, 1), index, weights).reshape(hidden.shape)

    replace_for(stack, moe.experts, "forward", forward)


def _jetmoe(stack: ExitStack, taps: Taps, moe: Any) -> None:
    """Compute JetMoE's chosen experts."""
    weights = {"gate_up_proj": moe.input_linear.weight, "down_proj": moe.output_linear.weight}
    experts = _gated(moe.activation, **weights, is_transposed=False)

    def forward(stream: Tensor) -> Tensor:
        hidden = stream.reshape(-1, stream.shape[-1])
        index, weights = moe.router(hidden)
        return compute_experts(taps, experts, hidden, index, weights).reshape(stream.shape) + moe.bias

    best(stack, moe.router)
    replace_for(stack, moe, "forward", forward)


def _longcat(stack: ExitStack, taps: Taps, moe: Any) -> None:
    """Compute LongCat's chosen experts; those without weights give back what they read."""
    own = moe.experts
    spare = len(own.gate_up_proj) > own.num_routed_experts  # not in a graph: see `drop_spare`
    first = own.gate_up_proj[: own.num_routed_experts] if spare else own.gate_up_proj
    weights = {"gate_up_proj": first, "down_proj": own.down_proj, "is_transposed": False}
    experts = _gated(own.act_fn, **weights, identities_from=own.num_routed_experts)

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return compute_experts(taps, experts, hidden, index, weights)

    replace_for(stack, own, "forward", forward)


def drop_spare(model: nn.Module) -> None:
    """Drop the weights of LongCat's experts that have none: they are stacked, and never read."""
    experts: Any
    for experts in model.modules():
        if type(experts).__name__ == "LongcatFlashExperts" and experts.gate_up_proj is not None:
            experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[: experts.num_routed_experts])


def identities_from(config: Any) -> int | None:
    """The number of LongCat's first expert without weights; None where each has some."""
    return config.n_routed_experts if getattr(config, "zero_expert_num", None) else None


def is_spare(name: str, config: Any) -> bool:
    """Whether a checkpoint's tensor is one of those that `drop_spare` drops."""
    number, first = SPARE.search(name), identities_from(config)
    return number is not None and first is not None and int(number[1]) >= first


def best(stack: ExitStack, router: Any) -> None:
    """Let JetMoE's router give the chosen experts, best first, and their weights, both [n, n_chosen]."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits, index = _largest(router.layer(hidden).float(), router.top_k)
        return index, torch.softmax(logits, dim=1).type_as(hidden)

    replace_for(stack, router, "forward", forward)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the largest numbers of each row; of equal ones the first, as ONNX does; torch leaves it open."""
    if torch.compiler.is_exporting():
        return scores.topk(count, dim=1)
    values, index = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :count], index[:, :count]


def mix_heads(stack: ExitStack, experts: Any) -> None:
    """Let JetMoE's projections of queries and of heads' outputs be `grouped` products: each token chooses its own."""

    def project(stream: Tensor) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
        hidden = stream.reshape(-1, stream.shape[-1])
        index, weights = experts.router(hidden)
        pairs = hidden.unsqueeze(1).expand(-1, experts.top_k, -1).reshape(-1, hidden.shape[-1])
        product = grouped(pairs, experts.input_linear.weight, index.reshape(-1), rows=False)
        return product.reshape(*stream.shape[:2], experts.top_k, -1), None, (index, weights)

    def merge(z: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
        index, weights = chosen
        product = grouped(z.reshape(-1, z.shape[-1]), experts.output_linear.weight, index.reshape(-1), rows=False)
        added = (product * weights.reshape(-1, 1)).reshape(*z.shape[:3], -1).sum(dim=2)
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
