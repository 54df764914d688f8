"""Files in parts of at most so many bytes, joined again and checked by SHA-256.

A part is a folder: pieces of files, or whole files, and nothing else. `manifest.json` stands in every one of them.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
BLOCK = 2**22


def split(files: list[Path], folder: Path, base: Path, largest: int) -> list[Path]:
    """Write files as parts `folder/1`, `folder/2`, ...; a file that does not fit goes on in the next part.

    Files with the same bytes are written once.

    Args:
        files: below `base`.
        folder: of the parts.
        base: their names in the manifest are relative to it.
        largest: bytes of a part, without the manifest.

    Returns:
        the folders.
    """
    entries: list[dict[str, Any]] = []
    number, room = 1, largest
    for file in files:
        entry: dict[str, Any] = {"name": str(file.relative_to(base)), "sha256": sha256(file), "pieces": []}
        same = next((one for one in entries if one["sha256"] == entry["sha256"]), None)
        entries.append(entry)
        if same is not None:
            entry["pieces"] = same["pieces"]
            continue
        with file.open("rb") as source:
            left = file.stat().st_size
            while left or not entry["pieces"]:
                if not room:
                    number, room = number + 1, largest
                size = min(left, room)
                name = f"{len(entries)}-{len(entry['pieces'])}"
                (folder / str(number)).mkdir(parents=True, exist_ok=True)
                (folder / str(number) / name).write_bytes(source.read(size))
                entry["pieces"].append([str(number), name])
                left, room = left - size, room - size
    made = [folder / str(one + 1) for one in range(number)]
    for part in made:
        (part / MANIFEST).write_text(json.dumps(entries))
    return made


def join(folder: Path, target: Path) -> list[Path]:
    """Put the files of all parts together.

    Args:
        folder: with the parts `1`, `2`, ...
        target: where the files go.

    Raises:
        SystemExit: a part is missing, or a file has another SHA-256.
    """
    manifests = sorted(folder.glob(f"*/{MANIFEST}"))
    if not manifests:
        raise SystemExit(f"{folder} holds no parts: run gather.py")
    made = []
    for entry in json.loads(manifests[0].read_text()):
        pieces = [folder / part / name for part, name in entry["pieces"]]
        if missing := [str(piece) for piece in pieces if not piece.exists()]:
            raise SystemExit(f"{entry['name']} lacks {', '.join(missing)}: bring that part too")
        file = target / entry["name"]
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as joined:
            for piece in pieces:
                joined.write(piece.read_bytes())
        if sha256(file) != entry["sha256"]:
            raise SystemExit(f"{entry['name']} is damaged: another SHA-256 than in {manifests[0]}")
        made.append(file)
    return made


def sha256(file: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    for block in blocks(file):
        digest.update(block)
    return digest.hexdigest()


def blocks(file: Path) -> Iterator[bytes]:
    """A file's bytes, a few at a time."""
    with file.open("rb") as source:
        while block := source.read(BLOCK):
            yield block
