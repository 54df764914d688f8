"""Check arguments against the annotations of a public function, before it does anything.

`typed` decorates a function, or a class: then its constructor and all public methods that it defines itself. Written
below `@dataclass` it leaves out the constructor that is made after it. An annotation says what is checked:

* int, float, str, bool, None, Path, callables, classes, literals: the value; numpy's and torch's numbers are numbers, a
  bool is no integer, and a text has to be one that UTF-8 can write.
* sequences, iterables, mappings: the value, and the entries of lists, tuples, sets, dictionaries and arrays. What can
  be gone through once only, or in no order, becomes a list where a sequence is asked for.
* unions: one of their parts fits.
* `Any`, arrays, protocols, type variables, names that only type checkers see, and unions with one of them: nothing;
  the function looks for itself.
"""

import inspect
import operator
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from itertools import islice
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from mionnx.errors import InputError, MIError
from mionnx.machine.arrays import is_tensor, scalar, to_array
from mionnx.machine.brief import TEXT_LETTERS, cut, spelled
from mionnx.machine.dialects import unknown_keyword
from mionnx.machine.ranges import MOST_ENTRIES

T = TypeVar("T", bound=Callable[..., Any])
Check = Callable[[Any], Any]  # gives the value to use, or REFUSED
REFUSED = object()
HELD: tuple[type, ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
)  # entries are looked at without being used up
WORDS = {int: "an integer", float: "a number", str: "a text", bool: "True or False", types.NoneType: "None"}
PLURALS = {"a text": "texts", "True or False": "booleans", "a number": "numbers", "an integer": "integers"}
LONGEST_NAME, PATH = 255, 4095  # bytes of a file's name, and of a path
DEEPEST = 64  # lists in a list: more dimensions than numpy has
REMEDIES = {"HookSpec": "HookSpec().capture(NAME) makes one", "Intervention": "Intervention.Zero() is one"}


def typed(error: type[MIError] = InputError, leave: Sequence[str] = ()) -> Callable[[T], T]:
    """Decorate a function or a class, whose arguments are then checked, except those it checks itself (`leave`)."""
    return partial(_decorate, error, {*leave})


def _decorate(error: type[MIError], leave: set[str], what: T) -> T:
    if not isinstance(what, type):
        return _checked(what, error, leave)
    for name, member in list(vars(what).items()):
        if getattr(member, "__module__", what.__module__) != what.__module__:
            continue  # a function of another file, which is decorated there
        if isinstance(member, types.FunctionType) and (not name.startswith("_") or name in ("__init__", "__call__")):
            setattr(what, name, _checked(member, error, leave))
        elif isinstance(member, classmethod | staticmethod) and not name.startswith("_"):
            setattr(what, name, type(member)(_checked(member.__func__, error, leave)))
    return what


