"""Count of the graphs asked for, and of the threads that ask."""

from threading import get_ident

_threads: set[int] = set()  # those that have used a graph
_uses = [0]  # how often any model's graph was asked for


def count_use() -> None:
    """Count a graph that this thread asks for."""
    _threads.add(get_ident())
    _uses[0] += 1


def one_thread() -> bool:
    """Whether no other thread has used a graph of any model, and so none opens or closes one."""
    return _threads <= {get_ident()}


def uses() -> int:
    """Count of graphs asked for, of all models."""
    return _uses[0]
