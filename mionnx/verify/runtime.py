"""`Runtime`: the interface of everything that `verify` compares; `GraphRuntime` is an engine behind it."""

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
    def missing(self, graph: GraphUnderTest) -> str | None:
        """Why it cannot run here, and what would install it; None if it can."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Versions and options."""

    @abstractmethod
    def passes(self, graph: GraphUnderTest, names: Sequence[str]) -> AbstractContextManager[Pass]:
        """Open the graph; the function hands each named value of a call to the sink, in any order."""

    def groups(self, graph: GraphUnderTest, names: Sequence[str]) -> Iterator[list[str]]:
        """The names in groups that are run for together."""
        yield list(names)


class GraphRuntime(Runtime):
    """An engine with its options: it reads ONNX, and so can run any part of a graph."""

    def __init__(self, title: str, options: Options) -> None:
        super().__init__(title)
        self.options, self.engine = options, engine_of(options)

    def missing(self, graph: GraphUnderTest) -> str | None:
        return self.engine.missing(self.options) or self.engine.refuses(graph.proto)

    def facts(self) -> dict[str, str]:
        return self.engine.facts(self.options)

    def source(self) -> str | None:
        """Body of a Python function of (path, feeds) that runs a model; None if Python cannot."""
        return self.engine.source(self.options)

    @contextmanager
    def opened(self, proto: onnx.ModelProto, folder: Path) -> Iterator[Piece]:
        """Open a model with its weights in a folder; the function runs it and gives all outputs."""
        names = [value.name for value in proto.graph.output]
        with self.engine.opened_alone(proto.SerializeToString(), folder, self.options) as program:
            yield lambda feeds: program.run(names, feeds)

    @contextmanager
    def passes(self, graph: GraphUnderTest, names: Sequence[str]) -> Iterator[Pass]:
        """See `Runtime.passes`."""
        with self.opened_part(graph, (), names) as piece:

            def run(call: TokenBatch, sink: Sink) -> None:
                outputs = piece(graph.feeds(call))
                for name in names:
                    sink(name, outputs.pop(name))

            yield run

    def groups(self, graph: GraphUnderTest, names: Sequence[str]) -> Iterator[list[str]]:
        """Small ones: a runtime keeps every output until the run is over."""
        return graph.groups(names)

    @contextmanager
    def opened_part(self, graph: GraphUnderTest, starts: Sequence[str], ends: Sequence[str]) -> Iterator[Piece]:
        """Open the part of a graph between some values and others."""
        with self.opened_proto(graph.part(starts, ends), graph.model.folder) as piece:
            yield piece

    @contextmanager
    def opened_proto(self, proto: onnx.ModelProto, folder: Path) -> Iterator[Piece]:
        """Open a model; feeds are cast to the dtypes of its inputs, and surplus ones left out."""
        types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
        dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in types.items()}
        with self.opened(proto, folder) as piece:
            yield lambda feeds: piece(
                {name: _fitted(feeds[name], dtype) for name, dtype in dtypes.items() if name in feeds}
            )


def _fitted(array: NDArray[Any], dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Cast an array; numbers beyond the dtype's range, as in masks, become its limits."""
    if array.dtype.kind == dtype.kind == "f" and dtype.itemsize < array.dtype.itemsize:
        ends = np.finfo(dtype)
        array = np.where(np.isfinite(array), np.clip(array, ends.min, ends.max), array)
    return array.astype(dtype, copy=False)
