"""Matrices in place of a model's own: those that blocks would give, those of a quantised model, and their cost."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.quantisation.matrix_loss import Candidate, FloatModel, MatrixLoss, matrix_losses, sample
from mionnx.engine.options import Options
from mionnx.errors import InputError
from mionnx.graph import matrices as of_graph
from mionnx.graph import onnx_file
from mionnx.graph.blocks import numbers_of
from mionnx.graph.dataflow import Dataflow, attributes
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.packed_weight import matmul_nbits
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress
from mionnx.quantise.blocks import quantise_blocks
from mionnx.quantise.matrices import WeightUses, expert_of
from mionnx.quantise.quantised_graph import BlockNames, Matrix, table_name
from mionnx.quantise.settings import Quantisation
from mionnx.spec.hook_spec import HookSpec


def of_blocks(
    model: FloatModel, name: str, matrix: Matrix, settings: Quantisation, importance: NDArray[Any] | None = None
) -> Candidate:
    """A weight in blocks: the numbers that quantising would leave."""
    rows = model.own(name)

    def in_blocks(part: of_graph.Matrix) -> of_graph.Matrix:
        blocks = quantise_blocks(part, matrix.bits, settings.block_size, settings.symmetric, importance)
        return numbers_of(blocks, matrix.bits, part.shape[1])

    def numbers() -> of_graph.Matrix:
        return in_blocks(rows) if rows.ndim == 2 else np.stack([in_blocks(one) for one in rows])

    *stacked, outputs, inputs = rows.shape
    kinds = matrix.kinds(name, (outputs, inputs), rows.dtype).values()
    size = prod(stacked) * sum(dtype.itemsize * prod(shape) for dtype, shape in kinds)
    return Candidate(name, matrix.bits, size, numbers, matrix.product, matrix.table)


def of_model(uses: WeightUses, other: HookedModel, experts: bool = False) -> list[Candidate]:
    """The matrices of a quantised model, and each expert of a stack, by their names in the model of floats."""
    flow = Dataflow(other.proto)
    tensors = {tensor.name for tensor in other.proto.graph.initializer}

    def candidate(name: str) -> Candidate | None:
        """A weight; None if it has no blocks of this name."""
        packed = BlockNames.of(name).packed
        product, table = packed in tensors, name == uses.table and table_name(name) in tensors
        if not product and not table:
            return None
        blocks = packed if product else table_name(name)
        reader = flow.nodes[flow.consumers[blocks][0]]
        parts = [blocks, *(part for part in reader.input[2:] if part in tensors)]
        size = sum(onnx_file.weight(other.proto, other.folder, part).nbytes for part in parts)

        def numbers() -> of_graph.Matrix:
            return matmul_nbits(flow, other.folder, reader) if product else of_graph.embedding(other)

        # 4 is the operator's default.
        return Candidate(name, attributes(reader).get("bits", 4), size, numbers, product, table)

    names = dict.fromkeys([one.weight for one in uses.products] + ([uses.table] if uses.table else []))
    candidates = [one for one in map(candidate, names) if one is not None]
    for stack in uses.stacks:
        of_stack = [one for one in map(candidate, stack.experts) if one is not None]
        if len(of_stack) == stack.count:
            candidates += [_together(stack.weight, of_stack), *(of_stack if experts else ())]
    return candidates


def _together(name: str, experts: Sequence[Candidate]) -> Candidate:
    bits, size = max(one.bits for one in experts), sum(one.bytes for one in experts)
    return Candidate(name, bits, size, lambda: np.stack([one.numbers() for one in experts]))


def losses(
    one: HookedModel,
    other: HookedModel | None,
    calls: Sequence[TokenBatch],
    spec: HookSpec,
    matrices: bool | None,  # whether they are measured; None: where one of the two is quantised, and nothing intervenes
    progress: Progress,
    notes: list[str],  # gets a line on the number of tokens
    experts: bool = False,  # whether each expert's matrix is measured too; then `matrices=None` is True
) -> list[MatrixLoss]:
    """Measure the matrices of the quantised one of two models in `verify`, those that cost most first."""
    pair = _pair(one, other)
    why = None
    if pair is None:
        why = "other= must be the floats of a model that mionnx quantised, or the reverse"
    elif not one.metadata.has_distribution:
        why = f"the head {one.metadata.head!r} gives no probabilities, whose KL is a matrix's cost"
    elif spec.num_interventions():
        why = "matrices are measured without interventions"
    if experts and matrices is False:
        raise InputError("experts=True with matrices=False: experts are measured with the other matrices")
    if not calls or matrices is False or (why and matrices is None and not experts):
        return []
    if why or pair is None:
        raise InputError(f"{'experts' if experts else 'matrices'}=True: {why}")
    floats, blocks = pair
    model = FloatModel(floats, Options(prepack=False))
    candidates = of_model(model.uses, blocks, experts)
    if experts and not any(expert_of(one.name) for one in candidates):
        raise InputError(f"experts=True: {blocks.name} has no stack of experts in blocks")
    tokens = sum(call.input_ids.size for call in sample(calls, floats))
    notes.append(f"{len(candidates)} matrices of {blocks.name}, one at a time in {floats.name}: over {tokens} tokens")
    results = sorted(matrix_losses(model, candidates, calls, progress), key=lambda loss: (-loss.kl, loss.name))
    idle = sum(loss.output_error == 0 < loss.weight_error and expert_of(loss.name) is not None for loss in results)
    if idle:
        notes.append(f"{idle} of the experts' matrices were chosen by no token: nothing is known of their cost")
    return results


def _pair(one: HookedModel, other: HookedModel | None) -> tuple[HookedModel, HookedModel] | None:
    """A model of floats and a quantised one; None if the two are not that."""
    if other is None or bool(one.metadata.quantised) == bool(other.metadata.quantised):
        return None
    return (other, one) if one.metadata.quantised else (one, other)
