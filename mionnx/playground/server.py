"""A file server on this machine alone, whose headers let a page use several threads.

1. It answers requests for its own name alone, 127.0.0.1 or localhost and its port: a page elsewhere whose name is led
   here gets 421, and cannot read the folder.
2. It gives regular files of the folder by their plain paths. No link is followed, no folder is listed, no name that
   begins with a dot is served. What else is asked for is a 404.
3. It has so many threads and no more; a connection that says nothing is closed.
"""

import os
import webbrowser
from functools import partial
from http import HTTPStatus
from http.client import HTTP_PORT
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from itertools import accumulate
from mimetypes import guess_type
from pathlib import Path
from shutil import copyfileobj
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import unquote

from mionnx.errors import ModelError

# An isolated page may share memory between threads; without these headers WASM has one.
ISOLATING = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# A folder that was written anew is shown as it is now, not as the browser knows it.
ALWAYS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
MIME = {".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm", ".json": "application/json"}
OWN_HOSTS = ("localhost", "127.0.0.1")
UNKNOWN = "application/octet-stream"
PAGE, FORBIDDEN = "/index.html", frozenset("\0\\:")
# O_NOFOLLOW: a link that takes the file's place after `_path` looked is not followed; O_BINARY is Windows'.
FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
THREADS = 32
SECONDS = 20  # that a connection may be silent


class _Files(BaseHTTPRequestHandler):
    """Files of a folder."""

    timeout = SECONDS
    server: "_Server"

    def __init__(self, *connection: Any, folder: Path, isolated: bool) -> None:
        self.folder, self.added = folder, ISOLATING if isolated else {}
        super().__init__(*connection)

    def do_GET(self) -> None:
        if [name.lower() for name in self.headers.get_all("Host", [])] not in self.server.names:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        try:
            path = self._path()
            opened = os.open(path, FLAGS)
        except OSError:  # not there, not readable, no name
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with os.fdopen(opened, "rb") as file:
            self.send_response(HTTPStatus.OK)
            # By the last suffix alone: a .wasm.gz is not WASM to the browser, the page unpacks it.
            kind = MIME.get(path.suffix) or guess_type(f"a{path.suffix}")[0] or UNKNOWN
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            if self.command == "GET":
                copyfileobj(file, self.wfile)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _path(self) -> Path:
        """The regular file that a request's path names."""
        where = unquote(self.path.partition("?")[0].partition("#")[0])
        parts = (PAGE if where == "/" else where).split("/")
        if parts.pop(0) or any(not part or part[0] == "." or {*part} & FORBIDDEN for part in parts):
            raise FileNotFoundError(where)
        paths = [*accumulate(parts, Path.__truediv__, initial=self.folder)][1:]
        if any(path.is_symlink() for path in paths) or not paths[-1].is_file():
            raise FileNotFoundError(where)
        return paths[-1]

    def end_headers(self) -> None:
        for name, value in {**self.added, **ALWAYS}.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *said: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    # Ctrl-C ends the server at once, whatever connections are open.
    daemon_threads = True
    block_on_close = False
    request_queue_size = THREADS

    def __init__(self, *address: Any) -> None:
        self._free = BoundedSemaphore(THREADS)
        super().__init__(*address)
        port = self.server_address[1]
        # Without a port the name means port 80.
        self.names = [[f"{name}:{port}"] for name in OWN_HOSTS] + [[name] for name in OWN_HOSTS if port == HTTP_PORT]

    def process_request(self, request: Any, client_address: Any) -> None:
        self._free.acquire()  # the next connection waits until a thread is free
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is its client's matter."""


def serve(folder: str | Path, port: int = 0, *, isolated: bool = True) -> HTTPServer:
    """Open a server of a playground's folder on localhost; `serve_forever` runs it.

    Args:
        port: 0 for a free one; `server_address` says which.
        isolated: send the headers that threads need.

    Raises:
        ModelError: no such folder, or the port is taken.

    Example:
        server = serve("site")
        print(f"http://localhost:{server.server_address[1]}/")
        server.serve_forever()
    """
    if not (Path(folder) / "manifest.json").is_file():
        raise ModelError(f"{folder} is no playground: it has no manifest.json")
    handler = partial(_Files, folder=Path(folder).resolve(), isolated=isolated)
    try:
        return _Server(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as error:
        raise ModelError(f"cannot serve {folder} on port {port}: {error}") from error


def run(server: HTTPServer, *, browser: bool) -> None:
    """Serve until the user interrupts."""
    if browser:
        webbrowser.open(f"http://localhost:{server.server_address[1]}/")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
