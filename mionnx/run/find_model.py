"""Find a model: a hooked folder, a checkpoint (exported once into the store), or a Hugging Face Hub id."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from types import ModuleType

from platformdirs import user_cache_path

from mionnx.errors import ExportError, InputError, MIError, ModelError
from mionnx.graph.folder_file import inside
from mionnx.graph.hooked_model import GRAPH, KEY, HookedModel
from mionnx.graph.weight_record import complete_beside
from mionnx.machine.cache_entry import MODELS
from mionnx.machine.cache_keys import source_digest
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.files import link_or_copy
from mionnx.machine.leftovers import new_folder, temporary_folder
from mionnx.machine.progress import Progress, silent
from mionnx.quantise.quantise import quantise_into
from mionnx.quantise.settings import BLOCK_DTYPES as BLOCKS
from mionnx.run.exporting import dtype_of, exporter_for, foreign_exporter, write
from mionnx.run.hub import download, download_file
from mionnx.run.hub_files import names_file
from mionnx.run.packaged_models import PACKAGED, packaged_model, shipped_models
from mionnx.run.repository import MAIN, Repository, Version
from mionnx.run.source_path import file_in, folder_in, is_hooked, local_path, missing, mistyped

LONGEST_NAME = 100  # characters of a model's name in the store
EXPORTING = ("mionnx.graph",)  # what every exporter uses: a change there may change the graph
FILES = (".pth", ".onnx", ".safetensors", ".gguf", ".bin", ".pt")  # what is meant as a file, and is no Hub id


_temporarily = Lock()


def cache_folder() -> Path:
    """The store: `MIONNX_CACHE` if it is set, else mionnx' folder in the user's cache directory."""
    chosen = os.environ.get("MIONNX_CACHE")
    return Path(chosen) if chosen else user_cache_path("mionnx", appauthor=False)


def find_model(
    source: str | Path,
    dtype: str,
    progress: Progress,
    refuse: Callable[[Path], None] | None = None,
    version: Version = MAIN,
) -> Path:
    """The hooked model's folder of a path, a shipped model's name or a Hub id.

    Args:
        refuse: called with a checkpoint's folder before it is exported; raises what speaks against it.
    """
    folder = checkpoint_folder(source, version=version, progress=progress)
    if not (folder / GRAPH).exists() or not is_hooked(folder / GRAPH):
        if refuse is not None:
            refuse(folder)
        return _exported(folder, dtype, progress)
    if (folder / GRAPH).is_symlink():
        folder = _linked(folder)
    if dtype in BLOCKS and not HookedModel.open(folder, check="none").metadata.quantised:
        return _quantised(folder, dtype, progress)
    DiskCache(cache_folder()).use(folder)
    return folder


def open_model(
    source: str | Path,
    dtype: str,
    check: str,
    progress: Progress,
    refuse: Callable[[Path], None] | None = None,
    version: Version = MAIN,
) -> HookedModel:
    """Find a model and open it.

    An export in the store that is damaged is made again, unless another process uses it, and that is said.

    Args:
        check: how its weights are compared with what was exported, see `HookedModel.open`.

    Raises:
        ModelError: nothing there, or damaged.
    """
    folder = find_model(source, dtype, progress, refuse, version)
    try:
        hooked = HookedModel.open(folder, check=check, progress=progress)
        if check != "none":
            complete_beside(hooked.folder, hooked.metadata)
        return hooked
    except ModelError as error:
        if local_path(source) == folder or not DiskCache(cache_folder()).discard(folder, str(error)):
            raise
    return HookedModel.open(find_model(source, dtype, progress, refuse, version), check=check, progress=progress)


def checkpoint_folder(
    source: str | Path,
    file: str | None = None,
    version: Version = MAIN,
    progress: Progress = silent,
    weights: bool = True,
) -> Path:
    """The folder or file of a path, a shipped model's name or a Hub id.

    A `.pth`, `.onnx` or `.gguf` file is a model by itself. A folder goes before a shipped model of its name. Models of
    the Hub are downloaded if need be; of a repository of GGUF files the named one: USER/REPOSITORY/FILE.gguf.

    Args:
        file: the name of the file, where the folder or repository has several models.
        version: of a repository of the Hub; its folder also of a folder here.
        weights: download weights; without them it is what a graph alone is made of.
    """
    name = str(source)
    folder = local_path(source) or shipped_models().get(name) or packaged_model(name)
    if folder is None:
        return hub_folder(name if file is None else f"{source}/{file}", None, version, progress, weights)
    folder = part_of(folder, version)
    return folder if file is None else file_in(folder, file)


def part_of(folder: Path, version: Version) -> Path:
    """The model's folder in a folder here."""
    if version.revision is not None:
        raise InputError(f"revision={version.revision!r}, but {folder} lies here: a revision is of a model of the Hub")
    return folder_in(folder, version.subfolder)


