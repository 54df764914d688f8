"""Compiled folders: one plain ONNX model in which a spec's interventions are baked in.

Any ONNX runtime runs it without mionnx. The folder, of the layout "plain":

model.onnx          the graph; `metadata_props["mionnx.compiled"]` is JSON: what it is, from which model and spec
model_*.onnx        the same with a knob at one of its doses
model.onnx.data,    the weights, if they are not embedded; of the target "generic" they are the files of the hooked
*.safetensors, ...  model: copies (`weights="alongside"`) or hard links (`"referenced"`)
spec.safetensors    the spec, as `HookSpec.save` writes it, every glob and predicate as the names that it means
README.md           the card: that this is not the original model, and what was done to it
SHA256SUMS          the hashes of all files, as `sha256sum -c` reads them
config.json, ...    config and tokenizer of the model

Other layouts put the graph, its weights and the rest elsewhere and add files; see `mionnx.compile.layouts`.
"""

import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from mionnx.compile.fused_nodes import join_parts
from mionnx.compile.interface import name_axes
from mionnx.compile.knobs import Knob, document
from mionnx.compile.layouts import CLIENT_LAYOUTS
from mionnx.compile.layouts.layout import ClientLayout, Content
from mionnx.compile.model_card import card
from mionnx.compile.monitors import document_monitors
from mionnx.compile.packaging import PACKAGE_TARGETS, Packaging
from mionnx.compile.stored_once import reshape_shared, store_once
from mionnx.engine.engines import engine_of
from mionnx.engine.merged_products import merge_blocks
from mionnx.engine.options import Options
from mionnx.errors import InputError, ModelError
from mionnx.graph import onnx_file
from mionnx.graph.folder_file import copy_beside, files_beside, inside, read_json
from mionnx.graph.hooked_model import GRAPH, INPUT_NAMES, KEPT, HookedModel
from mionnx.graph.io_names import LOGITS
from mionnx.graph.metadata import COMPILED
from mionnx.inputs.tokens import TOKENIZER_FILE, copy_tokenizer
from mionnx.machine.leftovers import LOCK_FILE, new_folder, remove_leftovers
from mionnx.machine.memory import format_bytes
from mionnx.machine.progress import Progress
from mionnx.spec.hook_spec import HookSpec

SPEC = "spec.safetensors"
CARD = "README.md"
SUMS = "SHA256SUMS"
DATA = "model.onnx.data"
LIMIT = 2**31 - 2**24  # a protobuf file holds 2 GiB; some is left for the graph
CHUNK = 2**24  # bytes that are hashed at once


def write_package(
    model: HookedModel,
    proto: onnx.ModelProto,
    spec: HookSpec,
    target: Path,
    packaging: Packaging,
    knobs: Mapping[str, Knob],
    last: bool,
    progress: Progress,
    check: Callable[[Path], Mapping[str, Any]] | None = None,
) -> None:
    """Write a compiled graph of a model, whose weights are still in the model's files, as a folder.

    Args:
        last: whether its logits are those of the last position alone.
        check: called with the path of the graph when it is written; what the card says of it.
    """
    layout = CLIENT_LAYOUTS[packaging.layout]
    onnx_file.rename(proto, LOGITS, model.metadata.output)  # as clients know it
    if last:
        _mark_last(proto)
    facts = json.loads(onnx_file.properties(proto)[COMPILED])
    embedded = packaging.placed == "embedded"
    config, generation = (_json(model.folder, name) for name in ("config.json", "generation_config.json"))
    turned = {name: knob for name, knob in knobs.items() if not knob.doses}
    content = Content(model, proto, target.name, facts, turned, last, embedded, config, generation)
    if content.encodes and not layout.takes_encoders:
        raise layout.refuse(f"{layout.client} decodes, and {model.name} is an encoder: use layout='plain'")
    if not content.encodes and not layout.takes_decoders:
        raise layout.refuse(f"{layout.client} runs encoders, and {model.name} is a decoder: use layout='plain'")
    layout.check(content)
    content = replace(content, proto=layout.adapt(content))
    if packaging.target != "ort-cuda":  # as `forward` runs it on the CPU: the same bits, in fewer nodes
        merge_blocks(content.proto)
        join_parts(content.proto)
    name_axes(content.proto.graph)
    document(content.proto, facts["knobs"])
    document_monitors(content.proto, facts["monitors"])
    remove_leftovers(target.parent, holding=(GRAPH,))
    with new_folder(target, ModelError) as partial, _room(model, packaging):
        graph = partial / layout.graph(content)
        graph.parent.mkdir(parents=True, exist_ok=True)
        _write_model(content, graph, layout, packaging, progress)
        _write_doses(graph, knobs)
        if check is not None:
            content = replace(content, facts={**facts, "verified": check(graph)})
        home = partial / layout.home(content)
        _write_rest(content, spec, home)
        layout.write(content, home)
        (home / CARD).write_text(card(content, spec, layout, packaging.target))
        _write_sums(home, partial, progress)


