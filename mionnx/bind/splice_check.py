"""A fragment meets a hook point: whether it fits there, and which hook points of its own it brings.

It is run on random values of two sizes: what comes out must have the shape of what went in, and an axis of a value
inside that changes with the batch or the text is that axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.engines import open_to_try
from mionnx.errors import InterventionError, MIError, ModelError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.fragment import HOOK, FittedFragment, Fragment, InnerHook
from mionnx.graph.known_value import Dims
from mionnx.graph.onnx_file import ModelProto, ValueInfoProto, dtype_of, in_opset, with_outputs
from mionnx.graph.value_sizes import check_sizes

# Sizes that dynamic axes have in the two runs; the n-th of a value's dynamic axes has the n-th of them.
# primes, each once: a size tells the axis and the run that it comes from
TRIAL_SIZES = ((2, 3), (5, 7), (11, 13))
Shape = tuple[int, ...]


@dataclass(frozen=True)
class SpliceSite:
    """An input of a fragment: the hook point's name, its axes as names and as sizes."""

    hook: str
    axes: tuple[str, ...]
    dims: tuple[str | int, ...]

    def shape(self, run: int) -> Shape:
        """In one of the two runs."""
        dynamic = [dim for dim in self.dims if isinstance(dim, str)]
        sizes = {dim: TRIAL_SIZES[min(n, len(TRIAL_SIZES) - 1)][run] for n, dim in enumerate(dict.fromkeys(dynamic))}
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.dims)


def check_fragment(fragment: Fragment, opset: int, sites: Sequence[SpliceSite]) -> FittedFragment:
    """Check a fragment against its input values: the hook point it is put at, and the one that it reads besides."""
    key = (opset, *sites)
    if key not in fragment.fits:
        fragment.fits[key] = _fit(fragment, opset, sites)
    return fragment.fits[key]


def _fit(fragment: Fragment, opset: int, sites: Sequence[SpliceSite]) -> FittedFragment:
    where = f"splice at {sites[0].hook}"
    if len(fragment.activations) != len(sites):
        raise InterventionError(
            f"{where}: the fragment has {len(fragment.activations)} inputs of activations, and "
            f"{len(sites)} {'is' if len(sites) == 1 else 'are'} given; a second one is named by reads="
        )
    for value, site in zip(fragment.activations, sites, strict=True):
        _check_type(where, value, site)
    _check_type(where, fragment.structure.graph.output[0], sites[0])
    try:
        proto = in_opset(fragment.structure, opset)
    except Exception as error:  # the converter's errors share no base class
        raise InterventionError(
            f"{where}: the fragment is written in opset {fragment.opset}, which cannot be converted to the model's "
            f"{opset}: {error}"
        ) from error
    names = _hooks(proto)
    first, second = (_run(where, fragment, proto, names, sites, run) for run in (0, 1))
    output = proto.graph.output[0].name
    for run, values in enumerate((first, second)):
        if values[output].shape != sites[0].shape(run):
            raise InterventionError(
                f"{where}: of a value of shape {list(sites[0].shape(run))} the fragment makes one of shape "
                f"{list(values[output].shape)}; what comes out takes the place of what went in"
            )
    flow = Dataflow(proto)
    # only values on the way to the output can be intervened at with an effect
    live = flow.read_by(flow.ancestors([output])) | {output}
    inner = tuple(_inner(name, first[name], second[name], sites, name in live) for name in names)
    return FittedFragment(fragment.sha256, inner, tuple(fragment.weights), proto)


def _check_type(where: str, value: ValueInfoProto, site: SpliceSite) -> None:
    tensor = value.type.tensor_type
    # sequences and maps are types of ONNX too
    if not value.type.HasField("tensor_type") or dtype_of(value).kind in "iubSUO":
        raise InterventionError(f"{where}: {value.name!r} of the fragment must be a tensor of floating-point numbers")
    if not tensor.HasField("shape"):
        return
    dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    fixed = list(zip(dims, site.dims, strict=False))
    if len(dims) != len(site.dims) or any(None is not dim != size for dim, size in fixed if isinstance(size, int)):
        spelled = "[" + ", ".join("?" if dim is None else str(dim) for dim in dims) + "]"
        shape = "[" + ", ".join(map(str, site.dims)) + "]"
        raise InterventionError(f"{where}: {value.name!r} of the fragment is {spelled}, the value there is {shape}")


def _hooks(proto: ModelProto) -> list[str]:
    """The values that become hook points, in execution order."""
    inputs = [value.name for value in proto.graph.input[:1]]
    outputs = [output for node in proto.graph.node for output in node.output]
    return [name for name in dict.fromkeys([*inputs, *outputs]) if name.startswith(HOOK)]


def _run(
    where: str, fragment: Fragment, proto: ModelProto, names: Sequence[str], sites: Sequence[SpliceSite], run: int
) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(run)
    feeds: dict[str, NDArray[Any]] = dict(fragment.weights)
    for value, site in zip(fragment.activations, sites, strict=True):
        feeds[value.name] = random.normal(size=site.shape(run)).astype(dtype_of(value))
    shapes: dict[str, Dims] = {name: array.shape for name, array in feeds.items()}
    try:  # before it is run: values may grow without bound
        check_sizes(proto, shapes, fragment.size)
    except ModelError as error:
        raise InterventionError(f"{where}: {error}") from error
    output = proto.graph.output[0].name
    others = [name for name in names if name not in feeds and name != output]
    try:
        results = open_to_try(with_outputs(proto, dict.fromkeys(others)), Path()).run([output, *others], feeds)
    except MIError as error:
        raise InterventionError(f"{where}: the fragment does not run on such values: {error}") from error
    # an input of the fragment may itself be a hook point: the engine gives outputs alone
    return {**results, **{name: feeds[name] for name in names if name in feeds}}


def _inner(name: str, first: NDArray[Any], second: NDArray[Any], sites: Sequence[SpliceSite], live: bool) -> InnerHook:
    pairs = [*zip(first.shape, second.shape, strict=False)] if first.ndim == second.ndim else []
    axes = [_axis(name, at, pair, sites[0]) for at, pair in enumerate(pairs)]
    return InnerHook(name, tuple(axis for axis, _ in axes), tuple(dim for _, dim in axes), str(first.dtype), live)


def _axis(name: str, at: int, pair: tuple[int, int], site: SpliceSite) -> tuple[str, str | int]:
    outer = [*zip(site.axes, site.dims, site.shape(0), site.shape(1), strict=True)]
    # the outer axis at the same place first: two fixed axes may have one size
    same = [(axis, dim) for axis, dim, *sizes in [*outer[at : at + 1], *outer] if (*sizes,) == pair]
    if pair[0] == pair[1]:
        here = [axis for axis, dim in same[:1] if outer[at : at + 1] and axis == outer[at][0]]
        return (here[0] if here else f"{name}.{at}"), pair[0]
    return same[0] if same else (f"{name}.{at}", f"{name}.{at}")
