"""File formats of a shard: safetensors, written first and mapped to read; others are made of it piece by piece."""

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.manifest import TOKEN_COLUMNS
from mionnx.analysis.harvest.texts import arrow
from mionnx.errors import InputError, SpecFileError, nearest
from mionnx.machine.files import atomic_path, make_folder
from mionnx.machine.streamed_file import TYPE_NAMES

NUMPY_NAMES = {short: name for name, short in TYPE_NAMES.items()}
PIECE = 4096  # tokens that are converted at once
Arrays = Mapping[str, NDArray[Any]]
# Writes a shard: folder, number, where its arrays lie, the arrays, tokens of a window; the names of the files.
Writer = Callable[[Path, int, Path, Arrays, int], list[str]]


def pieces(count: int, size: int) -> Iterator[slice]:
    """Pieces of `size` tokens, one after the other."""
    yield from (slice(at, min(at + size, count)) for at in range(0, count, size))


def open_shard(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a shard, mapped from the disk and not read yet."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # The smallest header is "{}".
            if not 2 <= length <= path.stat().st_size:
                raise ValueError("its header does not fit into it")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)  # an entry of safetensors itself, no array
        return {name: _mapped(path, 8 + length, entry) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecFileError(f"{path} is no whole shard of activations: {error}") from error


def _mapped(path: Path, start: int, entry: Mapping[str, Any]) -> NDArray[Any]:
    begin, end = entry["data_offsets"]
    dtype, shape = np.dtype(NUMPY_NAMES[entry["dtype"]]), tuple(entry["shape"])
    if end - begin != prod(shape) * dtype.itemsize or start + end > path.stat().st_size:
        raise ValueError("its arrays do not fit into it")
    # An empty file region cannot be mapped.
    if not prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start + begin, shape)


def safetensors(folder: Path, number: int, written: Path, arrays: Arrays, context: int) -> list[str]:
    """The file that was written, under its name."""
    name = f"shard-{number:05}.safetensors"
    written.replace(folder / name)
    return [name]


def parquet(folder: Path, number: int, written: Path, arrays: Arrays, context: int) -> list[str]:
    """A table with a row a token; a value of several numbers is a list of fixed size, flattened."""
    pyarrow, table_file = arrow("pyarrow", "parquet files"), arrow("pyarrow.parquet", "parquet files")
    name = f"shard-{number:05}.parquet"
    with atomic_path(folder / name) as partial:
        schema = pyarrow.schema([(key, _arrow_type(pyarrow, array)) for key, array in arrays.items()])
        # Activations hardly repeat or compress: both would cost time and save nothing.
        with table_file.ParquetWriter(partial, schema, compression="none", use_dictionary=False) as writer:
            for piece in pieces(len(next(iter(arrays.values()))), PIECE):
                columns = [_arrow_column(pyarrow, array[piece]) for array in arrays.values()]
                writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
    written.unlink()
    return [name]


def saelens(folder: Path, number: int, written: Path, arrays: Arrays, context: int) -> list[str]:
    """A dataset for each hook point, as SAELens caches activations: a row is a window."""
    datasets, writing = arrow("datasets", "SAELens' folders"), arrow("datasets.arrow_writer", "SAELens' folders")
    names = []
    for hook, values in arrays.items():
        if hook in TOKEN_COLUMNS:
            continue
        width = int(np.prod(values.shape[1:]))
        ids = datasets.Sequence(datasets.Value("int32"), length=context)
        features = datasets.Features({hook: datasets.Array2D((context, width), values.dtype.name), "token_ids": ids})
        make_folder(folder / hook)
        name = f"{hook}/data-{number:05}.arrow"
        with atomic_path(folder / name) as partial, writing.ArrowWriter(features=features, path=str(partial)) as writer:
            for piece in pieces(len(values) // context, max(1, PIECE // context)):
                tokens = slice(piece.start * context, piece.stop * context)
                windows = np.asarray(values[tokens]).reshape(-1, context, width)
                writer.write_batch({hook: windows, "token_ids": arrays["token_ids"][tokens].reshape(-1, context)})
            writer.finalize()
        names.append(name)
    written.unlink()
    return names


def finish_saelens(folder: Path, hooks: list[str], shards: int) -> None:
    """The files that make folders of shards datasets: `load_from_disk` reads them."""
    datasets = arrow("datasets", "SAELens' folders")
    for hook in hooks:
        files = [f"data-{number:05}.arrow" for number in range(shards)]
        info = datasets.Dataset.from_file(str(folder / hook / files[0])).info
        info.write_to_directory(str(folder / hook))
        state: dict[str, Any] = {"_data_files": [{"filename": name} for name in files]}
        # A fixed fingerprint, since the same harvest gives the same bytes; `load_from_disk` needs one.
        state |= {"_split": None, "_fingerprint": "0" * 16}
        state |= {"_format_type": None, "_format_kwargs": {}, "_format_columns": None, "_output_all_columns": False}
        (folder / hook / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))


WRITERS: dict[str, Writer] = {"safetensors": safetensors, "parquet": parquet, "saelens": saelens}
NUMPY_ONLY = ("bfloat16",)  # dtypes that arrow does not have


def check_format(name: str, dtype: str | None, packed: bool) -> None:
    """Refuse an unknown format, or one that cannot hold these values."""
    if name not in WRITERS:
        raise InputError(f"format={name!r}; one of {', '.join(WRITERS)}{nearest(name, WRITERS)}")
    if name != "safetensors" and dtype in NUMPY_ONLY:
        raise InputError(f"format={name!r} has no {dtype}: float32 or float16, or format='safetensors'")
    if name == "saelens" and not packed:
        raise InputError("format='saelens' has rows of one length: give packed=True and context=")
    if name != "safetensors":
        arrow("datasets" if name == "saelens" else "pyarrow", f"format={name!r}")


def _arrow_type(pyarrow: Any, array: NDArray[Any]) -> Any:
    plain = pyarrow.from_numpy_dtype(array.dtype)
    return plain if array.ndim == 1 else pyarrow.list_(plain, int(np.prod(array.shape[1:])))


def _arrow_column(pyarrow: Any, values: NDArray[Any]) -> Any:
    flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
    width = int(np.prod(values.shape[1:]))
    return flat if values.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, width)
