"""The oracle of the graph: a checkpoint run by transformers in eager torch, with a listener at every hook point."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from exporters.transformers.config import native_config
from exporters.transformers.heads import DECODER, TaskHead, head_of
from exporters.transformers.sentence import SENTENCE
from exporters.transformers.sentence import load as load_sentence
from exporters.transformers.trace import run_eagerly, run_once
from exporters.transformers.weights import beside_stream
from mionnx.errors import ModelError
from mionnx.graph.metadata import NEXT_TOKEN

# Token ids, attention mask, positions, of an encoder token types: [batch, seq] each.
TokenInputs = tuple[NDArray[Any], ...]
# Takes a hook point's name and value (bfloat16 as float32); returns the changed value, or None to keep it.
Listener = Callable[[str, NDArray[Any]], NDArray[Any] | None]
Opened = Callable[[TokenInputs, Listener], None]


def open_checkpoint(folder: Path, dtype: str, threads: int) -> Opened:
    """Load a checkpoint; returns a function that runs a batch and calls a listener at every hook point."""
    config = native_config(folder)
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        quantization["dequantize"] = True  # its floats, not its kernels
    with silent_transformers(None):  # `verify` has a bar of its own
        head = head_of(config, folder)
        model, missing = load(folder, config, dtype, head)
    if missing:
        raise ModelError(f"{folder} is no whole checkpoint: transformers finds no {sorted(missing)[0]!r} in it")

    def run(inputs: TokenInputs, listen: Listener) -> None:
        def tap(name: str, value: Tensor, stream: bool) -> Tensor:
            wide = value.float() if value.dtype == torch.bfloat16 else value  # numpy has no bfloat16
            result = listen(name, wide.detach().numpy().copy())
            if result is None:
                return value
            changed = torch.from_numpy(np.array(result)).to(value.dtype)
            return value.copy_(changed) if stream else changed

        tensors = tuple(map(torch.from_numpy, inputs))
        with _threads(threads):
            if head.kind == NEXT_TOKEN:
                ids, mask, positions = tensors[:3]
                run_eagerly(model, tap, ids, mask, positions, [])
            else:
                types = tensors[3:] or (torch.zeros_like(tensors[0]),)
                run_once(model, head, tap, (*tensors[:3], *types))

    return run


def load(folder: Path, config: Any, dtype: str, head: TaskHead = DECODER) -> tuple[PreTrainedModel, set[str]]:
    """Load a checkpoint in eager attention, with its head; the names of the weights that it lacks."""
    kind: Any = AutoModelForCausalLM if head.kind == NEXT_TOKEN else head.model_class(config)
    loaded: Any = kind.from_pretrained(
        folder,
        config=config,
        attn_implementation="eager",
        dtype=getattr(torch, dtype),
        output_loading_info=True,
        trust_remote_code=False,
    )
    model, info = loaded
    missing = {name for name in info["missing_keys"] if head.kind == NEXT_TOKEN or not beside_stream(name, model)}
    if head.sentence is not None:
        model.add_module(SENTENCE, load_sentence(head.sentence, getattr(torch, dtype)))
    return model.eval(), missing


@contextmanager
def silent_transformers(verbosity: int | None = logging.ERROR) -> Iterator[None]:
    """Hide transformers' progress bars, and its list of layers that are not loaded; None leaves what it says."""
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(level if verbosity is None else verbosity)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
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
