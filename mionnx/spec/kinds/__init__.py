"""Intervention kinds, one file each; `KINDS` is the table that everything else reads."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from mionnx.spec.kinds.kind import Kind


def _kinds() -> Iterator[Kind]:
    for info in iter_modules(__path__):
        module = import_module(f"{__name__}.{info.name}")
        for entry in vars(module).values():
            if (
                isinstance(entry, type)
                and issubclass(entry, Kind)
                # The base itself, and what a file imports, are no kinds of that file.
                and entry.__module__ == module.__name__ != Kind.__module__
            ):
                yield entry()


# Name -> kind, in alphabetical order.
KINDS: dict[str, Kind] = {kind.name: kind for kind in _kinds()}
