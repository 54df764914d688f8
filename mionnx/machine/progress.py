"""Progress of long work: a plain callback, and one that draws bars in a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

# (stage, done, total): what is being done, and how far it is, in whatever unit the stage counts.
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Show nothing."""


@contextmanager
def bars() -> Iterator[Progress]:
    """Draw one bar a stage on stderr, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as drawn:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = drawn.add_task(stage)
            drawn.update(tasks[stage], completed=done, total=total)

        yield show
