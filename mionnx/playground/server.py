"""A file server on this machine alone, whose headers let a page use several threads."""

import webbrowser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mionnx.errors import ModelError

# An isolated page may share memory between threads; without these headers WASM has one.
ISOLATING = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class _Files(SimpleHTTPRequestHandler):
    """Files of a folder."""

    extensions_map = {  # noqa: RUF012
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".gz": "application/octet-stream",
    }
    headers_added: dict[str, str] = ISOLATING

    def end_headers(self) -> None:
        for name, value in {**self.headers_added, "Cache-Control": "no-cache"}.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *said: Any) -> None:
        """Print nothing."""


class _Plain(_Files):
    """Without the headers, as most file servers are."""

    headers_added: dict[str, str] = {}  # noqa: RUF012


class _Server(ThreadingHTTPServer):
    daemon_threads = True


def serve(folder: str | Path, port: int = 0, *, isolated: bool = True) -> ThreadingHTTPServer:
    """Open a server of a folder on localhost; `serve_forever` runs it.

    Args:
        folder: of a playground.
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
    try:
        return _Server(("127.0.0.1", port), partial(_Files if isolated else _Plain, directory=str(folder)))
    except (OSError, OverflowError) as error:
        raise ModelError(f"cannot serve {folder} on port {port}: {error}") from error


def run(server: ThreadingHTTPServer, *, browser: bool) -> None:
    """Serve until the user interrupts.

    Args:
        server: see `serve`.
        browser: open the page in the user's browser.
    """
    if browser:
        webbrowser.open(f"http://localhost:{server.server_address[1]}/")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
