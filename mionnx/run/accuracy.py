"""The accuracy level of products with weights in blocks: floats, or 8 bits, for passes and generations alike.

ONNX Runtime's MatMulNBits computes in floats at level 0. At level 4 it rounds what it reads to 8 bits, by blocks: some
1.5 times as fast in decoding, and different by what the rounding costs. A product computes each row by itself, with the
same bits in any batch. But a sum of attention over padding, or over a past, has other last bits, and a value between
two steps is then rounded to the other one: the logits of SmolLM2 move by up to 0.9 of 17 for a change of 1e-7 in its
stream, as much as the rounding costs. At level 0 batches and pasts change last bits alone.

Activations of a dynamically quantised model are rounded with one scale for all tokens of a call, which is said.
"""

import warnings
from dataclasses import replace

from mionnx.engine.options import Options
from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.packed_weight import at_accuracy_level
from mionnx.machine.caller import caller_level


def refuse_unpacked_blocks(model: str, in_blocks: bool, options: Options) -> None:
    """Refuse to open blocks unpacked: each product would make floats of all of them.

    Args:
        in_blocks: whether it has weights in blocks, or would have once it is exported.

    Raises:
        InputError: `prepack=False`, for a model of blocks.
    """
    if in_blocks and options.prepack is False:
        raise InputError(
            f"prepack=False has no effect on {model}: its weights are blocks, which are always packed (unpacked, "
            "every product would make floats of them first, and a token take 40 to 80 times as long); leave it out"
        )


def at_level(hooked: HookedModel, level: int | None) -> HookedModel:
    """The same model with all products of blocks at one level; as it is for None."""
    if level is None:
        return hooked
    proto, products = at_accuracy_level(hooked.proto, level)
    if not products:
        raise InputError(
            f"accuracy_level={level} has no effect: {hooked.name} has no products with weights in blocks "
            '(MatMulNBits); from_pretrained(..., dtype="int4") makes some'
        )
    return replace(hooked, proto=proto)


class DynamicRoundingWarning(UserWarning):
    """Activations are rounded with one scale for a call: batches change results."""


def warn_of_dynamic_rounding(model: HookedModel) -> None:
    """Warn of a dynamically quantised model, when it is opened."""
    if model.rounds_by_call:
        warnings.warn(
            f"{model.name} rounds its activations to 8 bits with one scale for all tokens of a call (dynamic "
            "quantisation): rows of a batch, padding, earlier positions and cached decoding change each other's "
            "results by about the size of a step. Sweeps run one cell a call, all positions of it",
            DynamicRoundingWarning,
            stacklevel=caller_level(),
        )
