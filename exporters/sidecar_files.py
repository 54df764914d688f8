"""Files beside a hooked model: the checkpoint's config and tokenizer files."""

import shutil
from pathlib import Path

from mionnx.graph.hooked_model import KEPT


def keep_files(folder: Path, target: Path) -> None:
    """Copy a checkpoint's small files into the hooked model's folder."""
    if folder.resolve() == target.resolve():
        return
    for pattern in KEPT:
        for file in folder.glob(pattern):
            shutil.copyfile(file, target / file.name)
