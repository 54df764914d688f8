"""Fragments: small ONNX models that `Intervention.Splice` puts into a graph at a hook point.

1. A fragment's first input is the value at the hook point, and its one output takes that value's place: of the same
   shape, whatever the batch and the text. A second input, if there is one, is the value that `Splice(reads=)` names.
2. Its weights (initializers of floating-point numbers, more than one) become inputs of the graph it is spliced into:
   fragments that differ in weights only share one graph and one session. Everything else is part of its structure,
   whose hash is part of the graph's key.
3. Values whose names begin with `hook_` become hook points of their own, `{hook}.{name}`. Their axes are found by
   running the fragment on two small inputs of different sizes.
4. Standard operators only; local functions are inlined. Another opset than the model's is converted.
5. A file is checked as a model's is (see `mionnx.graph.validate`): its weights lie in its folder.
"""

import hashlib
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx.inliner import inline_local_functions
from onnx.numpy_helper import from_array
from onnx.reference import ReferenceEvaluator

from mionnx.errors import InterventionError
from mionnx.graph import onnx_file, validate

FLOAT_DTYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
LARGEST_MESSAGE = 2**31 - 2**16  # bytes of one protobuf message
HOOK = "hook_"  # how names of values begin that are hook points of a fragment
Source: TypeAlias = "Fragment | onnx.ModelProto | bytes | str | Path"


class Fragment:
    """A small ONNX model without its weights, and the weights beside it.

    Attributes:
        structure: the model; its inputs are the activations, then the weights.
        weights: name of an input -> array.
    """

    def __init__(self, structure: onnx.ModelProto, weights: Mapping[str, NDArray[Any]]) -> None:
        """Put a structure and its weights together, and check them."""
        self.structure = _bare(structure)
        self.weights = {name: np.ascontiguousarray(array) for name, array in weights.items()}
        self.fits: dict[Any, Any] = {}  # what `mionnx.bind.splice_check` found, by where
        self._check()

    @classmethod
    def of(cls, source: Source) -> "Fragment":
        """A fragment from a file, the bytes of one, or a model.

        Raises:
            InterventionError: see `Fragment`; bytes or a model whose weights lie in another file.
        """
        if isinstance(source, Fragment):
            return source
        if isinstance(source, str | Path):
            path = Path(source)
            proto = onnx_file.read(path)
            validate.check(proto, path.parent)
            return cls(*_parted(proto, path.parent))
        if not isinstance(source, onnx.ModelProto | bytes | bytearray | memoryview):
            what = f"{type(source).__name__} {reprlib.repr(source):.60}"
            raise InterventionError(f"splice: a fragment is an ONNX model, its bytes or its path, got {what}")
        proto = source if isinstance(source, onnx.ModelProto) else _parsed(source)
        if onnx_file.locations(proto):
            raise InterventionError(
                f"splice: the weights lie in {min(onnx_file.locations(proto))}: give the file's path"
            )
        validate.check(proto, Path())
        return cls(*_parted(proto, Path()))

    @property
    def activations(self) -> list[onnx.ValueInfoProto]:
        """The inputs that are no weights."""
        return [value for value in self.structure.graph.input if value.name not in self.weights]

    @property
    def opset(self) -> int:
        """The version of the standard operators."""
        return onnx_file.opset(self.structure)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the structure, weights excluded."""
        return hashlib.sha256(self.structure.SerializeToString(deterministic=True)).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(array.nbytes for array in self.weights.values())

    def evaluate(self, *activations: NDArray[Any]) -> NDArray[Any]:
        """Run the fragment with onnx's reference evaluator: slow, independent of any runtime."""
        feeds = {value.name: array for value, array in zip(self.activations, activations, strict=True)}
        outputs: Any = ReferenceEvaluator(self.structure).run(None, {**feeds, **self.weights})
        return outputs[0]

    def to_bytes(self) -> bytes:
        """The fragment as one ONNX model, weights inside.

        Raises:
            InterventionError: weights of more than the 2 GiB that an ONNX file holds.
        """
        if self.size > LARGEST_MESSAGE:
            raise InterventionError(f"splice: weights of {self.size / 2**30:.1f} GiB; an ONNX file holds 2")
        proto = onnx.ModelProto()
        proto.CopyFrom(self.structure)
        inputs = [*self.activations]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)
        proto.graph.initializer.extend(from_array(array, name) for name, array in self.weights.items())
        return proto.SerializeToString(deterministic=True)

    def _check(self) -> None:
        validate.check(self.structure, Path())
        inputs, outputs = [value.name for value in self.structure.graph.input], self.structure.graph.output
        if not 1 <= len(self.activations) <= 2 or len(outputs) != 1:
            raise InterventionError(
                "splice: a fragment has one input (or two, with reads=) and one output; this one has "
                f"{[value.name for value in self.activations]} and {[value.name for value in outputs]}"
            )
        for name, array in self.weights.items():
            if name not in inputs:
                raise InterventionError(f"splice: the fragment has no input for the weight {name!r}")
            if array.dtype.kind not in "iub" and np.isnan(array).any():
                raise InterventionError(f"splice: the fragment's weight {name!r} has NaN")
        own = {node.domain for part in validate.graphs(self.structure) for node in part.node} - {"", "ai.onnx"}
        if own:
            raise InterventionError(f"splice: operators of {', '.join(sorted(own))}; a fragment has standard ones only")

    def __repr__(self) -> str:
        nodes, count = len(self.structure.graph.node), len(self.weights)
        return f"Fragment({nodes} nodes, {count} weights of {self.size / 2**20:.1f} MiB)"


