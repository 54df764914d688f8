"""Name and instruction sets of this processor: kernels and the layout of packed weights depend on them."""

import platform
from pathlib import Path


def name() -> str:
    """Name of the processor, or its architecture."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def features() -> list[str]:
    """Instruction sets, sorted, by their Linux names; empty on other systems."""
    info = _cpuinfo()
    return sorted({*(info.get("flags") or info.get("Features") or "").split()})


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
