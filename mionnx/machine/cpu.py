"""Which processor this is: kernels, and the layout of packed weights, are chosen by it."""

import platform
from pathlib import Path


def name() -> str:
    """The processor's name, or its architecture where it has none to tell."""
    return _told().get("model name") or platform.processor() or platform.machine()


def features() -> list[str]:
    """The instruction sets that it has, as Linux names them, sorted; none where the system does not tell."""
    told = _told()
    return sorted({*(told.get("flags") or told.get("Features") or "").split()})


def _told() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