def written(text: str, weights: Mapping[str, NDArray[Any]]) -> Fragment:
    """A fragment in ONNX' own notation, the weights being inputs of its graph."""
    return Fragment(onnx.parser.parse_model(text), weights)


def _parsed(model: bytes) -> onnx.ModelProto:
    try:
        proto = onnx.load_from_string(bytes(model))
    except (DecodeError, ValueError, TypeError) as error:
        raise InterventionError(f"splice: no ONNX model: {error}") from error
    if not proto.graph.node or not proto.graph.output:
        raise InterventionError("splice: no ONNX model: it holds no graph")
    return proto


def _bare(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with functions inlined, without producer, documentation and metadata."""
    if proto.functions:
        validate.check(proto, Path())  # how often functions are called, before they are inlined
        proto = inline_local_functions(proto)
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    # two fragments with equal nodes must have one hash, and so one session
    for name in ("producer_name", "producer_version", "doc_string", "metadata_props"):
        bare.ClearField(name)
    for part in validate.graphs(bare):
        part.ClearField("doc_string")
        for node in part.node:
            node.ClearField("doc_string")
            node.ClearField("metadata_props")
    return bare


def _parted(proto: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
    """A model without its weights, which become inputs, and the weights."""
    initializers = list(proto.graph.initializer)
    weights = {tensor.name: tensor for tensor in initializers if _is_weight(tensor)}
    names = {tensor.name for tensor in initializers}
    inputs = [value for value in proto.graph.input if value.name not in names]
    inputs += [onnx.helper.make_tensor_value_info(one.name, one.data_type, one.dims) for one in weights.values()]
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.graph.initializer[:], bare.graph.input[:]
    bare.graph.input.extend(inputs)
    bare.graph.initializer.extend(tensor for tensor in initializers if tensor.name not in weights)
    # Read into memory: the file may go while the fragment lives.
    return bare, {name: np.array(onnx_file.weight(proto, folder, name)) for name in weights}


def _is_weight(tensor: onnx.TensorProto) -> bool:
    external = tensor.data_location == onnx.TensorProto.EXTERNAL
    # single numbers (an epsilon, a scale) stay: runtimes fold constants, and not inputs
    return external or (tensor.data_type in FLOAT_DTYPES and int(np.prod(tensor.dims)) > 1)


@dataclass(frozen=True)
class InnerHook:
    """A hook point inside a fragment."""

    name: str
    axes: tuple[str, ...]
    # A number for each axis, or its name where it is dynamic.
    dims: tuple[str | int, ...] = field(compare=False, repr=False)
    dtype: str = "float32"
    live: bool = True  # whether the fragment's output depends on it


@dataclass(frozen=True)
class FittedFragment:
    """A fragment's structure as it is put at one hook point."""

    sha256: str
    inner: tuple[InnerHook, ...]
    weights: tuple[str, ...]  # the names of its inputs after the activations
    proto: onnx.ModelProto = field(compare=False, repr=False)


def inner_names(hook: str, fitted: FittedFragment | None) -> Iterator[str]:
    """The names in the graph of the hook points that a fragment at `hook` brings."""
    yield from (f"{hook}.{inner.name}" for inner in fitted.inner) if fitted else ()
