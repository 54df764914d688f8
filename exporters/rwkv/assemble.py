"""An RWKV checkpoint folder to a hooked model folder, step by step."""

import zipfile
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError

import onnx_ir as ir
import torch
from torch import Tensor

from exporters.checkpoint_tensors import TORCH_DTYPES, StoredTensor, export_dtype, read_tensors
from exporters.rwkv.build import IR_DTYPE, Build
from exporters.rwkv.checkpoint import UNREAD, Shape, layout_of, pth_file, read_config, shape_of
from exporters.rwkv.network import build_network
from exporters.sidecar_files import find_files, keep_files
from exporters.weight_files import locations, place, some
from mionnx.errors import ExportError
from mionnx.graph import file_digest
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.layers import Recurrence
from mionnx.graph.metadata import Metadata
from mionnx.graph.own_version import own_version
from mionnx.graph.sizes import Sizes, context_length
from mionnx.graph.weight_record import describe_export
from mionnx.machine.progress import Progress

_LOCAL_HEADER = 30  # bytes of a zip entry's header before its name

CONFIGS = ("config.json", "generation_config.json")
STAGES = ("reading the checkpoint", "building the graph", "placing weights", "writing")


def export_checkpoint(folder: Path, target: Path, dtype: str, progress: Progress) -> None:
    """See `exporters.rwkv.export`."""

    def stage(number: int) -> None:
        progress(f"exporting {folder.name}: {STAGES[number]}", number + 1, len(STAGES))

    stage(0)
    alone = folder.is_file()  # then nothing but a tokenizer belongs to it
    files = [file for file in find_files(folder.parent if alone else folder) if not (alone and file.name in CONFIGS)]
    target.mkdir(parents=True, exist_ok=True)
    tensors = {tensor.name: tensor for tensor in _read(folder, target)}
    sources = {tensor.file for tensor in tensors.values()}
    file_digest.start(sources)  # read while the graph is built
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    layout, config = layout_of(shapes, folder), {} if alone else read_config(folder)
    shape = shape_of(shapes, layout, config)
    kind = export_dtype(dtype, list(tensors.values()))
    stage(1)
    build = build_network(layout, tensors, shape, IR_DTYPE[kind])
    unread = [name for name in tensors if name not in build.parameters and not UNREAD.search(name)]
    if unread:
        raise ExportError(f"{len(unread)} checkpoint tensors are read by no part of the graph: {some(unread)}")
    stage(2)
    parameters = list(build.parameters.values())
    place(parameters, tensors, iter(()), target, progress)
    graph = build.op.graph
    for value in parameters:
        graph.register_initializer(value)
    stage(3)
    digest, of_files = describe_export(target, locations(parameters), sources, progress)
    metadata = Metadata(
        family=f"rwkv{shape.version}",
        dtype=str(kind).removeprefix("torch."),
        sizes=Sizes(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_heads,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
        ),
        hooks={name: _axes(name, build) for name in build.hooks},
        attention=[],
        recurrence=_recurrences(shape),
        exporter={name: version(name) for name in ("mionnx", "onnx-ir")},
        weights_sha256=digest,
        weight_files=of_files,
        context_length=context_length(config),
    )
    for node in ir.traversal.RecursiveGraphIterator(graph):
        node.metadata_props.clear()  # they describe how the graph was built
    model = ir.Model(graph, ir_version=10, producer_name="mionnx", producer_version=own_version())
    model.metadata_props.update(metadata.to_props())
    ir.save(model, target / "model.onnx")
    keep_files(files, folder.parent if alone else folder, target)


def _read(folder: Path, staging: Path) -> list[StoredTensor]:
    file: Path | None = folder
    if folder.is_dir():
        file = None if any(folder.glob("*.safetensors")) else pth_file(folder)
    return read_tensors(folder, staging) if file is None else read_pth(file)


def _recurrences(shape: Shape) -> list[Recurrence | None]:
    """What the metadata say of each layer: nothing where a state is square, as RWKV-6's and 7's."""
    if shape.key_dim == shape.head_dim:
        return []
    gates = ["write", "decay", "token_shift"]
    one = Recurrence("gated", shape.num_heads, shape.key_dim, shape.head_dim, token_shift=True, gates=gates)
    return [one] * shape.num_layers


def _axes(name: str, build: Build) -> list[str | int]:
    shape = build.shape
    layer = HookPoint.parse(name).layer or 0
    sizes = {
        "hidden": shape.hidden_size,
        "n_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "key_dim": shape.key_dim,
        "value_dim": shape.head_dim,
        "vocab": shape.vocab_size,
        "d_mlp": build.tensors[build.layout.name(f"blocks.{layer}.ffn.key.weight")].shape[0],
    }
    return [sizes.get(axis, axis) for axis in HookPoint.parse(name).axes or ()]


def read_pth(file: Path) -> list[StoredTensor]:
    """Offset of each tensor in a `.pth`. Only plain tensors are unpickled, nothing is executed."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        starts = _starts(file)
    except (OSError, RuntimeError, UnpicklingError, zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ExportError(f"{file} is no intact .pth of tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ExportError(f"{file} holds something else than a table of tensors")
    # Each storage is mapped where it lies in the file, so addresses and offsets differ by one constant.
    base = min(tensor.untyped_storage().data_ptr() for tensor in tensors.values()) - min(starts)
    return [_stored(name, tensor, file, base, starts) for name, tensor in tensors.items()]


def _starts(file: Path) -> set[int]:
    starts = set()
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        for info in archive.infolist():
            if "/data/" not in info.filename or info.file_size == 0:
                continue
            if info.compress_type != zipfile.ZIP_STORED:  # weights are referenced in place
                raise ExportError(f"{file} is a compressed archive; save the checkpoint with torch.save as it is")
            # the lengths of name and extra field stand in the local header; the archive's table may have others
            stream.seek(info.header_offset + 26)
            name, extra = (int.from_bytes(stream.read(2), "little") for _ in range(2))
            starts.add(info.header_offset + _LOCAL_HEADER + name + extra)
    return starts


def _stored(name: str, tensor: Tensor, file: Path, base: int, starts: set[int]) -> StoredTensor:
    if tensor.dtype not in TORCH_DTYPES.values():
        raise ExportError(f"{file.name}: tensor {name} is {tensor.dtype}; quantised checkpoints are not supported")
    start = tensor.untyped_storage().data_ptr() - base
    if start not in starts or not tensor.is_contiguous():
        raise ExportError(f"{file.name}: tensor {name} is not stored in one piece; save it again as contiguous")
    return StoredTensor(name, file, tensor.dtype, tuple(tensor.shape), tensor.data_ptr() - base, tensor.nbytes)
