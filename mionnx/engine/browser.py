"""The engine onnxruntime-web-webgpu: onnxruntime-web's WebGPU in a headless Chromium, a browser for each open graph.

1. The page asks this process for work, on localhost, below a path that nobody can guess (`browser.mjs`).
2. Where there is no graphics processor Chromium's own driver, SwiftShader, computes. It has no float16; the plug-in's
   engine `ort-webgpu` has.
3. A node of numbers that the runtime leaves to the CPU would make another verdict: such a graph is refused.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from threading import Lock, Thread
from time import monotonic
from typing import Any

import numpy as np
import onnx

from mionnx.engine.engine import Arrays, Engine, Program, graph_of, inputs_of
from mionnx.engine.options import Options
from mionnx.engine.placement import CPU_PROVIDER, named
from mionnx.engine.web import WEB_PACKAGE, node_folder
from mionnx.engine.webgpu import numbers_among
from mionnx.errors import ModelError
from mionnx.graph import onnx_file

SCRIPT = Path(__file__).with_name("browser.mjs")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--enable-unsafe-webgpu", "--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-extensions"),
)
SOFTWARE = ("--enable-features=Vulkan", "--use-webgpu-adapter=swiftshader", "--use-vulkan=swiftshader")
STARTS_WITHIN = 60.0  # seconds
POLL = 5.0  # seconds that the page waits for a question, before it asks again
CONTENT_TYPES = {".mjs": "text/javascript", ".wasm": "application/wasm"}
PLACED = re.compile(r"placed on \[(\w+)\]")  # in a line of ONNX Runtime's log; lines of nodes follow it
ONE_NODE = re.compile(r"\]\s+(\w+) \((.*)\)\s*$")


class Page:
    """A headless browser with the page in it, and what is served to it."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.questions: Queue[bytes] = Queue()
        self.answers: Queue[bytes] = Queue()
        self.files: dict[str, bytes] = {"": b"<!doctype html><script type=module src=browser.mjs></script>"}
        self._alone = Lock()
        self.key = secrets.token_urlsafe(16)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        Thread(target=self._server.serve_forever, daemon=True).start()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        address = f"http://127.0.0.1:{self._server.server_port}/{self.key}/"
        command = [str(_browser()), *FLAGS, *root, *flags, f"--user-data-dir={self._profile.name}", address]
        self.native = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.close = weakref.finalize(self, _end, self.native, self._server, self._profile)

    def ask(self, question: Mapping[str, Any], within: float = float("inf")) -> tuple[dict[str, Any], bytes]:
        """The answer to a question, and the bytes behind it."""
        with self._alone:
            self.questions.put(json.dumps(question).encode())
            until = monotonic() + within
            while monotonic() < until and self.native.poll() is None:
                try:
                    line, _, data = self.answers.get(timeout=0.5).partition(b"\n")
                except Empty:
                    continue
                answer = json.loads(line)
                if "error" in answer:
                    raise ModelError(f"onnxruntime-web: {answer['error']}")
                return answer, data
        raise ModelError("the browser ended" if self.native.poll() is not None else "the browser does not answer")


def _end(browser: "subprocess.Popen[bytes]", server: ThreadingHTTPServer, profile: Any) -> None:
    browser.kill()
    browser.wait()
    server.shutdown()
    server.server_close()
    profile.cleanup()


