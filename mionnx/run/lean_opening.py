"""Graphs opened while as little as possible is held besides: packing weights is when a process holds most."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from mionnx.machine import memory
from mionnx.run.graph_uses import one_thread

Open = TypeVar("Open")


def opened_lean(make: Callable[[], Open], release: Callable[[], None], files: Collection[Path]) -> Open:
    """Open a graph, with free memory and pages of weights given back around it.

    The scales of blocks stay mapped beside the packed ones that hold them too. Pages that are read again are found in
    the system's page cache. Where another thread uses graphs, nothing is given back.

    Args:
        make: opens it.
        release: returns the engine's free memory.
        files: of the weights.
    """
    if not one_thread():
        return make()
    release()
    memory.release_mapped(files, 0)
    graph = make()
    memory.release_mapped(files, 0)
    return graph
