"""Runtimes that `verify` compares: engines, which run any part of a graph, and transformers; each by its name."""

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.bind.selection import Selection
from mionnx.engine.engines import ENGINES, engine_of
from mionnx.engine.options import OPTIMISATION_LEVELS, PROVIDERS, Options, installed_providers, known_providers
from mionnx.errors import ExportError, InputError, MIError, ModelError, install, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import FOUND_BY_STRUCTURE
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.cache_keys import instruction_sets, processor_name
from mionnx.run import exporting
from mionnx.verify.graph_under_test import Arrays, GraphUnderTest

# ONNX Runtime goes by its providers.
OTHER_ENGINES = {name: engine.settings for name, engine in ENGINES.items() if name != Options.engine}
RUNTIME_NAMES = ("torch", *(f"ort-{short}" for short in PROVIDERS), *OTHER_ENGINES)
WITH_THREADS = ("torch", "ort-cpu", *(name for name, settings in OTHER_ENGINES.items() if "threads" in settings))
PROVIDER = "ExecutionProvider"  # what the full name of every provider of ONNX Runtime ends in
PACKAGES = ("mionnx", "numpy", "torch", "transformers", *(name for one in ENGINES.values() for name in one.packages))
INSTALL = install("export")

Sink = Callable[[str, NDArray[Any]], None]
Pass = Callable[[TokenBatch, Sink], None]
Piece = Callable[[Arrays], Arrays]


class Runtime(ABC):
    """Something that runs a model; its title is a name with settings, such as "ort-cpu:none"."""

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

    def environment(self) -> dict[str, Any]:
        """Collect the facts that may make another machine's numbers differ."""
        return {
            "runtime": self.title,
            "options": self.facts(),
            "versions": _versions(),
            "python": platform.python_version(),
            "system": platform.platform(),
            "processor": processor_name(),
            "features": instruction_sets(),
            "providers": installed_providers(),
        }


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


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

    def groups(self, graph: GraphUnderTest, names: Sequence[str]) -> Iterator[list[str]]:
        # small ones: a runtime keeps every output until the run is over
        return graph.groups(names)

    @contextmanager
    def passes(self, graph: GraphUnderTest, names: Sequence[str]) -> Iterator[Pass]:
        with self.opened(graph, (), names) as piece:

            def run(call: TokenBatch, sink: Sink) -> None:
                outputs = piece(graph.feeds(call))
                for name in names:
                    sink(name, outputs.pop(name))  # taken out, so that memory holds no value that was handed on

            yield run

    @contextmanager
    def opened(self, graph: GraphUnderTest, starts: Sequence[str], ends: Sequence[str]) -> Iterator[Piece]:
        """Open the part of a graph between some values and others.

        Feeds are cast to the dtypes of its inputs, and surplus ones left out.
        """
        proto = graph.part(starts, ends)
        names = [value.name for value in proto.graph.output]
        types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
        dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in types.items()}
        with self.engine.opened_alone(proto.SerializeToString(), graph.model.folder, self.options) as program:
            yield lambda feeds: program.run(
                names, {name: _fitted(feeds[name], dtype) for name, dtype in dtypes.items() if name in feeds}
            )


