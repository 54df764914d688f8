"""A cluster of Ray: connecting to one, its workers, and the errors of code that runs there.

All of Ray that mionnx meets is in this room. What is distributed is a map over independent pieces of work: queues,
scheduling, workers that die and pieces that are repeated are Ray Data's.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from queue import Empty, Queue
from threading import Semaphore, Thread
from typing import Any, TypeVar

import numpy as np

from mionnx.errors import InputError, MIError, RuntimeMissingError, install
from mionnx.machine.brief import count
from mionnx.machine.ranges import at_least
from mionnx.run.runner import Runner

LOCAL = "local"
PATIENCE = 10.0  # seconds that a cluster has to answer
MISSES = 3  # in a row, after which it is given up
LEAVE = 20.0  # seconds for the end of a cluster
M = TypeVar("M", bound=Runner)


@dataclass(frozen=True)
class Workers:
    """Processes of a cluster that work at the same time, each with a model of its own."""

    ray: Any
    count: int
    cpus: int  # of each; also the threads of its model
    gpus: int

    def model(self, model: M) -> M:
        """The model as a worker opens it, its weights packed or not as here: that moves last bits."""
        packed = model.variants.options.prepack
        return type(model)(model.hooked, replace(model.options, threads=self.cpus, prepack=packed))

    def map(self, pieces: Callable[[], Iterator[Any]], work: type, *arguments: Any) -> Iterator[Any]:
        """Map pieces of work to results, which come in any order."""
        # `pieces` makes them in one process of the cluster, as fast as the workers take them; a worker makes one object
        # of the class `work`, and calls that with a piece. A head that does not answer any more is a
        # `RuntimeMissingError`.
        # One row, of which the next step makes all pieces.
        data = self.ray.data.from_items([{"begin": 0}])
        data.context.target_max_block_size = 1  # a piece goes to a worker as soon as it is made
        data.context.enable_progress_bars = False
        pool = self.ray.data.ActorPoolStrategy(size=self.count)
        data = data.map_batches(_all_of(pieces), num_cpus=0)  # it only hands out pieces: all CPUs are the workers'
        data = data.map_batches(
            _Worker,
            fn_constructor_args=(work, arguments),
            batch_size=1,
            compute=pool,
            num_cpus=self.cpus,
            num_gpus=self.gpus or None,
        )
        for row in _while_answering(data.iter_rows(), self.ray.get_runtime_context().gcs_address):
            if isinstance(result := row["piece"].value, MIError):
                raise result
            yield result


def _while_answering(rows: Iterable[Any], head: str) -> Iterator[Any]:
    """Rows as they come, while the head of the cluster answers."""
    # Ray itself waits without end for one that is dead.
    queue: Queue[tuple[bool, Any]] = Queue()
    room = Semaphore(0)  # no row is fetched before the one before it is taken

    def fetch() -> None:
        try:
            for row in rows:
                queue.put((True, row))
                room.acquire()
            queue.put((False, None))
        except BaseException as error:
            queue.put((False, error))

    Thread(target=fetch, daemon=True).start()  # ends with this process, even if Ray never answers
    misses = 0
    while True:
        try:
            more, row = queue.get(timeout=PATIENCE / 2)
        except Empty:
            misses = 0 if _answers(head) else misses + 1
            if misses < MISSES:
                continue
            raise RuntimeMissingError(
                f"the head of the Ray cluster, {head}, does not answer any more; what is finished is kept: begin a "
                "cluster again and repeat the call, and it goes on"
            ) from None
        if not more and row is not None:
            raise row
        if not more:
            return
        misses = 0
        room.release()
        yield row


def _answers(head: str) -> bool:
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


@dataclass(frozen=True)
class _Piece:
    """Any object, which Arrow does not look into; an error in the place of a piece or a result."""

    value: Any


def _batch(value: Any) -> dict[str, Any]:
    pieces = np.empty(1, object)  # filled by index: `np.array` would look into the object
    pieces[0] = _Piece(value)
    return {"piece": pieces}


def _all_of(pieces: Callable[[], Iterator[Any]]) -> Callable[[Any], Iterator[dict[str, Any]]]:
    def every(_: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from map(_batch, pieces())
        except MIError as error:
            yield _batch(error)

    return every


class _Worker:
    """One object of the work's class in each process."""

    def __init__(self, work: type, arguments: tuple[Any, ...]) -> None:
        self.work = work(*arguments)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        piece = batch["piece"][0].value
        try:
            return _batch(piece if isinstance(piece, MIError) else self.work(piece))
        except MIError as error:
            return _batch(error)


@contextmanager
def cluster(address: str, model: Runner, workers: int | None, cpus: int) -> Iterator[Workers]:
    """Connect to a cluster, as `harvest` says of its address; one that was begun here ends with the body."""
    # On CUDA each worker has a GPU.
    at_least("cpus", cpus, 1)
    if workers is not None:
        at_least("workers", workers, 1)
    if address.startswith("ray://"):
        raise InputError(
            f"{address!r}: a client of Ray writes on another machine's disk; run it in the cluster, 'auto'"
        )
    ray = _ray()
    begun = not ray.is_initialized()
    if begun:
        try:
            _reach(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
            raise InputError(f"no Ray cluster at {address!r}: {error}; 'local' begins one here") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    gpus = int(model.options.place[0] == "cuda")
    try:
        room = _room(ray.cluster_resources(), cpus, gpus)
        # Another cluster may grow, or become free; this machine does not.
        if address == LOCAL and room < (workers or 1):
            wish = f"{count(workers or 1, 'worker')} of {count(cpus, 'CPU')} and {count(gpus, 'GPU')}"
            raise InputError(f"{wish}: this machine has room for {room}")
        yield Workers(ray, workers or max(1, room), cpus, gpus)
    finally:
        if begun:
            ending = Thread(target=ray.shutdown, daemon=True)  # which waits for a dead head
            ending.start()
            ending.join(LEAVE)


def _reach(address: str) -> None:
    """Connect to "HOST:PORT" once: Ray itself waits long for what does not answer."""
    if address in (LOCAL, "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("an address is 'local', 'auto' or 'HOST:PORT'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nothing answers there ({error})") from error


def _ray() -> Any:
    try:
        import_module("ray.data")
        return import_module("ray")
    except ImportError as error:
        raise RuntimeMissingError(f"work on several processes needs Ray: {install('ray')}") from error


def _room(resources: dict[str, float], cpus: int, gpus: int) -> int:
    room = int(resources.get("CPU", 0)) // cpus
    return min(room, int(resources.get("GPU", 0))) if gpus else room
