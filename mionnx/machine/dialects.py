"""Other libraries' words and ours: `DIALECTS.md` is their page, and errors quote it."""

import dis
import re
import sys
from abc import ABCMeta
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mionnx.errors import MIError, UnknownImportError, UnknownKeywordError, UnknownNameError, nearest

PAGE = Path(__file__).with_name("DIALECTS.md")
OWNERS = {"model": "MIModel", "cache": "HookCache", "HookSpec": "HookSpec", "KVCache": "KVCache", "": "mionnx"}
THEIR_NAME = re.compile(r"`(?:(model|cache|HookSpec|KVCache)\.)?(\w+)`")
THEIR_KEYWORD = re.compile(r"`(\w+)\((\w+)=\)`")


@cache
def dialect_lines() -> dict[tuple[str, str], str]:
    """(owner, word) -> the line of the page, as an error says it."""
    # An owner is the class of ours that would have the word as an attribute, "mionnx", or the verb whose keyword it is.
    lines: dict[tuple[str, str], str] = {}
    library = ""
    for row in PAGE.read_text(encoding="utf-8").splitlines():
        if row.startswith("## "):
            library = row[3:]
        if row.startswith("| `"):
            theirs, ours = row.strip("| ").split(" | ")
            names = [(OWNERS[owner], name) for owner, name in THEIR_NAME.findall(theirs)]
            line = f", a word of {library}; here: {ours.replace('`', '')}"
            for word in [*names, *THEIR_KEYWORD.findall(theirs)]:
                lines.setdefault(word, line)  # a word of two libraries is answered by the first
    return lines


def unknown_name(owner: str, name: str, names: Iterable[str]) -> UnknownNameError:
    """The error of an unknown attribute, with the line of the table or the nearest name."""
    return UnknownNameError(f"{owner} has no {name!r}{_told(owner, name, names)}")


def unknown_keyword(verb: str, name: str, names: Iterable[str]) -> UnknownKeywordError:
    """The error of a keyword that a verb does not have; arguments as for `unknown_name`."""
    owner = "forward" if verb == "call" else verb  # model(tokens)
    return UnknownKeywordError(f"{verb}() has no keyword {name!r}{_told(owner, name, names)}")


def unknown_import(name: str, names: Iterable[str]) -> MIError:
    """The error of a name that the package `mionnx` does not have."""
    # `from mionnx import NAME` drops the message of an `AttributeError`, and asks in an instruction of its own.
    message = f"mionnx has no {name!r}{_told('mionnx', name, names)}"
    caller = sys._getframe(2)
    # the caller's instruction: `from mionnx import NAME` or an attribute
    imported = dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM" if caller.f_lasti >= 0 else False
    return UnknownImportError(message) if imported else UnknownNameError(message)


def _told(owner: str, name: str, names: Iterable[str]) -> str:
    line = dialect_lines().get((owner, name))
    return nearest(name, names) if line is None else line


class ForeignNames(ABCMeta):
    """Type of `Translated`: answers attributes of the class itself."""

    if not TYPE_CHECKING:  # type checkers are to know an unknown name themselves

        def __getattr__(cls, name: str) -> Any:
            raise _missing(cls, name)


class Translated(metaclass=ForeignNames):
    """Base of classes that answer an attribute of another library with its line of the table."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if any(name in vars(base) for base in type(self).__mro__):
                return object.__getattribute__(self, name)  # a property that raised an AttributeError: raise it again
            raise _missing(type(self), name)


def _missing(owner: type, name: str) -> AttributeError:
    if name.startswith("_"):  # asked for by protocols, many times, and never by a person
        return AttributeError(f"{owner.__name__!r} object has no attribute {name!r}")
    return unknown_name(owner.__name__, name, [member for member in dir(owner) if not member.startswith("_")])
