"""Programs timed by turns: seconds of each, and medians of ratios of neighbouring runs."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

Work = Callable[[], Any]


def alternate(
    programs: Mapping[str, Work], repeats: int, clock: Callable[[], float] = time.perf_counter, rest: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of each program, run by turns after a warm-up, `rest` seconds behind the one before.

    Threads of ONNX Runtime and OpenMP spin for 50 ms and more after a run, unless told otherwise: a call of a few
    milliseconds behind another program's would wait for a core.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, program in programs.items():
            time.sleep(rest)
            begin = clock()
            program()
            if turn:
                times[name].append(clock() - begin)
    return times


def ratio(one: list[float], other: list[float], places: int = 3) -> str:
    """The median of the ratios of neighbouring runs."""
    return f"{median(a / b for a, b in zip(one, other, strict=True)):.{places}f}"
