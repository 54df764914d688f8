"""RWKV-4 in transformers, eager, its hook points seen and changed where they stand: the oracle of `rwkv`.

Each row is run alone and whole, since transformers hides no padding from a state. Taps are views of the model's own
tensors, so that an edit is a copy into one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from families import VOCAB, single_threaded
from oracle import Edits, Inputs, Outcome, apply
from torch import Tensor, nn
from transformers import RwkvConfig, RwkvForCausalLM

from mionnx import HookPoint, Intervention

# Hook points that transformers has no tensor of that an edit would reach: a decay is one number for all tokens, a state
# is read by the next call.
UNSEEN = ("hook_decay", "hook_state")
See = Callable[[str, Tensor], None]


def make_rwkv4(folder: Path, **changes: Any) -> RwkvForCausalLM:
    """Save a random model as a checkpoint, and return it; decays are from 0.2 to nearly 1, and its stream is halved."""
    single_threaded()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96}
    layers = {"num_hidden_layers": 3, "rescale_every": 2, "layer_norm_epsilon": 1e-4}
    model = RwkvForCausalLM(RwkvConfig(**{**sizes, **layers, "tie_word_embeddings": False, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("time_decay", "time_first")):
                weight.copy_(torch.randn_like(weight) - 1.5 * name.endswith("time_decay"))
            elif "time_mix" in name:
                weight.copy_(torch.rand_like(weight))
            elif weight.dim() > 1:
                size = 3.0 if name.endswith("attention.key.weight") else 1.0
                weight.copy_(torch.randn_like(weight) * size / weight.shape[-1] ** 0.5)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    return model


def run(model: RwkvForCausalLM, inputs: Inputs, edits: Edits = ()) -> Outcome:
    """What stands at the hook points of the tokens after the past, zeros at padding; edits reach these tokens alone."""
    outcome, (batch, seq) = Outcome(np.empty(0)), inputs.real.shape
    for row in range(batch):
        ids = torch.from_numpy(inputs.ids[row][inputs.mask[row].astype(bool)])[None]
        past = int(inputs.mask[row, : inputs.past].sum())
        for name, value in _alone(model, ids, past, inputs, row, edits).items():
            sequence = "seq" in HookPoint.parse(name).axes
            shape = (batch, seq, *value.shape[1:]) if sequence else (batch, *value.shape)
            whole = outcome.values.setdefault(name, np.zeros(shape, np.float32))
            whole[(row, inputs.real[row]) if sequence else row] = value
    outcome.logits = outcome.values[str(HookPoint.Logits)]
    return outcome


def _alone(
    model: RwkvForCausalLM, ids: Tensor, past: int, inputs: Inputs, row: int, edits: Edits
) -> dict[str, np.ndarray]:
    """One text: hook point -> [tokens after the past, ...], or a state."""
    values: dict[str, np.ndarray] = {}
    positions = torch.arange(past, ids.shape[1])[None]
    of_row = [(point, _for_row(edit, point, inputs, row)) for point, edit in edits if _selects(edit, row)]

    def see(name: str, value: Tensor) -> None:
        point = HookPoint.parse(name)
        seen = value[:, past:] if "seq" in point.axes else value
        for one, edit in of_row:
            if one.name == name:
                seen.copy_(apply(seen, point, edit, positions, torch.tensor([ids.shape[1]]), positions))
        values[name] = seen[0].numpy().copy()

    with torch.no_grad(), ExitStack() as stack:
        _attach(model, see, stack)
        see(str(HookPoint.Logits), model(input_ids=ids, use_cache=True).logits)
    return values


def _selects(edit: Intervention, row: int) -> bool:
    return edit.rows is None or row in edit.rows


def _for_row(edit: Intervention, point: HookPoint, inputs: Inputs, row: int) -> Intervention:
    """The edit of one row: a replacement for all rows and their padding is cut to it."""
    own = replace(edit, rows=None)
    if edit.kind != "replace" or np.ndim(edit.value) != len(point.axes):
        return own
    part = np.asarray(edit.value)[row]
    return replace(own, value=part[inputs.real[row]][None])


def _attach(model: RwkvForCausalLM, see: See, stack: ExitStack) -> None:
    def after(module: nn.Module, name: str) -> None:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            see(name, output[0] if isinstance(output, tuple) else output)

        stack.callback(module.register_forward_hook(hook).remove)

    def before(module: nn.Module, name: str) -> None:
        stack.callback(module.register_forward_pre_hook(lambda _, args: see(name, args[0])).remove)

    network = model.rwkv
    after(network.embeddings, "hook_embed")
    after(network.ln_out, "hook_final_norm")
    layers = iter(range(len(network.blocks)))
    for i, block in enumerate(network.blocks):
        where = f"blocks.{i}"
        if i:
            before(block, f"{where}.hook_resid_pre")
        else:
            after(block.pre_ln, f"{where}.hook_resid_pre")
        after(block.attention, f"{where}.hook_attn_out")
        before(block.ln2, f"{where}.hook_resid_mid")
        after(block.ln2, f"{where}.mlp.hook_pre")
        before(block.feed_forward.value, f"{where}.mlp.hook_act")
        after(block.feed_forward, f"{where}.hook_mlp_out")
        after(block, f"{where}.hook_resid_post")
        reads = partial(_reads, block.attention.extract_key_value, see, where)
        stack.enter_context(patch.object(block.attention, "extract_key_value", reads))
    modeling = sys.modules[type(model).__module__]
    wkv = partial(_wkv, modeling.rwkv_linear_attention, see, layers)
    stack.enter_context(patch.object(modeling, "rwkv_linear_attention", wkv))


def _reads(original: Callable[..., Any], see: See, where: str, *args: Any, **options: Any) -> Any:
    receptance, key, value, state = original(*args, **options)
    for short, tensor in (("r", receptance), ("k", key), ("v", value)):
        see(f"{where}.rwkv.hook_{short}", tensor.unsqueeze(2))
    return receptance, key, value, state


def _wkv(original: Callable[..., Any], see: See, layers: Any, decay: Tensor, *args: Any, **options: Any) -> Any:
    where = f"blocks.{next(layers)}.rwkv"
    key = args[1]
    see(f"{where}.hook_decay", torch.exp(-torch.exp(decay)).expand(*key.shape[:2], 1, -1).clone())
    wkv, state = original(decay, *args, **options)
    see(f"{where}.hook_wkv", wkv.unsqueeze(2))
    see(f"{where}.hook_state", torch.stack(state, 1)[:, None])
    return wkv, state
