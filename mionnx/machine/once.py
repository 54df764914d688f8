"""Made once, whichever thread asks first: a value by key (`Once`), and a property (`once_property`)."""

from collections.abc import Callable, Hashable
from functools import cached_property
from threading import Lock, RLock
from typing import Any, Generic, Self, TypeVar, overload
from weakref import WeakValueDictionary

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class KeyedLocks(Generic[K]):
    """A lock a key; it lives as long as a thread holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[K, Any] = WeakValueDictionary()
        self._lock = Lock()

    def of(self, key: K) -> Any:
        """The lock of a key; reentrant.

        Example:
            with locks.of("a"): ...
        """
        with self._lock:
            lock = self._locks.get(key)
            if lock is None:
                lock = self._locks[key] = RLock()
            return lock


class Once(Generic[K, V]):
    """Values by key: each is made once, and those of different keys in parallel."""

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._making: KeyedLocks[K] = KeyedLocks()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if there is none; after a failure the next thread tries again."""
        with self._making.of(key):
            if key not in self._values:
                self._values[key] = make()
            return self._values[key]

    def keep(self, condition: Callable[[K], bool]) -> None:
        """Forget the values of all keys but those that fulfil a condition."""
        for key in [*self._values]:  # a copy: another thread may add to it meanwhile
            if not condition(key):
                self._values.pop(key, None)

    def values(self) -> list[V]:
        """All that were made."""
        return [*self._values.values()]


class once_property(cached_property[V]):  # noqa: N801 - used as `cached_property` is
    """`functools.cached_property`, computed once for all threads.

    From Python 3.12 on, `functools` computes it in every thread that asks at the same time.
    """

    def __init__(self, compute: Callable[[Any], V]) -> None:
        super().__init__(compute)
        self._alone = RLock()

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> V: ...

    def __get__(self, instance: object | None, owner: type[Any] | None = None) -> Self | V:
        if instance is None:
            return self
        with self._alone:
            return super().__get__(instance, owner)
