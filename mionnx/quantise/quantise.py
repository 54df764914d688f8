"""A hooked model of floats becomes one of blocks, weight by weight: no more than one of them is in memory."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.graph.blocks import GivenBlocks
from mionnx.graph.hooked_model import GRAPH, KEPT, HookedModel
from mionnx.graph.metadata import Attention
from mionnx.graph.weight_record import describe_export
from mionnx.machine.leftovers import new_folder
from mionnx.machine.progress import Progress, silent
from mionnx.machine.streamed_file import Kind, StreamedFile, streamed
from mionnx.quantise.blocks import quantise_blocks
from mionnx.quantise.matrices import Found, find_weights, rows_of
from mionnx.quantise.quantised_graph import Matrix, Parts, with_blocks
from mionnx.quantise.settings import Quantisation

WEIGHTS = "quantised.safetensors"


def quantise(model: HookedModel, target: Path, settings: Quantisation, progress: Progress = silent) -> Path:
    """Write a hooked model whose weights are blocks.

    Products with weights become `MatMulNBits`, the table of the tokens `GatherBlockQuantized`, both operators of ONNX
    Runtime; norms, biases, routers and stacked experts stay as they are.

    Args:
        model: of float32 or float16.
        target: the folder to make.
        settings: of the blocks.
        progress: called as (stage, done, total) in bytes.

    Returns:
        the folder.

    Raises:
        ModelError: it exists, cannot be written, or the model is quantised already or has nothing to quantise.
    """
    if target.exists():
        raise ModelError(f"{target} exists already")
    with new_folder(target, ModelError) as partial:
        quantise_into(model, partial, settings, progress)
    return target


def quantise_into(
    model: HookedModel,
    folder: Path,
    settings: Quantisation,
    progress: Progress = silent,
    given: Mapping[str, GivenBlocks] | None = None,
) -> None:
    """Write the files of a quantised model into a folder; see `quantise`.

    Args:
        model, folder, settings, progress: see `quantise`.
        given: a checkpoint's own blocks by the names of their weights, which are kept as they are; what the model's
            files hold in the places of these weights is not read.
    """
    model.need_weights("quantising it")
    found, given = find_weights(model), given or {}
    matrices = _matrices(model, found, settings, given)
    proto = with_blocks(model.proto, found, matrices, settings)
    _write_weights(model, proto, matrices, settings, folder, progress, given)
    _describe(model, proto, matrices, settings, folder, progress)
    (folder / GRAPH).write_bytes(proto.SerializeToString())
    for path in [path for pattern in KEPT for path in model.folder.glob(pattern) if path.is_file()]:
        shutil.copyfile(path, folder / path.name)


def _matrices(
    model: HookedModel, found: Found, settings: Quantisation, given: Mapping[str, GivenBlocks]
) -> dict[str, Matrix]:
    """The weights that become blocks, by name.

    Raises:
        ModelError: there are none, or a pattern of the settings names none.
    """
    chosen: dict[str, Matrix] = {}
    for product in found.products:
        kept = settings.keeps(product.weight) or (product.head and not settings.unembedding)
        if kept and product.weight not in given:
            continue
        rows = rows_of(model, product.weight, product.turned)
        if rows.shape[1] >= settings.block_size or product.weight in given:
            made = _matrix(product.weight, product.turned, settings, given)
            known = chosen.setdefault(product.weight, made)
            if known.turned != product.turned:
                raise ModelError(f"{product.weight} is read as it is and turned: it cannot be blocks of either")
    table = found.table
    if table is not None and (table in given or (settings.embedding and not settings.keeps(table))):
        made = replace(_matrix(table, True, settings, given), product=False)
        as_table = chosen.get(table) or made
        width = rows_of(model, table, turned=True).shape[1]
        fits = width % as_table.block_size == 0  # the operator knows no width but that of its blocks
        fits = fits and (as_table.given is None or as_table.given.order is None)
        if fits and as_table.turned:
            chosen[table] = replace(as_table, table=True)
    if not chosen:
        already = {node.op_type for node in model.proto.graph.node} & {"MatMulNBits", "GatherBlockQuantized"}
        raise ModelError(
            f"{model.folder} has no weight to quantise: "
            + ("its weights are blocks already" if already else "no product with a matrix of floats that may change")
        )
    _refuse_unused(model, settings)
    return chosen


def _matrix(name: str, turned: bool, settings: Quantisation, given: Mapping[str, GivenBlocks]) -> Matrix:
    """What becomes of a weight."""
    own = given.get(name)
    if own is not None:
        return Matrix(turned, own.bits, own.block_size, own.zero_points, given=own)
    return Matrix(turned, settings.bits_of(name), settings.block_size, not settings.symmetric)


def _refuse_unused(model: HookedModel, settings: Quantisation) -> None:
    names = [tensor.name for tensor in model.proto.graph.initializer]
    for what, patterns in (("keep", settings.keep), ("in_8_bits", settings.in_8_bits)):
        for pattern in patterns:
            only = replace(settings, keep=(pattern,), in_8_bits=())
            if not any(only.keeps(name) for name in names):
                raise ModelError(f"{what}={pattern!r} names no weight of {model.folder}, such as {names[0]!r}")


def _write_weights(
    model: HookedModel,
    proto: onnx.ModelProto,
    matrices: dict[str, Matrix],
    settings: Quantisation,
    folder: Path,
    progress: Progress,
    given: Mapping[str, GivenBlocks],
) -> None:
    """Write all weights of the graph into one file, and point its initializers there."""
    kept = [tensor for tensor in proto.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    floats = {tensor.name: onnx_file.weight(model.proto, model.folder, tensor.name) for tensor in kept}
    kinds: dict[str, Kind] = {name: (array.dtype, array.shape) for name, array in floats.items()}
    for name, matrix in matrices.items():
        rows = rows_of(model, name, matrix.turned)
        kinds |= matrix.kinds(name, rows.shape, rows.dtype)
    with streamed(folder / WEIGHTS, kinds, ModelError) as file:
        for name, array in floats.items():
            numbers = given[name].numbers() if name in given else array
            file.put(name, 0, numbers if numbers.shape == array.shape else numbers.T)
        total = sum(rows_of(model, name, True).size for name in matrices)
        done = 0
        for name, matrix in matrices.items():
            rows = rows_of(model, name, matrix.turned)
            if matrix.given is not None:
                blocks = matrix.given.read()
            else:
                blocks = quantise_blocks(rows, matrix.bits, settings.block_size, settings.symmetric)
            for part, values in matrix.arrays(name, blocks).items():
                if part in kinds:
                    file.put(part, 0, values)
            done += rows.size
            progress(f"quantising to {settings.bits} bits", done, total)
        _point(proto, kept, matrices, file)


def _point(
    proto: onnx.ModelProto, kept: list[onnx.TensorProto], matrices: dict[str, Matrix], file: StreamedFile
) -> None:
    """Make initializers of what is in the file."""
    for tensor in kept:
        tensor.CopyFrom(_external(tensor.name, file, tensor.name))
    for name, matrix in matrices.items():
        for part in Parts.of(name):
            if part in file.kinds and (matrix.product or part != Parts.of(name).packed):
                proto.graph.initializer.append(_external(part, file, part))
        if matrix.table:
            for part, view in matrix.views(name, file.kinds).items():
                proto.graph.initializer.append(_external(view.name, file, part, view.shape))


def _external(name: str, file: StreamedFile, held: str, dims: Iterable[int] | None = None) -> onnx.TensorProto:
    dtype, shape = file.kinds[held]
    tensor = onnx.TensorProto(name=name, dims=shape if dims is None else dims)
    tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    length = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    for key, value in (("location", WEIGHTS), ("offset", file.places[held]), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _describe(
    model: HookedModel,
    proto: onnx.ModelProto,
    matrices: dict[str, Matrix],
    settings: Quantisation,
    folder: Path,
    progress: Progress,
) -> None:
    """Write the metadata: those of the model, its new weights, and how they were made."""
    digest, files = describe_export(folder, [WEIGHTS], [folder / WEIGHTS], progress)
    attention = [
        replace(one, output_projection=Parts.of(one.output_projection).packed, output_is_rows=False)
        if one.output_projection in matrices
        else one
        for one in model.metadata.attention
    ]
    made: dict[str, Any] = settings.to_entry() | {"matrices": len(matrices), "of_weights_sha256": model.weights_sha256}
    metadata = replace(
        model.metadata,
        attention=list[Attention](attention),
        exporter={**model.metadata.exporter, "mionnx": version("mionnx")},
        weights_sha256=digest,
        weight_files=files,
        quantised=made,
        fused=[],
        stock={},
    )
    del proto.metadata_props[:]
    for key, value in metadata.to_props().items():
        proto.metadata_props.add(key=key, value=value)
