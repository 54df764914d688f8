"""Compiled folders: one plain ONNX model in which a spec's interventions are baked in.

Any ONNX runtime runs it without mionnx. The folder:

model.onnx          the graph; `metadata_props["mionnx.compiled"]` is JSON: what it is, from which model and spec
model.onnx.data,    the weights, if they are not embedded; of the target "generic" they are the files of the hooked
*.safetensors, ...  model: copies (`weights="alongside"`) or hard links (`"referenced"`)
spec.safetensors    the spec, as `HookSpec.save` writes it, every glob and predicate as the names that it means
README.md           the card: that this is not the original model, and what was done to it
config.json, ...    config and tokenizer of the model

The layout "triton" is a model repository: `{name}/config.pbtxt`, `{name}/1/` with the model, `{name}/` with the rest.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx

from mionnx.compile.model_card import card, interface_of, triton_config
from mionnx.compile.stored_once import reshape_shared, store_once
from mionnx.engine.engines import engine_of
from mionnx.engine.options import Options
from mionnx.errors import InputError, ModelError, nearest
from mionnx.graph import onnx_file
from mionnx.graph.folder_file import copy_beside, files_beside, read_json
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import GRAPH, INPUT_NAMES, KEPT, ROUNDING_LEVEL, HookedModel
from mionnx.graph.metadata import COMPILED
from mionnx.inputs.tokens import TOKENIZER_FILE, copy_tokenizer
from mionnx.machine.leftovers import new_folder, remove_leftovers
from mionnx.machine.memory import format_bytes
from mionnx.machine.progress import Progress
from mionnx.rewrite.plan import ALL, NONE, PADDED
from mionnx.spec.hook_spec import HookSpec

SPEC = "spec.safetensors"
CARD = "README.md"
DATA = "model.onnx.data"
WEIGHT_PLACES = ("embedded", "alongside", "referenced")
TARGETS = {"generic": None, "ort-cpu": "cpu", "ort-cuda": "cuda", "web": None}
PRODUCT_LEVELS = (0, ROUNDING_LEVEL)  # of accuracy, see `Packaging`
LAYOUTS = ("plain", "optimum", "triton")
FUSED = (NONE, PADDED, ALL)
LIMIT = 2**31 - 2**24  # a protobuf file holds 2 GiB; some is left for the graph
Knobs = Mapping[str, str | HookPoint | Sequence[str | HookPoint] | None]


@dataclass(frozen=True)
class Packaging:
    """Weights, target runtime and layout of a compiled folder.

    Attributes:
        weights: "embedded" in model.onnx (up to 2 GiB), "alongside" as files of its own, or "referenced": hard links
            to the hooked model's files, on the same disk. By default alongside, for the web embedded.
        target: "generic" (the model's own operators: standard ones, and ONNX Runtime's `MatMulNBits` and
            `GatherBlockQuantized` where its weights are blocks), "ort-cpu" or "ort-cuda" (optimised for this version of
            ONNX Runtime, with its own operators), or "web" (one file, for onnxruntime-web).
        layout: "plain", "optimum" (what `ORTModelForCausalLM.from_pretrained` loads) or "triton" (a repository).
        fused: of the fused operators that an adopted file came with, those to keep where nothing inside them is
            touched: "none", "padded" (right for padded texts too) or "all". Only ONNX Runtime has such operators.
        accuracy_level: of products with weights in blocks: 0, in floats, or 4, what they read rounded to 8 bits. None
            is the level that `forward` computes them at.
    """

    weights: str | None = None
    target: str = "generic"
    layout: str = "plain"
    fused: str = NONE
    accuracy_level: int | None = None

    def __post_init__(self) -> None:
        weights = ("weights", self.weights or "alongside", WEIGHT_PLACES)
        target, layout = ("target", self.target, TARGETS), ("layout", self.layout, LAYOUTS)
        for what, choice, choices in (weights, target, layout, ("fused", self.fused, FUSED)):
            if choice not in choices:
                raise InputError(f"{what} {choice!r}; one of {', '.join(choices)}{nearest(str(choice), choices)}")
        if self.accuracy_level not in (None, *PRODUCT_LEVELS):
            raise InputError(f"accuracy_level={self.accuracy_level!r}; one of {', '.join(map(str, PRODUCT_LEVELS))}")
        if self.target.startswith("ort-") and self.weights == "referenced":
            raise InputError(
                f"target {self.target} writes weights anew: they cannot be references to the model's files"
            )

    @property
    def placed(self) -> str:
        """The place of the weights: "embedded", "alongside" or "referenced"."""
        return self.weights or ("embedded" if self.target == "web" else "alongside")


def write_package(
    model: HookedModel, proto: onnx.ModelProto, spec: HookSpec, target: Path, packaging: Packaging, progress: Progress
) -> None:
    """Write a compiled graph of a model, whose weights are still in the model's files, as a folder."""
    remove_leftovers(target.parent, holding=(GRAPH,))
    with new_folder(target, ModelError) as partial, _room(model, packaging):
        # Triton wants each version of a model in a numbered folder.
        at = partial / target.name / "1" if packaging.layout == "triton" else partial
        at.mkdir(parents=True, exist_ok=True)
        _write_model(model, proto, at, packaging, progress)
        _write_rest(model, spec, proto, at.parent if packaging.layout == "triton" else at, packaging, target.name)


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


