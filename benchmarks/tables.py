"""Tables of a benchmark: on the terminal, and as Markdown under `results/`."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Rows = Sequence[Sequence[str]]


def present(
    name: str,
    heading: str,
    title: str,
    tables: Sequence[tuple[Sequence[str], Rows]],
    save: bool,
    said: str = "",
    notes: Sequence[str] = (),
) -> None:
    """Print tables, and keep them if asked to.

    Args:
        name: of the file under `results/`, without its ending.
        heading: the file's first line.
        title: over each table: what was measured, machine, repeats.
        tables: columns and rows of each.
        save: whether to write the file.
        said: what else the file's first paragraph says.
        notes: below the tables.
    """
    console = Console()
    parts = [f"# {heading}", f"{title}. {said}".strip()]
    for columns, rows in tables:
        drawn = Table(*columns, title=title)
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)
        lines = [columns, ["---"] * len(columns), *rows]
        parts.append("\n".join(" | ".join(line) for line in lines))
    if notes:
        console.print(*notes, sep="\n")
    parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
    if save:
        (RESULTS / f"{name}.md").write_text("\n\n".join(parts) + "\n")


def earlier(name: str, columns: Sequence[str], measured: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The rows of a saved table with these columns, by their first cells, but those that are measured anew."""
    path = RESULTS / f"{name}.md"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [tuple(line.split(" | ")) for line in lines if line.count(" | ") == len(columns) - 1]
    return {row[0]: row for row in rows[2:] if row[0] not in measured}  # behind names and dashes
