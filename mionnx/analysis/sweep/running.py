"""Run a sweep as its verb was asked to: progress, a file to resume from, and what is left behind."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.sweep import Sweep
from mionnx.errors import InputError
from mionnx.machine.cache_entry import SWEEPS
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.progress import shown
from mionnx.run.find_model import cache_folder

Before = Callable[[Sweep], None]


def run_sweep(sweep: Sweep, progress: bool | None, resume: str | Path | bool, before: Before | None) -> SweepResult:
    """Run a sweep as its verb was asked to; see `patch_sweep`."""
    sweep.file = _progress_file(sweep, resume)
    temporary = sweep.file if resume is True else None
    if before is not None:
        before(sweep)
    try:
        with shown(progress) as show:
            result = sweep.run(show)
    except Exception:  # an interruption is none: its file stays
        _delete(temporary)
        raise
    finally:
        sweep.model.give_back(later=True)
    _delete(temporary)
    return result


def _progress_file(sweep: Sweep, resume: str | Path | bool) -> Path | None:
    """Path of the file for computed cells; None if nothing is stored."""
    if not isinstance(resume, bool):
        return Path(resume)
    if not resume:
        key = sweep.setting.metric.resume_key
        if key is not None:
            raise InputError(f"resume_key={key!r} has no effect without resume=True or resume=FILE")
        return None
    try:
        folder = DiskCache(cache_folder()).kind_folder(SWEEPS)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EROFS, "it cannot be written", str(folder))
        file = folder / f"{sweep.key[:32]}.safetensors"
        if file.is_symlink():
            raise OSError(errno.EEXIST, "it is a link, which is not followed", str(file))
    except OSError as error:
        lost = "an interruption would lose the cells that are computed; resume=FILE keeps them elsewhere"
        DiskCache(cache_folder()).say_unusable(error, lost, SWEEPS)
        return None
    return file


def _delete(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)
