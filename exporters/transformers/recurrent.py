"""Taps of recurrent mixers: transformers' convolutions and recurrences, with their hook points.

transformers keeps each recurrence in a function of the modelling module, as it keeps its rotation, with one signature
for all families. It is replaced by one that taps what the recurrence reads and calls `recur`: one node of a traced
graph (`exporters.recurrence` makes operators of it), a loop elsewhere. Padding neither writes nor forgets, and a
convolution passes over it, wherever it stands.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from exporters.recurrence.columns import COLUMNS
from exporters.recurrence.expand import FORGETS_ALL, RECURRENCE, RECURRENCE_DOMAIN
from exporters.transformers.attention import Taps, replace_for
from exporters.transformers.layout import Layout
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint

LENGTH_EPSILON = 1e-6  # of the length of queries and keys in the delta rule
Carried = tuple[Tensor, ...]
Function = Callable[..., Any]


def mixer_of(block: nn.Module, layout: Layout) -> nn.Module | None:
    """The recurrent mixer of a block, or of the layer inside of it; None where it attends instead."""
    end = f".{layout.recurrent}"
    mixers = [module for path, module in block.named_modules() if layout.recurrent and f".{path}".endswith(end)]
    if not mixers:
        return None
    # attention may have the same name
    own = layout.mixer_output != layout.output_projection and hasattr(mixers[0], layout.mixer_output)
    return mixers[0] if own or _convolutions(mixers[0]) else None


def kernel_of(model: PreTrainedModel, layout: Layout) -> int:
    """The kernel of the short convolutions of a model; 0 without any."""
    if layout.recurrent is None:
        return 0
    mixers = [mixer_of(block, layout) for block in model.get_submodule(layout.blocks).children()]
    kernels = {int(one.kernel_size[0]) for mixer in mixers if mixer for one in _convolutions(mixer)}
    if len(kernels) > 1:
        raise ExportError(f"{model.config.model_type!r} has convolutions of several kernels: {sorted(kernels)}")
    return max(kernels, default=0)


def _convolutions(mixer: nn.Module) -> list[nn.Conv1d]:
    return [module for module in mixer.modules() if isinstance(module, nn.Conv1d)]


class Columns:
    """Which columns a convolution reads at each token, and which it carries on, passing over padding.

    Columns are kernel - 1 of the past and one a token, of all rows one after another; `mask` is [batch, seq].
    """

    def __init__(self, mask: Tensor, kernel: int) -> None:
        self.mask, self.kernel = mask, kernel
        # in a traced graph each layer has a node of its own, since an intervention may hide a token from some
        self.read = None if torch.compiler.is_exporting() else self._read()
        self.by_layer: dict[int, tuple[Tensor, ...]] = {}

    def of(self, layer: int, x: Tensor) -> tuple[Tensor, ...]:
        """Of a layer in which `x` stands: `kernel` times [batch * seq], the last the token's own, and those carried."""
        if self.read is not None:
            return self.read
        if layer not in self.by_layer:
            self.by_layer[layer] = self._node(layer, x)
        return self.by_layer[layer]

    def _node(self, layer: int, x: Tensor) -> tuple[Tensor, ...]:
        batch, seq = self.mask.shape
        shapes = [(batch * seq,)] * self.kernel + [(batch * (self.kernel - 1),)]
        return tuple(
            torch.onnx.ops.symbolic_multi_out(
                f"{RECURRENCE_DOMAIN}::{COLUMNS}",
                [x, self.mask],
                {"layer": layer, "kernel": self.kernel},
                dtypes=[torch.int64] * len(shapes),
                shapes=shapes,
                version=1,
            )
        )

    def _read(self) -> tuple[Tensor, ...]:
        mask, (batch, seq), past = self.mask, self.mask.shape, self.kernel - 1
        real = torch.cat([mask.new_ones(batch, past), mask], 1)
        before_it = real.cumsum(1) - real
        at = torch.arange(past + seq, device=mask.device).expand(batch, -1)
        place = torch.where(real.bool(), before_it, past + seq)  # padding behind all others, where nobody looks
        table = mask.new_zeros(batch, past + seq + 1).scatter(1, place, at)
        first = torch.arange(batch, device=mask.device)[:, None] * (past + seq)
        before = [table.gather(1, before_it[:, past:] - back) + first for back in range(past, 0, -1)]
        last = real.sum(1, keepdim=True) + torch.arange(-past, 0, device=mask.device)
        own = at[:, past:] + first
        return tuple(one.flatten() for one in (*before, own, table.gather(1, last) + first))


