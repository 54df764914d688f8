"""GGUF files of a folder: which one is meant."""

from pathlib import Path

from mionnx.errors import ExportError, ModelError, nearest
from mionnx.graph.folder_file import inside

SUFFIX = ".gguf"


def gguf_files(folder: Path) -> list[Path]:
    """GGUF files of a folder, by name; of a path to one, that file."""
    if folder.is_file():
        return [folder] if folder.suffix == SUFFIX else []
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file())


def choose(folder: Path, file: str | None = None) -> Path:
    """The file of a folder to export.

    Args:
        folder: a folder with GGUF files, or one of them.
        file: the name of one, where the folder has several.

    Raises:
        ExportError: there is none, none of that name, several and no choice, or one that lies outside the folder.
    """
    found = gguf_files(folder)
    try:
        for path in found if folder.is_dir() else ():
            inside(folder, path.name)
    except ModelError as error:
        raise ExportError(str(error)) from error
    names = [path.name for path in found]
    if file is not None:
        named = [path for path in found if file in (path.name, path.stem)]
        if not named:
            has = ", ".join(names) or "none"
            raise ExportError(f"{folder} has no GGUF file {file!r}; it has {has}{nearest(file, names)}")
        return named[0]
    if not found:
        raise ExportError(f"{folder} holds no GGUF file")
    if len(found) > 1:
        raise ExportError(
            f"{folder} holds {len(found)} GGUF files: give one of them, as {found[0]}, or --file on the command line. "
            f"It has {', '.join(names)}"
        )
    return found[0]
