"""Texts of a dataset, one after the other: from files, from folders of Hugging Face's `datasets`, or as given."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from mionnx.errors import InputError, RuntimeMissingError, install, nearest

Source = str | Path | Iterable[Any]
COLUMN = "text"  # with the texts, if nothing is said


class Texts:
    """A dataset that can be gone through from its beginning."""

    def __init__(self, source: Source, column: str | None = None) -> None:
        """Look for the files, if the source is a file or a folder and not an iterable of texts, ids [seq] or `Tokens`.

        Args:
            column: of tables and JSON objects, the one with the texts; "text" if None.
        """
        self._column, self._files = column or COLUMN, list[Path]()
        self._texts: Iterable[Any] = ()
        if isinstance(source, str | Path):
            self._files = _files(Path(source))
        elif isinstance(source, Mapping):
            raise InputError(
                f"texts are a file, a folder or an iterable of texts, and a dictionary's are its keys, "
                f"{', '.join(map(repr, [*source][:3]))}: give the list of texts, or of rows of ids"
            )
        elif isinstance(source, Iterable):
            self._texts = source
        else:
            raise InputError(f"texts are a file, a folder or an iterable of texts, got {type(source).__name__}")
        if column is not None and all(path.suffix == ".txt" for path in self._files):
            raise InputError(f"column={column!r}: only tables and JSON lines have columns, not these texts")
        # Whether it can be gone through more than once; an iterator cannot.
        self.again = not isinstance(self._texts, Iterator)
        # Number of texts, as far as it is known without reading them; 0 if it is not.
        self.count = len(self._texts) if isinstance(self._texts, Sized) else 0

    def __iter__(self) -> Iterator[Any]:
        yield from self._texts
        for path in self._files:
            try:
                yield from READERS[path.suffix](path, self._column)
            except (OSError, ValueError) as error:  # a damaged parquet file is a ValueError
                raise InputError(f"{path} cannot be read: {error}") from error


def _files(source: Path) -> list[Path]:
    try:
        if source.is_file():
            return [_checked(source)]
    except (OSError, ValueError) as error:  # a name that no file can have
        raise InputError(f"{str(source)[:60]!r} is no file and no folder: {error}") from error
    if not source.is_dir():
        raise InputError(f"{source} is no file and no folder; texts themselves are given as a list, or an iterator")
    # A `DatasetDict`: which of its splits is meant is not to be guessed.
    if (source / "dataset_dict.json").is_file():
        splits = json.loads((source / "dataset_dict.json").read_text()).get("splits", [])
        raise InputError(f"{source} has splits: choose one, {', '.join(str(source / split) for split in splits)}")
    if (source / "state.json").is_file():
        # In the order of the dataset, which the names of the files need not have.
        return [source / entry["filename"] for entry in json.loads((source / "state.json").read_text())["_data_files"]]
    files = sorted(path for path in source.iterdir() if path.suffix in READERS and path.is_file())
    if not files:
        raise InputError(f"{source} holds no texts: {', '.join(READERS)}")
    return files


def _checked(path: Path) -> Path:
    if path.suffix not in READERS:
        raise InputError(f"{path}: texts come in {', '.join(READERS)}{nearest(path.suffix, READERS)}")
    return path


def _lines(path: Path, column: str) -> Iterator[str]:
    """The lines of a text file that are not blank."""
    with path.open(encoding="utf-8") as file:
        yield from (line.rstrip("\n") for line in file if line.strip())


def _objects(path: Path, column: str) -> Iterator[Any]:
    """The texts of JSON lines: strings, lists of ids, or objects with a column."""
    for number, line in enumerate(_lines(path, column), 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is no JSON: {error}") from error
        if isinstance(entry, Mapping):
            if column not in entry:
                raise InputError(f"{path}, line {number} has no {column!r}{nearest(column, entry)}")
            entry = entry[column]
        yield entry


def _parquet(path: Path, column: str) -> Iterator[Any]:
    parquet = arrow("pyarrow.parquet", "parquet files")
    with parquet.ParquetFile(path) as file:
        _check_column(path, column, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            yield from _entries(batch.column(0))


def _arrow(path: Path, column: str) -> Iterator[Any]:
    with arrow("pyarrow", "datasets").memory_map(str(path)) as mapped:
        stream = arrow("pyarrow.ipc", "datasets").open_stream(mapped)
        _check_column(path, column, stream.schema.names)
        for batch in stream:
            yield from _entries(batch.column(batch.schema.get_field_index(column)))


def _entries(column: Any) -> Iterator[Any]:
    """The texts of an array of arrow; lists of ids as arrays, without an object a token."""
    # Texts, and lists with missing entries, have no plain array of numbers behind them.
    if column.null_count or not hasattr(column, "offsets") or not hasattr(column, "values"):
        yield from column.to_pylist()
        return
    flat, ends = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    yield from (flat[begin:end] for begin, end in pairwise(ends))


def _check_column(path: Path, column: str, names: list[str]) -> None:
    if column not in names:
        raise InputError(f"{path} has no column {column!r}, it has {', '.join(names)}: choose with column=")


def arrow(module: str, what: str) -> Any:
    """Import a module of pyarrow or of Hugging Face's `datasets`."""
    try:
        return import_module(module)
    except ImportError as error:
        raise RuntimeMissingError(f"{what} need {module.split('.')[0]}: {install('harvest')}") from error


READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    ".txt": _lines,
    ".jsonl": _objects,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
