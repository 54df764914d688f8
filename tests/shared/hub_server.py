"""A Hugging Face Hub on the loopback: repositories in folders, asked over HTTP by the real `huggingface_hub`."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/models/(?P<repo>[^/]+(?:/[^/]+)?)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
FILE = re.compile(r"/(?P<repo>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class HubServer:
    """Repositories, and what was asked for.

    Attributes:
        root: repository -> `root/USER/NAME`; another revision than main -> `root/USER/NAME@REVISION`.
        url: of the server, for `HF_ENDPOINT`.
        gated: repository -> the token that opens it.
        breaks: path of a file -> after how many of its bytes each next connection is cut.
        asked: (method, path of a file in its repository, first byte) of each request for a file.
        tokens: those that came with a request.
    """

    root: Path
    url: str = ""
    gated: dict[str, str] = field(default_factory=dict)
    breaks: dict[str, list[int]] = field(default_factory=dict)
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def fetched(self) -> list[str]:
        """The files that were asked for with their bytes, each once."""
        return sorted({path for method, path, _ in self.asked if method == "GET"})

    def folder(self, repository: str, revision: str | None) -> Path | None:
        """The files of a revision: its branch or its commit; None if there is no such one."""
        if revision in (None, "main"):
            return self.root / repository
        made = [
            path
            for path in (self.root / repository).parent.iterdir()
            if path.name.split("@")[0] == repository.split("/")[-1]
        ]
        return next((path for path in made if revision in (path.name.partition("@")[2], commit(path))), None)


def commit(folder: Path) -> str:
    """The commit of a repository: of the names and bytes of its files."""
    digest = hashlib.sha1()
    for path in files(folder):
        digest.update(path.encode() + (folder / path).read_bytes())
    return digest.hexdigest()


def files(folder: Path) -> list[str]:
    """Paths of a repository's files."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def oid(path: Path) -> str:
    """A file's identity, which is its ETag."""
    return hashlib.sha1(path.read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers as huggingface.co does, in what the client reads."""

    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Say nothing on stderr."""

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        found = FILE.fullmatch(path) or API.fullmatch(path)
        if found is None:
            return self._send(404, b"")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.tokens |= {token} - {""}
        repository = found["repo"]
        if not (self.hub.root / repository).is_dir():
            return self._send(401 if not token else 404, b"", {"X-Error-Code": "RepoNotFound"})
        if self.hub.gated.get(repository, token) != token:
            return self._send(403 if token else 401, b"", {"X-Error-Code": "GatedRepo"})
        folder = self.hub.folder(repository, found["revision"])
        if folder is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if found.re is FILE:
            return self._file(folder, found["path"], body)
        entries = [(name, (folder / name).stat().st_size, oid(folder / name)) for name in files(folder)]
        if found["what"] == "tree":
            return self._json([{"type": "file", "path": name, "size": size, "oid": one} for name, size, one in entries])
        siblings = [{"rfilename": name, "size": size, "blobId": one} for name, size, one in entries]
        return self._json({"id": repository, "sha": commit(folder), "siblings": siblings, "private": False, "tags": []})

    def _file(self, folder: Path, name: str, body: bool) -> None:
        path = folder / name
        if not path.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit(folder)})
        data = path.read_bytes()
        first = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["", "0"])[1])
        self.hub.asked.append((self.command, name, first))
        headers = {"ETag": f'"{oid(path)}"', "X-Repo-Commit": commit(folder), "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        if body and self.hub.breaks.get(name):
            self._send(206 if first else 200, data[first:], headers, until=self.hub.breaks[name].pop(0))
            self.close_connection = True
            return self.connection.close()
        return self._send(206 if first else 200, data[first:], headers, body=body)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        body: bool = True,
        until: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:until])
            self.wfile.flush()


@contextmanager
def serving(root: Path) -> Iterator[HubServer]:
    """A Hub of the repositories in a folder, while it is needed."""
    hub = HubServer(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answering", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
