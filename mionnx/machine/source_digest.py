"""Digest of Python sources, for cache keys: a changed program does not serve entries of an older one."""

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def source_digest(*modules: str) -> str:
    """SHA-256 of the sources of modules and packages, read once a process.

    Args:
        modules: full names: "mionnx.rewrite".

    Returns:
        hexadecimal.
    """
    digest = hashlib.sha256()
    for module in modules:
        for name, file in _sources(module):
            digest.update(f"{module}/{name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _sources(module: str) -> list[tuple[str, Path]]:
    """The files of a module, sorted by their names below it."""
    spec = find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"no module {module}")
    if spec.submodule_search_locations is None:
        return [("", Path(spec.origin or ""))]
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    return sorted((file.relative_to(folder).as_posix(), file) for folder in folders for file in folder.rglob("*.py"))
