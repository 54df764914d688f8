"""`caller_level`: the line that a warning points to."""

import sys
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])


def caller_level() -> int:
    """The stack level of the nearest caller outside of mionnx."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
