"""A hooked model of floats becomes one of blocks, weight by weight: no more than one of them is in memory."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.graph.blocks import EXPERT, GivenBlocks
from mionnx.graph.folder_file import copy_beside, files_beside
from mionnx.graph.hooked_model import GRAPH, KEPT, HookedModel
from mionnx.graph.layers import Attention
from mionnx.graph.own_version import own_version
from mionnx.graph.weight_record import describe_export
from mionnx.machine.leftovers import new_folder, remove_leftovers
from mionnx.machine.progress import Progress, silent
from mionnx.machine.streamed_file import Kind, StreamedFile, streamed
from mionnx.quantise.blocks import quantise_blocks
from mionnx.quantise.choice import Choice, choose
from mionnx.quantise.matrices import find_weights, rows_of
from mionnx.quantise.quantised_graph import BlockNames, Matrix, table_name, with_blocks
from mionnx.quantise.settings import Quantisation

BLOCK_WEIGHTS = "quantised.safetensors"


def quantise(model: HookedModel, target: Path, settings: Quantisation, progress: Progress = silent) -> Path:
    """Write a hooked model of float32 or float16 as one whose weights are blocks, into a new folder."""
    # Products with weights become `MatMulNBits`, the table of the tokens `GatherBlockQuantized`, both operators of ONNX
    # Runtime; norms, biases and routers stay as they are.
    if target.exists():
        raise ModelError(f"{target} exists already")
    remove_leftovers(target.parent, holding=())
    with new_folder(target, ModelError) as partial:
        quantise_into(model, partial, settings, progress)
    return target


def quantise_into(
    model: HookedModel,
    folder: Path,
    settings: Quantisation,
    progress: Progress = silent,
    # a checkpoint's own blocks by the names of their weights, which are kept as they are; what the model's files hold
    # in the places of these weights is not read
    own_blocks: Mapping[str, GivenBlocks] | None = None,
    # weight -> mean square of each of its inputs, [in]; see `quantise_blocks`
    importance: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    """Write the files of a quantised model into a folder; see `quantise`."""
    model.need_weights("quantising it")
    weights, own_blocks = find_weights(model), own_blocks or {}
    choice = choose(model, weights, settings, own_blocks)
    proto = with_blocks(model.proto, weights, choice.matrices, settings)
    onnx_file.rename(proto, "logits", model.metadata.output)
    turned = {stack.weight: stack.turned for stack in weights.stacks}
    _write_weights(model, proto, choice.matrices, settings, folder, progress, own_blocks, importance or {}, turned)
    _describe(model, proto, choice, settings, folder, progress)
    (folder / GRAPH).write_bytes(proto.SerializeToString())
    copy_beside(files_beside(model.folder, KEPT), model.folder, folder)


def _write_weights(
    model: HookedModel,
    proto: onnx.ModelProto,
    matrices: dict[str, Matrix],
    settings: Quantisation,
    folder: Path,
    progress: Progress,
    own_blocks: Mapping[str, GivenBlocks],
    importance: Mapping[str, NDArray[Any]],
    turned: Mapping[str, bool],
) -> None:
    """Write all weights of the graph into one file, and point its initializers there."""
    # `turned` says of each stack of experts whether its matrices are [out, in].
    outside = [tensor for tensor in proto.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    floats = {tensor.name: onnx_file.weight(model.proto, model.folder, tensor.name) for tensor in outside}
    read = {name for node in proto.graph.node for name in node.input}
    kinds: dict[str, Kind] = {name: (array.dtype, array.shape) for name, array in floats.items()}
    for name, matrix in matrices.items():
        rows = rows_of(model, name, matrix.turned)
        parts = matrix.kinds(name, rows.shape, rows.dtype)
        # An order that experts share is one initializer, of the first of them.
        kinds |= {part: kind for part, kind in parts.items() if part != BlockNames.of(name).order or part in read}
    with streamed(folder / BLOCK_WEIGHTS, _part_by_part(kinds, matrices), ModelError) as file:
        for name, array in floats.items():
            _put_floats(file, name, array, own_blocks, turned)
        total = sum(rows_of(model, name, True).size for name in matrices)
        done = 0
        for name, matrix in matrices.items():
            rows = rows_of(model, name, matrix.turned)
            if matrix.own is not None:
                blocks = matrix.own.read()
            else:
                form = matrix.bits, settings.block_size, settings.symmetric
                blocks = quantise_blocks(rows, *form, importance.get(name))
            for part, values in matrix.arrays(name, blocks).items():
                if part in kinds:
                    file.put(part, 0, values)
            done += rows.size
            progress(f"quantising to {settings.bits} bits", done, total)
        _point(proto, outside, matrices, file)


def _part_by_part(kinds: Mapping[str, Kind], matrices: Iterable[str]) -> dict[str, Kind]:
    """The same entries, parts of one kind together."""
    # Blocks of products of one value then lie one after another; see `mionnx.engine.merged_products`.
    parts = [part for same in zip(*map(BlockNames.of, matrices), strict=True) for part in same if part in kinds]
    in_blocks = {*parts}
    others = [name for name in kinds if name not in in_blocks]
    return {name: kinds[name] for name in (*others, *parts)}


def _put_floats(
    file: StreamedFile,
    name: str,
    array: NDArray[Any],
    own_blocks: Mapping[str, GivenBlocks],
    turned: Mapping[str, bool],
) -> None:
    """Write a weight that stays in floats, or the numbers of a checkpoint's own blocks of it."""
    if f"{name}{EXPERT}0" in own_blocks:
        if name not in turned:
            raise ModelError(f"{name} is blocks in the checkpoint, and the graph reads it as no stack of experts")
        for number in range(len(array)):
            matrix = own_blocks[f"{name}{EXPERT}{number}"].numbers()
            file.put(name, number, (matrix if turned[name] else matrix.T)[None])
        return
    numbers = own_blocks[name].numbers() if name in own_blocks else array
    # The checkpoint's blocks are [out, in], the graph may hold the weight turned.
    file.put(name, 0, numbers if numbers.shape == array.shape else numbers.T)


