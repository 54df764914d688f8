"""Mutants of files: bytes that are damaged, and structures that a stranger may write, from a seed."""

import json
import zipfile
from collections.abc import Callable, Iterable
from io import BytesIO
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import onnx

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 10**18),
    *(0.5, -0.0, 1e-308, 1e308, 1e39, "", "x", "²", "9" * 5000, "../../etc/passwd", "/etc/passwd", "a\ud800", "\0"),
    *([], {}, [0], [[]], ["x"], {"a": 1}, [1] * 1000, {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}),
)
NUMBERS = (0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
WIDTHS = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
}
PARTS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
)
Mutate = Callable[[bytes, Random], bytes]


def damaged(data: bytes, random: Random) -> bytes:
    """Some bytes of a file changed, most of them near its beginning, where headers are."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        reach = random.choice((16, 64, 1024, len(found)))
        at = random.randrange(max(1, min(reach, len(found))))
        kind = random.randrange(6)
        if kind == 0 and found:
            found[at] ^= 1 << random.randrange(8)
        elif kind == 1 and found:
            found[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            width = random.choice((4, 8))
            number = random.choice(NUMBERS) % 2 ** (8 * width)
            found[at : at + width] = number.to_bytes(width, "little")
        elif kind == 3:
            del found[at : at + random.choice((1, 8, 100))]
        elif kind == 4:
            found[at:at] = random.randbytes(random.choice((1, 8, 100)))
        else:
            del found[random.randrange(len(found) + 1) :]
    return bytes(found)


def places(value: Any, most: int = 20_000) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value; of long lists the first few."""
    found, waiting = list[tuple[Any, Any]](), [value]
    while waiting and len(found) < most:
        one = waiting.pop()
        keys: Iterable[Any] = [*one] if isinstance(one, dict) else range(min(len(one), 40))
        for key in keys:
            found.append((one, key))
            if isinstance(one[key], dict | list):
                waiting.append(one[key])
    return found


def odd(value: Any, random: Random) -> Any:
    """A JSON value with some of its parts replaced, dropped or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        found = places(value)
        if not found:
            break
        depths = random.random() < 0.5  # half of the time near the top: most places are in the vocabulary
        container, key = random.choice(found[:40] if depths else found)
        kind = random.randrange(8)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, list):
            container.insert(key, container[key])
        elif kind == 2:
            deep: Any = container[key]
            for _ in range(random.choice((2, 50, 3000))):
                deep = [deep]
            container[key] = deep
        elif kind == 3:
            container[key] = random.choice(found)[0]
            if any(container[key] is one for one in (container, value)):
                container[key] = None
        else:
            container[key] = random.choice(ODD)
    return value


def as_json(value: Any) -> bytes:
    """The bytes of JSON, whatever became of it: parts may hold each other or be nested too deep to write."""
    try:
        return json.dumps(value).encode()
    except (RecursionError, ValueError):
        return b"[" * 20_000


def json_file(data: bytes, random: Random) -> bytes:
    """A JSON file with odd values."""
    return as_json(odd(json.loads(data), random))


def safetensors_file(data: bytes, random: Random) -> bytes:
    """A safetensors file with an odd header; its tensors stay."""
    size = int.from_bytes(data[:8], "little")
    header = as_json(odd(json.loads(data[8 : 8 + size]), random))
    said = len(header) if random.random() < 0.9 else random.choice(NUMBERS) % 2**64
    return said.to_bytes(8, "little") + header + data[8 + size :]


def packed_file(data: bytes, random: Random) -> bytes:
    """A checkpoint of integers whose packed layers have parts of other dtypes or shapes, other numbers, or none."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    note, start = header.pop("__metadata__", None), 8 + size
    held = {name: data[start + one["data_offsets"][0] : start + one["data_offsets"][1]] for name, one in header.items()}
    names = [name for name in header if name.rpartition(".")[2] in PARTS]
    for _ in range(random.choice((1, 1, 2, 5))):
        _change_part(header, held, random.choice(names), random)
    place = 0
    for name, entry in header.items():
        entry["data_offsets"] = [place, place := place + len(held[name])]
    text = as_json(header if note is None else {"__metadata__": note, **header})
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(held[name] for name in header)


