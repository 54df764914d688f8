"""Memory of open graphs: what is open, what it costs, when it closes and is returned to the system.

1. The graph used longest ago is closed when a pool has more than `max_graphs` or `max_bytes`.
2. When an analysis ends, graphs that no call has used since the last one ended are closed, until all of a pool take at
   most an eighth of the weights' size.
3. Memory that freed activations leave behind in the engine's arena and in the C library is returned, if the process
   has grown by more than that eighth, once no graph has been used for two seconds.

4. Each graph maps the weights' files anew, and a page counts once for each mapping that has read it. Where they are
   more than the weights once, when a graph was opened, or (of 256 MiB of weights and more) behind a pass and not within
   two seconds, all are let go; the next run fetches its own from the system's cache.
5. A mapping is a file's piece, one for each of the weights, and the system gives a process a certain number of them (of
   which each thread takes one too). Half of them are for graphs: beyond that, those of the models used longest ago are
   closed.
"""

import atexit
import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from threading import RLock, Timer, current_thread
from threading import enumerate as enumerate_threads
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from mionnx.engine.options import Options
from mionnx.machine import memory

SHARING = 2**23  # approximate bytes of a session on a device that shares its weights with others
SESSION, NODE = 2**19, 2**13  # approximate bytes of a session, and of each of its nodes, besides weights that it shares
SEGMENT = 2**20  # approximate bytes of one more session
SHARE = 8  # the part of the weights' size that may lie idle: an eighth
LEAST_IDLE = 2**25  # bytes that may, however small the model
WATCHED = 2**28  # bytes of weights from which on pages are looked at behind a pass: of fewer, less is held
PAUSE, LONGEST_WAIT = 2.0, 30.0  # seconds

_uses = [0]  # how often any model's graph was asked for
all_pools: WeakSet["GraphMemory[Any, Any]"] = WeakSet()  # of all models
_pools_lock = RLock()
_idle: WeakSet["IdleMemory"] = WeakSet()


