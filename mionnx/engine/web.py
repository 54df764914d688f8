"""The engine onnxruntime-web: WASM under Node, in a process of its own for each graph."""

import json
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import onnx

from mionnx.engine.engine import Arrays, Engine, Program, graph_of, inputs_of
from mionnx.engine.options import Options
from mionnx.errors import ModelError
from mionnx.graph import onnx_file

SERVER = Path(__file__).with_name("web.mjs")
FOLDER = "MIONNX_NODE"  # an environment variable: the folder whose node_modules has onnxruntime-web
WEB_PACKAGE = Path("node_modules") / "onnxruntime-web" / "package.json"


def node_folder() -> Path | None:
    """Find the folder of onnxruntime-web: `MIONNX_NODE`, the current folder, or one above it."""
    chosen = os.environ.get(FOLDER)
    folders = [Path(chosen)] if chosen else [Path.cwd(), *Path.cwd().parents]
    return next((folder for folder in folders if (folder / WEB_PACKAGE).is_file()), None)


class WebProgram(Program):
    """A process of Node's that has one model open."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.inputs = inputs_of(model)
        self._alone = Lock()  # one process, one file for each direction
        self._scratch = tempfile.TemporaryDirectory()
        file = Path(self._scratch.name) / "model.onnx"
        file.write_bytes(model.SerializeToString())
        command = ["node", str(SERVER), str((node_folder() or Path()).resolve())]
        pipe = subprocess.PIPE
        self.native = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._finalizer = weakref.finalize(self, _end, self.native, self._scratch)
        _ask(self.native, {"open": str(file)})

    def close(self) -> None:
        self._finalizer()

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> Arrays:
        tensors, start, scratch = [], 0, Path(self._scratch.name)
        with self._alone:
            with (scratch / "feeds").open("wb") as file:
                for name, value in feeds.items():
                    if name not in self.inputs:
                        continue
                    array = np.asarray(value)
                    data = np.ascontiguousarray(array).tobytes()
                    place = {"start": start, "end": start + len(data)}
                    tensors.append({"name": name, "type": str(array.dtype), "dims": list(array.shape), **place})
                    file.write(data)
                    start += len(data)
            files = {"run": str(scratch / "feeds"), "out": str(scratch / "out")}
            entries = _ask(self.native, {**files, "feeds": tensors, "names": list(outputs)})["found"]
            data = (scratch / "out").read_bytes()
        return {
            one["name"]: np.frombuffer(data[one["start"] : one["end"]], one["type"]).reshape(one["dims"])
            for one in entries
        }


def _end(node: "subprocess.Popen[str]", scratch: "tempfile.TemporaryDirectory[str]") -> None:
    node.kill()
    node.communicate()
    scratch.cleanup()


class Web(Engine):
    """onnxruntime-web with one thread.

    Weights travel inside the model, which can have 2 GiB at most.
    """

    name = "onnxruntime-web"

    def missing(self, options: Options) -> str | None:
        if shutil.which("node") is None:
            return "Node is not installed: install Node 20, then `npm install onnxruntime-web`"
        if node_folder() is None:
            return (
                f"onnxruntime-web is not in the current folder's node_modules, nor in {FOLDER}'s: "
                "npm install onnxruntime-web"
            )
        return None

    def lacks(self, options: Options) -> tuple[str, ...]:
        return ("bfloat16",)  # a browser has no arrays of it

    def facts(self, options: Options) -> dict[str, str]:
        node = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout.strip()
        package = json.loads(((node_folder() or Path()) / WEB_PACKAGE).read_text())
        return {"onnxruntime-web": package["version"], "node": node, "threads": "1"}

    def open(
        self, model: Path | bytes, folder: Path, options: Options, *, optimised: bool = False, spinning: bool = True
    ) -> WebProgram:
        proto = graph_of(model)
        onnx_file.embed(proto, folder)
        return WebProgram(proto)


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
