"""`Table`: a table that `print` shows as it is."""

import rich.table
from rich.console import Console


class Table(rich.table.Table):
    """A table of rich; as text it is the table itself, as wide as the terminal at most."""

    def __str__(self) -> str:
        console = Console(color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    __repr__ = __str__
