"""The engine of the ONNX standard itself: onnx's `ReferenceEvaluator`, in numpy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from mionnx.engine.engine import Arrays, Engine, Program, graph_of, inputs_of
from mionnx.engine.options import Options
from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.graph.operator_table import DOMAIN
from mionnx.graph.validate import graphs
from mionnx.graph.weight_value import PACKED_OPERATORS, in_floats


class ReferenceProgram(Program):
    """An evaluator of onnx's."""

    def __init__(self, evaluator: ReferenceEvaluator, model: onnx.ModelProto) -> None:
        self.native, self.inputs = evaluator, inputs_of(model)
        self._alone = Lock()  # its operators keep attributes of the last run

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> Arrays:
        arrays = {name: np.asarray(value) for name, value in feeds.items() if name in self.inputs}
        try:
            with self._alone:
                values = self.native.run(list(outputs), arrays)
        except Exception as error:  # its operators raise what numpy raises
            raise ModelError(f"onnx's ReferenceEvaluator failed while running the model: {error}") from error
        return dict(zip(outputs, map(np.asarray, values), strict=True))


class Reference(Engine):
    """Slow, with its weights in memory; an oracle where others disagree.

    Operators of ONNX Runtime on weights in blocks are computed as standard ones, with the numbers of the blocks.
    """

    name = "reference"
    packages = ("onnx",)

    def missing(self, options: Options) -> str | None:
        return None  # onnx is a part of every installation

    def refuses(self, model: onnx.ModelProto) -> str | None:
        for graph in graphs(model):
            for node in graph.node:
                if node.op_type == "Scan" and any(any(item.ints) for item in node.attribute if "axes" in item.name):
                    return "onnx's ReferenceEvaluator implements Scan along axis 0 only: nothing would install it"
                if node.domain == DOMAIN and node.op_type not in PACKED_OPERATORS:
                    return f"onnx's ReferenceEvaluator has no {node.op_type}, an operator of ONNX Runtime's own"
        return None

    def facts(self, options: Options) -> dict[str, str]:
        return {"onnx": onnx.__version__, "numpy": np.__version__}

    def source(self, options: Options) -> str:
        return "from onnx.reference import ReferenceEvaluator\n\nreturn ReferenceEvaluator(path).run(None, feeds)[0]"

    def open(
        self, model: Path | bytes, folder: Path, options: Options, *, optimised: bool = False, spinning: bool = True
    ) -> ReferenceProgram:
        proto = graph_of(model)
        if why := self.refuses(proto):
            raise ModelError(why)
        in_floats(proto, folder)
        onnx_file.embed(proto, folder)
        try:
            return ReferenceProgram(ReferenceEvaluator(proto), proto)
        except Exception as error:  # what its operators do not implement is an error of any class
            raise ModelError(f"onnx's ReferenceEvaluator cannot open this part of the model: {error}") from error
