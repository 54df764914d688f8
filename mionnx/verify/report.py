"""Folder for a bug report: the part of a graph that differs, its inputs, both outputs, and a program."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.runtimes import GraphRuntime
from mionnx.verify.steps import Side, StepPart

PROGRAM = '''"""Runs both sides on inputs.npz as they were compared, and prints how far each is from what was seen:
expected.npz is {first}, found.npz is {second}."""

from pathlib import Path

import numpy as np
import onnx

here = Path(__file__).parent
inputs = dict(np.load(here / "inputs.npz"))


def feeds_of(path):
    """A model's inputs, in the dtypes that it takes."""
    graph = onnx.load(path, load_external_data=False).graph
    kinds = {{value.name: value.type.tensor_type.elem_type for value in graph.input}}
    dtypes = {{name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in kinds.items()}}
    return {{name: inputs[name].astype(dtype) for name, dtype in dtypes.items() if name in inputs}}


{functions}

for title, file, run in ({sides}):
    value = np.asarray(run(str(here / file), feeds_of(here / file)))
    for name in ("expected", "found"):
        (seen,) = np.load(here / f"{{name}}.npz").values()
        apart = np.abs(value.astype(np.float64) - seen.astype(np.float64)).max() if seen.size else 0.0
        print(f"{{title}} and {{name}}.npz: largest difference {{apart:.3g}}")
'''


def write_report(folder: Path, summary: str, part: StepPart, first: Side, second: Side) -> None:
    """Write a folder that shows the narrowed difference without mionnx."""
    files = {"model.onnx": second} if first.graph is second.graph else {"first.onnx": first, "model.onnx": second}
    try:
        folder.mkdir(parents=True)
        for name, side in files.items():
            (folder / name).write_bytes(_standing(side.graph, part).SerializeToString())
        for name, arrays in (("inputs", part.feeds), ("expected", part.expected), ("found", part.other)):
            np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        (folder / "reproduce.py").write_text(_program(first, second, files))
        (folder / "README.md").write_text(_text(summary, part, first, second))
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error}") from error


def _standing(graph: GraphUnderTest, part: StepPart) -> onnx.ModelProto:
    """Extract the part, weights included."""
    outputs = {name for node in graph.dataflow.nodes for name in node.output}
    # the first model may lack some of the start values
    proto = graph.part([name for name in part.starts if name in outputs], [part.value])
    onnx_file.embed(proto, graph.model.folder)
    return proto


def _program(first: Side, second: Side, files: Mapping[str, Side]) -> str:
    functions, sides = [], []
    for name, side in (("first", first), ("second", second)):
        source = side.runtime.source() if isinstance(side.runtime, GraphRuntime) else None
        if source is None:
            functions.append(f"# {side.title} is not run from Python")
            continue
        file = next(file for file, owner in files.items() if owner.graph is side.graph)
        lines = "".join(f"    {line}\n" if line else "\n" for line in source.splitlines())
        functions.append(f"def {name}(path, feeds):\n{lines}".rstrip())
        sides.append(f'("{side.title}", "{file}", {name})')
    texts = {"functions": "\n\n\n".join(functions), "sides": ", ".join([*sides, ""]).strip()}
    return PROGRAM.format(first=first.title, second=second.title, **texts)


def _text(summary: str, part: StepPart, first: Side, second: Side) -> str:
    inputs = "\n".join(f"- `{name}` {value.dtype} {list(value.shape)}" for name, value in part.feeds.items())
    models = "" if first.graph is second.graph else "`first.onnx` is the same part of the first model. "
    where = {side.title: side.runtime.environment() for side in (first, second) if side.runtime}
    return (
        f"# {first.title} and {second.title} disagree\n\n{summary}\n\n"
        f"`model.onnx` on `inputs.npz` gives `{part.value}`: `expected.npz` in {first.title}, `found.npz` in "
        f"{second.title}. {models}`python reproduce.py` needs numpy, onnx and the two runtimes.\n\n"
        f"Inputs:\n\n{inputs}\n\nMade on:\n\n```json\n{json.dumps(where, indent=1)}\n```\n"
    )
