"""A fragment as it was checked at a hook point: its structure, and the hook points that it brings."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx

HOOK = "hook_"


@dataclass(frozen=True)
class InnerHook:
    """A hook point inside a fragment.

    Attributes:
        name: of the value, as the fragment has it.
        dims: a number for each axis, or its name where it is dynamic.
        dtype: numpy's name.
        live: whether the fragment's output depends on it.
    """

    name: str
    axes: tuple[str, ...]
    dims: tuple[str | int, ...] = field(compare=False, repr=False)
    dtype: str = "float32"
    live: bool = True


@dataclass(frozen=True)
class FittedFragment:
    """A fragment's structure as it is put at one hook point.

    Attributes:
        sha256: of the structure.
        inner: the hook points it brings.
        weights: the names of its inputs after the activations.
        proto: the structure, in the model's opset.
    """

    sha256: str
    inner: tuple[InnerHook, ...]
    weights: tuple[str, ...]
    proto: onnx.ModelProto = field(compare=False, repr=False)


def inner_names(hook: str, fitted: FittedFragment | None) -> Iterator[str]:
    """The names in the graph of the hook points that a fragment at `hook` brings."""
    yield from (f"{hook}.{inner.name}" for inner in fitted.inner) if fitted else ()