def _handler(page: Page) -> type[BaseHTTPRequestHandler]:
    dist = (node_folder() or Path()) / WEB_PACKAGE.parent / "dist"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix(f"/{page.key}/") if self.path.startswith(f"/{page.key}/") else None
            if name == "question":
                try:
                    self._give(page.questions.get(timeout=POLL), "application/json")
                except Empty:
                    self.send_response(204)
                    self.end_headers()
                return
            file = SCRIPT if name == SCRIPT.name else dist / str(name).removeprefix("dist/")
            if name in page.files:
                self._give(page.files[name], "application/octet-stream" if name else "text/html")
            elif file == SCRIPT or (file.parent == dist and file.is_file()):
                self._give(file.read_bytes(), CONTENT_TYPES.get(file.suffix, "application/octet-stream"))
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            if self.path != f"/{page.key}/answer":
                self.send_error(404)
                return
            page.answers.put(self.rfile.read(int(self.headers["Content-Length"])))
            self._give(b"", "text/plain")

        def _give(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    return Handler


def _browser() -> str | None:
    return next((program for name in BROWSERS if (program := shutil.which(name))), None)


@cache
def adapter() -> tuple[tuple[str, ...], dict[str, Any]]:
    """The flags with which the browser has an adapter, and what it is; empty without one."""
    for flags in ((), SOFTWARE):
        page = Page(flags)
        try:
            facts, _ = page.ask({"adapter": True}, STARTS_WITHIN)
        finally:
            page.close()
        if facts:
            return flags, facts
    return (), {}


class BrowserProgram(Program):
    """A browser that has one model open."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.inputs = inputs_of(model)
        self._alone = Lock()
        self.native = Page(adapter()[0])
        self.native.files["model"] = model.SerializeToString()
        answer, _ = self.native.ask({"open": True})
        del self.native.files["model"]
        if not any(PLACED.search(line) for line in answer["log"]):
            self.close()
            raise ModelError("this onnxruntime-web does not say which nodes run on WebGPU: it is no verdict")
        if nodes := numbers_among([*_on_cpu(answer["log"])], model):
            self.close()
            raise ModelError(f"WebGPU leaves {named(nodes)} to the CPU: its numbers would be no verdict on WebGPU")

    def close(self) -> None:
        self.native.close()

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> Arrays:
        tensors, parts, start = [], [], 0
        for name, value in feeds.items():
            if name in self.inputs:
                array = np.asarray(value)
                parts.append(np.ascontiguousarray(array).tobytes())
                place = {"start": start, "end": start + len(parts[-1])}
                tensors.append({"name": name, "type": str(array.dtype), "dims": list(array.shape), **place})
                start = place["end"]
        with self._alone:
            self.native.files["feeds"] = b"".join(parts)
            answer, data = self.native.ask({"feeds": tensors, "names": list(outputs)})
        return {
            one["name"]: np.frombuffer(data[one["start"] : one["end"]], one["type"]).reshape(one["dims"])
            for one in answer["values"]
        }


def _on_cpu(log: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Operator and name of the nodes that ONNX Runtime's log says are on the CPU."""
    here = False
    for line in log:
        if provider := PLACED.search(line):
            here = provider[1] == CPU_PROVIDER
        elif here:
            yield from ONE_NODE.findall(line)


class Browser(Engine):
    """onnxruntime-web's WebGPU in a headless Chromium; weights travel inside the model, of 2 GiB at most."""

    name = "onnxruntime-web-webgpu"

    def missing(self, options: Options) -> str | None:
        if _browser() is None:
            return "no Chromium is installed: apt-get install chromium"
        if node_folder() is None:
            return "onnxruntime-web is not in the current folder's node_modules, nor in MIONNX_NODE's: npm install it"
        try:
            facts = adapter()[1]
        except ModelError as error:
            return f"Chromium does not start here: {error}"
        return None if facts else "this Chromium has no WebGPU adapter, in software (SwiftShader) either"

    def lacks(self, options: Options) -> tuple[str, ...]:
        return ("bfloat16",) if adapter()[1].get("float16") else ("bfloat16", "float16")

    def facts(self, options: Options) -> dict[str, str]:
        flags, facts = adapter()
        package = json.loads(((node_folder() or Path()) / WEB_PACKAGE).read_text())
        browser = subprocess.run([str(_browser()), "--version"], capture_output=True, text=True).stdout.strip()
        title = " ".join(filter(None, (facts.get("vendor"), facts.get("description"))))
        adapters = {"adapter": f"{title}, in software" if flags or "swiftshader" in title.lower() else title}
        return {"onnxruntime-web": package["version"], "browser": browser, **adapters}

    def open(
        self, model: Path | bytes, folder: Path, options: Options, *, optimised: bool = False, spinning: bool = True
    ) -> BrowserProgram:
        proto = graph_of(model)
        onnx_file.embed(proto, folder)
        return BrowserProgram(proto)