def idle_limit(weights: int) -> int:
    """Bytes that may lie idle beside weights of so many bytes."""
    return max(weights // SHARE, LEAST_IDLE)


class Costly(Protocol):
    """Something open."""

    @property
    def cost(self) -> int:
        """Approximate bytes of memory."""


Key = TypeVar("Key")
Graph = TypeVar("Graph", bound=Costly)


class GraphMemory(Generic[Key, Graph]):
    """Open graphs within the limits of some options."""

    def __init__(self, options: Options) -> None:
        self.open: dict[Key, Graph] = {}  # the one used longest ago first
        self._limits = options.max_graphs, options.max_bytes
        self._recent: set[Key] = set()  # used since `close_idle`
        self._lock = RLock()  # held for no longer than the fields are read
        self._used = 0  # of `_uses`, when a graph was last asked for
        with _pools_lock:
            all_pools.add(self)

    @property
    def mappings(self) -> int:
        """How many pieces of files the open graphs map, at most."""
        return 0

    @property
    def cost(self) -> int:
        """Approximate bytes of all open graphs."""
        return sum(graph.cost for graph in self.open.values())

    def used(self, key: Key) -> Graph | None:
        """An open graph, which is the one used most recently from now on; None if it is not open."""
        with self._lock:
            self._used = _uses[0]
            graph = self.open.pop(key, None)
            if graph is not None:
                self._put(key, graph)
            return graph

    def keep(self, key: Key, graph: Graph) -> None:
        """Add an open graph, and close others until there is room."""
        count, size = self._limits
        size = size or memory.total() // 2
        with self._lock:
            self._put(key, graph)
            self.close([*self.open][:-1], lambda: len(self.open) <= count and self.cost <= size)
        limit_mappings(memory.most_mappings() // 2)

    def _put(self, key: Key, graph: Graph) -> None:
        self.open[key] = graph  # last in the dictionary
        self._recent.add(key)

    def close(self, keys: Iterable[Key], enough: Callable[[], bool] = lambda: False) -> None:
        """Close graphs, in this order, until there is enough room."""
        with self._lock:
            for key in keys:
                if enough():
                    return
                del self.open[key]  # a thread that runs it meanwhile keeps it until it has its result

    def close_mapped(self, allowed: float) -> None:
        """Close all graphs but the last while they map more pieces of files than allowed."""
        self.close([*self.open][:-1], lambda: self.mappings <= allowed)

    def close_idle(self, allowed: int) -> None:
        """Close graphs not used since the last such call, while all take more than allowed."""
        with self._lock:
            recent, self._recent = self._recent, set()
            self.close([key for key in self.open if key not in recent], lambda: self.cost <= allowed)


def limit_mappings(most: float) -> None:
    """Close graphs, those of the models used longest ago first, until all map no more than so many pieces of files."""
    with _pools_lock:
        pools = sorted(all_pools, key=lambda pool: pool._used)
    total = sum(pool.mappings for pool in pools)
    for pool in pools:
        if total <= most:
            return
        total -= pool.mappings
        pool.close_mapped(most - total)
        total += pool.mappings


def count_use() -> None:
    """Note that a graph is asked for: free memory is about to be needed again."""
    _uses[0] += 1


def _alone() -> bool:
    """Whether no other thread of the program may unmap weights that it has read: a pause has the main one beside it.

    Threads that a program does not wait for, as those of a notebook, a bar or a pause, read no weights.
    """
    return all(one.daemon for one in enumerate_threads() if one is not current_thread())


class MappedPages:
    """Resident pages of the files in which a model's weights lie."""

    def __init__(self) -> None:
        self._least = memory.resident()[1]  # bytes of all files when these were last let go
        self._when = 0.0  # seconds of the monotonic clock, when they last were

    def watch(self, weights: int, parts: Callable[[], Collection[memory.Part]], files: Collection[Path]) -> None:
        """`limit` behind a pass, at most once in so many seconds: passes by turns would fetch their pages each time."""
        if weights >= WATCHED and time.monotonic() > self._when + PAUSE:
            self.limit(weights, parts, files)

    def limit(self, weights: int, parts: Callable[[], Collection[memory.Part]], files: Collection[Path]) -> None:
        """Let pages go where the process holds more than the weights' bytes once."""
        now = memory.resident()[1]
        self._least = min(self._least, now)
        if now > self._least + weights + idle_limit(weights) and _alone():
            memory.let_go(parts(), files)
            self._least, self._when = memory.resident()[1], time.monotonic()


class IdleMemory:
    """Free memory of the process, which no value lies in."""

    def __init__(self) -> None:
        self._least = memory.resident()[0]  # bytes when some was last returned, or the least since
        self._lock, self._since = RLock(), 0.0
        self._timer: Timer | None = None
        self._ended = False
        _idle.add(self)

    def release(self, allowed: int, release: Callable[[], None], later: bool = False) -> None:
        """Return memory if the process has grown by more than the bytes allowed.

        Args:
            later: wait, in another thread, for a pause in which no graph of this process is used.
        """
        with self._lock:
            waited = 0.0 if self._timer is None else time.monotonic() - self._since
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            now = memory.resident()[0]
            if now > self._least + allowed:
                # The next analysis takes what the last one took: returned in between, it would be fetched again.
                if later and waited < LONGEST_WAIT:
                    self._since = time.monotonic() - waited
                    self._wait(allowed, release)
                    return
                release()
                self._least = memory.resident()[0]
            else:
                self._least = min(self._least, now)

    def watch(self, allowed: int, release: Callable[[], None]) -> None:
        """Release in the next pause, if the process has grown; quick enough for every call."""
        if self._timer is None and memory.resident()[0] > self._least + allowed:
            self.release(allowed, release, later=True)

    def expect(self, allowed: int, release: Callable[[], None]) -> None:
        """Look in the next pause whether the process has grown: for what reads weights and ends with no pass."""
        with self._lock:
            if self._timer is None:
                self._since = time.monotonic()
                self._wait(allowed, release)

    def end(self) -> None:
        """Wait for no pause any more, and for a release that is under way."""
        # The interpreter, at its end, stops threads that are no part of it where they come back from the engine, and
        # the engine, which is C++, ends the process then: "terminate called without an active exception".
        with self._lock:
            self._ended = True
            if self._timer is not None:
                self._timer.cancel()

    def _wait(self, allowed: int, release: Callable[[], None]) -> None:
        """Release after a pause; where a graph was used meanwhile, after another one."""
        if self._ended:
            return
        before = _uses[0]

        def end() -> None:
            with self._lock:
                if self._timer is timer and not self._ended:  # else something else was begun
                    self.release(allowed, release, later=_uses[0] != before)

        self._timer = timer = Timer(PAUSE, end)
        timer.daemon = True
        timer.start()


if hasattr(os, "register_at_fork"):  # a child has none of the threads, and no lock that one of them held is let go
    os.register_at_fork(after_in_child=_idle.clear)


@atexit.register
def _end_pauses() -> None:
    for one in [*_idle]:
        one.end()
