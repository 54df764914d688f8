"""Quirks of encoders whose tokens read those beside them: padding beside a text is as little as what is beyond it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from exporters.transformers.attention import Taps, replace_for
from exporters.transformers.taps import Attachment
from mionnx.graph.hook_points import HookPoint


class Bottlenecks(Attachment):
    """Taps around layers that compute attention and several MLPs on a narrower stream of their own."""

    def outside_blocks(self) -> None:
        super().outside_blocks()
        mask, transform = self.taps.mask, "cls.predictions.transform"
        if self.has(transform, self.model):  # behind which no module is called
            self.after(self.module(transform), partial(self.taps.at, HookPoint.MlmHead))
        # what tokens read of those beside them is zero beyond a text: padding is no text either
        self.after(self.model.get_input_embeddings(), lambda x: x * mask[..., None].to(x.dtype))

    def block(self, i: int, block: nn.Module) -> None:
        layout, at = self.layout, self.taps.at
        self.stream_before(i, block)
        self.name_layer(i, self.module(layout.attention, block))
        self.after(self.module(str(layout.mlp_added), block), partial(at, HookPoint.MlpOut(i)))
        self.before(self.module(str(layout.post_norm), block), partial(at, HookPoint.ResidPostSum(i)))
        self.stream_after(i, block)


class ConvolutionHeads(Attachment):
    """Taps on heads that attend, and behind them as many that convolve with kernels that each token makes.

    A convolution head has the query of the head so many before it, a key of its own position (made of the span around
    it) and a value. Its kernel stands in the columns of the keys that it weighs, as scores and pattern. Weights of
    neighbours that a text has not, which transformers fills with zeros, are lost to a row.
    """

    def own_attention(self, i: int, attention: nn.Module, mask: Tensor | None) -> None:
        own = self.module("self", attention)
        replace_for(self.stack, own, "forward", partial(attend, self.taps, i, own))


def attend(taps: Taps, layer: int, own: Any, hidden_states: Tensor, attention_mask: Tensor, **_: Any) -> Any:
    """z of all heads, [batch, seq, hidden], and their pattern."""
    count, kernel, dtype = own.num_attention_heads, own.conv_kernel_size, hidden_states.dtype

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    query, key, value = (heads(project(hidden_states)) for project in (own.query, own.key, own.value))
    span = heads(spans(own.key_conv_attn_layer, hidden_states * taps.mask[..., None].to(dtype)))
    query = taps.at(HookPoint.AttnQ(layer), torch.cat([query, query], 1))
    value = torch.cat([value, heads(own.conv_out_layer(hidden_states))], 1)
    key, value = taps.keep(torch.cat([key, span], 1), value, layer)
    (attending, convolving), (key, span) = query.split(count, 1), key.split(count, 1)
    attending = attending @ key.transpose(2, 3) / own.attention_head_size**0.5 + attention_mask
    weights = own.conv_kernel_layer((convolving * span).transpose(1, 2).flatten(2))
    scores, lost = placed(heads(weights), taps.mask)
    scores = taps.at(HookPoint.AttnScores(layer), torch.cat([attending, scores], 1))
    lost = torch.cat([torch.full_like(lost, torch.finfo(dtype).min), lost], 1)
    wide = torch.promote_types(dtype, torch.float32)
    shares = torch.softmax(torch.cat([scores, lost], -1), -1, dtype=wide).to(dtype)
    pattern = taps.at(HookPoint.AttnPattern(layer), shares.split([scores.shape[-1], kernel], -1)[0])
    taps.patterns[layer] = query, pattern
    return (pattern @ value).transpose(1, 2).flatten(2), pattern


def spans(layer: Any, x: Tensor) -> Tensor:
    """A separable convolution over [batch, seq, hidden], of zeros beyond the text."""
    weight, seq = layer.depthwise.weight.squeeze(1), x.shape[1]
    kernel = weight.shape[1]
    around = nn.functional.pad(x, (0, 0, kernel // 2, kernel // 2))
    terms = [around.narrow(1, j, seq) * weight[:, j] for j in range(kernel)]
    return nn.functional.linear(sum(terms[1:], terms[0]), layer.pointwise.weight.squeeze(2), layer.bias.squeeze(1))


def placed(weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [.., seq, seq] of kernels [batch, n_heads, seq, kernel] at the keys that they weigh, and others."""
    batch, count, seq, kernel = weights.shape
    lowest, middle = torch.finfo(weights.dtype).min, kernel // 2
    tokens, steps = torch.arange(seq, device=mask.device), torch.arange(kernel, device=mask.device)
    away = tokens - tokens[:, None] + middle  # [seq_q, seq_k]: which number of a kernel weighs a key
    near = (away >= 0) & (away < kernel) & (mask[:, None, None] != 0)
    at_keys = weights.gather(3, away.clamp(0, kernel - 1).expand(batch, count, seq, seq))
    there = nn.functional.pad(mask, (middle, middle))[:, tokens[:, None] + steps]  # [batch, seq, kernel]
    return torch.where(near, at_keys, lowest), torch.where(there[:, None] != 0, lowest, weights)
