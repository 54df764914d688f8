"""`Stored`: results that are saved as one `.safetensors` file, and loaded again as they were.

The format:

1. An ordinary safetensors file; it is read without executing anything. Arrays are its tensors, in their own dtype.
2. Its `__metadata__` has `mionnx_result` = "1", the version; `kind`, the name of the result's class; `contents`, a JSON
   text; and the checksum of `mionnx.machine.tensor_file`, without which it is refused.
3. `contents` is {attribute: value}. Null, booleans, numbers and texts stand for themselves, a JSON list for a list; any
   other value is an object of one entry: {"array": tensor}, {"scalar": tensor of no axes}, {"tuple": [values]},
   {"dict": [[key, value], ...]}, or {a class: its attributes}, of the classes that the result names itself (`INSIDE`).
4. Refused: another kind, by the name of what reads it; another version; a damaged file; attributes that are missing or
   unknown; tensors that nothing uses.
5. Files are written atomically: a temporary file is renamed into place.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import SpecFileError
from mionnx.machine.tensor_file import RESULT_KEY, read_metadata, read_tensors, told_of, whose, write_tensors
from mionnx.machine.typed import typed

VERSION = "1"
ENDING = ".safetensors"
Tensors = dict[str, NDArray[Any]]


class Storable:
    """Base of the values in a saved result; by default dataclasses, told by their fields."""

    INSIDE: ClassVar[tuple[type["Storable"], ...]] = ()  # classes of values inside it

    def _contents(self) -> dict[str, Any]:
        """The stored attributes: numbers, texts, arrays, lists, tuples, dictionaries, `INSIDE`."""
        if not is_dataclass(self):
            raise SpecFileError(f"a {type(self).__name__} cannot be saved to be loaded again")
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        """The value again; what it lacks or has too much of is a `TypeError` or a `KeyError`."""
        return cls(**contents)


@typed(SpecFileError)
class Stored(Storable):
    """A result that `save` writes and `load` reads."""

    def save(self, path: str | Path) -> Path:
        """Write the result as one .safetensors file, to load again.

        Raises:
            SpecFileError: another ending, a value that no file can hold, or a file that cannot be written.
        """
        if Path(path).suffix.lower() != ENDING:
            raise SpecFileError(f"{path}: a {type(self).__name__} is saved as {ENDING}")
        return self._store(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a result that `save` wrote as .safetensors: the same values, to the last bit.

        Raises:
            SpecFileError: the file is missing, damaged, or of another kind.
        """
        name = cls.__name__
        problem = f"{path} is no saved {name}"
        # the kind first: another result's file is refused by name before its arrays are hashed
        metadata = read_metadata(path, problem)
        if RESULT_KEY not in metadata or metadata.get("kind") != name:
            raise SpecFileError(f"{problem}: {whose(metadata)}")
        metadata, tensors = read_tensors(path, problem)
        if metadata[RESULT_KEY] != VERSION:
            raise SpecFileError(f"{problem} of version {VERSION}: its metadata says {metadata[RESULT_KEY]!r}")
        with told_of(path):
            result = _Reader(cls, tensors).build(cls, json.loads(metadata["contents"]))
        if tensors:
            raise SpecFileError(f"{path} holds tensors that nothing in it uses: {', '.join(sorted(tensors))}")
        return result

    def _store(self, path: str | Path) -> Path:
        writer = _Writer(self)
        contents = json.dumps(writer.members(self))
        write_tensors(path, writer.tensors, {RESULT_KEY: VERSION, "kind": type(self).__name__, "contents": contents})
        return Path(path)


def _classes(result: Storable | type[Storable]) -> dict[str, type[Storable]]:
    """The classes that may stand in a result, by name: those inside it, and inside these."""
    classes: dict[str, type[Storable]] = {}
    waiting = [*result.INSIDE]
    while waiting:
        one = waiting.pop()
        if classes.setdefault(one.__name__, one) is one:
            waiting.extend(other for other in one.INSIDE if other.__name__ not in classes)
    return classes


class _Writer:
    """Turns values into JSON and tensors; a tensor is named after its place."""

    def __init__(self, result: Storable) -> None:
        self.tensors: Tensors = {}
        self.classes = _classes(result)

    def members(self, value: Storable, place: str = "") -> dict[str, Any]:
        return {name: self.encode(one, f"{place}{name}") for name, one in value._contents().items()}

    def encode(self, value: Any, place: str) -> Any:
        if isinstance(value, Storable) and self.classes.get(type(value).__name__) is type(value):
            return {type(value).__name__: self.members(value, f"{place}.")}
        if hasattr(value, "__array__"):  # of numpy, or on the device that computed it
            # keys of a dictionary may make two places one name
            while place in self.tensors:
                place += "'"
            self.tensors[place] = np.asarray(value)
            # a number of numpy and an array of no axes are two things
            return {"scalar" if isinstance(value, np.generic) else "array": place}
        if type(value) in (type(None), bool, int, float, str):
            return value
        if isinstance(value, list | tuple):
            entries = [self.encode(one, f"{place}.{i}") for i, one in enumerate(value)]
            return {"tuple": entries} if isinstance(value, tuple) else entries
        if isinstance(value, Mapping):
            pairs = value.items()  # pairs, since keys of JSON are texts alone
            return {"dict": [[self.encode(key, place), self.encode(one, f"{place}.{key}")] for key, one in pairs]}
        raise SpecFileError(f"{place} is a {type(value).__name__}, which no file can hold")


class _Reader:
    """Makes values of JSON and tensors; a tensor is taken out of the dictionary when it is used."""

    def __init__(self, result: type[Storable], tensors: Tensors) -> None:
        self.tensors = tensors
        self.classes = _classes(result)

    def build(self, kind: type[Storable], members: Mapping[str, Any]) -> Any:
        return kind._of_contents({name: self.value(one) for name, one in members.items()})

    def value(self, entry: Any) -> Any:
        if isinstance(entry, list):
            return [self.value(one) for one in entry]
        if not isinstance(entry, dict):
            return entry
        ((tag, inner),) = entry.items()
        if tag in self.classes:
            return self.build(self.classes[tag], inner)
        if tag in ("array", "scalar"):
            array = self.tensors.pop(inner)  # taken out: what is left in the end is refused
            return array if tag == "array" else array[()]
        if tag == "tuple":
            return tuple(self.value(one) for one in inner)
        if tag == "dict":
            return {self.value(key): self.value(one) for key, one in inner}
        raise ValueError(f"no value is a {tag!r}")
