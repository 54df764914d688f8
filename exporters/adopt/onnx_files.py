"""Foreign ONNX files of a folder or a repository in the layouts of the Hub.

Nothing heavy is imported here: whoever looks for an exporter asks, onnx_ir installed or not.
"""

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from google.protobuf.message import DecodeError

from mionnx.errors import ExportError, ModelError
from mionnx.graph.embedded_weights import read_properties
from mionnx.graph.folder_file import inside
from mionnx.graph.metadata import PREFIX

SUBFOLDER = "onnx"  # of the Hub's layout
# merged before separate decoders: one with a past serves prompts as well, one without cannot go on
PREFERRED = ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx", "decoder_model.onnx")


def onnx_files(folder: Path) -> list[Path]:
    """Foreign ONNX files of a folder and its subfolder `onnx`, preferred ones first; a hooked model is none."""
    if folder.is_file():
        return [folder] if folder.suffix == ".onnx" else []
    files = [*folder.glob("*.onnx"), *(folder / SUBFOLDER).glob("*.onnx")]
    paths = {str(path.relative_to(folder)): path for path in files}
    return [paths[name] for name in in_order([*paths]) if paths[name].is_file() and not _is_hooked(folder, name)]


def in_order(names: Sequence[str]) -> list[str]:
    """Paths of ONNX files in a folder or a repository, preferred ones first."""
    places = {name: place for place, name in enumerate(PREFERRED)}
    paths = [PurePosixPath(name) for name in names if str(PurePosixPath(name).parent) in (".", SUBFOLDER)]
    return [
        str(path)
        for path in sorted(paths, key=lambda path: (places.get(path.name, len(places)), len(path.parts), path.name))
    ]


def pick(names: Sequence[str], file: str | None, where: str) -> str:
    """The path of the file to adopt, of paths in a folder or a repository `where`: the one named, or the preferred."""
    paths = in_order(names)
    named = [one for one in paths if file in (None, PurePosixPath(one).name, PurePosixPath(one).stem, one)]
    if not paths:
        raise ExportError(f"{where} holds no ONNX file")
    if not named:
        raise ExportError(f"{where} has no ONNX file {file!r}; it has {', '.join(paths)}")
    return named[0]


def _is_hooked(folder: Path, name: str) -> bool:
    try:
        return not read_properties(inside(folder, name)).keys().isdisjoint((f"{PREFIX}format", f"{PREFIX}hooks"))
    except (ModelError, DecodeError):
        return False


def choose(folder: Path, file: str | None = None) -> Path:
    """The file of a folder to adopt: the one named, or the preferred; or the file itself."""
    if folder.is_file():
        return folder / pick([folder.name], file, str(folder)) if folder.suffix != ".onnx" else folder
    name = pick([str(path.relative_to(folder)) for path in onnx_files(folder)], file, str(folder))
    try:
        inside(folder, name)
    except ModelError as error:
        raise ExportError(str(error)) from error
    return folder / name


def config_folder(file: Path) -> Path:
    """The folder of the config and the tokenizer of a file: its own, or the one above `onnx`."""
    own = file.parent
    beside, other = (os.path.lexists(folder / "config.json") for folder in (own, own.parent))
    above = own.name == SUBFOLDER and other and not beside
    return own.parent if above else own
