"""OpenVINO on the CPU as a runtime to compare, in float32."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import onnx

from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.verify.graph_under_test import Arrays, GraphUnderTest
from mionnx.verify.runtime import GraphRuntime, Piece


class OpenVino(GraphRuntime):
    """OpenVINO's CPU plugin. It would compute in bfloat16 where the processor can: it is told not to."""

    def __init__(self, title: str, threads: int = 0) -> None:
        super().__init__(title)
        self.options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if threads:
            self.options["INFERENCE_NUM_THREADS"] = threads
        self._copies: dict[Path, tempfile.TemporaryDirectory[str]] = {}
        self._numbers = count()

    def missing(self, subject: GraphUnderTest) -> str | None:
        """Whether OpenVINO is installed."""
        return None if find_spec("openvino") else "OpenVINO is not installed: pip install openvino"

    def facts(self) -> dict[str, str]:
        """Version and options."""
        return {"openvino": version("openvino"), **{key: str(value) for key, value in self.options.items()}}

    def program(self) -> str:
        """See `GraphRuntime.program`."""
        made = f'openvino.Core().compile_model(path, "CPU", {self.options!r})'
        return f"import openvino\n\nmodel = {made}\nreturn model(feeds)[model.output(0)]"

    @contextmanager
    def opened(self, proto: onnx.ModelProto, folder: Path) -> Iterator[Piece]:
        """A compiled model; see `GraphRuntime.opened`."""
        import openvino

        names = [value.name for value in proto.graph.output]
        at = self._weights(folder, proto) / f"{next(self._numbers)}.onnx"
        try:
            at.write_bytes(proto.SerializeToString())
            ready = openvino.Core().compile_model(str(at), "CPU", self.options)
        except (OSError, RuntimeError) as error:
            raise ModelError(f"OpenVINO cannot open this part of the model: {error}") from error

        def run(feeds: Arrays) -> Arrays:
            try:
                found = ready(feeds)
            except RuntimeError as error:
                raise ModelError(f"OpenVINO failed while running the model: {error}") from error
            return {name: found[ready.output(name)].copy() for name in names}

        try:
            yield run
        finally:
            at.unlink(missing_ok=True)

    def _weights(self, folder: Path, proto: onnx.ModelProto) -> Path:
        """A folder with copies of a model's weight files: OpenVINO follows no link out of the graph's own folder.

        Raises:
            ModelError: they cannot be copied.
        """
        if folder not in self._copies:
            self._copies[folder] = tempfile.TemporaryDirectory()
        scratch = self._copies[folder]
        for name in onnx_file.locations(proto):
            target = Path(scratch.name) / name
            if not target.exists():
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(folder / name, target)
                except OSError as error:
                    target.unlink(missing_ok=True)
                    raise ModelError(f"cannot copy {folder / name} for OpenVINO: {error}") from error
        return Path(scratch.name)
