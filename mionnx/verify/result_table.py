"""Tables of a `Verification` for a terminal of any width: names of hook points stay whole, numbers are left out."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich.markup import escape
from rich.table import Column

from mionnx.analysis.quantisation.matrix_loss import MatrixLoss
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.decimals import decimal
from mionnx.verify.difference import HookDifference, LayerLoss, Repeat
from mionnx.view import Table
from mionnx.view.page import NO_NUMBER

MATRIX_HEADS = ("matrix", "bits", "bytes", "numbers", "output", "KL, nats", "top 1")
GOING = ("cosine", "absolute", "greedy", "top 1", "KL, nats")  # left out in this order where there is no room


def verification_table(rows: list[dict[str, str]], titles: Mapping[str, str], title: str) -> Table:
    """The table of all numbers; a narrow terminal shows the most of them for which it has room."""
    heads = [*rows[0]] if rows else ["runtime", ""]
    # hook points are shortened first, then ever more numbers go
    fewer = [[head for head in heads if head not in GOING[:gone]] for gone in range(len(GOING) + 1)]
    forms = [(heads, False), *((some, True) for some in fewer)]
    return _chain([_table(rows, titles, title, *form) for form in forms])


def _table(rows: list[dict[str, str]], titles: Mapping[str, str], title: str, heads: list[str], short: bool) -> Table:
    columns = [Column(head, no_wrap=head != "runtime", overflow="fold") for head in heads]
    table = Table(*columns, title=escape(title), caption="at: without blocks. and hook_" if short and rows else None)
    for row in rows:
        cells = {**row, "at": short_name(row["at"])} if short else row
        table.add_row(*(cells[head] for head in heads))
    for runtime, verdict in titles.items():
        table.add_row(escape(runtime), verdict)
    return table


def repeats_table(repeats: Sequence[Repeat]) -> Table:
    """Table of repeated runs, for a terminal and a page."""

    def form(short: bool) -> Table:
        heads = ("runtime", "repeated", "bits", "relative", "first at")
        table = Table(*(Column(head, no_wrap=head != "repeated") for head in heads), on_page={"heading": "Repeated"})
        for run in repeats:
            bits = "[green]identical" if run.identical else "[red]differ"
            first = short_name(run.first or "") if short else run.first or ""
            table.add_row(escape(run.runtime), run.what, bits, f"{run.relative:.1e}", first)
        return table

    return _in_two_forms(form)


def loss_table(rows: Sequence[HookDifference], layers: Sequence[LayerLoss], title: str) -> Table:
    """Table of the distance of two models at each hook point, and what each layer adds."""
    added = {str(HookPoint.ResidPost(one.layer)): one.added for one in layers}
    most = max(added.values(), default=0.0)

    def form(short: bool) -> Table:
        heads = ("at" if short else "hook point", "distance", "layer adds", "relative", "this step")
        table = Table(*(Column(head, no_wrap=True) for head in heads), title=escape(title))
        for row in rows:
            share = added.get(row.name)
            text = "" if share is None else f"{share:+.1e}{' most' * (share == most)}"
            local = "" if row.local is None else f"{row.local:.1e}"
            name = short_name(row.name) if short else row.name
            table.add_row(name, f"{row.lost:.1e}", text, f"{row.relative:.1e}", local)
        return table

    return _in_two_forms(form)


def matrix_table(losses: Sequence[MatrixLoss], most: int | None) -> Table:
    """Table of quantised matrices: their own errors, and KL where one alone is quantised."""
    shown = losses[:most]

    def form(short: bool) -> Table:
        heads = [head for head in MATRIX_HEADS if not (short and head in ("bytes", "top 1"))]
        columns = (Column(head, no_wrap=head != "matrix", overflow="fold") for head in heads)
        title = "each matrix alone in the model of floats: relative error of its numbers, of its output, and KL"
        caption = f"{len(losses) - len(shown)} more" if len(shown) < len(losses) else None
        table = Table(*columns, title=title, caption=caption)
        for one in shown:
            cells = {"matrix": escape(one.name), "bits": str(one.bits), "bytes": f"{one.bytes:,}"}
            cells |= {"numbers": f"{one.weight_error:.1e}", "output": f"{one.output_error:.1e}"}
            cells |= {"KL, nats": f"{one.kl:.1e}", "top 1": f"{one.top_1:.1%}"}
            table.add_row(*(cells[head] for head in heads))
        return table

    return _in_two_forms(form)


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


def _in_two_forms(form: Callable[[bool], Table]) -> Table:
    """A table whose names are short in a narrow terminal."""
    return _chain([form(False), form(True)])


def _chain(tables: list[Table]) -> Table:
    for wide, narrow in pairwise(tables):
        wide.narrower = narrow
    return tables[0]
