"""`IdleMemory`: memory that no call uses any more, returned to the system when an analysis ends.

1. Graphs that no call has used since the last analysis ended are closed, the least recently used first, until all of a
   pool take at most an eighth of the weights' size (`OpenGraphs.close_idle`).
2. What freed activations leave behind in the engine's arena and in the C library is returned if the process has grown
   by more than an eighth of the weights' size: below that, the next call would only have to fetch it again. After an
   analysis it is returned when no graph has been used for `PAUSE` seconds, so that the next analysis finds what the
   last one took; at the latest `LONGEST` seconds after.

Pages of mapped weight files stay: the system takes them back where memory is short. Unmapping them by their addresses
could have met what another thread mapped there meanwhile, and gained little (SmolLM2, PSS after five structures, a
lens and `give_back`: float32 743 MB with, 731 without; int4 211 and 183; 113 MB of weights after every analysis: at
most 2.0 times the weights with, 2.6 without).
"""

import time
from collections.abc import Callable, Sequence
from threading import RLock, Timer

from mionnx.machine import memory
from mionnx.run.open_graphs import OpenGraphs, uses

SHARE = 8  # the part of the weights' size that may lie idle: an eighth
LEAST_IDLE = 2**25  # bytes that may, however small the model
PAUSE, LONGEST_WAIT = 2.0, 30.0  # seconds


class IdleMemory:
    """The memory of a process when some was last returned, or the least since.

    Attributes:
        held: bytes of no file.
    """

    def __init__(self) -> None:
        self.held = memory.anonymous()
        self._lock, self._since = RLock(), 0.0
        self._timer: Timer | None = None

    def give_back(self, pools: Sequence[OpenGraphs], *, later: bool) -> None:
        """Close idle graphs, and return free memory.

        Args:
            later: keep free memory until no graph has been used for `PAUSE` seconds.
        """
        allowed = max(pools[0].weights // SHARE, LEAST_IDLE)
        for pool in pools:
            pool.close_idle(allowed)
        self.release(allowed, pools[0].engine.release, PAUSE if later else 0.0)

    def release(self, allowed: int, release: Callable[[], None], pause: float = 0.0) -> None:
        """Return memory of no file if more than the bytes allowed were added to what was held.

        Args:
            pause: seconds without a use of a graph, in this process, that are waited for in another thread.
        """
        with self._lock:
            waited = 0.0 if self._timer is None else time.monotonic() - self._since
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            now = memory.anonymous()
            if now > self.held + allowed and pause and waited < LONGEST_WAIT:
                self._since = time.monotonic() - waited
                self._wait(allowed, release, pause)
            elif now > self.held + allowed:
                release()
                now = memory.anonymous()
                self.held = now
            self.held = min(self.held, now)

    def _wait(self, allowed: int, release: Callable[[], None], pause: float) -> None:
        """Release after a pause; where a graph was used meanwhile, after another one."""
        used = uses()

        def end() -> None:
            with self._lock:
                if self._timer is timer:  # else something else was begun
                    self.release(allowed, release, pause if uses() != used else 0.0)

        self._timer = timer = Timer(pause, end)
        timer.daemon = True
        timer.start()
