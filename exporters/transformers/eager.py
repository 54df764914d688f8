"""A checkpoint run by transformers in eager torch, every hook point's value handed on: the oracle of the graph."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from exporters.transformers.trace import run_eagerly
from mionnx.bind.selection import Selection
from mionnx.errors import ModelError
from mionnx.inputs.token_batch import TokenBatch
from mionnx.rewrite.plan import Edit
from mionnx.spec.intervention import Intervention

Edits = Sequence[tuple[Edit, Intervention]]
Sink = Callable[[str, NDArray[Any]], None]
Opened = Callable[[TokenBatch, Edits, Sink], None]


def open_checkpoint(folder: Path, dtype: str, threads: int) -> Opened:
    """Load a checkpoint.

    Args:
        folder: with `config.json` and all of its weights.
        dtype: "float32", "float16" or "bfloat16".
        threads: of torch; 0 leaves them.

    Returns:
        a function that runs one call without a past, and hands on what each hook point has after its interventions.

    Raises:
        ModelError: weights are missing.
    """
    with _without_bars():
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=getattr(torch, dtype), output_loading_info=True
        )
    if info["missing_keys"]:
        name = sorted(info["missing_keys"])[0]
        raise ModelError(f"{folder} is no whole checkpoint: transformers finds no {name!r} in it")
    model.eval()

    def run(call: TokenBatch, edits: Edits, sink: Sink) -> None:
        with _threads(threads):
            _run(model, call, edits, sink)

    return run


@contextmanager
def _without_bars() -> Iterator[None]:
    """The comparison shows how far it is; transformers' own bars would lie across."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(model: PreTrainedModel, call: TokenBatch, edits: Edits, sink: Sink) -> None:
    def listen(name: str, value: Tensor, stream: bool) -> Tensor:
        changed = value
        for edit, intervention in edits:
            if edit.hook == name:
                changed = _apply(changed, edit, intervention, call)
        if stream and changed is not value:
            changed = value.copy_(changed)
        sink(name, _array(changed))
        return changed

    inputs = (torch.from_numpy(array) for array in (call.input_ids, call.attention_mask, call.position_ids))
    run_eagerly(model, listen, *inputs, _no_past(model, call.batch))


def _array(value: Tensor) -> NDArray[Any]:
    wide = value.float() if value.dtype == torch.bfloat16 else value
    return wide.detach().numpy().copy()


def _no_past(model: PreTrainedModel, batch: int) -> list[tuple[Tensor, Tensor]]:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    empty = torch.zeros(batch, heads, 0, width, dtype=model.dtype)
    return [(empty, empty) for _ in range(config.num_hidden_layers)]


def _apply(value: Tensor, edit: Edit, intervention: Intervention, call: TokenBatch) -> Tensor:
    """An intervention in torch: the changed value where it is selected, the old one elsewhere."""
    place = Selection(edit, intervention, tuple(value.shape), call)
    given = torch.empty(0)
    if intervention.value is not None:
        given = torch.from_numpy(place.value(intervention.value, np.float32).copy()).to(value.dtype)
    if edit.kind == "zero":
        changed = torch.zeros_like(value)
    elif edit.kind == "scale":
        changed = value * given
    elif edit.kind == "replace":
        changed = given.expand_as(value)
    elif edit.kind == "project_out":
        rows = given.reshape(-1, given.shape[-1])
        changed = value - torch.einsum("...w,kw,kv->...v", value, rows, rows)
    else:  # add, and a knockout's mask, which is added to the scores
        changed = value + given
    return torch.where(torch.from_numpy(place.selected()), changed, value)
