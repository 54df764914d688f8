"""Render chat templates in a process of its own, with bounded memory and time: a template is not trusted."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from mionnx.errors import InputError, TokenizerError

PROGRAM = Path(__file__).with_name("chat_sandbox.py")
START = "import sys; sys.path[:] = {path!r}; import runpy; runpy.run_path({program!r}, run_name='__main__')"
SECONDS = 10.0  # for one chat
STARTING = 120.0  # seconds for the process to start in: a busy machine's disk
Process = subprocess.Popen[str]


class ChatRenderer:
    """Renders chat templates, one at a time, in at most so many seconds each."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._alone = Lock()
        # Started at the first chat and kept, beside the id of the process that started it: a start takes longer than a
        # thousand chats. One that exceeds its time is ended, and the next chat starts another.
        self._owned: tuple[int, Process | None] = (0, None)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Render a template of jinja2, with the functions and filters that transformers gives chat templates."""
        try:
            line = json.dumps({"template": template, "variables": dict(variables)}, default=dict)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"messages and variables hold plain values only, as JSON does: {error}") from error
        with self._alone:
            answer = self._answer(line)
        if "error" in answer:
            raise TokenizerError(f"the chat template cannot be rendered: {answer['error']}")
        return str(answer["text"])

    def _answer(self, line: str) -> dict[str, Any]:
        process = self._running()
        try:
            answer = _asked(process, line, self.seconds)
        except BaseException:  # interrupted: its answer would be taken for the next chat's
            _end(process)
            raise
        if answer is None:
            memory = "MemoryError" in _end(process)
            return {"error": "it needs too much memory" if memory else f"it takes longer than {self.seconds:g} seconds"}
        return answer

    def _running(self) -> Process:
        """The process; a new one after a fork, whose two sides must not read the same pipe."""
        owner, process = self._owned
        if process is None or owner != os.getpid() or process.poll() is not None:
            process = _started()
            weakref.finalize(self, _end, process)
            if _asked(process, None, STARTING) is None:
                raise TokenizerError(f"the process for chat templates does not start: {_end(process)}")
            self._owned = os.getpid(), process
        return process


def _started() -> Process:
    if not sys.executable:
        raise TokenizerError("chat templates are rendered in a Python process, and there is no Python: give text")
    pipe, program = subprocess.PIPE, START.format(path=sys.path, program=str(PROGRAM))
    # -I: environment variables and user site-packages count for nothing; the path comes with the program
    command = [sys.executable, "-I", "-X", "utf8", "-c", program]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8")


def _asked(process: Process, line: str | None, seconds: float) -> dict[str, Any] | None:
    """The answer to a line, or the sign of being ready; None if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    # the pipe then ends, and `readline` with it: a read from a pipe has no time limit of its own
    timer = Timer(seconds, process.kill)
    timer.start()
    try:
        if line is not None:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        # a line cut off: the process was ended while it wrote
        return json.loads(answer) if answer.endswith("\n") else None
    except OSError:
        return None
    finally:
        timer.cancel()


def _end(process: Process) -> str:
    """End the process; what it said last."""
    process.kill()
    try:
        return process.communicate()[1][-500:]
    except (OSError, ValueError):  # closed already
        return ""


chats = ChatRenderer()
