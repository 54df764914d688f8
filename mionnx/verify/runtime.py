"""What a runtime has to be able to do, so that it can be compared with another."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.engine.engines import engine_of
from mionnx.engine.options import Options
from mionnx.inputs.token_batch import TokenBatch
from mionnx.verify.graph_under_test import Arrays, GraphUnderTest

Sink = Callable[[str, NDArray[Any]], None]
Pass = Callable[[TokenBatch, Sink], None]
Piece = Callable[[Arrays], Arrays]


class Runtime(ABC):
    """Something that runs a model.

    Attributes:
        title: as it was asked for: "ort-cpu:none", say.
    """

    def __init__(self, title: str) -> None:
        self.title = title

    @abstractmethod
    def missing(self, subject: GraphUnderTest) -> str | None:
        """Why it cannot run here, and what would install it; None if it can."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Versions and options."""

    @abstractmethod
    def passes(self, subject: GraphUnderTest, names: Sequence[str]) -> AbstractContextManager[Pass]:
        """Opens the subject; the function hands each named value of a call to the sink, in any order."""

    def groups(self, subject: GraphUnderTest, names: Sequence[str]) -> Iterator[list[str]]:
        """The names in groups that are run for together."""
        yield list(names)


class GraphRuntime(Runtime):
    """An engine with its options: it reads ONNX, and so can run any part of a graph.

    Attributes:
        options: settings, the engine's name among them.
    """

    def __init__(self, title: str, options: Options) -> None:
        super().__init__(title)
        self.options, self.engine = options, engine_of(options)

    def missing(self, subject: GraphUnderTest) -> str | None:
        """See `Runtime.missing`."""
        return self.engine.missing(self.options) or self.engine.refuses(subject.proto)

    def facts(self) -> dict[str, str]:
        """See `Runtime.facts`."""
        return self.engine.facts(self.options)

    def source(self) -> str | None:
        """The body of a Python function of (path, feeds) that runs a model as this does; None if Python cannot."""
        return self.engine.source(self.options)

    @contextmanager
    def opened(self, proto: onnx.ModelProto, folder: Path) -> Iterator[Piece]:
        """A function that runs a model, its weights in a folder, and gives all its outputs."""
        names = [value.name for value in proto.graph.output]
        with self.engine.opened_alone(proto.SerializeToString(), folder, self.options) as program:
            yield lambda feeds: program.run(names, feeds)

    @contextmanager
    def passes(self, subject: GraphUnderTest, names: Sequence[str]) -> Iterator[Pass]:
        """See `Runtime.passes`."""
        with self.opened_part(subject, (), names) as piece:

            def run(call: TokenBatch, sink: Sink) -> None:
                found = piece(subject.feeds(call))
                for name in names:
                    sink(name, found.pop(name))

            yield run

    def groups(self, subject: GraphUnderTest, names: Sequence[str]) -> Iterator[list[str]]:
        """Small ones: a runtime keeps every output until the run is over."""
        return subject.groups(names)

    @contextmanager
    def opened_part(self, subject: GraphUnderTest, starts: Sequence[str], ends: Sequence[str]) -> Iterator[Piece]:
        """Opens the part of a subject's graph between some values and others."""
        with self.opened_proto(subject.part(starts, ends), subject.model.folder) as piece:
            yield piece

    @contextmanager
    def opened_proto(self, proto: onnx.ModelProto, folder: Path) -> Iterator[Piece]:
        """Opens a model; what is fed is cast to what its inputs take, and what it does not read is left out."""
        types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
        dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in types.items()}
        with self.opened(proto, folder) as piece:
            yield lambda feeds: piece(
                {name: _fitted(feeds[name], dtype) for name, dtype in dtypes.items() if name in feeds}
            )


def _fitted(array: NDArray[Any], dtype: "np.dtype[Any]") -> NDArray[Any]:
    """An array in another dtype; numbers beyond its range, as masks have them, become its outermost ones."""
    if array.dtype.kind == dtype.kind == "f" and dtype.itemsize < array.dtype.itemsize:
        ends = np.finfo(dtype)
        array = np.where(np.isfinite(array), np.clip(array, ends.min, ends.max), array)
    return array.astype(dtype, copy=False)
