"""`Shown`: the base of every result: printed, as a table, DataFrame, JSON, picture and page, saved and loaded again."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape as markup

from mionnx.errors import RuntimeMissingError, SpecFileError
from mionnx.machine.brief import Brief
from mionnx.machine.files import write_atomic
from mionnx.machine.ranges import at_least
from mionnx.machine.stored import ENDING, Stored
from mionnx.machine.typed import typed
from mionnx.view.figure import to_png
from mionnx.view.page import plain, readable, render_view
from mionnx.view.panels import Table, View
from mionnx.view.pictures import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Columns = Mapping[str, Sequence[Any] | NDArray[Any]]
NODE_DATA = ".nodedata.json"
RISING = ((0, "#f7f7f7"), (1, "#2166ac"))
DIVERGING = ((0, "#b2182b"), (0.5, "#f7f7f7"), (1, "#2166ac"))


@typed(SpecFileError)
class Shown(Brief, Stored, ABC):
    """A result: a class declares its panels in `view` and its cells in `_columns`.

    All else is drawn from these.

    Saved as .safetensors it can be loaded again; see `mionnx.machine.stored`.
    """

    frame_height = 480  # of the page in a notebook, in pixels
    IN_JSON: ClassVar[Sequence[str]] = ()  # attributes of the JSON, if it is not the fields of the dataclass
    POINTS: ClassVar[Sequence[str]] = ()  # columns of hook points, whose names are short in a narrow terminal
    LEAST: ClassVar[Sequence[str]] = ()  # columns that a narrow terminal leaves out, in this order

    @abstractmethod
    def view(self) -> View:
        """The panels of the result's picture and page."""

    @abstractmethod
    def _columns(self) -> Columns:
        """The columns of the frame by name; integers of which some are None are a list."""

    def figure(self) -> "Figure":
        """The result as a matplotlib figure."""
        return draw(self.view())

    def page(self) -> str:
        """The result as one HTML page that works offline."""
        return render_view(self.view())

    def table(self, k: int = 10) -> Table:
        """Table for a terminal: the first k rows of the frame, or a table of the result's own."""
        at_least("k", k, 0)
        columns = self._columns()
        more = max((len(values) for values in columns.values()), default=0) - k
        caption = f"{more:,} more" if more > 0 else None
        cells = {name: [*map(_told, values[:k])] for name, values in columns.items()}
        return Table.fitting(cells, self.POINTS, self.LEAST, title=markup(repr(self)), caption=caption)

    def to_frame(self) -> "DataFrame":
        """The result as a pandas DataFrame: a row for each cell, in each pair.

        Raises:
            RuntimeMissingError: pandas is not installed.

        Example:
            sweep.to_frame().query("layer == 23").groupby("head").effect.mean()
        """
        try:
            from pandas import DataFrame, array
        except ImportError as error:
            raise RuntimeMissingError("to_frame makes a DataFrame of pandas: pip install pandas") from error
        # A layer or head that is not there for each cell is missing (<NA>), and the others stay integers.
        columns = self._columns().items()
        gaps = {name for name, one in columns if isinstance(one, list) and None in one}
        return DataFrame({name: array(one, "Int64") if name in gaps else one for name, one in columns})

    def to_dict(self) -> dict[str, Any]:
        """The result as lists, dictionaries, numbers and texts; arrays are allowed."""
        names = self.IN_JSON or [one.name for one in fields(cast(Any, self))]
        values = {name: getattr(self, name) for name in names}
        return {name: value.to_dict() if isinstance(value, Shown) else value for name, value in values.items()}

    def to_json(self) -> str:
        """The result as JSON; what is not finite is null."""
        return json.dumps(plain(self.to_dict(), digits=None), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write .safetensors to load again, or .html, .png, .json, by the file's ending.

        `.nodedata.json` has a number for each hook point, which Model Explorer lays over the hooked model's graph: hook
        points are names of its tensors.

        Raises:
            SpecFileError: another ending, a result without a number for each hook point, or a file that cannot be
                written.
        """
        if Path(path).suffix.lower() == ENDING:
            return self._store(path)
        if Path(path).name.lower().endswith(NODE_DATA):
            write_atomic(Path(path), self._node_data())
            return Path(path)
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

    def _by_hook(self) -> Mapping[str, float]:
        """Hook point -> the result's number there; none of most results."""
        return {}

    def _node_data(self) -> bytes:
        numbers = self._by_hook()
        if not numbers:
            raise SpecFileError(
                f"a {type(self).__name__} has no number for each hook point: sweeps, probes and lenses have, and are "
                f"saved as {NODE_DATA}"
            )
        # what is not finite has no place in JSON, and no colour
        results = {name: {"value": float(value)} for name, value in numbers.items() if np.isfinite(value)}
        low, high = (end({entry["value"] for entry in results.values()} | {0.0}) for end in (min, max))
        stops = DIVERGING if low < 0 < high else RISING
        data = {"name": repr(self), "results": results, "gradient": [{"stop": at, "bgColor": one} for at, one in stops]}
        return json.dumps(data, indent=1, allow_nan=False).encode()

    def _repr_html_(self) -> str:
        page = escape(self.page(), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:{self.frame_height}px;border:0"></iframe>'


def _told(cell: Any) -> str:
    return readable(float(cell)) if isinstance(cell, float | np.floating) else markup(str(cell))


def long_form(axes: Mapping[str, Sequence[Any]], numbers: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Columns of a row for each cell of axes; `"position, token"` -> pairs gives two columns of one axis."""
    places = np.indices([len(entries) for entries in axes.values()]).reshape(len(axes), -1).tolist()
    columns: dict[str, Any] = {}
    for (name, entries), indices in zip(axes.items(), places, strict=True):
        names = name.split(", ")
        parts = [entries] if len(names) == 1 else [*zip(*entries, strict=True)]
        columns |= {one: [part[i] for i in indices] for one, part in zip(names, parts, strict=True)}
    return columns | {name: np.asarray(array).ravel() for name, array in numbers.items()}
