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

from exporters.transformers.native_config import native_config
from exporters.transformers.trace import run_eagerly
from mionnx.errors import ModelError

TokenInputs = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # token ids, attention mask, positions: [batch, seq] each
# Takes a hook point's name and value (bfloat16 as float32); returns the changed value, or None to keep it.
Listener = Callable[[str, NDArray[Any]], NDArray[Any] | None]
Opened = Callable[[TokenInputs, Listener], None]


def open_checkpoint(folder: Path, dtype: str, threads: int) -> Opened:
    """Load a checkpoint.

    Args:
        folder: with `config.json` and all of its weights.
        dtype: "float32", "float16" or "bfloat16".
        threads: of torch; 0 leaves them.

    Returns:
        a function that runs one token batch without a past, and calls a listener at every hook point.

    Raises:
        ModelError: weights are missing.
        ExportError: see `native_config`.
    """
    with _without_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=_in_floats(native_config(folder)),
            attn_implementation="eager",
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, info = loaded
    if info["missing_keys"]:
        name = sorted(info["missing_keys"])[0]
        raise ModelError(f"{folder} is no whole checkpoint: transformers finds no {name!r} in it")
    model.eval()

    def run(inputs: TokenInputs, listen: Listener) -> None:
        with _threads(threads):
            _run(model, inputs, listen)

    return run


def _in_floats(config: Any) -> Any:
    """Ask transformers for the floats of a checkpoint of MXFP4, not for its kernels."""
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        quantization["dequantize"] = True
    return config


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide transformers' progress bars: `verify` has one of its own."""
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


def _run(model: PreTrainedModel, inputs: TokenInputs, listen: Listener) -> None:
    def tap(name: str, value: Tensor, stream: bool) -> Tensor:
        result = listen(name, _array(value))
        if result is None:
            return value
        changed = torch.from_numpy(np.array(result)).to(value.dtype)
        return value.copy_(changed) if stream else changed

    ids, mask, positions = map(torch.from_numpy, inputs)
    run_eagerly(model, tap, ids, mask, positions, [])


def _array(value: Tensor) -> NDArray[Any]:
    wide = value.float() if value.dtype == torch.bfloat16 else value
    return wide.detach().numpy().copy()
