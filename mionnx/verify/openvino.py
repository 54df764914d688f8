"""OpenVINO on the CPU as a runtime to compare, in float32."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx

from mionnx import graph
from mionnx.errors import ModelError
from mionnx.verify.runtime import GraphRuntime, Piece
from mionnx.verify.subject import Arrays, Subject


class OpenVino(GraphRuntime):
    """OpenVINO's CPU plugin. It would compute in bfloat16 where the processor can: it is told not to."""

    def __init__(self, title: str, threads: int = 0) -> None:
        super().__init__(title)
        self.options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if threads:
            self.options["INFERENCE_NUM_THREADS"] = threads

    def missing(self, subject: Subject) -> str | None:
        """Whether OpenVINO is installed."""
        return None if find_spec("openvino") else "OpenVINO is not installed: pip install openvino"

    def facts(self) -> dict[str, str]:
        """Version and options."""
        return {"openvino": version("openvino"), **{key: str(value) for key, value in self.options.items()}}

    @contextmanager
    def opened(self, proto: onnx.ModelProto, folder: Path) -> Iterator[Piece]:
        """A compiled model; see `GraphRuntime.opened`."""
        import openvino

        names = [value.name for value in proto.graph.output]
        with tempfile.TemporaryDirectory() as scratch:
            at = Path(scratch) / "model.onnx"
            at.write_bytes(proto.SerializeToString())
            for name in graph.locations(proto):
                _bring((folder / name).resolve(), at.parent / name)
            try:
                ready = openvino.Core().compile_model(str(at), "CPU", self.options)
            except RuntimeError as error:
                raise ModelError(f"OpenVINO cannot open this part of the model: {error}") from error

            def run(feeds: Arrays) -> Arrays:
                try:
                    found = ready(feeds)
                except RuntimeError as error:
                    raise ModelError(f"OpenVINO failed while running the model: {error}") from error
                return {name: found[ready.output(name)].copy() for name in names}

            yield run


def _bring(source: Path, target: Path) -> None:
    """Put a weight file beside a graph: OpenVINO follows no link out of the graph's folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)
