"""One repository of the Hugging Face Hub: its files listed and downloaded, refusals in a sentence."""

import errno
import glob
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from mionnx.errors import ModelError, nearest
from mionnx.machine.memory import format_bytes
from mionnx.machine.progress import Progress, silent

GATED = (401, 403)  # statuses of HTTP: no token, or one without access
LONGEST_MESSAGE = 200  # letters of another library's message


@dataclass(frozen=True)
class Version:
    """Revision and folder of a model's repository, and the token to ask for it with."""

    revision: str | None = None  # a branch, tag or commit; None for the main branch
    subfolder: str = ""
    token: str | bool | None = field(default=None, repr=False)  # None: `HF_TOKEN`, or that of `hf auth login`


MAIN = Version()


@dataclass
class Repository:
    """A repository of the Hub, the files of a model in it by their paths in the model's folder."""

    name: str  # USER/REPOSITORY
    version: Version = MAIN
    progress: Progress = silent  # in bytes
    near: str = ""  # end of the sentence that refuses a repository that there is not: what may have been meant
    commit: Path | None = None  # its folder in the Hub's cache; None before anything was downloaded
    away: str = ""  # why the Hub is out of reach
    lacking: int = 0  # bytes that the cache lacked at the last download

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Path -> bytes of each file; without a network, of those in the cache."""
        folder = self._subfolder
        files = self._list()
        sizes = {name: files[str(PurePosixPath(folder, name))] for name in below(folder, files)}
        if not sizes:
            folders = sorted({str(PurePosixPath(name).parent) for name in files} - {"."})
            raise ModelError(f"{self.where} has no files in a folder {folder!r}{nearest(folder, folders)}")
        return sizes

    @property
    def where(self) -> str:
        """The repository in words, for refusals."""
        revision = f" (revision {self.version.revision})" if self.version.revision else ""
        reach = f" in the Hub's cache (the Hub is out of reach: {self.away})" if self.away else ""
        return f"{self.name}{revision}{reach}"

    def fetch(self, names: Iterable[str]) -> Path:
        """Download files that the cache lacks, and give the model's folder in the cache."""
        from huggingface_hub import try_to_load_from_cache  # not needed for a folder, and slow to import

        inner = {str(PurePosixPath(self._subfolder, name)): self.sizes[name] for name in names if name in self.sizes}
        if not self.away and (inner or self.commit is None):
            # The first files settle the commit, and the cache notes that the revision is it.
            revision = self.version.revision if self.commit is None else self.commit.name
            cached = {
                path for path in inner if isinstance(try_to_load_from_cache(self.name, path, revision=revision), str)
            }
            self.lacking = sum(inner[path] for path in inner.keys() - cached)
            with self._refusals():
                self.commit = self._snapshot(revision, [*map(glob.escape, inner)], tqdm_class=self._bar(self.lacking))
        assert self.commit is not None
        return self.commit / self._subfolder

    @property
    def _subfolder(self) -> str:
        return self.version.subfolder.strip("/")

    def _list(self) -> Mapping[str, int]:
        """Path in the repository -> bytes."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        revision, token = self.version.revision, self.version.token
        with self._refusals():
            try:
                info = HfApi().model_info(self.name, revision=revision, files_metadata=True, token=token)
            except Exception as error:  # of several libraries, by version: no network
                if isinstance(error, HFValidationError) or (isinstance(error, HfHubHTTPError) and _status(error) < 500):
                    raise
                self.away = _first_line(error)
            else:
                return {one.rfilename: one.size or 0 for one in info.siblings or ()}
            self.commit = self._snapshot(revision, [], local_files_only=True)
        files = [path for path in self.commit.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.commit)): path.stat().st_size for path in files}

    def _snapshot(self, revision: str | None, patterns: list[str], **more: Any) -> Path:
        from huggingface_hub import snapshot_download

        token = self.version.token
        return Path(snapshot_download(self.name, revision=revision, token=token, allow_patterns=patterns, **more))

    def _bar(self, total: int) -> type:
        """A bar for huggingface_hub that tells bytes to `progress`."""
        from huggingface_hub.utils import tqdm

        stage, progress = f"downloading {self.name}, {format_bytes(total)}", self.progress

        class Bytes(tqdm):  # type: ignore[type-arg, misc]
            def __init__(self, *arguments: Any, **named: Any) -> None:
                # The other bars count files, and bytes of the network once more.
                self.counts = named.get("unit") == "B" and not str(named.get("name")).endswith(".transfer")
                self.read = 0
                super().__init__(*arguments, **{**named, "disable": True})

            def update(self, n: float | None = 1) -> None:
                if self.counts and total:
                    with tqdm.get_lock():  # several files are downloaded at once
                        self.read += int(n or 0)
                        progress(stage, min(self.read, total), total)

        return Bytes

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Say what huggingface_hub refuses in one sentence."""
        try:
            yield
        except Exception as error:  # httpx's and requests' errors share no base class
            raise ModelError(self._refusal(error)) from error

    def _refusal(self, error: Exception) -> str:
        from huggingface_hub import constants, errors

        ways = "give token=, or set HF_TOKEN"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{self.name} has no revision {self.version.revision!r} on the Hugging Face Hub"
        if isinstance(error, errors.GatedRepoError):
            page = f"{constants.ENDPOINT}/{self.name}"
            return f"{self.name} is gated: accept its terms at {page}, and {ways} of an account that has"
        if isinstance(error, errors.HFValidationError | errors.RepositoryNotFoundError):
            private = "" if isinstance(error, errors.HFValidationError) else f" (for a private one {ways})"
            return f"{self.name!r} is neither a folder here nor a model of the Hugging Face Hub{private}{self.near}"
        if isinstance(error, errors.LocalEntryNotFoundError):
            return (
                f"{self.name!r} is neither a folder here nor in the cache of the Hugging Face Hub, which is out of "
                f"reach ({self.away}){self.near}"
            )
        if isinstance(error, errors.HfHubHTTPError) and _status(error) in GATED:
            return f"the Hugging Face Hub refuses {self.name} (HTTP {_status(error)}): {ways} that has access to it"
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return (
                f"no room for {self.name} in {constants.HF_HUB_CACHE}: {format_bytes(self.lacking)} are "
                "needed; HF_HUB_CACHE names another folder"
            )
        return f"the download of {self.name} broke off ({_first_line(error)}): called again, it goes on with what lacks"


def _status(error: Any) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", None) or 500)


def _first_line(error: Exception) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:LONGEST_MESSAGE]


def below(folder: str, names: Iterable[str]) -> list[str]:
    """The paths of a folder's files, from that folder."""
    return [name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/")] if folder else [*names]
