"""What each tensor of a transformers checkpoint is made of in a GGUF file, and how what llama.cpp changed is undone.

llama.cpp's converter puts rows of queries and keys, and heads of some values, into another order, adds to the weights
of norms, stores decays as they are and not their logarithm, cuts matrices in two and stacks experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from exporters.gguf.architectures import architecture_of
from exporters.gguf.facts import FACTORS
from exporters.gguf.header import Header, TensorInfo, read_pieces, read_tensor
from exporters.gguf.layout import Architecture, Config
from exporters.weight_files import some
from mionnx.errors import ExportError

LEAVES = ("weight", "bias")
EXPERT_NUMBER = "{expert}"  # in the name of a module: a stack in the file, one tensor an expert in a checkpoint
STACKED = 3  # axes of a stack of experts


@dataclass(frozen=True)
class Renamed:
    """A tensor of a checkpoint.

    Attributes:
        infos: the tensors of the file that it is made of, their rows one after another.
        shape: its own.
        rows, columns: where each of its rows and columns stands among these; None where they are in order.
        offset: what has been added to it.
        decays: whether the file has -exp(x) of it.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    shape: tuple[int, ...]
    rows: NDArray[np.int64] | None = None
    columns: NDArray[np.int64] | None = None
    offset: float = 0.0
    decays: bool = False

    @property
    def info(self) -> TensorInfo:
        """The first tensor of the file: all have its type."""
        return self.infos[0]


def rename(header: Header, config: Config) -> list[Renamed]:
    """Find transformers' name for every tensor, and what to undo.

    Raises:
        ExportError: tensors without a place, or of another shape than their order needs.
    """
    architecture, unknown = architecture_of(header), []
    parts: dict[str, list[tuple[int, str, TensorInfo]]] = {}
    for gguf_name, info in header.tensors.items():
        if gguf_name in FACTORS or _is_beyond(gguf_name, config):  # factors go into the config's rotation
            continue
        module, name, place = _name(gguf_name, architecture)
        if name is None:
            unknown.append(gguf_name)
            continue
        for own, part in _experts(name, info):
            parts.setdefault(own, []).append((place, module, part))
    if unknown:
        raise ExportError(
            f"{header.file}: {len(unknown)} tensors have no place in {config['model_type']}: {some(unknown)}"
        )
    return [_made(header, name, own, architecture, config) for name, own in parts.items()]


def _is_beyond(name: str, config: Config) -> bool:
    """Whether a tensor is of a layer that predicts further tokens, behind those of the model."""
    block, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return block == "blk" and number.isdigit() and int(number) >= config["num_hidden_layers"]


def _name(gguf_name: str, architecture: Architecture) -> tuple[str, str | None, int]:
    """llama.cpp's name of a module, transformers' name of the tensor, and its place among those that make it."""
    path, _, leaf = gguf_name.rpartition(".")
    path, leaf = (path, leaf) if leaf in LEAVES else (gguf_name, "")
    block, _, rest = path.partition(".")
    number, _, module = rest.partition(".")
    table, before = (architecture.outside, "") if block != "blk" else (architecture.layer, architecture.blocks)
    module = path if block != "blk" else module
    for key, end in ((f"{module}.{leaf}", ""), (module, f".{leaf}" if leaf else "")):
        if key in table and (block != "blk" or number.isdigit()):
            inside = f"{before}.{number}." if block == "blk" else ""
            return key, f"{inside}{table[key]}{end}", [*table].index(key)
    return module, None, 0


def _experts(name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """A stack of experts, one by one; any other tensor as it is."""
    if len(info.shape) != STACKED:
        yield name, info
        return
    count, *shape = info.shape
    length = info.length // count
    for expert in range(count):
        part = replace(info, shape=tuple(shape), offset=info.offset + expert * length, length=length)
        yield name.replace(EXPERT_NUMBER, str(expert)), part


def _made(
    header: Header, name: str, parts: list[tuple[int, str, TensorInfo]], architecture: Architecture, config: Config
) -> Renamed:
    """One tensor of a checkpoint, of its parts: in the order of the table, those of one expert together."""
    count = len({place for place, _, _ in parts})
    experts = len(parts) // count
    by_place = sorted(parts, key=lambda part: part[0])  # stable: experts stay in order
    ordered = [by_place[kind * experts + expert] for expert in range(experts) for kind in range(count)]
    infos, module = tuple(info for _, _, info in ordered), ordered[0][1]
    widths, kinds = {info.shape[1:] for info in infos}, {info.kind for info in infos}
    if len(widths) > 1 or len(kinds) > 1:
        raise ExportError(f"{header.file}: {infos[0].name} and {infos[-1].name} are of other widths or types")
    rows = sum(info.shape[0] for info in infos)
    shape = (rows, *infos[0].shape[1:]) if experts == 1 else (experts, rows // experts, *infos[0].shape[1:])
    leaf = infos[0].name.rpartition(".")[2]
    if module == architecture.convolution and leaf == "weight":
        shape = (shape[0], 1, *shape[1:])
    elif module in architecture.flat:
        shape = (prod(shape),)
    order = architecture.order(module, config)
    for axis, places in enumerate((order.rows, order.columns)):
        if places is not None and len(places) != (rows, infos[0].shape[-1])[axis]:
            raise ExportError(
                f"{header.file}: {infos[0].name} is {list(infos[0].shape)}, its metadata mean {len(places)}"
            )
    offset = architecture.norm_offset if module.endswith("_norm") and leaf == "weight" else 0.0
    offset = 0.0 if module in architecture.plain_norms else offset
    return Renamed(name, infos, shape, order.rows, order.columns, offset, module in architecture.decays)


def pieces(header: Header, tensor: Renamed) -> Iterator[NDArray[np.float32]]:
    """The numbers of a tensor in order, some rows at a time where these are in order in the file."""
    if tensor.rows is None and tensor.columns is None:
        parts: Iterator[NDArray[np.float32]] = (piece for one in tensor.infos for piece in read_pieces(header, one))
    else:
        numbers = np.concatenate([read_tensor(header, info) for info in tensor.infos])
        numbers = numbers if tensor.rows is None else numbers[tensor.rows]
        parts = iter([numbers if tensor.columns is None else numbers[:, tensor.columns]])
    for part in parts:
        part = part - np.float32(tensor.offset) if tensor.offset else part
        if tensor.decays:
            if not (part < 0).all():
                raise ExportError(f"{header.file}: {tensor.info.name} has numbers that no decay is: 0 or above")
            part = np.log(-part)
        yield part
