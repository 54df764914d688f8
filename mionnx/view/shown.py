"""`Shown`: the base of every result with a figure and a page."""

import json
from abc import ABC, abstractmethod
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mionnx.errors import SpecFileError
from mionnx.machine.brief import Brief
from mionnx.machine.files import write_atomic
from mionnx.machine.stored import ENDING, Stored
from mionnx.machine.typed import typed
from mionnx.view.figure import to_png
from mionnx.view.page import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@typed(SpecFileError)
class Shown(Brief, Stored, ABC):
    """A result as a figure, as a page, as JSON; a notebook shows its page, `print` few lines.

    Saved as .safetensors it can be loaded again; see `mionnx.machine.stored`.
    """

    frame_height = 480  # of the page in a notebook, in pixels

    @abstractmethod
    def figure(self) -> "Figure":
        """The result as a matplotlib figure."""

    @abstractmethod
    def page(self) -> str:
        """The result as one HTML page that works offline."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The result as lists, dictionaries, numbers and texts; arrays are allowed."""

    def to_json(self) -> str:
        """The result as JSON; what is not finite is null."""
        return json.dumps(plain(self.to_dict(), digits=None), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write .safetensors to load again, or .html, .png, .json, by the file's ending.

        Raises:
            SpecFileError: another ending, or a file that cannot be written.
        """
        if Path(path).suffix.lower() == ENDING:
            return self._store(path)
        form = {".html": self._html, ".png": self._png, ".json": self._json}.get(Path(path).suffix.lower())
        if form is None:
            raise SpecFileError(
                f"{path}: a result is saved as .html, .png or .json, and as {ENDING} to be loaded again"
            )
        write_atomic(Path(path), form())
        return Path(path)

    def _html(self) -> bytes:
        return self.page().encode()

    def _png(self) -> bytes:
        return to_png(self.figure())

    def _json(self) -> bytes:
        return self.to_json().encode()

    def _repr_html_(self) -> str:
        page = escape(self.page(), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:{self.frame_height}px;border:0"></iframe>'
