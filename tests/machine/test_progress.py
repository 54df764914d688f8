"""Progress: bars in a terminal, lines in a log, nothing for short work, one switch for nested work."""

from __future__ import annotations

import inspect
import os
import pty
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mionnx import InputError, MIModel, distributed, probe
from mionnx.machine import progress
from mionnx.machine.progress import shown

PROMPTS = ["The capital of France is", "The capital of Italy is"]


class Log:
    """What was written to standard error, which is no terminal."""

    def __init__(self, captured: pytest.CaptureFixture[str]) -> None:
        self.captured, self.text = captured, ""

    def getvalue(self) -> str:
        self.text += self.captured.readouterr().err
        return self.text


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Log:
    """A log in which a minute is a tenth of a second."""
    monkeypatch.setattr(progress, "MINUTE", 0.1)
    return Log(capsys)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A real terminal as standard error; what it got is in the list afterwards."""
    ours, theirs = pty.openpty()
    seen: list[str] = []
    with monkeypatch.context() as patched, os.fdopen(theirs, "w") as stream:
        patched.setattr(sys, "stderr", stream)
        patched.setenv("TERM", "xterm")
        patched.delenv("COLUMNS", raising=False)
        yield seen
        stream.flush()
        os.set_blocking(ours, False)
        try:
            while part := os.read(ours, 65536):
                seen.append(part.decode())
        except (BlockingIOError, OSError):
            os.close(ours)


def work(progress: bool | None, seconds: float) -> None:
    with shown(progress) as show:
        for step in range(4):
            show("cells", step, 1200)
            time.sleep(seconds / 4)
        show("cells", 1200, 1200)


def test_a_log_gets_a_line_a_minute(log: Log) -> None:
    """FINDINGS, part 2, 5: a sweep of 437 s wrote not one line."""
    work(None, 0.35)
    lines = log.getvalue().splitlines()
    assert 3 <= len(lines) <= 5
    assert lines[0].startswith("mionnx: cells ")
    assert lines[-1].startswith("mionnx: cells 1,200 of 1,200 (0:0")


def test_a_line_in_a_log_tells_what_went_on_since_the_last(log: Log) -> None:
    """Lines of `doctor` repeated every stage of a quarter of an hour."""
    with shown(None) as show:
        show("reading", 1, 1)
        time.sleep(0.15)
        show("writing", 1, 3)
        time.sleep(0.25)
    first, *rest = log.getvalue().splitlines()
    assert first.startswith("mionnx: reading 1 of 1 (")
    assert rest
    assert all(line.startswith("mionnx: writing 1 of 3 (") for line in rest)


def test_work_of_less_than_a_minute_writes_nothing_into_a_log(log: Log) -> None:
    work(None, 0.02)
    assert not log.getvalue()


def test_a_log_gets_a_line_at_once_if_asked_for(log: Log) -> None:
    work(True, 0.0)
    assert "cells 1,200 of 1,200" in log.getvalue()


def test_nothing_is_shown_where_nothing_is_wanted(log: Log) -> None:
    work(False, 0.15)
    assert not log.getvalue()


def test_a_terminal_gets_bars_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SOON", 0.05)
    with terminal(monkeypatch) as long:
        work(None, 0.4)
    assert "cells" in "".join(long)
    assert "━" in "".join(long)
    with terminal(monkeypatch) as short:
        work(None, 0.0)
    assert not "".join(short)
    with terminal(monkeypatch) as asked:
        work(True, 0.0)
    assert "cells" in "".join(asked)


def test_inner_work_follows_the_outer_one(log: Log) -> None:
    with shown(False):
        work(None, 0.15)
    assert not log.getvalue()
    with shown(True) as outer:
        outer("outer", 1, 2)
        work(None, 0.0)
    assert "outer 1 of 2; cells 1,200 of 1,200" in log.getvalue()


def test_it_ends_where_the_work_fails(log: Log) -> None:
    def failing() -> None:
        with shown(True) as show:
            show("cells", 1, 0 // 0)

    with pytest.raises(ZeroDivisionError):
        failing()
    told = log.getvalue()
    time.sleep(0.25)
    assert log.getvalue() == told


VERBS = ["harvest", "head_scores", "statistics", "contrast", "dose_response", "patch_sweep", "path_patch"]
VERBS += ["ablation_sweep", "verify", "bisect"]
OTHERS = (probe, distributed.harvest, distributed.patch_sweep)


@pytest.mark.parametrize("verb", [*(getattr(MIModel, name) for name in VERBS), *OTHERS], ids=lambda verb: verb.__name__)
def test_each_verb_has_the_same_switch(verb: object) -> None:
    """API.md: None, True or False."""
    parameter = inspect.signature(verb).parameters["progress"]  # type: ignore[arg-type]
    assert parameter.default is None
    assert parameter.annotation == "bool | None"


def test_verbs_show_how_far_they_are(shipped: MIModel, log: Log) -> None:
    """FINDINGS, part 2, 5: `progress=True` was refused."""
    shipped.patch_sweep(*PROMPTS, "resid_pre", progress=True)
    assert "cells 20 of 20" in log.getvalue()
    shipped.head_scores("induction", batch=2, period=5, progress=True)
    assert "attention patterns" in log.getvalue()
    shipped.contrast(*PROMPTS, progress=True)
    assert "capturing" in log.getvalue()
    told = log.getvalue()
    shipped.patch_sweep(*PROMPTS, "resid_pre", progress=False)
    assert log.getvalue() == told


def test_a_function_is_refused(shipped: MIModel) -> None:
    with pytest.raises(InputError, match="progress must be"):
        shipped.patch_sweep(*PROMPTS, "resid_pre", progress=print)  # type: ignore[arg-type]
