"""What tells a metric, and whatever it is made of, from every other: the same in another process, or an error.

A Python function is known by its code, its defaults, what its closure holds and the globals that it reads, each by the
same rule. A library's function, class or module is known by its name, a module of the user's own by its file. What has
a state of its own that cannot be read here cannot be told apart, and a sweep with it cannot be resumed.
"""

import dis
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, EllipsisType, FunctionType, ModuleType
from typing import Any

import numpy as np

from mionnx.errors import InputError

SIMPLE = (type(None), bool, int, float, complex, str, bytes, EllipsisType)
INSTALLED = ("site-packages", "dist-packages")


def mark_of(value: Any, within: tuple[Any, ...] = ()) -> Any:
    """What tells a value from others, of what JSON can hold.

    Args:
        value: a metric, or something that it is made of.
        within: what it is a part of, outermost first: a function that refers to itself is not followed round.

    Raises:
        InputError: it cannot be told from others of its kind.
    """
    if any(value is one for one in within):
        return "itself"
    inner = (*within, value)
    for kind, mark in MARKS.items():
        if isinstance(value, kind):
            return [type(value).__name__, mark(value, inner)]
    name = _library_name(value)
    if name is None:
        raise InputError(
            f"a sweep with {_spelled(inner)} cannot be resumed: what is in a {type(value).__name__} cannot be told "
            "from what was in it before; give a function of plain numbers, texts and arrays, or resume=False"
        )
    return name


def _function(value: FunctionType, within: tuple[Any, ...]) -> Any:
    if _is_installed(value.__code__.co_filename):
        return f"{value.__module__}.{value.__qualname__}"
    read = sorted({name for name in _globals_of(value.__code__) if name in value.__globals__})
    parts = (
        value.__defaults__,
        value.__kwdefaults__,
        [_content(cell) for cell in value.__closure__ or ()],
        {name: value.__globals__[name] for name in read},
    )
    return [_code(value.__code__, within), *(mark_of(part, within) for part in parts)]


def _code(code: CodeType, within: tuple[Any, ...]) -> Any:
    names = [*code.co_names, *code.co_freevars, str(code.co_argcount), str(code.co_flags)]
    return [code.co_code.hex(), code.co_exceptiontable.hex(), names, mark_of(code.co_consts, within)]


def _globals_of(code: CodeType) -> Iterator[str]:
    """The names of globals that code reads, and the code within it."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is assigned yet
        return "nothing"


def _array(value: Any, within: tuple[Any, ...]) -> Any:
    array = np.asarray(value)
    if array.dtype.hasobject:
        return mark_of(array.tolist(), within)
    return [array.dtype.str, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def _entries(value: Any, within: tuple[Any, ...]) -> Any:
    return [mark_of(entry, within) for entry in value]


def _unordered(value: Any, within: tuple[Any, ...]) -> Any:
    return sorted(map(repr, _entries(value, within)))


def _module(value: ModuleType, within: tuple[Any, ...]) -> Any:
    file = getattr(value, "__file__", None)
    if file is None or _is_installed(file):
        return value.__name__
    return [value.__name__, hashlib.sha256(Path(file).read_bytes()).hexdigest()]


def _is_installed(file: str) -> bool:
    """Whether a file is a library's: that a new version of one changes a metric is not noticed."""
    path = Path(file)
    return bool({*path.parts} & {*INSTALLED}) or path.is_relative_to(sysconfig.get_path("stdlib"))


def _library_name(value: Any) -> str | None:
    """The name by which a library's function or class is found; None if it is not found so."""
    home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    found = sys.modules.get(str(home or "numpy"))  # a ufunc says no module
    for part in str(name).split("."):
        found = getattr(found, part, None)
    file = getattr(sys.modules.get(str(home)), "__file__", None)
    own = file is not None and not _is_installed(file)
    return None if found is not value or value is None or own or home == "__main__" else f"{home}.{name}"


def _spelled(within: tuple[Any, ...]) -> str:
    whole, part = within[0], within[-1]
    name = getattr(whole, "__name__", type(whole).__name__)
    return f"the metric {name}" + ("" if part is whole else f", which reads a {type(part).__name__},")


MARKS: dict[Any, Callable[[Any, tuple[Any, ...]], Any]] = {
    SIMPLE: lambda value, within: repr(value),
    (np.ndarray, np.generic): _array,
    (tuple, list): _entries,
    (set, frozenset): _unordered,
    dict: lambda value, within: _unordered(value.items(), within),
    slice: lambda value, within: _entries((value.start, value.stop, value.step), within),
    CodeType: _code,
    FunctionType: _function,
    ModuleType: _module,
    partial: lambda value, within: _entries((value.func, value.args, value.keywords), within),
}
