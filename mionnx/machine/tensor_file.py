"""Reading `.safetensors` files: their errors become errors of mionnx."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mionnx.errors import MIError, SpecFileError


@contextmanager
def open_tensors(path: str | Path, problem: str, error: type[MIError] = SpecFileError) -> Iterator[Any]:
    """Open a file to read some of its tensors.

    Args:
        path: the file.
        problem: first words of the message if it cannot be read: "x.safetensors is no saved spec".
        error: class of that error.

    Raises:
        MIError: the file is missing or damaged, or has a dtype that numpy lacks.
    """
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (OSError, SafetensorError, AttributeError, TypeError, ValueError) as cause:
        # the last three: a tensor of a dtype that numpy does not have
        raise error(f"{problem}: {cause}") from cause


def read_tensors(
    path: str | Path, problem: str, error: type[MIError] = SpecFileError
) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Read a whole file: its metadata, and its tensors by name; see `open_tensors`."""
    with open_tensors(path, problem, error) as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
