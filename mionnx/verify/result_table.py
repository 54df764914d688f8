"""Tables of a `Verification` for a terminal of any width: names stay whole, numbers are left out."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.markup import escape
from rich.table import Column

from mionnx.analysis.quantisation.matrix_loss import MatrixLoss
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.decimals import decimal
from mionnx.verify.rows import LayerLoss, Row
from mionnx.view import Table
from mionnx.view.page import NO_NUMBER

MATRIX_HEADS = ("matrix", "bits", "bytes", "numbers", "output", "KL, nats", "top 1")
GOING = ("cosine", "absolute", "greedy", "top 1", "KL, nats")  # left out in this order where there is no room


def verification_table(rows: list[dict[str, str]], titles: Mapping[str, str], title: str) -> Table:
    """The table of all numbers; a narrow terminal shows the most of them for which it has room.

    Where not all fit, hook points are first written without "blocks." and "hook_".

    Args:
        rows: heading -> cell, of a runtime each; the cells of "at" are hook points.
        titles: further runtimes, which have a verdict only.
    """
    heads = [*rows[0]] if rows else ["runtime", ""]
    return _chain([_table(rows, titles, title, *form) for form in _forms(heads)])


def repeats_table(rows: Sequence[tuple[str, ...]]) -> Table:
    """Table of repeated runs: runtime, repetition, bits, relative difference, hook point."""
    tables = []
    for short in (False, True):
        heads = ("runtime", "repeated", "bits", "relative", "first at")
        table = Table(*(Column(head, no_wrap=head != "repeated") for head in heads))
        for *cells, first in rows:
            table.add_row(*cells, short_name(first) if short else first)
        tables.append(table)
    return _chain(tables)


def loss_table(rows: Sequence[Row], layers: Sequence[LayerLoss], title: str) -> Table:
    """Table of the distance of two models at each hook point, and what each layer adds."""
    added = {str(HookPoint.ResidPost(one.layer)): one.added for one in layers}
    most = max(added.values(), default=0.0)
    tables = []
    for short in (False, True):
        heads = ("at" if short else "hook point", "distance", "layer adds", "relative", "this step")
        table = Table(*(Column(head, no_wrap=True) for head in heads), title=escape(title))
        for row in rows:
            share = added.get(row.name)
            text = "" if share is None else f"{share:+.1e}{' most' * (share == most)}"
            local = "" if row.local is None else f"{row.local:.1e}"
            name = short_name(row.name) if short else row.name
            table.add_row(name, f"{row.lost:.1e}", text, f"{row.relative:.1e}", local)
        tables.append(table)
    return _chain(tables)


def matrix_table(losses: Sequence[MatrixLoss], most: int | None) -> Table:
    """Table of quantised matrices: their own errors, and KL where one alone is quantised."""
    shown = losses[:most]
    tables = []
    for short in (False, True):
        left_out = ("bytes", "top 1") if short else ()
        heads = [head for head in MATRIX_HEADS if head not in left_out]
        title = "each matrix alone in the model of floats: relative error of its numbers, of its output, and KL"
        left = f"{len(losses) - len(shown)} more" if len(shown) < len(losses) else None
        table = Table(*(Column(head, no_wrap=head != "matrix", overflow="fold") for head in heads), title=title)
        table.caption = left
        for one in shown:
            cells = {"matrix": escape(one.name), "bits": str(one.bits), "bytes": f"{one.bytes:,}"}
            cells |= {"numbers": f"{one.weight_error:.1e}", "output": f"{one.output_error:.1e}"}
            cells |= {"KL, nats": f"{one.kl:.1e}", "top 1": f"{one.top_1:.1%}"}
            table.add_row(*(cells[head] for head in heads))
        tables.append(table)
    return _chain(tables)


def short_name(hook: str) -> str:
    """A hook point without "blocks." and "hook_": "3.resid_post", "0.attn.pattern"."""
    return hook.removeprefix("blocks.").replace("hook_", "", 1)


def list_of(heading: str, lines: Sequence[str], style: str) -> Table:
    """Lines of text as a table of one column."""
    table = Table("", on_page={"heading": heading, "styles": {"": style}})
    for line in lines:
        table.add_row(escape(line))
    return table


def percent(share: float | None) -> str:
    """A share in percent; a dash where there is none."""
    return NO_NUMBER if share is None else f"{decimal(100 * share, 1)} %"


def pairs(values: Mapping[str, Any]) -> str:
    """Names and values in a line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _chain(tables: list[Table]) -> Table:
    for wide, narrow in pairwise(tables):
        wide.narrower = narrow
    return tables[0]


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
