"""ONNX Runtime as a runtime to compare: any provider, optimisation level and thread count."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from mionnx.engine import onnx_runtime
from mionnx.engine.onnx_runtime import Options
from mionnx.errors import ModelError, RuntimeMissingError
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.runtime import GraphRuntime, Piece

INSTALL = {"cuda": "pip install onnxruntime-gpu, on a machine with an NVIDIA GPU"}

PROGRAM = """import onnxruntime

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = {threads}
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.{level}
session = onnxruntime.InferenceSession(path, options, providers={providers}, disabled_optimizers={disabled})
return session.run(None, feeds)[0]"""


class OnnxRuntime(GraphRuntime):
    """ONNX Runtime with the options that mionnx opens sessions with."""

    def __init__(self, title: str, options: Options) -> None:
        super().__init__(title)
        self.options = options

    def missing(self, subject: GraphUnderTest) -> str | None:
        """Why the provider cannot be had."""
        try:
            self.options.provider_name()
        except RuntimeMissingError as error:
            install = INSTALL.get(self.options.provider, "a build of ONNX Runtime that has this provider")
            return f"{error}; what would install it: {install}"
        return None

    def facts(self) -> dict[str, str]:
        """Version, provider, level and threads."""
        options = self.options
        return {
            "onnxruntime": onnx_runtime.version(),
            "provider": options.provider_name(),
            "level": options.level,
            "threads": str(options.threads or "all"),
        }

    def program(self) -> str:
        """See `GraphRuntime.program`."""
        options, level = self.options, onnx_runtime.LEVELS[self.options.level].name
        providers = [(options.provider_name(), {key: str(value) for key, value in options.provider_options.items()})]
        return PROGRAM.format(
            threads=options.threads, level=level, providers=providers, disabled=list(onnx_runtime.UNSTABLE_FUSIONS)
        )

    @contextmanager
    def opened(self, proto: onnx.ModelProto, folder: Path) -> Iterator[Piece]:
        """A session; see `GraphRuntime.opened`.

        Raises:
            ModelError: the provider gave up, or takes no part of the model: ONNX Runtime would use the CPU.
        """
        ready = onnx_runtime.open_session(proto.SerializeToString(), folder, self.options, assigned=True)
        name = self.options.provider_name()
        ran = onnx_runtime.assigned(ready)
        if ran and name not in ran:
            raise ModelError(f"{name} takes no part of this model: ONNX Runtime gave it to {', '.join(sorted(ran))}")
        names = [value.name for value in proto.graph.output]
        yield lambda feeds: onnx_runtime.run(ready, names, feeds)