def hub_folder(
    name: str, file: str | None, version: Version = MAIN, progress: Progress = silent, weights: bool = True
) -> Path:
    """The folder or single file of a model of the Hub, downloaded if need be.

    Args:
        name: of its repository, or of a GGUF or `.pth` file in it.
        file: which of its ONNX files; None for a checkpoint, or else the preferred one.

    Raises:
        ModelError: there is no such model, none can be had, or a folder here was mistyped.
    """
    one, names = names_file(name), [*shipped_models(), *PACKAGED]
    if not one and (name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix in FILES):
        raise ModelError(f"{name} is no folder with a model: nothing is there{missing(name, names)}")
    meant = None if one or version.revision else mistyped(name, names)
    if meant is not None:
        raise ModelError(
            f"{name} is no folder with a model: nothing is there; did you mean {meant!r}? With revision='main' it is "
            "looked for on the Hugging Face Hub"
        )
    repository, _, single = name.rpartition("/") if one else (name, "", "")
    source = Repository(repository, version, progress, missing(name, names))
    if one:
        return download_file(source, single)
    return download(source, lambda files: foreign_exporter().pick(files, file, name), file is not None, weights)


def _exported(folder: Path, dtype: str, progress: Progress) -> Path:
    exporter = exporter_for(folder)
    dtype = dtype_of(exporter, folder, dtype)
    named = folder if folder.is_file() else folder.resolve()  # a file of the Hub's cache is a link to a number
    name = f"{named.name[:LONGEST_NAME]}-{_fingerprint(folder, dtype, exporter)}"
    return _in_store(name, lambda target: write(exporter, folder, target, dtype, progress))


def _quantised(folder: Path, dtype: str, progress: Progress) -> Path:
    """A hooked model of floats as one of blocks, in the store."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([str(folder.resolve()), facts, dtype, source_digest("mionnx.quantise", *EXPORTING)])
    key = hashlib.sha256(text.encode()).hexdigest()[:KEY]
    hooked = HookedModel.open(folder)
    return _in_store(
        f"{hooked.name[:LONGEST_NAME]}-{key}", lambda target: quantise_into(hooked, target, BLOCKS[dtype], progress)
    )


def _in_store(name: str, make: Callable[[Path], None]) -> Path:
    """A model's folder in the store, made if need be.

    Where the store cannot be written, it is a temporary folder that lasts as long as this process.
    """
    otherwise = "the model goes into a temporary folder that lasts as long as this process"

    def into_the_store(folder: Path) -> None:
        try:
            make(folder)
        except MIError as error:
            if _disk_is_full(error):
                raise OSError(errno.ENOSPC, str(error)) from error
            raise

    entry = DiskCache(cache_folder()).folder(MODELS, name, into_the_store, otherwise)
    if entry is not None:
        return entry
    with _temporarily:
        try:
            target = temporary_folder() / name
            if not target.exists():
                with new_folder(target, OSError) as partial:
                    make(partial)
        except OSError as error:
            problem = f"neither the store {cache_folder()} nor a temporary folder can be written"
            raise ExportError(f"{problem}: {error}") from error
    return target


def _disk_is_full(error: BaseException | None) -> bool:
    """Whether an error came of one of the system that says so."""
    while error is not None and getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        error = error.__cause__ or error.__context__
    return error is not None


def _linked(folder: Path) -> Path:
    """A folder of hard links to the files of a hooked model in the Hub's cache.

    ONNX Runtime follows no link out of a folder.
    """
    files = {path.name: inside(folder, path.name) for path in folder.iterdir() if not path.is_dir()}
    key = hashlib.sha256(json.dumps({name: str(path) for name, path in files.items()}).encode()).hexdigest()[:KEY]

    def make(target: Path) -> None:
        try:
            for name, path in files.items():
                link_or_copy(path, target / name)
        except OSError as error:
            raise ModelError(f"cannot link or copy the files of {folder}: {error}") from error

    return _in_store(f"{folder.name[:LONGEST_NAME]}-{key}", make)


def _fingerprint(folder: Path, dtype: str, exporter: ModuleType) -> str:
    """Key of an export: the checkpoint's files and the exporter's sources."""
    files = sorted(path for path in [*folder.glob("*"), *folder.glob("onnx/*")] if path.is_file())
    beside = "*" if folder.suffix == ".onnx" else "rwkv_vocab*.txt"  # weights and config of a foreign graph
    files += (
        [] if folder.is_dir() else [folder, *(path for path in sorted(folder.parent.glob(beside)) if path.is_file())]
    )
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    rooms = (*EXPORTING, "mionnx.quantise") if dtype in BLOCKS else EXPORTING
    text = json.dumps([str(folder.resolve()), facts, dtype, source_digest(exporter.__name__.partition(".")[0], *rooms)])
    return hashlib.sha256(text.encode()).hexdigest()[:KEY]
