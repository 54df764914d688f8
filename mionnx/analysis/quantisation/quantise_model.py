"""`MIModel.quantise`: an open model's weights as blocks of 4 or 8 bits, written to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mionnx.analysis.quantisation.quantise_by_text import quantise_by_text
from mionnx.errors import InputError
from mionnx.machine.progress import shown
from mionnx.machine.typed import typed
from mionnx.quantise.quantise import quantise
from mionnx.quantise.settings import Quantisation
from mionnx.run.runner import Runner


@typed()
def quantise_model(
    model: Runner,
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
    budget: float | None = None,
    texts: str | Sequence[str] | None = None,
    importance: bool | str | Sequence[str] = False,
) -> Path:
    """Write the model with its weights quantised, as a hooked model with all of its hook points.

    Products become ONNX Runtime's `MatMulNBits`, the token table `GatherBlockQuantized`. Norms, biases and
    routers keep their floats. `from_pretrained(..., dtype="int4")` does the same with the defaults, into the
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
        budget: a bound of KL(floats || blocks) in nats, the mean over the tokens of a text: the matrices that cost most
            KL for a byte take 8 bits, or floats if 8 bits for all do not do, until the written model is within it. The
            choice, KL and the text's hash are in the metadata (`hooked.metadata.quantised["budget"]`).
        texts: to measure on, in windows of 256 tokens; if left out, what the model writes by itself (1,024 tokens).
        importance: choose the scales of blocks of 4 bits by least squares, each input weighted with its mean square, on
            what the model writes by itself, or on texts given here (llama.cpp's importance matrix): the same bytes, and
            on SmolLM2 a KL of 0.23 in place of 0.39.

    Returns:
        the folder.

    Raises:
        InputError: other settings; texts without a budget.
        ModelError: a budget that cannot be met (the best is said); the folder exists or cannot be written, a pattern
            names no weight, or nothing is left to quantise.

    Example:
        small = MIModel.from_pretrained(model.quantise("world-int4", in_8_bits=["*down_proj*"]))
    """
    settings = Quantisation(
        bits, block_size, symmetric, accuracy_level, tuple(keep), tuple(in_8_bits), embedding, unembedding
    )
    if budget is None and texts is not None:
        raise InputError("texts= is what a budget is measured on: give budget= too")
    with shown() as progress:
        if budget is not None or importance:
            return quantise_by_text(model, Path(folder), settings, budget, texts, importance, progress)
        return quantise(model.hooked, Path(folder), settings, progress)
