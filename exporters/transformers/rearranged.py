"""Models rearranged in place, so that a layer is one module and its axes are batch, sequence, channels.

The weights stay those of the checkpoint, under the names of the modules that have them afterwards.
"""

import re
from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from exporters.transformers.families import layout_in, layout_of

GATHERED = "layers"  # the module that holds blocks made of lists of parts


def rearrange(model: PreTrainedModel) -> None:
    """Rearrange a model whose layout says so, in place; once."""
    layout = layout_in(model)
    if layout.shared is not None:
        _write_out_shared(model, layout.shared)
    if layout.parts:
        _gather(getattr(model, model.base_model_prefix, model), layout.parts)
    if layout.channels_first:
        _channels_last(model.get_submodule(layout.blocks.rpartition(".")[0]))


def rearranged_name(name: str, model: PreTrainedModel) -> str:
    """The name that a weight of a checkpoint has in the rearranged model: "ffns.3.lin1" is "layers.3.ffns.lin1"."""
    parts = "|".join(layout_of(model.config).parts)
    return re.sub(rf"(^|\.)({parts})\.(\d+)\.", rf"\1{GATHERED}.\3.\2.", name, count=1) if parts else name


def _write_out_shared(model: PreTrainedModel, shared: str) -> None:
    """Give each layer that shares a group's parameters a module of its own on them."""
    config = model.config
    groups: Any = model.get_submodule(shared)
    if len(groups) == config.num_hidden_layers:  # type: ignore[arg-type]
        return
    layers = []
    for layer in range(config.num_hidden_layers):
        group = groups[layer * len(groups) // config.num_hidden_layers]
        memo = {id(one): one for one in (*group.parameters(), *group.buffers(), config)}
        layers.append(deepcopy(group, memo))  # `copy` would share its hooks
    config.num_hidden_groups = config.num_hidden_layers
    model.set_submodule(shared, nn.ModuleList(layers))


class Gathered(nn.Module):
    """A layer of XLM: its attention, its MLP and their norms, which the model keeps in lists."""

    def __init__(self, parts: dict[str, nn.Module], pre_norm: bool) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        for name, module in parts.items():
            self.add_module(name, module)

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        """The stream behind the layer; `mask` is [batch, seq]."""
        parts = self._modules
        attend, mlp, first, second = (parts[name] for name in ("attentions", "ffns", "layer_norm1", "layer_norm2"))
        if self.pre_norm:
            hidden_states = hidden_states + attend(first(hidden_states), mask)[0]
            return hidden_states + mlp(second(hidden_states))
        hidden_states = first(hidden_states + attend(hidden_states, mask)[0])
        return second(hidden_states + mlp(hidden_states))


def _gather(base: Any, lists: tuple[str, ...]) -> None:
    if hasattr(base, GATHERED):
        return
    parts = {name: base._modules.pop(name) for name in lists}
    blocks = [dict(zip(parts, one, strict=True)) for one in zip(*parts.values(), strict=True)]
    base.add_module(GATHERED, nn.ModuleList([Gathered(one, getattr(base, "pre_norm", False)) for one in blocks]))
    base.forward = MethodType(_run_gathered, base)


def _run_gathered(
    base: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, **_: Any
) -> BaseModelOutput:
    """XLM without languages, and without the zeros that it writes over padding, which no token reads."""
    stream = base.layer_norm_emb(base.embeddings(input_ids) + base.position_embeddings(position_ids))
    for block in base.layers:
        stream = block(stream, attention_mask)
    return BaseModelOutput(last_hidden_state=stream)


class ChannelProduct(nn.Linear):
    """A convolution over one column: a product with as many blocks of a matrix as it has groups."""

    def __init__(self, convolution: nn.Conv1d) -> None:
        nn.Module.__init__(self)
        self.groups, self.in_features = convolution.groups, convolution.in_channels
        self.out_features = convolution.out_channels
        self.weight = nn.Parameter(convolution.weight.squeeze(2), convolution.weight.requires_grad)
        self.bias: Any = convolution.bias

    def forward(self, input: Tensor) -> Tensor:
        """Channels come last, [.., seq, in], and go last."""
        if self.groups == 1:
            return super().forward(input)
        parts = zip(input.chunk(self.groups, -1), self.weight.chunk(self.groups), strict=True)
        return torch.cat([nn.functional.linear(part, weight) for part, weight in parts], -1) + self.bias


def _channels_last(encoder: Any) -> None:
    """Let SqueezeBERT's layers compute on [batch, seq, channels], and give the stream alone."""
    for block in encoder.layers:
        for name, module in [*block.named_modules()]:
            if isinstance(module, nn.Conv1d):
                block.set_submodule(name, ChannelProduct(module))
            elif isinstance(module, nn.LayerNorm):
                vars(module)["forward"] = MethodType(nn.LayerNorm.forward, module)
        attention = block.attention
        attention.transpose_for_scores = MethodType(_heads, attention)
        attention.transpose_key_for_scores = MethodType(_keys, attention)
        attention.transpose_output = MethodType(_merged, attention)
        block.forward = MethodType(_run_block, block)
    encoder.forward = MethodType(_run_encoder, encoder)


def _heads(attention: Any, x: Tensor) -> Tensor:
    return x.unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)


def _keys(attention: Any, x: Tensor) -> Tensor:
    return _heads(attention, x).transpose(2, 3)


def _merged(_attention: Any, x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _run_block(block: Any, hidden_states: Tensor, mask: Tensor) -> Tensor:
    attended = block.attention(hidden_states, mask, False)["context_layer"]
    middle = block.post_attention(attended, hidden_states)
    return block.output(block.intermediate(middle), middle)


def _run_encoder(encoder: Any, hidden_states: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
    for block in encoder.layers:
        hidden_states = block(hidden_states, attention_mask)
    return BaseModelOutput(last_hidden_state=hidden_states)