def _checked(function: Any, error: type[MIError], leave: set[str]) -> Any:
    parameters = inspect.signature(function).parameters
    names = [*parameters]
    if names in ([], ["self"], ["cls"]):
        return function
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    checks: dict[str, Check] = {}
    placed: list[Check | None] = []

    def fit(name: str, check: Check | None, value: Any) -> Any:
        """What an annotation makes of an argument."""
        value = scalar(value)  # an array of no axes is its number: annotations say int and float
        if type(value) is range and abs((value.stop - value.start) // value.step) > MOST_ENTRIES:
            raise error(f"{name} has more than {MOST_ENTRIES:,} entries, got {value}: give fewer")
        if check is None and name not in parameters and not takes_any:
            raise unknown_keyword(function.__name__, name, names)
        fitted = value if check is None else check(value)
        if fitted is REFUSED:
            raise error(refusal(name, _hints(function)[name], value))
        return fitted

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if not checks:  # when it is first called, all names of its annotations are there
            by_name = _checks(function, leave)
            placed[:] = map(by_name.get, names)
            checks.update(by_name)
        try:
            values = [*map(fit, names, placed, args), *map(scalar, args[len(names) :])]
            return function(*values, **{name: fit(name, checks.get(name), value) for name, value in named.items()})
        except RecursionError as problem:
            if deep := [name for name, value in (*zip(names, args, strict=False), *named.items()) if _is_deep(value)]:
                said = f"{deep[0]} must not hold lists in lists more than {DEEPEST} deep, nor hold itself"
                raise error(said) from problem
            raise

    return call


def _is_deep(value: Any) -> bool:
    """Whether a value holds others in others more than numpy's dimensions deep, or holds itself."""
    level: list[Any] = [value] if isinstance(value, (*HELD, Mapping)) else []
    for _ in range(DEEPEST):
        inner = [one for outer in level for one in (outer.values() if isinstance(outer, Mapping) else outer)]
        # each object once: one that holds itself, or many times another, would otherwise grow with every level
        level = [one for one in {id(one): one for one in inner}.values() if isinstance(one, (*HELD, Mapping))]
        if not level:
            return False
    return True


def _checks(function: Any, leave: set[str]) -> dict[str, Check]:
    checks = {name: check for name, hint in _hints(function).items() if name not in leave and (check := _check(hint))}
    return {**checks, "return": _any}  # never empty


def _hints(function: Any) -> dict[str, Any]:
    """Name of a parameter -> its annotation; a name that only type checkers see is `Any`."""
    inner = inspect.unwrap(function)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = [one.name for one in inspect.signature(inner).parameters.values() if one.kind not in several]
    return {name: _hint(hint, inner.__globals__) for name, hint in inner.__annotations__.items() if name in taken}


def _hint(hint: Any, names: dict[str, Any]) -> Any:
    try:
        return get_type_hints(types.SimpleNamespace(__annotations__={"it": hint}), names)["it"]
    except NameError:
        return Any


def refusal(name: str, hint: Any, value: Any) -> str:
    """The message that refuses an argument."""
    parts = [part for part in _parts(hint) if part is not types.NoneType]
    remedy = next((f": {REMEDIES[part.__name__]}" for part in parts if getattr(part, "__name__", "") in REMEDIES), "")
    kinds = [*dict.fromkeys(map(_words, parts))]
    listed = ", ".join(kinds[:-1]) + " or " * (len(kinds) > 1) + kinds[-1]
    return f"{name} must be {listed}, got {shown(value)}{remedy}"


def shown(value: Any) -> str:
    """A value in a message: spelled out where it is short, and its type."""
    kind = type(value).__name__
    if value is None or isinstance(value, bool | int | float | str):
        text = cut(ascii(value) if isinstance(value, str) and not _is_text(value) else repr(value), TEXT_LETTERS)
        kind += f" of {len(value)} characters" if isinstance(value, str) and len(value) > TEXT_LETTERS else ""
        return text if value is None or isinstance(value, bool) else f"{text} ({kind})"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    return f"{cut(spelled(value), TEXT_LETTERS)} ({kind})"


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if Callable in (origin, hint):
        return "a function"
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return "a dictionary"
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"({', '.join(_words(arg) for arg in args)})"
    if isinstance(origin, type) and not issubclass(origin, Iterable):
        return _words(origin)
    if origin is not None and args:
        inner = " or ".join(dict.fromkeys(_plural(_words(part)) for part in _parts(args[0])))
        return f"a list of {inner}"
    name = getattr(hint, "__name__", str(hint))
    if isinstance(hint, type) and issubclass(hint, os.PathLike):
        return "a path"
    return WORDS.get(hint) or f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _plural(words: str) -> str:
    return PLURALS.get(words) or (words.partition(" ")[2] + "s" if words.startswith(("a ", "an ")) else words)


def _check(hint: Any) -> Check | None:
    """The check of an annotation; None if there is nothing to check."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        return lambda value: value if isinstance(value, str | int) and value in args else REFUSED
    if Callable in (origin, hint):
        return lambda value: value if callable(value) else REFUSED
    if hint in PLAIN_CHECKS:
        return PLAIN_CHECKS[hint]
    if origin is type:
        return partial(_instance, type)
    kind = origin or hint
    unchecked = kind in (object, Any, np.ndarray) or getattr(kind, "_is_protocol", False)
    if unchecked or not isinstance(kind, type):
        return None
    if issubclass(kind, os.PathLike):
        return _path
    if kind in (dict, Mapping):
        return partial(_mapping, *(_check(arg) for arg in args or (Any, Any)))
    if kind is tuple and args and args[-1] is not Ellipsis:
        return partial(_record, [_check(arg) for arg in args])
    if issubclass(kind, Iterable) and kind in COLLECTIONS:
        return partial(_entries, _check(args[0]) if args else None, kind in ORDERED)
    return partial(_instance, kind)


def _union(parts: Sequence[Any]) -> Check | None:
    paths = any(isinstance(part, type) and issubclass(part, os.PathLike) for part in parts)
    checks = [_check(part) for part in parts if not (paths and part is str)]  # the text of a path has rules of its own
    tests = [check for check in checks if check is not None]
    # one part that is not checked lets everything through
    return partial(_first, tests) if len(tests) == len(checks) else None


def _first(checks: Sequence[Check], value: Any) -> Any:
    for check in checks:
        fitted = check(value)
        if fitted is not REFUSED:
            return fitted
    return REFUSED


def _any(value: Any) -> Any:
    return value


def _instance(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else REFUSED


def _integer(value: Any) -> Any:
    if isinstance(value, int):
        return REFUSED if isinstance(value, bool) else value
    if hasattr(value, "dtype") and ("bool" in str(value.dtype) or getattr(value, "ndim", None)):
        return REFUSED  # an array of one number or truth value has an index too
    try:
        return operator.index(value)
    except Exception:  # numpy and torch raise errors of several kinds
        return REFUSED


def _number(value: Any) -> Any:
    if isinstance(value, np.floating | np.integer):
        return value.item()  # which json can write
    if isinstance(value, int | float):
        return value
    try:
        # numpy would make a number of the text "3"
        array = None if isinstance(value, (str, bytes, *HELD)) else to_array(value)
    except ValueError:
        return REFUSED
    return float(array) if array is not None and array.ndim == 0 and array.dtype.kind in "fiub" else REFUSED


def _boolean(value: Any) -> Any:
    return value if isinstance(value, bool) else bool(value) if isinstance(value, np.bool_) else REFUSED


def _text(value: Any) -> Any:
    return value if isinstance(value, str) and _is_text(value) else REFUSED


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False
    return True


def _path(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        return REFUSED
    try:
        name = os.fsencode(value)
    except UnicodeEncodeError:
        return REFUSED
    return REFUSED if b"\0" in name or len(name) > PATH or max(map(len, name.split(b"/"))) > LONGEST_NAME else value


def _mapping(keys: Check | None, entries: Check | None, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return REFUSED
    if isinstance(value, dict):
        for one, other in value.items():
            if (keys and keys(one) is REFUSED) or (entries and entries(other) is REFUSED):
                return REFUSED
    return value


def _record(checks: Sequence[Check | None], value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != len(checks):
        return REFUSED
    pairs = zip(checks, value, strict=True)
    return REFUSED if any(check is not None and check(one) is REFUSED for check, one in pairs) else value


def _entries(check: Check | None, ordered: bool, value: Any) -> Any:
    # all of them can be gone through, and none is meant: a text's letters, a dictionary's keys, a class' members
    if isinstance(value, str | bytes | Mapping | type) or not isinstance(value, Iterable):
        return REFUSED
    if is_tensor(value) or isinstance(value, np.ndarray):
        try:
            value = to_array(value)
        except ValueError:  # a tensor without data
            return REFUSED
        if value.ndim == 0:
            return REFUSED
    elif ordered and not isinstance(value, Sequence):
        value = list(islice(value, MOST_ENTRIES + 1))  # there may be no end
        if len(value) > MOST_ENTRIES:
            return REFUSED
    looked_at = isinstance(value, (*HELD, range, np.ndarray))
    entries = value[:1] if isinstance(value, range) else value  # its others are integers too
    refused = looked_at and check is not None and any(check(one) is REFUSED for one in entries)
    return REFUSED if refused else value


PLAIN_CHECKS: dict[Any, Check | None] = {
    int: _integer, float: _number, bool: _boolean, str: _text, types.NoneType: partial(_instance, types.NoneType),
    None: partial(_instance, types.NoneType),
}  # fmt: skip
ORDERED = (list, tuple, Sequence)
COLLECTIONS = (*ORDERED, Iterable, set, frozenset)
