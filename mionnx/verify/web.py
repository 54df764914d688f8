"""onnxruntime-web on WASM under Node as a runtime to compare."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.compile.package import embed
from mionnx.errors import ModelError
from mionnx.verify.graph_under_test import Arrays, GraphUnderTest
from mionnx.verify.runtime import GraphRuntime, Piece

SERVER = Path(__file__).with_name("web.mjs")
FOLDER = "MIONNX_NODE"  # an environment variable: the folder whose node_modules has onnxruntime-web
PACKAGE = Path("node_modules") / "onnxruntime-web" / "package.json"


def node_folder() -> Path | None:
    """The folder whose `node_modules` has onnxruntime-web: `MIONNX_NODE`, or the current one or one above it."""
    chosen = os.environ.get(FOLDER)
    places = [Path(chosen)] if chosen else [Path.cwd(), *Path.cwd().parents]
    return next((place for place in places if (place / PACKAGE).is_file()), None)


class Web(GraphRuntime):
    """onnxruntime-web with one thread; weights travel inside the model, so it can have 2 GiB at most."""

    def missing(self, subject: GraphUnderTest) -> str | None:
        """Whether Node and onnxruntime-web are there."""
        if shutil.which("node") is None:
            return "Node is not installed: install Node 20, then `npm install onnxruntime-web`"
        if node_folder() is None:
            return (
                f"onnxruntime-web is not in the current folder's node_modules, nor in {FOLDER}'s: "
                "npm install onnxruntime-web"
            )
        return None

    def facts(self) -> dict[str, str]:
        """Versions of onnxruntime-web and of Node."""
        node = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout.strip()
        package = json.loads(((node_folder() or Path()) / PACKAGE).read_text())
        return {"onnxruntime-web": package["version"], "node": node, "threads": "1"}

    @contextmanager
    def opened(self, proto: onnx.ModelProto, folder: Path) -> Iterator[Piece]:
        """A session in a process of Node's; see `GraphRuntime.opened`."""
        held = onnx.ModelProto()
        held.CopyFrom(proto)
        embed(held, folder)
        names = [value.name for value in proto.graph.output]
        command = ["node", str(SERVER), str((node_folder() or Path()).resolve())]
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch) / "model.onnx"
            model.write_bytes(held.SerializeToString())
            del held
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as node:
                try:
                    _ask(node, {"open": str(model)})
                    yield lambda feeds: _run(node, Path(scratch), feeds, names)
                finally:
                    node.kill()


def _ask(node: "subprocess.Popen[str]", question: Mapping[str, Any]) -> dict[str, Any]:
    assert node.stdin is not None
    assert node.stdout is not None
    assert node.stderr is not None
    try:
        node.stdin.write(json.dumps(question) + "\n")
        node.stdin.flush()
    except OSError:
        raise ModelError(f"onnxruntime-web ended: {node.stderr.read()[-500:]}") from None
    for line in node.stdout:
        if line.startswith("@"):
            answer = json.loads(line[1:])
            if "error" in answer:
                raise ModelError(f"onnxruntime-web: {answer['error']}")
            return answer
    raise ModelError(f"onnxruntime-web ended: {node.stderr.read()[-500:]}")


def _run(node: "subprocess.Popen[str]", scratch: Path, feeds: Arrays, names: list[str]) -> Arrays:
    given, start = [], 0
    with (scratch / "feeds").open("wb") as file:
        for name, array in feeds.items():
            data = np.ascontiguousarray(array).tobytes()
            place = {"start": start, "end": start + len(data)}
            given.append({"name": name, "type": str(array.dtype), "dims": list(array.shape), **place})
            file.write(data)
            start += len(data)
    question = {"run": str(scratch / "feeds"), "feeds": given, "out": str(scratch / "out"), "names": names}
    found = _ask(node, question)["found"]
    data = (scratch / "out").read_bytes()
    return {entry["name"]: _array(entry, data) for entry in found}


def _array(entry: Mapping[str, Any], data: bytes) -> NDArray[Any]:
    return np.frombuffer(data[entry["start"] : entry["end"]], entry["type"]).reshape(entry["dims"])
