"""Callers outside of mionnx: the line that a warning points to, and the verb called there."""

import sys
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
WRAPPERS = ("machine/typed.py", "run/tokenizing.py", "sweep/comparison.py")  # of decorators around verbs


def caller_level() -> int:
    """The stack level of the nearest caller outside of mionnx."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


def caller_verb() -> str:
    """The function of mionnx that the nearest caller outside of it called."""
    frame, verb = sys._getframe(1), ""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        if not frame.f_code.co_filename.endswith(WRAPPERS):
            verb = frame.f_code.co_name
        frame = frame.f_back
    return verb
