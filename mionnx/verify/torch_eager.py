"""transformers in torch, eager, as a runtime to compare: the exporter's taps record."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from mionnx.bind.selection import Selection
from mionnx.errors import ExportError, MIError, ModelError, install
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import FOUND_BY_STRUCTURE
from mionnx.inputs.token_batch import TokenBatch
from mionnx.run import exporting
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.runtime import Pass, Runtime, Sink

INSTALL = install("export")


class Eager(Runtime):
    """The model's checkpoint in transformers.

    The exporter that knows the checkpoint runs it (`open_eagerly`): nothing here imports torch.
    """

    def __init__(self, title: str, checkpoint: Path | None = None, threads: int = 0) -> None:
        super().__init__(title)
        self.checkpoint, self.threads = checkpoint, threads

    def _exporter(self, graph: GraphUnderTest) -> ModuleType:
        return exporting.exporter_for(self._folder(graph))

    def _folder(self, graph: GraphUnderTest) -> Path:
        return self.checkpoint or graph.model.folder

    def missing(self, graph: GraphUnderTest) -> str | None:
        """Check that torch, checkpoint and family are there, and nothing is spliced."""
        if any(edit.fit is not None for edit in graph.plan.edits):
            return "a splice is an ONNX model, which torch does not run: compare the other runtimes"
        if FOUND_BY_STRUCTURE in graph.model.metadata.exporter:
            family = graph.model.metadata.family
            return f"hook points of {family!r} were found by structure, and checked at export: torch has no taps there"
        try:
            exporter = self._exporter(graph)
        except (ExportError, ImportError) as error:
            return f"{error}; name the checkpoint's folder, or {INSTALL}"
        if not hasattr(exporter, "open_eagerly"):
            return f"{exporter.__name__} has no eager model of this family: transformers has none"
        absent = exporter.missing_eagerly(self._folder(graph))
        return f"{absent}; {INSTALL}, or name the checkpoint's folder" if absent else None

    def facts(self) -> dict[str, str]:
        """Versions and threads."""
        from importlib.metadata import version

        names = ("torch", "transformers")
        return {**{name: version(name) for name in names}, "threads": str(self.threads or "all")}

    @contextmanager
    def passes(self, graph: GraphUnderTest, names: Sequence[str]) -> Iterator[Pass]:
        """See `Runtime.passes`."""
        exporter, folder = self._exporter(graph), self._folder(graph)
        with _as_model_errors():
            opened = exporter.open_eagerly(folder, graph.model.metadata.dtype, self.threads)
        points = {*names}

        def run(call: TokenBatch, sink: Sink) -> None:
            with _as_model_errors():
                opened((call.input_ids, call.attention_mask, call.position_ids), _listener(graph, call, sink, points))

        yield run


def _listener(
    graph: GraphUnderTest, call: TokenBatch, sink: Sink, points: set[str]
) -> Callable[[str, NDArray[Any]], NDArray[Any] | None]:
    """Apply a spec's interventions by their numpy references, and record what is wanted."""
    choice: dict[int | None, NDArray[Any]] = {}  # layer -> the experts that its tokens chose

    def listen(name: str, value: NDArray[Any]) -> NDArray[Any] | None:
        point = HookPoint.parse(name)
        here = [Selection(edit, one, value.shape, call) for edit, one in graph.bound.edits if edit.hook == name]
        for selection in here:  # bfloat16 comes as float32
            chosen = value if name == selection.edit.at_experts else choice.get(point.layer)
            value = selection.applied(value.astype(graph.model.dtype(point)), chosen).astype(value.dtype)
        if point.variant == "MlpExpertIndices":
            choice[point.layer] = value
        if name in points:
            sink(name, value)
        return value if here else None

    return listen


@contextmanager
def _as_model_errors() -> Iterator[None]:
    """Errors of torch and transformers are of any class."""
    try:
        yield
    except MIError:
        raise
    except Exception as error:
        raise ModelError(f"transformers cannot run this checkpoint: {type(error).__name__}: {error}") from error
