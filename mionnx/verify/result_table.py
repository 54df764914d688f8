"""Tables of a `Verification` for a terminal of any width: names stay whole, numbers are left out."""

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column

from mionnx.view import Table

GOING = ("cosine", "absolute", "greedy", "top 1", "KL, nats")  # left out in this order where there is no room
ENDLESS = 10_000  # columns of a terminal in which nothing is folded


def fitting(rows: list[dict[str, str]], titles: Mapping[str, str], title: str, width: int) -> Table:
    """The table with the most numbers that fits a terminal.

    Where not all fit, hook points are first written without "blocks." and "hook_".

    Args:
        rows: heading -> cell, of a runtime each; the cells of "at" are hook points.
        titles: further runtimes, which have a verdict only.
        title: of the table.
        width: columns of the terminal.
    """
    tables = [_table(rows, titles, title, *form) for form in _forms([*rows[0]] if rows else ["runtime", ""])]
    return next((table for table in tables if natural_width(table) <= width), tables[-1])


def natural_width(table: Table) -> int:
    """The columns that a table takes if nothing is folded."""
    console = Console(width=ENDLESS)
    return Measurement.get(console, console.options, table).maximum


def short_name(hook: str) -> str:
    """A hook point without "blocks." and "hook_": "3.resid_post", "0.attn.pattern"."""
    return hook.removeprefix("blocks.").replace("hook_", "", 1)


def _forms(heads: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Headings, and whether names are short: first all, then ever fewer."""
    yield heads, False
    yield heads, True
    for gone in range(1, len(GOING) + 1):
        yield [head for head in heads if head not in GOING[:gone]], True


def _table(rows: list[dict[str, str]], titles: Mapping[str, str], title: str, heads: list[str], short: bool) -> Table:
    columns = [Column(head, no_wrap=head != "runtime", overflow="fold") for head in heads]
    table = Table(*columns, title=escape(title), caption="at: without blocks. and hook_" if short and rows else None)
    for row in rows:
        shown = {**row, "at": short_name(row["at"])} if short else row
        table.add_row(*(shown[head] for head in heads))
    for runtime, verdict in titles.items():
        table.add_row(escape(runtime), verdict)
    return table
