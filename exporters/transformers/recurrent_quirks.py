"""Quirks of families with recurrent mixers."""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from exporters.transformers.attention import TappedCache, replace_for
from exporters.transformers.recurrent import FORGETS_ALL, convolved, no_mask, recur
from exporters.transformers.taps import Attachment
from mionnx.graph.hook_points import HookPoint


class LightningAttention(Attachment):
    """Linear attention whose heads forget at a rate each, in blocks that weigh the normed stream and what they add."""

    def recurrences(self, mixer: nn.Module) -> None:
        """Let the model take our cache; a mixer's forward is written anew."""
        modeling = sys.modules[type(mixer).__module__]
        replace_for(self.stack, modeling, "MiniMaxCache", TappedCache)
        replace_for(self.stack, modeling, "create_recurrent_attention_mask", no_mask)

    def block(self, i: int, block: Any) -> None:
        super().block(i, block)
        at = self.taps.at

        def forward(hidden_states: Tensor, **options: Any) -> Tensor:
            x = block.input_layernorm(hidden_states)
            out = block.self_attn(hidden_states=x, **options)[0] * block.attn_beta_factor
            x = at(HookPoint.ResidMid(i), x * block.attn_alpha_factor + at(HookPoint.AttnOut(i), out))
            x = block.post_attention_layernorm(x)
            return x * block.mlp_alpha_factor + at(HookPoint.MlpOut(i), block.mlp(x) * block.mlp_beta_factor)

        replace_for(self.stack, block, "forward", forward)

    def first_addition(self, i: int, block: nn.Module, mixer: nn.Module | None) -> None:
        """Nothing: factors stand between modules and the stream."""

    def second_addition(self, i: int, block: nn.Module) -> None:
        """Nothing, for the same reason."""

    def mixer(self, i: int, mixer: Any) -> None:
        super().mixer(i, mixer)

        def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
            heads = mixer.act_fn(mixer.qkv_proj(hidden_states)).unflatten(-1, (mixer.num_attention_heads, -1))
            q, k, v = heads.split(mixer.head_dim, -1)
            decay = -mixer.slope_rate.flatten()[:, None] * torch.ones_like(v[..., :1])
            y = mixer.norm(recur(self.taps, q, k, v, decay)[0].flatten(2))
            return mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden_states)) * y), None

        replace_for(self.stack, mixer, "forward", forward)


