"""Progress of long work: a bar in a terminal or notebook, a line a minute in a log.

1. Work that is done within two seconds shows nothing.
2. Work inside other work shows itself among that one's bars, and is silent where that one was told to be.
3. A thread draws: a stage that does not report for long is shown nevertheless, and reporting costs nothing.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from html import escape
from threading import Event, Thread
from typing import Any, Protocol, cast

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

# (stage, done, total): what is being done, and how far it is, in any unit; a total of 0 is unknown.
Progress = Callable[[str, int, int], None]
Stages = dict[str, tuple[int, int]]  # stage -> done, total
SOON, MINUTE, OFTEN = 2.0, 60.0, 0.5  # seconds before a bar, between two lines, between two drawings

_shown: ContextVar[Progress | None] = ContextVar("shown", default=None)


def silent(stage: str, done: int, total: int) -> None:
    """Show nothing."""


@contextmanager
def shown(progress: bool | None = None) -> Iterator[Progress]:
    """Show how far work is, in the way of the place where it runs.

    Args:
        progress: None for a bar in a terminal or notebook when the work takes longer than two seconds, and a line a
            minute on stderr elsewhere; True at once, wherever it runs; False for nothing.
    """
    outer = _shown.get()
    if progress is None and outer is not None:
        yield outer
        return
    with drawn(at_once=progress is True) if progress is not False else silence() as show, reported_to(show):
        yield show


@contextmanager
def reported_to(show: Progress) -> Iterator[None]:
    """Report work inside to a function, in the place of bars and lines."""
    token = _shown.set(show)
    try:
        yield
    finally:
        _shown.reset(token)


@contextmanager
def silence() -> Iterator[Progress]:
    """Show nothing."""
    yield silent


@contextmanager
def drawn(at_once: bool) -> Iterator[Progress]:
    """Draw what is reported, from a thread."""
    stages, ended = Stages(), Event()
    console = Console(stderr=True)
    place: ProgressPlace = InNotebook() if in_notebook() else InTerminal(console) if console.is_terminal else InLog()

    def draw() -> None:
        if not at_once and ended.wait(place.first):
            return
        while True:
            place.draw(dict(stages))  # a copy: work goes on reporting
            if ended.wait(place.pause):
                break
        place.end(dict(stages))

    # A copy of the context: a kernel finds the cell that an output belongs to by it.
    thread = Thread(target=copy_context().run, args=(draw,), name="mionnx progress", daemon=True)
    thread.start()
    try:
        # a dictionary's update is one step for all threads: no lock
        yield lambda stage, done, total: stages.update({stage: (done, total)})
    finally:
        ended.set()
        thread.join()


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook; IPython is there then."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class ProgressPlace(Protocol):
    """A place where progress is shown."""

    # first, pause: seconds before the first drawing, and between two.
    first: float
    pause: float

    def draw(self, stages: Stages) -> None:
        """Show the stages as they are."""

    def end(self, stages: Stages) -> None:
        """Show that all is done."""


class InTerminal:
    """Bars that go when the work is done."""

    def __init__(self, console: Console) -> None:
        self.first, self.pause = SOON, OFTEN
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bars, self._tasks = Bars(*columns, console=console, transient=True), dict[str, TaskID]()

    def draw(self, stages: Stages) -> None:
        """Draw a bar for each stage."""
        self._bars.start()
        for stage, (done, total) in stages.items():
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage)
            self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def end(self, stages: Stages) -> None:
        """Draw the last state, and remove it."""
        self.draw(stages)
        self._bars.stop()


class InNotebook:
    """Bars below the cell, left there when the work is done."""

    def __init__(self) -> None:
        self.first, self.pause = SOON, OFTEN
        self._begin, self._handle = time.monotonic(), cast(Any, None)

    def draw(self, stages: Stages) -> None:
        """Display the bars, the first time, or bring them up to date."""
        from IPython.display import display

        if not stages:
            return
        content = {"text/html": "".join(map(_html, stages.items())), "text/plain": _line(stages, self._begin)}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def end(self, stages: Stages) -> None:
        """Show the last state."""
        self.draw(stages)


class InLog:
    """Lines, for a reader who comes later: what went on since the line before."""

    def __init__(self) -> None:
        self.first = self.pause = MINUTE
        self._begin, self._said = time.monotonic(), Stages()

    def draw(self, stages: Stages) -> None:
        """Print a line; of a stage that is slow to go on the same once more."""
        new = {stage: at for stage, at in stages.items() if self._said.get(stage) != at}
        if stages:
            print(_line(new or dict([[*stages.items()][-1]]), self._begin), file=sys.stderr, flush=True)
        self._said = stages

    def end(self, stages: Stages) -> None:
        """Print a last line."""
        self.draw(stages)


def _line(stages: Stages, begin: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    parts = (f"{stage} {done:,}" + (f" of {total:,}" if total else "") for stage, (done, total) in stages.items())
    return f"mionnx: {'; '.join(parts)} ({minutes}:{seconds:02})"


def _html(stage: tuple[str, tuple[int, int]]) -> str:
    name, (done, total) = stage
    bar = f'<progress value="{done}" max="{total}"></progress>' if total else "<progress></progress>"
    number = f"{done:,} of {total:,}" if total else f"{done:,}"
    return f"<div>{bar} {escape(name)} {number}</div>"
