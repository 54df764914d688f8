"""`choose`: which weights of a model become blocks, and why the others do not."""

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod

from mionnx.errors import ModelError, nearest
from mionnx.graph import onnx_file
from mionnx.graph.blocks import GivenBlocks
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.brief import count
from mionnx.machine.caller import caller_level
from mionnx.quantise.matrices import FLOAT_TYPES, ExpertStack, WeightUses, rows_of
from mionnx.quantise.quantised_graph import Matrix, order_of_all
from mionnx.quantise.settings import Quantisation

ASKED = "as asked"
MOST_NODES = 30_000  # of a graph whose experts have nodes of their own
NO_PRODUCT = "no product with a matrix reads it (a router, a convolution)"


class FewBlocksWarning(UserWarning):
    """Most of a model's weights stay in floats, or its token table does."""


@dataclass
class Choice:
    """The weights of a model, by what becomes of them."""

    matrices: dict[str, Matrix] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)  # weight of two or more axes that stays in floats -> the reason
    stacks: list[str] = field(default_factory=list)  # weights of stacked experts, whose matrices are among `matrices`
    # bytes_in_blocks, bytes_left: what both take in the model of floats.
    bytes_in_blocks: int = 0
    bytes_left: int = 0

    def to_entry(self) -> dict[str, int]:
        entry = {"matrices": len(self.matrices), "matrices_left": len(self.left)}
        return entry | {"bytes_in_blocks": self.bytes_in_blocks, "bytes_left": self.bytes_left}


def choose(
    model: HookedModel, uses: WeightUses, settings: Quantisation, own_blocks: Mapping[str, GivenBlocks] | None = None
) -> Choice:
    """Choose the weights of blocks beside a checkpoint's `own_blocks`; warn if most of the model stays in floats."""
    choice, own_blocks = Choice(), own_blocks or {}
    for product in uses.products:
        if product.weight in own_blocks:
            choice.matrices[product.weight] = _matrix(product.weight, product.turned, settings, own_blocks)
        elif settings.keeps(product.weight) or (product.head and not settings.unembedding):
            choice.left.setdefault(product.weight, ASKED)
        elif (width := rows_of(model, product.weight, product.turned).shape[1]) < settings.block_size:
            choice.left[product.weight] = f"{width} numbers in a row, a block has {settings.block_size}"
        else:
            matrix = _matrix(product.weight, product.turned, settings, own_blocks)
            earlier = choice.matrices.setdefault(product.weight, matrix)
            if earlier.turned != product.turned:
                raise ModelError(f"{product.weight} is read as it is and turned: it cannot be blocks of either")
    for stack in uses.stacks:
        _add_stack(model, stack, settings, choice, own_blocks)
    unread = _add_table(model, uses, settings, choice, own_blocks)
    _count(model, choice)
    if not choice.matrices:
        raise ModelError(f"{model.folder} has no weight to quantise: {_why_none(model, choice)}")
    _refuse_unused(uses, settings, choice)
    _warn(model, choice, unread)
    return choice


def _matrix(name: str, turned: bool, settings: Quantisation, own_blocks: Mapping[str, GivenBlocks]) -> Matrix:
    own = own_blocks.get(name)
    if own is not None:
        return Matrix(turned, own.bits, own.block_size, own.zero_points, own=own)
    return Matrix(turned, settings.bits_of(name), settings.block_size, not settings.symmetric)


def _add_stack(
    model: HookedModel,
    stack: ExpertStack,
    settings: Quantisation,
    choice: Choice,
    own_blocks: Mapping[str, GivenBlocks],
) -> None:
    """Choose the matrices of experts, all of a stack or none."""
    width = rows_of(model, stack.experts[0], stack.turned).shape[1]
    nodes = len(model.proto.graph.node) + 2 * len(choice.matrices)
    own = stack.experts[0] in own_blocks
    blocks = [own_blocks[name] for name in stack.experts] if own else []
    # Of each expert: a Slice and a MatMulNBits, and a Gather where inputs are in an order of its own.
    each = 3 if any(one.order is not None for one in blocks) and order_of_all(blocks) is None else 2
    if settings.keeps(stack.weight) and not own:
        choice.left[stack.weight] = ASKED
    elif width < settings.block_size and not own:
        choice.left[stack.weight] = f"{width} numbers in a row, a block has {settings.block_size}"
    elif nodes + each * stack.count > MOST_NODES:
        choice.left[stack.weight] = f"its {stack.count} experts would make more than {MOST_NODES:,} nodes of the graph"
    else:
        form = _matrix(stack.weight, stack.turned, settings, {})
        for name in stack.experts:
            # A pattern may name single experts of a stack.
            matrix = replace(form, bits=max(form.bits, settings.bits_of(name)))
            choice.matrices[name] = _matrix(name, stack.turned, settings, own_blocks) if own else matrix
        choice.stacks.append(stack.weight)


