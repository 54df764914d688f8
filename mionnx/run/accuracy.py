"""The accuracy level of products with weights in blocks: floats for measuring, 8 bits for generating.

ONNX Runtime's MatMulNBits computes in floats at level 0. At level 4 it rounds what it reads to 8 bits, by blocks: two
to three times as fast in decoding, and different by what the rounding costs. A model that `mionnx.quantise` made
measures at level 0 and generates at level 4, unless `accuracy_level` says one for both. What a token reads is rounded
by itself, so that batches and caches change last bits alone, at either level.
"""

import warnings
from dataclasses import replace

from mionnx.bind.bound_spec import Binder
from mionnx.engine.options import ONNX_RUNTIME, PROVIDERS, Options
from mionnx.errors import InputError
from mionnx.graph.hooked_model import ROUNDING_LEVEL, HookedModel
from mionnx.graph.packed_weight import at_accuracy_level, attributes
from mionnx.machine.caller import caller_level
from mionnx.run.graph_pool import GraphPool


class GeneratingLevelWarning(UserWarning):
    """Generating rounds activations to 8 bits where measuring does not."""


class SlowBlocksWarning(UserWarning):
    """Products with weights of 8 bits are computed in floats, for which there is no fast kernel."""


def warn_of_slow_blocks(hooked: HookedModel, options: Options) -> None:
    """Warn of products with much more time than float32's, when a model is opened.

    ONNX Runtime (1.31, 1.32) has fast kernels on the CPU for 4 bits at both levels, for 8 bits only at level 4.
    """
    level = options.accuracy_level
    slow = sum(
        node.op_type == "MatMulNBits"
        and (given := attributes(node)).get("bits", 4) == 8
        and (given.get("accuracy_level", 0) if level is None else level) != ROUNDING_LEVEL
        for node in hooked.proto.graph.node
    )
    if slow and _on_cpu(options):
        warnings.warn(
            f"{slow} products with weights in 8 bits are computed in floats, many times slower than float32; "
            "accuracy_level=4 is fast and rounded",
            SlowBlocksWarning,
            stacklevel=caller_level(),
        )


def refuse_unpacked_blocks(model: str, in_blocks: bool, options: Options) -> None:
    """Refuse to open blocks unpacked: each product would make floats of all of them.

    Args:
        model: its name, for the message.
        in_blocks: whether it has weights in blocks, or would have once it is exported.
        options: how it is opened.

    Raises:
        InputError: `prepack=False`, for a model of blocks.
    """
    if in_blocks and options.prepack is False and options.engine == ONNX_RUNTIME:
        raise InputError(
            f"prepack=False has no effect on {model}: its weights are blocks, which are always packed (unpacked, "
            "every product would make floats of them first, and a token take 40 to 80 times as long); leave it out"
        )


class Rounding:
    """A model of blocks at the level that generates.

    Attributes:
        hooked: the same model, its products at level 4.
        variants: its open graphs.
        binder: binds specs to it.
    """

    def __init__(self, hooked: HookedModel, options: Options) -> None:
        self.hooked = at_level(hooked, ROUNDING_LEVEL)
        self.variants = GraphPool(self.hooked, replace(options, accuracy_level=ROUNDING_LEVEL))
        self.binder = Binder(self.hooked)
        warnings.warn(
            f"generate is faster with {hooked.metadata.weight_dtype} and rounded, forward is exact; accuracy_level=0 "
            "generates exactly, accuracy_level=4 measures what is generated",
            GeneratingLevelWarning,
            stacklevel=caller_level(),
        )


def at_level(hooked: HookedModel, level: int | None) -> HookedModel:
    """The same model with all products of blocks at one level; as it is for None.

    Raises:
        InputError: it has no such products.
    """
    if level is None:
        return hooked
    proto, products = at_accuracy_level(hooked.proto, level)
    if not products:
        raise InputError(
            f"accuracy_level={level} has no effect: {hooked.name} has no products with weights in blocks "
            '(MatMulNBits); from_pretrained(..., dtype="int4") makes some'
        )
    return replace(hooked, proto=proto)


def generates_rounded(hooked: HookedModel, options: Options) -> bool:
    """Whether a model generates at another level than it measures at: on a CPU only."""
    made = hooked.metadata.quantised
    unsaid = options.accuracy_level is None and _on_cpu(options)
    return unsaid and bool(made) and made.get("accuracy_level", 0) != ROUNDING_LEVEL


def _on_cpu(options: Options) -> bool:
    return options.engine == ONNX_RUNTIME and options.provider in ("cpu", PROVIDERS["cpu"])
