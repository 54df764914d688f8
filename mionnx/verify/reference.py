"""onnx's `ReferenceEvaluator` as a runtime to compare: the standard's own words, in numpy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from mionnx.compile.package import embed
from mionnx.errors import ModelError
from mionnx.graph.validate import graphs
from mionnx.verify.graph_under_test import Arrays, GraphUnderTest
from mionnx.verify.runtime import GraphRuntime, Piece


class Reference(GraphRuntime):
    """Slow, and holds its weights in memory; an oracle where others disagree."""

    def missing(self, subject: GraphUnderTest) -> str | None:
        """Whether the graph has what onnx's evaluator does not implement; onnx itself is always there."""
        for graph in graphs(subject.proto):
            for node in graph.node:
                if node.op_type == "Scan" and any(any(item.ints) for item in node.attribute if "axes" in item.name):
                    return "onnx's ReferenceEvaluator implements Scan along axis 0 only: nothing would install it"
        return None

    def facts(self) -> dict[str, str]:
        """Versions."""
        return {"onnx": onnx.__version__, "numpy": np.__version__}

    def program(self) -> str:
        """See `GraphRuntime.program`."""
        return "from onnx.reference import ReferenceEvaluator\n\nreturn ReferenceEvaluator(path).run(None, feeds)[0]"

    @contextmanager
    def opened(self, proto: onnx.ModelProto, folder: Path) -> Iterator[Piece]:
        """An evaluator; see `GraphRuntime.opened`."""
        held = onnx.ModelProto()
        held.CopyFrom(proto)
        embed(held, folder)
        try:
            ready = ReferenceEvaluator(held)
        except Exception as error:  # what its operators do not implement is an error of any class
            raise ModelError(f"onnx's ReferenceEvaluator cannot open this part of the model: {error}") from error

        def run(feeds: Arrays) -> Arrays:
            try:
                found = ready.run(None, feeds)
            except Exception as error:  # its operators raise what numpy raises
                raise ModelError(f"onnx's ReferenceEvaluator failed while running the model: {error}") from error
            return dict(zip(ready.output_names, map(np.asarray, found), strict=True))

        yield run
