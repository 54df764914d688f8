"""Mutants of a GGUF file's structure: keys and their types, counts, tensors' names, dims, types and offsets."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

ALIGNMENT = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
SIZES = (0, 1, 2, 3, 7, 8, 31, 64, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
ODD = (0, 1, 2, 3, 7, 16, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, -1, 0.5, -1.0, 1e308)
TEXTS = ("", "x", "llama", "gemma3", "phi3", "gpt2", "bert", "yarn", "linear", "a" * 5000, "\0", "\u0120", "../../etc")
TYPES = (0, 1, 2, 8, 12, 14, 24, 28, 30, 39, 255, 2**31)
KEYS = ("general.alignment", "general.type", "split.count", "llama.rope.scaling.type", "llama.rope.scaling.factor")


@dataclass
class Key:
    """A key of the metadata: its name, the number of its type, and the bytes of its value."""

    name: bytes
    kind: int
    value: bytes


@dataclass
class Entry:
    """A tensor of the table."""

    name: bytes
    dims: list[int]
    kind: int
    offset: int


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> bytes:
        return self.take(self.number("Q"))

    def value(self, kind: int) -> bytes:
        """The bytes of a value."""
        begun = self.at
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            for _ in range(count):
                self.value(inner)
        else:
            self.number(SCALARS[kind])
        return self.data[begun : self.at]


def gguf_file(data: bytes, random: Random) -> bytes:
    """A GGUF file with odd keys and tensors; the bytes of its tensors stay."""
    reader = _Reader(data)
    start, tensors, keys = reader.take(8), reader.number("Q"), reader.number("Q")
    found = []
    for _ in range(keys):
        name, kind = reader.text(), reader.number("I")
        found.append(Key(name, kind, reader.value(kind)))
    table = []
    for _ in range(tensors):
        name, axes = reader.text(), reader.number("I")
        table.append(
            Entry(name, [reader.number("Q") for _ in range(axes)], *(reader.number(code) for code in ("I", "Q")))
        )
    rest = data[-(-reader.at // ALIGNMENT) * ALIGNMENT :]
    counts = [len(table), len(found)]
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice(CHANGES)(found, table, counts, random)
    return written(start, found, table, counts, rest)


def written(start: bytes, keys: list[Key], table: list[Entry], counts: list[int], rest: bytes) -> bytes:
    parts = [start, struct.pack("<QQ", *counts)]
    for key in keys:
        parts += [_text(key.name), struct.pack("<I", key.kind % 2**32), key.value]
    for entry in table:
        parts += [_text(entry.name), struct.pack("<I", len(entry.dims))]
        parts += [struct.pack("<Q", dim % 2**64) for dim in entry.dims]
        parts.append(struct.pack("<IQ", entry.kind % 2**32, entry.offset % 2**64))
    header = b"".join(parts)
    return header + bytes(-len(header) % ALIGNMENT) + rest


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _scalar(kind: int, random: Random) -> bytes:
    number = random.choice(ODD)
    code = SCALARS[kind]
    if code in "fd":
        return struct.pack(f"<{code}", random.choice((number, float("nan"), float("inf"))) if abs(number) < 1e38 else 0)
    width = struct.calcsize(code)
    return (int(min(number, 2**64)) % 2 ** (8 * width)).to_bytes(width, "little")


def _value(random: Random) -> tuple[int, bytes]:
    """A type, and the bytes of an odd value of it."""
    kind = random.choice((*SCALARS, STRING, STRING, ARRAY, ARRAY, ARRAY))
    if kind == STRING:
        return kind, _text(random.choice(TEXTS).encode())
    if kind != ARRAY:
        return kind, _scalar(kind, random)
    inner, count = random.choice((*SCALARS, STRING)), random.choice((0, 1, 2, 3, 1000))
    held = [_text(random.choice(TEXTS).encode()) if inner == STRING else _scalar(inner, random) for _ in range(count)]
    said = count if random.random() < 0.8 else random.choice(SIZES)
    return kind, struct.pack("<IQ", inner, said) + b"".join(held)


def _odd_key(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    key = random.choice(keys)
    key.kind, key.value = _value(random)


def _odd_number(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    """Another number of the type that a key has."""
    key = random.choice([key for key in keys if key.kind in SCALARS] or [Key(b"", 4, b"")])
    key.value = _scalar(key.kind, random)


def _as_array(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    """An array of a key's own value, for a number or a text."""
    key = random.choice([key for key in keys if key.kind != ARRAY] or [Key(b"", 4, bytes(4))])
    count = random.choice((0, 1, 2, 30))
    key.kind, key.value = ARRAY, struct.pack("<IQ", key.kind, count) + key.value * count


def _other_type(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    """The same bytes as another type, of the elements of an array too."""
    key = random.choice(keys)
    if key.kind == ARRAY and random.random() < 0.7:
        key.value = struct.pack("<I", random.choice((*SCALARS, STRING, ARRAY))) + key.value[4:]
    else:
        key.kind = random.choice((*range(13), 255))


def _key_gone_or_twice(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    at = random.randrange(len(keys))
    if random.random() < 0.7:
        del keys[at]
    else:
        keys.insert(at, keys[at])
    counts[1] = len(keys)


def _key_added(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    keys.append(Key(random.choice(KEYS).encode(), *_value(random)))
    counts[1] = len(keys)


def _counts(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    counts[random.randrange(2)] = random.choice(SIZES)


def _dims(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    entry = random.choice(table)
    choice = random.randrange(4)
    if choice == 0 and entry.dims:
        entry.dims[random.randrange(len(entry.dims))] = random.choice(SIZES)
    elif choice == 1:
        entry.dims.reverse()
    elif choice == 2:
        entry.dims.append(random.choice((0, 1, 1, 2)))
    else:
        del entry.dims[random.randrange(len(entry.dims) + 1) :]


def _place(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    entry = random.choice(table)
    entry.offset = random.choice((random.choice(SIZES), random.choice(table).offset, entry.offset + 4))


def _all_in_one_place(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    for entry in table:
        entry.offset = 0


def _kind(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    random.choice(table).kind = random.choice(TYPES)


def _tensor_gone_or_twice(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    at = random.randrange(len(table))
    if random.random() < 0.6:
        del table[at]
    else:
        table.insert(at, table[at])
    counts[0] = len(table)


def _name(keys: list[Key], table: list[Entry], counts: list[int], random: Random) -> None:
    entry, other = random.choice(table), random.choice(table)
    if random.random() < 0.5:
        entry.name, other.name = other.name, entry.name
    else:
        odd = (
            b"",
            b"\xff",
            b"blk.99999999999999999999.attn_q.weight",
            b"blk..attn_q.weight",
            b"blk.\xc2\xb2.attn_q.weight",
        )
        entry.name = random.choice(odd)


Change = Callable[[list[Key], list[Entry], list[int], Random], None]
CHANGES: tuple[Change, ...] = (
    *(_odd_key, _odd_key, _odd_number, _odd_number, _as_array, _other_type, _key_gone_or_twice, _key_added, _counts),
    *(_dims, _dims, _place, _all_in_one_place, _kind, _tensor_gone_or_twice, _name),
)
