"""What keys of the cache depend on besides their own subject: the program's sources, and the processor."""

import hashlib
import platform
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def source_digest(*modules: str) -> str:
    """SHA-256 (hexadecimal) of the sources of modules and packages by full name, read once a process."""
    digest = hashlib.sha256()
    for module in modules:
        for name, file in _sources(module):
            # name and size before the bytes: a line moved from one file to the next gives another digest
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


def processor_name() -> str:
    """Name of the processor, or its architecture."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Instruction sets, sorted, by their Linux names; empty on other systems."""
    info = _cpuinfo()
    return sorted({*(info.get("flags") or info.get("Features") or "").split()})


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    # of many processors the last: they are alike
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