def _why_none(model: HookedModel, choice: Choice) -> str:
    if {node.op_type for node in model.proto.graph.node} & {"MatMulNBits", "GatherBlockQuantized"}:
        return "its weights are blocks already"
    reasons = Counter(choice.left.values()).most_common()
    return "; ".join(f"{count(number, 'weight')}: {reason}" for reason, number in reasons) or "it has none"


def _add_table(
    model: HookedModel, uses: WeightUses, settings: Quantisation, choice: Choice, own_blocks: Mapping[str, GivenBlocks]
) -> str | None:
    """Choose the token table too; tell why it stays in floats against the settings."""
    name = uses.table
    if name is None:
        why = "the token table was not found: no single Gather of a weight reads the tokens"
        return why if settings.embedding else None
    if name not in own_blocks and (settings.keeps(name) or not settings.embedding):
        choice.left[name] = ASKED
        return None
    width = rows_of(model, name, turned=True).shape[1]
    matrix = choice.matrices.get(name) or replace(_matrix(name, True, settings, own_blocks), product=False)
    if width % matrix.block_size:  # the operator knows no width but that of its blocks
        reason = f"rows of {width} numbers are not whole blocks of {matrix.block_size}"
    elif not matrix.turned:
        reason = "the product that shares it reads it turned"
    else:
        choice.matrices[name] = replace(matrix, table=True)
        choice.left.pop(name, None)
        return None
    choice.left[name] = reason
    return f"the token table {name} stays in floats: {reason}"


def _count(model: HookedModel, choice: Choice) -> None:
    """Add the bytes, and the weights that no product reads."""
    for tensor in model.proto.graph.initializer:
        # Vectors (norms, biases) are not counted: they always stay.
        if tensor.data_type in FLOAT_TYPES and len(tensor.dims) > 1:
            size = prod(tensor.dims) * onnx_file.weight(model.proto, model.folder, tensor.name).dtype.itemsize
            if tensor.name in choice.matrices or tensor.name in choice.stacks:
                choice.bytes_in_blocks += size
            else:
                choice.left.setdefault(tensor.name, NO_PRODUCT)
                choice.bytes_left += size


def _refuse_unused(uses: WeightUses, settings: Quantisation, choice: Choice) -> None:
    weights = {one.weight for one in uses.products} | {one.weight for one in uses.stacks}
    weights |= set() if uses.table is None else {uses.table}
    for what, patterns, names in (
        ("keep", settings.keep, sorted(weights)),
        ("in_8_bits", settings.in_8_bits, sorted([*choice.matrices, *choice.stacks])),
    ):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = nearest(pattern, names) or f"; weights are {names[0]!r} and {len(names) - 1} more"
                raise ModelError(f"{what}={pattern!r} names no weight that becomes blocks{near}")


def _warn(model: HookedModel, choice: Choice, unread: str | None) -> None:
    """Say what stays in floats without having been asked for."""
    sentences = [unread] if unread else []
    left = {name: reason for name, reason in choice.left.items() if reason != ASKED}
    if choice.bytes_left > choice.bytes_in_blocks and left:
        most = next(iter(left))
        sentences.append(
            f"{count(len(left), 'weight')}, {choice.bytes_left:,} of "
            f"{choice.bytes_left + choice.bytes_in_blocks:,} bytes with those that were kept, stay in floats, "
            f"such as {most}: {left[most]}"
        )
    if sentences:
        warnings.warn(f"{model.name}: {'; '.join(sentences)}", FewBlocksWarning, stacklevel=caller_level())