def _write_model(
    model: HookedModel, proto: onnx.ModelProto, at: Path, packaging: Packaging, progress: Progress
) -> None:
    provider = TARGETS[packaging.target]
    if provider is not None or packaging.placed == "embedded":
        model.need_weights(f"a file for {packaging.target} with its weights {packaging.placed}")
    if provider is not None:
        _check_size(proto, packaging)
        options = Options(provider)
        engine_of(options).write_optimised(proto.SerializeToString(), model.folder, at / GRAPH, DATA, options)
        written = onnx.load(at / GRAPH, load_external_data=False)
        # Exactly ours, whatever the optimiser keeps of them.
        del written.metadata_props[:]
        written.metadata_props.extend(proto.metadata_props)
        if (at / DATA).exists():
            store_once(written, at / DATA)
        if packaging.placed == "embedded":
            reshape_shared(written)
            onnx_file.embed(written, at)
            (at / DATA).unlink(missing_ok=True)
        (at / GRAPH).write_bytes(written.SerializeToString())
        return
    if packaging.placed == "embedded":
        reshape_shared(proto)
        _check_size(proto, packaging)
        onnx_file.embed(proto, model.folder)
    else:
        for done, name in enumerate(files := onnx_file.locations(proto) if model.has_weights else {}):
            progress(f"writing {name}", done, len(files))
            (at / name).parent.mkdir(parents=True, exist_ok=True)
            # A file of the model may be a symbolic link: what it points to is copied or linked.
            _deliver((model.folder / name).resolve(), at / name, packaging.placed)
    (at / GRAPH).write_bytes(proto.SerializeToString())


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


def _write_rest(
    model: HookedModel, spec: HookSpec, proto: onnx.ModelProto, at: Path, packaging: Packaging, name: str
) -> None:
    facts = json.loads(next(entry.value for entry in proto.metadata_props if entry.key == COMPILED))
    spec.save(str(at / SPEC))
    files = files_beside(model.folder, KEPT)
    copy_beside([file for file in files if file.name != TOKENIZER_FILE], model.folder, at)
    for file in [file for file in files if file.name == TOKENIZER_FILE]:
        copy_tokenizer(file, at / file.name)
    _name_inputs(at / "tokenizer_config.json")
    if packaging.layout == "optimum" and not (at / "config.json").is_file():
        raise ModelError(f"{model.folder} has no config.json, and optimum loads no model without one")
    interface = interface_of(proto.graph)
    (at / CARD).write_text(card(facts, spec, model.metadata, interface, packaging.target))
    if packaging.layout == "triton":
        (at / "config.pbtxt").write_text(triton_config(name, interface))


def _name_inputs(path: Path) -> None:
    """Name the graph's inputs in a tokenizer's config without their names."""
    # A tokenizer class of transformers 4 gives segments too, which no decoder reads.
    config = read_json(path) if path.is_file() else None
    if isinstance(config, dict) and "model_input_names" not in config:
        path.write_text(json.dumps({**config, "model_input_names": [*INPUT_NAMES]}, ensure_ascii=False, indent=1))