def convolved(taps: Taps) -> Function:
    """A causal convolution, each channel by itself: a sum of shifted columns, [batch, channels, columns]."""

    def tapped(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        batch, channels = x.shape[:2]
        columns, read = x.transpose(1, 2).flatten(0, 1), taps.columns.of(taps.layer, x)[:-1]
        terms = [columns.index_select(0, one) * weight[:, i] for i, one in enumerate(read)]
        result = sum(terms[1:], terms[0])
        result = result if bias is None else result + bias
        result = result if activation is None else ACT2FN[activation](result)
        result = result.reshape(batch, -1, channels)
        return taps.at(HookPoint.SsmConv(taps.layer), result).transpose(1, 2)

    return tapped


def recur(
    taps: Taps, q: Tensor, k: Tensor, v: Tensor, g: Tensor, strength: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y [batch, seq, n_heads, value] and the state [batch, n_heads, key, value] after the last token.

    q, k are [batch, seq, n_heads, key]; g, the log decay, [batch, seq, n_heads, 1 or key] or [batch, seq, n_heads, key,
    value]; `strength`, of the delta rule, [batch, seq, n_heads, 1].
    """
    layer, dtype = taps.layer, v.dtype
    q, k, v = (taps.at(point(layer), x) for point, x in ((HookPoint.SsmQ, q), (HookPoint.SsmK, k), (HookPoint.SsmV, v)))
    if strength is not None:
        strength = taps.at(HookPoint.SsmWrite(layer), strength)
    by_number = g.dim() == 5
    decays = taps.at(HookPoint.SsmLogDecay(layer), g.flatten(3) if by_number else g).clamp(min=FORGETS_ALL, max=0.0)
    g = decays.unflatten(3, g.shape[3:]) if by_number else decays
    wide = torch.promote_types(dtype, torch.float32)
    real = taps.mask[:, :, None, None].to(wide)
    q, k, v, g = q.to(wide), k.to(wide), v.to(wide) * real, g.to(wide) * (real[..., None] if by_number else real)
    state = taps.state(k, v)
    reads = [q, k, v, g, state] + ([] if strength is None else [strength.to(wide) * real])
    if torch.compiler.is_exporting():
        name = f"{RECURRENCE_DOMAIN}::{RECURRENCE}"
        y, state = torch.onnx.ops.symbolic_multi_out(
            name, reads, {"layer": layer}, dtypes=[wide, wide], shapes=[v.shape, state.shape], version=1
        )
    else:
        y, state = _loop(*reads)
    y = taps.at(HookPoint.SsmY(layer), y.to(dtype))
    return y, taps.keep_state(taps.at(HookPoint.SsmState(layer), state))


def _loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, strength: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    ys = []
    for t in range(v.shape[1]):
        state = state * (g[:, t] if g.dim() == 5 else g[:, t, :, :, None]).exp()
        key, written = k[:, t, :, :, None], v[:, t]
        if strength is not None:
            written = strength[:, t] * (written - (key * state).sum(-2))
        state = state + key * written[:, :, None]
        ys.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(ys, 1), state


def selective_scan(taps: Taps) -> Function:
    """Mamba: its channels share B and C, and are the value of one head; each number of the state has a decay."""

    # transformers' names: (hidden_states, dt, A, B, C), each [batch, channels or state, seq] but A [channels, state]
    def tapped(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        x, dt, k, q = (args[i].transpose(1, 2) for i in (0, 1, 3, 4))
        dt = taps.at(HookPoint.SsmDt(taps.layer), functional.softplus(dt + options["delta_bias"]))
        decay = dt[:, :, None, None] * args[2].t()
        y, state = recur(taps, q[:, :, None], k[:, :, None], (dt * x)[:, :, None], decay)
        gate = functional.silu(options["z"].transpose(1, 2))
        return ((y[:, :, 0] + x * options["D"]) * gate).transpose(1, 2), state

    return tapped


def chunk_scan(taps: Taps) -> Function:
    """Mamba-2: heads share B and C by groups, and have one decay each."""

    # transformers' names: (hidden_states, dt, A, B, C), each [batch, seq, n_heads or groups, ...] but A [n_heads]
    def tapped(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        x, dt, log_decay, k, q = args[:5]
        lowest, highest = options.get("dt_limit", (0.0, float("inf")))
        dt = functional.softplus(dt + options["dt_bias"])
        if (lowest, highest) != (0.0, float("inf")):
            dt = dt.clamp(min=lowest, max=highest)
        dt = taps.at(HookPoint.SsmDt(taps.layer), dt)
        q, k = (_repeated(one, x.shape[2]) for one in (q, k))
        y, state = recur(taps, q, k, x * dt[..., None], (dt * log_decay)[..., None])
        return y + options["D"][:, None] * x, state

    return tapped


def delta_rule(taps: Taps) -> Function:
    """The gated delta rule; Kimi's has decays by key."""

    def tapped(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        heads = value.shape[2]
        q, k = (_repeated(x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPSILON), heads) for x in (query, key))
        return recur(taps, q * key.shape[-1] ** -0.5, k, value, g if g.dim() == 4 else g[..., None], beta[..., None])

    return tapped


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[batch, seq, groups, size] for each head of a group."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2, output_size=heads)


def no_mask(*_: Any, **__: Any) -> None:
    """Stand in for a mask of tokens: here padding is masked where it is read."""


FUNCTIONS: dict[str, Callable[[Taps], Function]] = {
    "causal_conv1d_fn": convolved,
    "mamba_selective_scan": selective_scan,
    "mamba2_chunk_scan": chunk_scan,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "create_recurrent_attention_mask": lambda _: no_mask,
}


def tap_recurrences(stack: ExitStack, taps: Taps, mixer: nn.Module) -> None:
    """Replace the functions of a family's modelling module."""
    modeling = sys.modules[type(mixer).__module__]
    names = [name for name in FUNCTIONS if hasattr(modeling, name)]
    if "causal_conv1d_fn" not in names:
        raise ExportError(f"transformers' {modeling.__name__} has no causal_conv1d_fn: mionnx needs another release")
    for name in names:
        replace_for(stack, modeling, name, FUNCTIONS[name](taps))
