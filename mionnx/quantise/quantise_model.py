"""`MIModel.quantise`: an open model's weights as blocks of 4 or 8 bits, written to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.progress import bars
from mionnx.machine.typed import typed
from mionnx.quantise.quantise import quantise
from mionnx.quantise.settings import Quantisation


class Hooked(Protocol):
    """Anything that has a hooked model, such as `MIModel`."""

    hooked: HookedModel


@typed()
def quantise_model(
    model: Hooked,
    folder: str | Path,
    *,
    bits: int = 4,
    block_size: int = 32,
    symmetric: bool = True,
    accuracy_level: int = 0,
    keep: Sequence[str] = (),
    in_8_bits: Sequence[str] = (),
    embedding: bool = True,
    unembedding: bool = True,
) -> Path:
    """Write the model with its weights quantised, as a hooked model with all of its hook points.

    Products become ONNX Runtime's `MatMulNBits`, the token table `GatherBlockQuantized`. Norms, biases, routers and
    stacked experts keep their floats. `from_pretrained(..., dtype="int4")` does the same with the defaults, into the
    store.

    Args:
        folder: path of a folder that does not exist yet.
        bits: 4 or 8 of a number.
        block_size: neighbouring numbers of a row that share a scale: 16, 32, 64, 128 or 256.
        symmetric: a block has a scale; if False, a zero point too.
        accuracy_level: 0: products in floats, every hook point within 5e-5 of the same numbers in float32; 4: ONNX
            Runtime rounds what a product reads to 8 bits, faster and less exact.
        keep: names or globs of weights that stay in floats.
        in_8_bits: names or globs of weights that take 8 bits, where the others take 4.
        embedding, unembedding: whether the token table and the unembedding are quantised.

    Returns:
        the folder.

    Raises:
        InputError: other settings.
        ModelError: the folder exists or cannot be written, a pattern names no weight, or nothing is left to quantise.

    Example:
        small = MIModel.from_pretrained(model.quantise("world-int4", in_8_bits=["*down_proj*"]))
    """
    settings = Quantisation(
        bits, block_size, symmetric, accuracy_level, tuple(keep), tuple(in_8_bits), embedding, unembedding
    )
    with bars() as progress:
        return quantise(model.hooked, Path(folder), settings, progress)
