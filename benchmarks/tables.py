"""What every benchmark ends with: tables on the terminal, and the same tables as Markdown under `results/`."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Rows = Sequence[Sequence[str]]


def present(
    name: str, heading: str, said: str, tables: Sequence[tuple[Sequence[str], Rows]], save: bool, title: str = ""
) -> None:
    """Print tables, and keep them if asked to.

    Args:
        name: of the file under `results/`, without its ending.
        heading: the file's first line.
        said: how it was measured: machine, versions, repeats.
        tables: columns and rows of each.
        save: whether to write the file.
        title: over each table on the terminal; `said` if left out.
    """
    console = Console()
    parts = [f"# {heading}", said]
    for columns, rows in tables:
        drawn = Table(*columns, title=title or said)
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)
        lines = [columns, ["---"] * len(columns), *rows]
        parts.append("\n".join(" | ".join(line) for line in lines))
    if save:
        (RESULTS / f"{name}.md").write_text("\n\n".join(parts) + "\n")
