"""`Engine` opens a graph as a `Program`; a program runs it. Nothing outside this room knows an engine's own objects."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.engine.options import Options
from mionnx.errors import InputError
from mionnx.graph import onnx_file
from mionnx.machine import memory

Arrays = dict[str, NDArray[Any]]
Operator = tuple[str, str]  # domain, name


@dataclass(frozen=True)
class Input:
    """One input of a program."""

    dtype: "np.dtype[Any]"
    rank: int | None  # number of axes; None if the graph does not say
    optional: bool = False


class Program(ABC):
    """One graph, open in one engine; threads may run it at the same time."""

    native: Any
    inputs: Mapping[str, Input]  # everything that can be fed, by name
    shares_weights: bool = False  # whether other programs use the same memory for their weights
    rolls: bool = False  # whether `rolling` gives anything

    @abstractmethod
    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> Arrays:
        """Run the graph, and give some of its outputs as arrays; feeds that it does not read are left out."""

    def run_on_device(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """As `run`, but results stay where the engine computes them, to be fed again without a copy."""
        return dict(self.run(outputs, feeds))

    def compute(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """As `run` where the engine computes on the CPU; on another device as `run_on_device`."""
        return dict(self.run(outputs, feeds))

    def rolling(self, outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]], present: Mapping[str, str]) -> Any:
        """A `RollingCache` of this program, for decoding in calls of one shape; or None."""
        # `feeds` are those of one step, the past padded on the left; `present`: output -> the input that takes it next.
        return None

    def resident(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Arrays put where the engine computes, once for many runs."""
        return dict(arrays)

    def close(self) -> None:
        """End what Python's garbage collector would not end; most programs have nothing of the kind."""
        return


class Engine(ABC):
    """Something that runs ONNX graphs."""

    name: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ()  # the fields of `Options` that it has, besides those of every engine
    packages: ClassVar[tuple[str, ...]] = ()  # the distributions that bring it, for the record of a comparison
    casts: ClassVar[bool] = False  # whether a graph can give its outputs in every dtype that it casts to

    @abstractmethod
    def missing(self, options: Options) -> str | None:
        """Why it cannot run on this machine, and what would install it; None if it can."""

    def lacks(self, options: Options) -> tuple[str, ...]:
        """The dtypes of models, "bfloat16" say, that it has no operators for with these options."""
        return ()

    def packs(self, options: Options) -> bool:
        """Whether each program packs weights for itself, unless `Options.prepack` is False."""
        return False

    def computes(self, operators: Iterable[Operator], dtype: str, options: Options) -> bool:
        """Whether it has kernels for operators outside the ONNX standard."""
        return False

    def title(self, options: Options) -> str:
        """The engine with its provider, for messages."""
        return f"{self.name} on {options.provider}" if "provider" in self.settings else self.name

    def refuses(self, model: onnx.ModelProto) -> str | None:
        """Why it cannot run this graph, if that is known before it is opened; None otherwise."""
        return None

    @abstractmethod
    def facts(self, options: Options) -> dict[str, str]:
        """Versions and options, for the record of a comparison."""

    def source(self, options: Options) -> str | None:
        """Body of a Python function of (path, feeds) that runs a model; None if Python cannot."""
        return None

    @abstractmethod
    def open(
        self, model: Path | bytes, folder: Path, options: Options, *, optimised: bool = False, spinning: bool = True
    ) -> Program:
        """Open a file, or the bytes of a model whose external data lie in `folder`."""
        # `optimised`: this engine has optimised the graph already; `spinning`: threads keep the processor while they
        # wait.

    def open_to_try(self, model: Path | bytes, folder: Path) -> Program:
        """Open a graph for runs that may fail, on the CPU; nothing is optimised, packed or printed."""
        return self.open(model, folder, Options(engine=self.name))

    def write_optimised(
        self, model: bytes, folder: Path, path: Path, data: str, options: Options, *, packed: bool = False
    ) -> None:
        """Write a model as the engine optimises it, with operators of its own; its weights go to the file `data`."""
        # `packed`: with weights packed for this machine, as a base has them (`mionnx.run.prepacked`).
        raise InputError(f"engine={self.name!r} writes no optimised graphs")

    def release(self) -> None:
        """Return memory to the system that no open graph and no result uses."""
        memory.release()

    @contextmanager
    def opened_alone(
        self, model: Path | bytes, folder: Path, options: Options, *, in_order: bool = False
    ) -> Iterator[Program]:
        """Open a graph for a `with` statement, and refuse one that the engine would run elsewhere."""
        # `in_order`: nodes run in the order that they are written in, where the engine has such a setting.
        program = self.open(model, folder, options)
        try:
            yield program
        finally:
            program.close()


def graph_of(model: Path | bytes) -> onnx.ModelProto:
    """A model that an engine is to open, parsed."""
    return onnx_file.parse(model) if isinstance(model, bytes) else onnx_file.read(model)


def inputs_of(model: onnx.ModelProto) -> dict[str, Input]:
    """The inputs of a graph, read from the graph itself."""
    defaults = {tensor.name for tensor in model.graph.initializer}
    inputs = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        rank = len(tensor.shape.dim) if tensor.HasField("shape") else None
        inputs[value.name] = Input(dtype, rank, value.name in defaults)
    return inputs