def _fitted(array: NDArray[Any], dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Cast an array; numbers beyond the dtype's range, as in masks, become its limits."""
    if array.dtype.kind == dtype.kind == "f" and dtype.itemsize < array.dtype.itemsize:
        ends = np.finfo(dtype)
        array = np.where(np.isfinite(array), np.clip(array, ends.min, ends.max), array)
    return array.astype(dtype, copy=False)


class TorchEager(Runtime):
    """The model's checkpoint in transformers.

    The exporter that knows the checkpoint runs it (`open_eagerly`): nothing here imports torch.
    """

    def __init__(self, title: str, checkpoint: Path | None = None, threads: int = 0) -> None:
        super().__init__(title)
        self.checkpoint, self.threads = checkpoint, threads

    def _exporter(self, graph: GraphUnderTest) -> tuple[ModuleType, Path]:
        folder = self.checkpoint or graph.model.folder
        return exporting.exporter_for(folder), folder

    def missing(self, graph: GraphUnderTest) -> str | None:
        if any(edit.fit is not None for edit in graph.bound.plan.edits):
            return "a splice is an ONNX model, which torch does not run: compare the other runtimes"
        if FOUND_BY_STRUCTURE in graph.model.metadata.exporter:
            family = graph.model.metadata.family
            return f"hook points of {family!r} were found by structure, and checked at export: torch has no taps there"
        try:
            exporter, folder = self._exporter(graph)
        except (ExportError, ImportError) as error:
            return f"{error}; name the checkpoint's folder, or {INSTALL}"
        if not hasattr(exporter, "open_eagerly"):
            return f"{exporter.__name__} has no eager model of this family: transformers has none"
        absent = exporter.missing_eagerly(folder)
        return f"{absent}; {INSTALL}, or name the checkpoint's folder" if absent else None

    def facts(self) -> dict[str, str]:
        return {**{name: version(name) for name in ("torch", "transformers")}, "threads": str(self.threads or "all")}

    @contextmanager
    def passes(self, graph: GraphUnderTest, names: Sequence[str]) -> Iterator[Pass]:
        exporter, folder = self._exporter(graph)
        with _as_model_errors():
            forward = exporter.open_eagerly(folder, graph.model.metadata.reference_dtype, self.threads)

        def run(call: TokenBatch, sink: Sink) -> None:
            with _as_model_errors():
                forward(tuple(call.feeds().values()), _listener(graph, call, sink, {*names}))

        yield run


def _listener(
    graph: GraphUnderTest, call: TokenBatch, sink: Sink, names: set[str]
) -> Callable[[str, NDArray[Any]], NDArray[Any] | None]:
    """Apply a spec's interventions by their numpy references, and record the named values."""
    choice: dict[int | None, NDArray[Any]] = {}  # layer -> the experts that its tokens chose

    def listen(name: str, value: NDArray[Any]) -> NDArray[Any] | None:
        point = HookPoint.parse(name)
        here = [Selection(edit, one, value.shape, call) for edit, one in graph.bound.edits if edit.hook == name]
        for selection in here:  # bfloat16 comes as float32
            chosen = value if name == selection.edit.at_experts else choice.get(point.layer)
            value = selection.applied(value.astype(graph.model.dtype(point)), chosen).astype(value.dtype)
        if point.variant == "MlpExpertIndices":
            # After the interventions: later hook points of the layer are limited by these experts.
            choice[point.layer] = value
        if name in names:
            sink(name, value)
        return value if here else None  # None: torch goes on with its own tensor

    return listen


@contextmanager
def _as_model_errors() -> Iterator[None]:
    try:
        yield
    except MIError:
        raise
    except Exception as error:  # those of torch and transformers are of any class
        raise ModelError(f"transformers cannot run this checkpoint: {type(error).__name__}: {error}") from error


def runtime_of(title: str, checkpoint: Path | None = None) -> Runtime:
    """The runtime of a name with an optimisation level and "threads=N" after colons; "torch" reads `checkpoint`."""
    name, *settings = title.split(":")
    providers = known_providers()
    if name not in (*RUNTIME_NAMES, *providers, *installed_providers()):
        choices = (*RUNTIME_NAMES, *providers)
        raise InputError(f"no runtime {name!r}; there are {', '.join(RUNTIME_NAMES)}, and ONNX Runtime's providers by "
                         f"their full names{nearest(name, choices)}")  # fmt: skip
    options = _settings(title, name, settings)
    threads = options.get("threads", 0)
    if name == "torch":
        return TorchEager(title, checkpoint, threads)
    if name in OTHER_ENGINES:
        return GraphRuntime(title, Options(threads=threads, fast="fast" in OTHER_ENGINES[name], engine=name))
    provider = next((short for short in PROVIDERS if name == f"ort-{short}"), name)
    return GraphRuntime(title, Options(provider, threads, level=options.get("level", "all")))


def _settings(title: str, name: str, settings: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    ort = name not in OTHER_ENGINES and (name.startswith("ort-") or name.endswith(PROVIDER))
    threads = ort or name in WITH_THREADS
    for setting in settings:
        key, _, value = setting.partition("=")
        if options.keys() & {"level" if setting in OPTIMISATION_LEVELS else key}:
            raise InputError(f"runtime {title!r}: {setting!r} is given after another setting of the same thing")
        if ort and setting in OPTIMISATION_LEVELS:
            options["level"] = setting
        elif key == "threads" and value.isdigit() and int(value) and threads:
            options["threads"] = int(value)
        else:
            choices = [*(OPTIMISATION_LEVELS if ort else ()), *(["threads=N"] if threads else [])]
            raise InputError(
                f"runtime {title!r}: {name} has no setting {setting!r}; it has {', '.join(choices) or 'none'}"
                f"{nearest(setting, choices)}"
            )
    return options
