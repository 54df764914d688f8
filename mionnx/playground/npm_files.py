"""Files of npm packages that a playground brings along: pinned, checked, kept in the store.

1. `PACKAGES` names versions, the registry's hash of each, and SHA-256 of every file that is taken.
2. npm downloads a package once (`npm pack`: nothing is installed, none of its scripts run); both hashes are checked,
   and the files stay in the store. Afterwards no network is needed, and no npm.
3. WASM is kept as gzip, a quarter of its size, whatever a file server compresses; the page unpacks it.
"""

import base64
import gzip
import hashlib
import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mionnx.errors import RuntimeMissingError
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.leftovers import temporary_folder
from mionnx.machine.progress import Progress, silent
from mionnx.run.find_model import cache_folder

MIT = Path(__file__).with_name("onnxruntime-web.LICENSE")  # its package says MIT, and brings no text of it
SECONDS = 600


@dataclass(frozen=True)
class NpmPackage:
    """A package of npm's registry."""

    name: str
    version: str
    licence: str
    integrity: str  # SHA-512 of its archive in base64, as the registry says it
    files: Mapping[str, str]  # path in the package -> SHA-256

    @property
    def folder(self) -> str:
        """Its folder in a playground's `vendor`."""
        return self.name.removeprefix("@").replace("/", "-")


def _listed(text: str) -> dict[str, str]:
    """Path -> SHA-256, from what sha256sum prints."""
    return {path: sha256 for sha256, path in (line.split() for line in text.strip().splitlines())}


PACKAGES = (
    NpmPackage(
        "onnxruntime-web",
        "1.30.0",
        "MIT",
        "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
        _listed("""
219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b  dist/ort.wasm.min.mjs
e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b  dist/ort-wasm-simd-threaded.mjs
3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2  dist/ort-wasm-simd-threaded.wasm
3dffff71811bc13a3a3d9591c57ca5ee5735b8f5f3eaf789510b02bb040ae3a0  dist/ort.webgpu.min.mjs
3d1c85995364bb643302fc6fd877a0c3ba5ae72401815e0f24828a53d9191e28  dist/ort-wasm-simd-threaded.asyncify.mjs
39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da  dist/ort-wasm-simd-threaded.asyncify.wasm
"""),
    ),
    NpmPackage(
        "@huggingface/tokenizers",
        "0.2.0",
        "Apache-2.0",
        "LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
        _listed("""
258e46332101335ce8d95aed7745b19ac3b46d37f3e159a89cf894c2ea9b1d3a  dist/tokenizers.min.mjs
c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4  LICENSE
"""),
    ),
)


def vendor(target: Path, progress: Progress = silent) -> dict[str, str]:
    """Put the packages' files into a new folder; returns path in it -> SHA-256 of the unpacked file."""
    hashes: dict[str, str] = {}
    for number, package in enumerate(PACKAGES):
        progress("packages of npm", number, len(PACKAGES))
        source = _stored(package)
        (target / package.folder).mkdir(parents=True)
        for path, sha256 in package.files.items():
            name = _stored_name(path)
            shutil.copyfile(source / name, target / package.folder / name)
            hashes[f"{package.folder}/{name}"] = sha256
        if "LICENSE" not in package.files:
            shutil.copyfile(MIT, target / package.folder / "LICENSE")
            hashes[f"{package.folder}/LICENSE"] = hashlib.sha256(MIT.read_bytes()).hexdigest()
    return hashes


def _stored_name(path: str) -> str:
    return Path(path).name + (".gz" if path.endswith(".wasm") else "")


def _stored(package: NpmPackage) -> Path:
    # Another version or hash is another entry.
    key = hashlib.sha256(repr(package).encode()).hexdigest()[:32]

    def build(folder: Path) -> dict[str, Any]:
        _download(package, folder)
        return {"package": package.name, "version": package.version}

    entry = DiskCache(cache_folder()).get("npm", key, build)
    if entry is not None:
        return entry.path
    folder = temporary_folder() / key  # the store cannot be written
    if not folder.is_dir():
        folder.mkdir()
        build(folder)
    return folder


def _download(package: NpmPackage, folder: Path) -> None:
    with TemporaryDirectory() as scratch:
        archive = _packed(package, Path(scratch))
        integrity = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if integrity != package.integrity:
            raise RuntimeMissingError(
                _other(package, f"its archive's SHA-512 is {integrity}, and {package.integrity} is pinned")
            )
        with tarfile.open(archive) as tar:
            for path, sha256 in package.files.items():
                member = tar.extractfile(f"package/{path}")  # npm's archives hold one folder of this name
                data = b"" if member is None else member.read()
                if hashlib.sha256(data).hexdigest() != sha256:
                    raise RuntimeMissingError(_other(package, f"{path} is not the pinned file"))
                # Without a time in it: the same bytes each time.
                packed = gzip.compress(data, 9, mtime=0) if path.endswith(".wasm") else data
                (folder / _stored_name(path)).write_bytes(packed)


def _other(package: NpmPackage, why: str) -> str:
    return f"npm gave another {package.name}@{package.version}: {why}"


def _packed(package: NpmPackage, scratch: Path) -> Path:
    what = f"{package.name}@{package.version}"
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeMissingError(f"{what} is not in the store yet, and npm is not installed: install Node 20 with npm")
    command = [npm, "pack", what, "--json", "--ignore-scripts", "--pack-destination", str(scratch)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, cwd=scratch, timeout=SECONDS)
        # The name alone: what npm prints is not to lead out of the folder.
        return scratch / Path(json.loads(ran.stdout)[0]["filename"]).name
    except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        said = "" if "ran" not in locals() else ran.stderr.strip()[-300:]
        raise RuntimeMissingError(
            f"{what} is not in the store yet, and npm cannot download it (a network is needed once): {said}"
        ) from None