def _change_part(header: dict[str, Any], held: dict[str, bytes], name: str, random: Random) -> None:
    if name not in header:  # gone already
        return
    entry, kind = header[name], random.randrange(8)
    shape, width = entry["shape"], max(1, len(held[name]) // max(1, prod(entry["shape"])))
    if kind == 0:
        del header[name]
    elif kind == 1:  # another dtype of the same bytes
        entry["dtype"] = random.choice([dtype for dtype, size in WIDTHS.items() if size == width] or ["I32"])
    elif kind == 2:  # another dtype of as many numbers
        entry["dtype"] = random.choice([*WIDTHS])
        held[name] = random.randbytes(prod(shape) * WIDTHS[entry["dtype"]])
    elif kind == 3:
        entry["shape"] = random.choice((shape[::-1], [prod(shape)], [1, *shape], [*shape, 1], [prod(shape), 1]))
    elif kind == 4 and shape:  # fewer, more or no rows
        rows = random.choice((0, 1, shape[0] - 1, shape[0] + 1, 2 * shape[0]))
        entry["shape"] = [max(0, rows), *shape[1:]]
        held[name] = (held[name] * 3)[: prod(entry["shape"]) * width]
    elif kind == 5:
        held[name] = random.choice(
            (random.randbytes(len(held[name])), b"\xff" * len(held[name]), bytes(len(held[name])))
        )
    elif kind == 6:  # another part's place
        module, _, part = name.rpartition(".")
        other = f"{module}.{random.choice([one for one in PARTS if one != part])}"
        header[other], held[other] = header.pop(name), held[name]
    else:  # what another has
        other = random.choice([one for one in header if one != name])
        header[name], held[name] = json.loads(json.dumps(header[other])), held[other]


def quantization(data: bytes, random: Random) -> bytes:
    """A config with an odd quantization_config."""
    config = json.loads(data)
    return as_json({**config, "quantization_config": odd(config["quantization_config"], random)})


def npz_file(data: bytes, random: Random) -> bytes:
    """An archive with a damaged, doubled, renamed or missing member."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    at = random.randrange(len(members))
    name, held = members[at]
    changed = [
        (name, damaged(held[:200], random) + held[200:]),
        (name.swapcase(), held),
        (f"../{name}", held),
        (name, b""),
        (name, bytes(2 ** random.randrange(28))),
    ]
    members[at : at + random.randrange(2)] = [random.choice(changed)]
    target = BytesIO()
    with zipfile.ZipFile(target, "w", random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for one, content in members:
            archive.writestr(one, content)
    return target.getvalue()


def onnx_file(data: bytes, random: Random) -> bytes:
    """A graph with odd nodes, attributes, shapes and places of weights."""
    proto = onnx.ModelProto.FromString(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        _change_graph(proto, random)
    return proto.SerializeToString()


def _change_graph(proto: onnx.ModelProto, random: Random) -> None:
    nodes, weights = proto.graph.node, proto.graph.initializer
    node = nodes[random.randrange(len(nodes))]
    kind = random.randrange(10)
    if kind == 0:
        del nodes[random.randrange(len(nodes))]
    elif kind == 1:
        nodes.append(node)
    elif kind == 2 and node.input:
        node.input[random.randrange(len(node.input))] = random.choice(nodes).output[0]
    elif kind == 3:
        node.op_type = random.choice(nodes).op_type
    elif kind == 4 and node.attribute:
        attribute = random.choice(node.attribute)
        attribute.i = random.choice(NUMBERS) % 2**63
        attribute.ints.extend([-1, attribute.i])
    elif kind == 5 and weights:
        tensor = random.choice(weights)
        tensor.dims[:] = [random.choice(NUMBERS) % 2**63 for _ in range(random.randrange(4))]
    elif kind == 6 and weights:
        tensor = random.choice(weights)
        for entry in tensor.external_data:
            if random.random() < 0.5:
                entry.value = random.choice(("-1", "x", "", "9" * 30, "../secret.txt", "/etc/passwd", "link"))
    elif kind == 7 and proto.metadata_props:
        entry = random.choice(proto.metadata_props)
        try:
            entry.value = as_json(odd([json.loads(entry.value)], random)[:1]).decode()
        except (ValueError, TypeError, KeyError):
            entry.value = "["
    elif kind == 8:
        value = random.choice([*proto.graph.input, *proto.graph.output])
        value.type.tensor_type.shape.dim.add().dim_value = random.choice(NUMBERS) % 2**63
    else:
        shape = onnx.helper.make_tensor("shape", onnx.TensorProto.INT64, [2], [random.choice(NUMBERS[:9]), 7])
        nodes.insert(0, onnx.helper.make_node("Constant", [], ["fuzz_shape"], value=shape))
        nodes.insert(1, onnx.helper.make_node("ConstantOfShape", ["fuzz_shape"], ["fuzz_large"]))


def linked(folder: Path, secret: Path, random: Random) -> None:
    """Put a link out of the folder, a pipe or a link to a device in the place of one of its files."""
    import os

    file = random.choice([path for path in sorted(folder.iterdir()) if path.is_file()])
    file.unlink()
    kind = random.randrange(3)
    if kind == 0:
        file.symlink_to(secret)
    elif kind == 1:
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
