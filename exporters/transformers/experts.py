"""Hook points of mixtures of experts: the router's logits, its choice, and what each chosen expert computes.

transformers keeps the weights of a layer's experts in stacked parameters and computes them in a function that can be
registered (`ExpertsInterface`). The one here computes the same, a hook point at each step. Only tokens that chose an
expert are multiplied with its weights: `grouped` is one node of the traced graph, which `expand_grouped` turns into
standard operators.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ExpertsInterface

from exporters.transformers.attention import Taps, active_taps, replace_for
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint

EXPERTS = "mionnx"
GROUPED_DOMAIN, GROUPED = "mionnx.experts", "GroupedMatMul"


OWN_EXPERTS = ("DbrxFFN", "JetMoeMoE", "Llama4TextMoe", "LongcatFlashMoE")  # see `own_experts`
# What transformers' modules call a layer's router, and the MLP that every token goes through besides.
ROUTERS, SHARED = ("gate", "router"), ("shared_expert", "shared_experts", "shared_mlp")


def grouped(x: Tensor, weight: Tensor, chosen: Tensor, rows: bool, partial: bool = False) -> Tensor:
    """Multiply each row by the matrix that it chose.

    Args:
        x: [n, in].
        weight: [n_experts, out, in], or with `rows` [n_experts, in, out].
        chosen: int64 [n], which matrix.
        rows: see `weight`.
        partial: whether some rows choose none, by a number beyond the stack: they become zero.

    Returns:
        [n, out].
    """
    out = weight.shape[2 if rows else 1]
    if torch.compiler.is_exporting():
        shape = (x.shape[0], out)
        given: Any = (x, weight, chosen)
        name = f"{GROUPED_DOMAIN}::{GROUPED}"
        attributes: Any = {"rows": int(rows), "partial": int(partial)}
        return torch.onnx.ops.symbolic(name, given, attributes, dtype=x.dtype, shape=shape, version=1)
    if x.is_meta:
        matrices = weight.index_select(0, chosen)
        return torch.bmm(x.unsqueeze(1), matrices if rows else matrices.transpose(1, 2)).squeeze(1)
    made = x.new_zeros(len(x), out)
    for expert in chosen[chosen < len(weight)].unique().tolist() if partial else chosen.unique().tolist():
        here = chosen == expert
        made[here] = x[here] @ (weight[expert] if rows else weight[expert].T)
    return made


def compute_experts(
    taps: Taps, experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, weigh_inputs: bool = False
) -> Tensor:
    """Compute the chosen experts of every token, weigh and add them.

    Args:
        taps: of the layer.
        experts: transformers' module with the stacked weights.
        hidden: [batch * seq, hidden].
        index: int64 [batch * seq, n_chosen], which experts a token chose.
        weights: [batch * seq, n_chosen].
        weigh_inputs: whether weights are applied to what experts read, and not to what they give.

    Returns:
        [batch * seq, hidden].
    """
    tokens = *taps.tokens, index.shape[-1]
    index = taps.at(HookPoint.MlpExpertIndices(taps.layer), index.reshape(tokens))
    weights = taps.at(HookPoint.MlpExpertWeights(taps.layer), weights.reshape(tokens))
    pairs = hidden.unsqueeze(1).expand(-1, tokens[-1], -1).reshape(-1, hidden.shape[-1])
    given = pairs * weights.reshape(-1, 1) if weigh_inputs else pairs
    made = _experts_of(taps, experts, given, index.reshape(-1), tokens).unflatten(0, tokens)
    return add_chosen(taps, made if weigh_inputs else made * weights.unsqueeze(-1), hidden)


def add_chosen(taps: Taps, made: Tensor, like: Tensor) -> Tensor:
    """Add outputs [batch, seq, n_chosen, hidden], in the form and dtype of `like`."""
    made = taps.at(HookPoint.MlpExpertOut(taps.layer), made.to(like.dtype))
    return made.sum(dim=2).reshape(like.shape)


def _experts_of(taps: Taps, experts: Any, pairs: Tensor, chosen: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """The output of each pair of a token and an expert that it chose, [n, hidden]."""
    rows, biased = experts.is_transposed, experts.has_bias
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    given = getattr(experts, "first", None)
    inner = given(pairs, chosen) if given else _product(experts, name, pairs, chosen, rows, biased)
    act = tap_neurons(taps, inner, tokens, experts)
    made = _product(experts, "down_proj", act, chosen, rows, biased)
    if _partial(experts):
        made = torch.where((chosen >= experts.identities_from).unsqueeze(1), pairs, made)
    return experts.post_expert_norm(made) if experts.has_post_expert_norm else made


def _product(experts: Any, name: str, x: Tensor, chosen: Tensor, rows: bool, biased: bool) -> Tensor:
    made = grouped(x, getattr(experts, name), chosen, rows, _partial(experts))
    return made + getattr(experts, f"{name}_bias")[chosen] if biased else made


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


class TapRouter(TorchFunctionMode):
    """Tap the logits of a router: the first linear map that it computes."""

    def __init__(self, taps: Taps) -> None:
        super().__init__()
        self.taps, self.seen = taps, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.seen or func is not nn.functional.linear:
            return result
        self.seen = True
        logits = result.reshape(*self.taps.tokens, result.shape[-1])
        return self.taps.at(HookPoint.MlpRouterLogits(self.taps.layer), logits).reshape(result.shape)


def _forward(experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts in transformers' calling convention."""
    return compute_experts(active_taps(), experts, hidden, index, weights)


ExpertsInterface.register(EXPERTS, _forward)


def find_experts(block: nn.Module) -> nn.Module | None:
    """The module around the router and experts of a block; None in a dense block."""
    for parent in block.modules():
        if type(parent).__name__ in OWN_EXPERTS or any(_stacked(child) for child in parent.children()):
            return parent
    return None


def _stacked(module: nn.Module) -> bool:
    """Whether transformers computes a module's experts in a function that can be registered."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def tap_router(stack: ExitStack, taps: Taps, parent: nn.Module) -> None:
    """Tap the router beside a layer's experts.

    Raises:
        ExportError: there is none by the names that transformers has for it.
    """
    routers = [getattr(parent, name) for name in ROUTERS if isinstance(getattr(parent, name, None), nn.Module)]
    if len(routers) != 1:
        raise ExportError(f"{type(parent).__name__} has no router by the name of {' or '.join(ROUTERS)}")
    forward = routers[0].forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with TapRouter(taps):
            return forward(*args, **kwargs)

    replace_for(stack, routers[0], "forward", inside)


def shared_expert(parent: nn.Module) -> nn.Module | None:
    """The MLP of all tokens beside the experts, if there is one."""
    return next((found for name in SHARED if (found := getattr(parent, name, None)) is not None), None)