class LinearUnits(Attachment):
    """Griffin's mixer, a gated linear recurrence of channels, whose code keeps its state in its module."""

    def recurrences(self, mixer: nn.Module) -> None:
        """Nothing: a mixer's forward is written anew."""

    def mixer(self, i: int, mixer: Any) -> None:
        super().mixer(i, mixer)
        unit, taps = mixer.rg_lru, self.taps

        def gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            heads = x.unflatten(-1, (len(weight), -1)).flatten(0, 1).transpose(0, 1) @ weight + bias[:, None]
            return torch.sigmoid(heads.transpose(0, 1).flatten(1).view_as(x))

        def forward(stream: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
            kernel = mixer.conv_1d.weight.squeeze(1)
            columns: Any = taps.cache
            columns = columns.update_conv_state(mixer.linear_x(stream).transpose(1, 2), i)
            x = convolved(taps)(columns, kernel, mixer.conv_1d.bias).transpose(1, 2)
            first = position_ids[..., None] == 0  # of a text, which reads no state
            forget = gate(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
            log_decay = -8.0 * forget * nn.functional.softplus(unit.recurrent_param)
            size = torch.where(first, 1.0, torch.sqrt(1 - torch.exp(2 * log_decay)))
            written = x * gate(x, unit.input_gate_weight, unit.input_gate_bias) * size.type_as(x)
            log_decay = torch.where(first, FORGETS_ALL, log_decay)
            one = torch.ones_like(written[..., None, :1])
            y = recur(taps, one, one, written[:, :, None], log_decay[:, :, None, None])[0]
            return mixer.linear_out(y[:, :, 0] * mixer.act_fn(mixer.linear_y(stream))), None

        replace_for(self.stack, mixer, "forward", forward)


class SideBySide(Attachment):
    """Taps on attention and a mixer that read the same norm, and join the stream together, each behind a factor."""

    def attends(self, block: nn.Module) -> bool:
        return True

    def block(self, i: int, block: Any) -> None:
        super().block(i, block)
        at = self.taps.at
        self.name_layer(i, block.self_attn)
        self.heads(i, block)

        def forward(hidden_states: Tensor, mamba_attention_mask: Any = None, **options: Any) -> tuple[Tensor]:
            x = block.input_layernorm(hidden_states)
            mixed = block.mamba(x, cache=options["cache"], attention_mask=mamba_attention_mask)
            mixed = at(HookPoint.SsmOut(i), mixed * block.ssm_out_multiplier)
            attended = block.self_attn(hidden_states=x * block.attention_in_multiplier, **options)[0]
            attended = at(HookPoint.AttnOut(i), attended * block.attn_out_multiplier)
            x = at(HookPoint.ResidMid(i), hidden_states + (mixed + attended))
            return (x + at(HookPoint.MlpOut(i), block.feed_forward(block.pre_ff_layernorm(x))),)

        replace_for(self.stack, block, "forward", forward)

    def first_addition(self, i: int, block: nn.Module, mixer: nn.Module | None) -> None:
        """Nothing: factors stand between modules and the stream."""

    def second_addition(self, i: int, block: nn.Module) -> None:
        """Nothing: a block's forward is written anew."""


class OneHalf(Attachment):
    """Taps on blocks of one half each: a mixer, attention, or an MLP."""

    def attends(self, block: Any) -> bool:
        return bool(block.block_type == "full_attention")

    def block(self, i: int, block: Any) -> None:
        if block.block_type in ("mlp", "moe"):
            self.stream_before(i, block)
            self.mlp(i, block)
            self.second_addition(i, block)
            self.stream_after(i, block)
        else:
            Attachment(self.model, replace(self.layout, mlp=None), self.taps, self.stack).block(i, block)


class SharedBlocks(Attachment):
    """Taps on a transformer block in front of a mixer, which reads the stream and what the block gives.

    The mixer alone adds to the stream; the block is attention, an MLP and a projection one after another.
    """

    def attends(self, block: nn.Module) -> bool:
        return self.has(self.layout.attention, block)

    def block(self, i: int, block: nn.Module) -> None:
        layout = self.layout
        self.layout = replace(layout, mlp=None)
        super().block(i, block)
        self.layout = layout
        if self.attends(block):
            self.name_layer(i, self.module(layout.attention, block))
            self.heads(i, block)
            self.mlp(i, block)
            self.after(self.module("linear", block), partial(self.taps.at, HookPoint.SsmShared(i)))


class SelectiveHeads(SharedBlocks):
    """Mamba's scan in several heads, each with what addresses, reads and steps of its own."""

    def mixer(self, i: int, mixer: Any) -> None:
        super().mixer(i, mixer)
        taps, size, heads = self.taps, mixer.ssm_state_size, mixer.n_mamba_heads

        def by_head(x: Tensor, weight: Tensor) -> Tensor:
            """[batch, seq, n_heads, inputs] by a product of each head, [n_heads, outputs, inputs]."""
            return (x.transpose(1, 2) @ weight.transpose(1, 2)).transpose(1, 2)

        def forward(hidden_states: Tensor, **_: Any) -> Tensor:
            columns: Any = taps.cache
            x, gate = mixer.in_proj(hidden_states).unflatten(-1, (-1, 2)).unbind(-1)
            columns = columns.update_conv_state(x.transpose(1, 2), i)
            conv = mixer.conv1d
            x = convolved(taps)(columns, conv.weight.squeeze(1), conv.bias, activation=mixer.activation).transpose(1, 2)
            x, gate = x.unflatten(-1, (heads, -1)), gate.unflatten(-1, (heads, -1))
            step, k, q = by_head(x, mixer.x_proj_weight).split([mixer.time_step_rank, size, size], -1)
            dt = nn.functional.softplus(by_head(step, mixer.dt_proj_weight) + mixer.dt_proj_bias)
            dt = taps.at(HookPoint.SsmDt(i), dt.flatten(2)).unflatten(-1, (heads, -1))
            decay = dt[:, :, :, None] * -torch.exp(mixer.A_log.float()).transpose(1, 2)
            y = recur(taps, q, k, dt * x, decay)[0]
            return mixer.out_proj(((y + mixer.D * x) * nn.functional.silu(gate)).flatten(2))

        replace_for(self.stack, mixer, "forward", forward)