def _json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object beside the graph; empty where there is none."""
    content = read_json(inside(folder, name)) if (folder / name).is_file() else {}
    return content if isinstance(content, dict) else {}


def _mark_last(proto: onnx.ModelProto) -> None:
    """Say in the graph that its logits are of one position: clients read it off the axis."""
    for output in proto.graph.output:
        if output.name == "logits":
            output.type.tensor_type.shape.dim[1].dim_value = 1


@contextmanager
def _room(model: HookedModel, packaging: Packaging) -> Iterator[None]:
    """Say how much a folder needs where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        needed = format_bytes(sum(onnx_file.locations(model.proto).values()))
        links = "; --weights referenced (weights='referenced') links them and needs none"
        links *= packaging.target == "generic"
        raise ModelError(f"cannot write the folder: {error.strerror}; its weights are {needed}{links}") from error


def _write_model(content: Content, graph: Path, layout: ClientLayout, packaging: Packaging, progress: Progress) -> None:
    provider = PACKAGE_TARGETS[packaging.target]
    if provider is not None or content.embedded:
        content.model.need_weights(f"a file for {packaging.target} with its weights {packaging.placed}")
    if provider is not None:
        _write_optimised(content, graph, layout, packaging, Options(provider))
    elif content.embedded:
        reshape_shared(content.proto)
        _check_size(content.proto, packaging)
        onnx_file.embed(content.proto, content.model.folder)
        graph.write_bytes(content.proto.SerializeToString())
    else:
        files = [*onnx_file.locations(content.proto)] if content.model.has_weights else []
        names = layout.data(files, content)
        for done, name in enumerate(files):
            progress(f"writing {names[name]}", done, len(files))
            to = graph.parent / names[name]
            to.parent.mkdir(parents=True, exist_ok=True)
            # A file of the model may be a symbolic link: what it points to is copied or linked.
            _deliver((content.model.folder / name).resolve(), to, packaging.placed)
        onnx_file.rename_files(content.proto, names)
        graph.write_bytes(content.proto.SerializeToString())


def _write_optimised(
    content: Content, graph: Path, layout: ClientLayout, packaging: Packaging, options: Options
) -> None:
    """Write ONNX Runtime's own optimised graph."""
    proto = content.proto
    _check_size(proto, packaging)
    data = layout.data([DATA], content)[DATA]
    engine_of(options).write_optimised(proto.SerializeToString(), content.model.folder, graph, data, options)
    written = onnx.load(graph, load_external_data=False)
    # Exactly ours, whatever the optimiser keeps of them.
    del written.metadata_props[:]
    written.metadata_props.extend(proto.metadata_props)
    document(written, content.facts["knobs"])
    if (graph.parent / data).exists():
        store_once(written, graph.parent / data)
    if content.embedded:
        reshape_shared(written)
        onnx_file.embed(written, graph.parent)
        (graph.parent / data).unlink(missing_ok=True)
    graph.write_bytes(written.SerializeToString())


def _check_size(proto: onnx.ModelProto, packaging: Packaging) -> None:
    size = sum(onnx_file.locations(proto).values())
    if packaging.placed == "embedded" and size > LIMIT:
        raise InputError(
            f"the weights are {size / 2**30:.1f} GiB, and a file with its weights embedded holds 2: use "
            "weights='alongside'"
        )


def _deliver(source: Path, target: Path, how: str) -> None:
    if how == "alongside":
        shutil.copyfile(source, target)
        return
    try:
        os.link(source, target)
    except OSError as error:
        raise InputError(
            f"{source} cannot be linked to from {target.parent} ({error.strerror}): use weights='alongside'"
        ) from error


def _write_doses(graph: Path, knobs: Mapping[str, Knob]) -> None:
    """Write a graph beside the first for each dose of the knobs that have them; all read the same weights."""
    dosed = {name: knob.doses for name, knob in knobs.items() if knob.doses}
    for strengths in itertools.product(*dosed.values()) if dosed else ():
        proto = onnx.load(graph, load_external_data=False)
        doses = dict(zip(dosed, strengths, strict=True))
        for tensor in proto.graph.initializer:
            if tensor.name in doses:
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(doses[tensor.name], np.float32), tensor.name))
        title = "_".join(f"{name}_{strength:g}" for name, strength in doses.items())
        graph.with_name(f"{graph.stem}_{title}.onnx").write_bytes(proto.SerializeToString())


def _write_rest(content: Content, spec: HookSpec, at: Path) -> None:
    spec.save(str(at / SPEC))
    files = files_beside(content.model.folder, KEPT)
    copy_beside([file for file in files if file.name != TOKENIZER_FILE], content.model.folder, at)
    for file in [file for file in files if file.name == TOKENIZER_FILE]:
        copy_tokenizer(file, at / file.name)
    types = ["token_type_ids"] * content.model.has_token_types
    _name_inputs(at / "tokenizer_config.json", [*INPUT_NAMES, *types])


def _name_inputs(path: Path, names: list[str]) -> None:
    """Name the graph's inputs in a tokenizer's config without their names."""
    # A tokenizer class of transformers 4 gives segments too, which no decoder reads.
    config = read_json(path) if path.is_file() else None
    if isinstance(config, dict) and "model_input_names" not in config:
        path.write_text(json.dumps({**config, "model_input_names": names}, ensure_ascii=False, indent=1))


def _write_sums(home: Path, folder: Path, progress: Progress) -> None:
    """Hash every file of a folder, by paths that begin at the folder of the sums."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    total, done, lines = sum(path.stat().st_size for path in files), 0, []
    for path in files:
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
                progress("hashing", done := done + len(chunk), total)
        lines.append(f"{digest.hexdigest()}  {os.path.relpath(path, home)}\n")
    (home / SUMS).write_text("".join(lines))
