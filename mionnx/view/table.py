"""`Table`: a table that `print` shows as it is, in a narrow terminal in another form."""

from collections.abc import Mapping
from typing import Any, Self

import rich.table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement

ENDLESS = 10_000  # columns of a terminal in which nothing is folded


class Table(rich.table.Table):
    """A table of rich; as text it is the table itself, as wide as the terminal at most.

    It may be a panel of a page.

    Attributes:
        narrower: shown instead where this one would have to fold its cells.
        on_page: "heading" and "note" above it on a page; "chooses": whether a click on a row chooses it for the whole
            page; "most": rows shown at first; "styles": heading of a column -> "token", "share" (coloured from 0 to 1)
            or "bar".
    """

    narrower: Self | None = None
    on_page: Mapping[str, Any]

    def __init__(self, *headers: Any, on_page: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*headers, **options)
        self.on_page = on_page or {}

    @property
    def natural_width(self) -> int:
        """The columns that it takes if nothing is folded; the title does not count."""
        console = Console(width=ENDLESS)
        return Measurement.get(console, console.options, self).maximum

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.narrower is None or self.natural_width <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from self.narrower.__rich_console__(console, options)

    def __str__(self) -> str:
        console = Console(color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    __repr__ = __str__
