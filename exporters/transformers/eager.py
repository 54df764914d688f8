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
from exporters.transformers.trace import run_eagerly
from mionnx.errors import ModelError

TokenInputs = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # token ids, attention mask, positions: [batch, seq] each
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
        model, missing = load(folder, config, dtype)
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

        ids, mask, positions = map(torch.from_numpy, inputs)
        with _threads(threads):
            run_eagerly(model, tap, ids, mask, positions, [])

    return run


def load(folder: Path, config: Any, dtype: str) -> tuple[PreTrainedModel, set[str]]:
    """Load a checkpoint in eager attention; the names of the weights that it lacks."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        attn_implementation="eager",
        dtype=getattr(torch, dtype),
        output_loading_info=True,
        trust_remote_code=False,
    )
    model, info = loaded
    return model.eval(), {*info["missing_keys"]}


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