def _point(
    proto: onnx.ModelProto, floats: list[onnx.TensorProto], matrices: dict[str, Matrix], file: StreamedFile
) -> None:
    for tensor in floats:
        tensor.CopyFrom(_external(tensor.name, file, tensor.name))
    for name, matrix in matrices.items():
        for part in BlockNames.of(name):
            if part in file.kinds and (matrix.product or part != BlockNames.of(name).packed):
                proto.graph.initializer.append(_external(part, file, part))
        if matrix.table:
            packed = BlockNames.of(name).packed
            rows, blocks, size = file.kinds[packed][1]  # a lookup reads the same bytes as [rows, bytes]
            proto.graph.initializer.append(_external(table_name(name), file, packed, (rows, blocks * size)))


def _external(name: str, file: StreamedFile, part: str, dims: Iterable[int] | None = None) -> onnx.TensorProto:
    dtype, shape = file.kinds[part]
    tensor = onnx.TensorProto(name=name, dims=shape if dims is None else dims)
    tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    length = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    for key, value in (("location", BLOCK_WEIGHTS), ("offset", file.places[part]), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _describe(
    model: HookedModel,
    proto: onnx.ModelProto,
    choice: Choice,
    settings: Quantisation,
    folder: Path,
    progress: Progress,
) -> None:
    digest, files = describe_export(folder, [BLOCK_WEIGHTS], [folder / BLOCK_WEIGHTS], progress)
    attention = [
        # The hook points of heads' shares read the projection by its name and orientation, which the blocks change.
        replace(one, output_projection=BlockNames.of(one.output_projection).packed, output_is_rows=False)
        if one is not None and one.output_projection in choice.matrices
        else one
        for one in model.metadata.attention
    ]
    entry: dict[str, Any] = settings.to_entry() | choice.to_entry() | {"of_weights_sha256": model.weights_sha256}
    metadata = replace(
        model.metadata,
        attention=list[Attention | None](attention),
        exporter={**model.metadata.exporter, "mionnx": own_version()},
        weights_sha256=digest,
        weight_files=files,
        quantised=entry,
        fused=[],
        stock={},
    )
    del proto.metadata_props[:]
    for key, value in metadata.to_props().items():
        proto.metadata_props.add(key=key, value=value)
