"""The file server on localhost: its own name alone, files of the folder alone, a bounded number of threads."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import TYPE_CHECKING

import pytest

from mionnx import ModelError
from mionnx.playground import serve
from mionnx.playground import server as module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an inside, links into and out of it, hidden files and a pipe."""
    home = tmp_path_factory.mktemp("home")
    site, outside = home / "site", home / "outside"
    for made in (site / "engine", outside, site / ".git"):
        made.mkdir(parents=True)
    for path in ("manifest.json", "index.html", "engine/core.js", "LICENSE", "spaced name.txt", ".env", ".git/config"):
        (site / path).write_text(path)
    (outside / "secret.txt").write_text("secret")
    (site / "away").symlink_to(outside)
    (site / "secret.txt").symlink_to(outside / "secret.txt")
    os.mkfifo(site / "pipe")
    (site / "inside.js").symlink_to(site / "engine" / "core.js")
    return site


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    server = serve(folder)
    assert server.server_address[0] == "127.0.0.1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def asked(port: int, path: str, *hosts: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for host in hosts or (f"localhost:{port}",):
        connection.putheader("Host", host)
    connection.endheaders()
    found = connection.getresponse()
    return found.status, {name.lower(): value for name, value in found.getheaders()}, found.read()


def test_files_come_with_their_kinds_and_the_headers_of_threads(port: int):
    kinds = {"/": "text/html", "/engine/core.js?v=1#x": "text/javascript", "/manifest.json": "application/json"}
    for path, kind in {**kinds, "/LICENSE": "application/octet-stream", "/spaced%20name.txt": "text/plain"}.items():
        status, headers, body = asked(port, path)
        assert (status, headers["content-type"], int(headers["content-length"])) == (200, kind, len(body))
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-embedder-policy"] == "require-corp"
    status, headers, body = asked(port, "/engine/core.js", method="HEAD")
    assert (status, headers["content-length"], body) == (200, "14", b"")
    assert asked(port, "/", method="POST")[0] == 501


def test_only_its_own_name_is_answered(port: int):
    for host in (f"localhost:{port}", f"LOCALHOST:{port}", f"127.0.0.1:{port}"):
        assert asked(port, "/manifest.json", host)[0] == 200
    others = [
        "evil.example",
        f"evil.example:{port}",
        "localhost",
        f"localhost:{port + 1}",
        f"localhost.evil.example:{port}",
    ]
    for host in (*others, "", f"0.0.0.0:{port}", f"127.0.0.2:{port}", f"x@localhost:{port}", f"localhost:{port}/"):
        status, _, body = asked(port, "/manifest.json", host)
        assert status == 421, host
        assert b"manifest" not in body
    assert asked(port, "/", f"localhost:{port}", "evil.example")[0] == 421


@pytest.mark.parametrize(
    "path",
    [
        *("/secret.txt", "/away/secret.txt", "/away", "/inside.js", "/pipe"),  # links, and a pipe
        *("/engine", "/engine/", "/.", "/engine//core.js", "/./index.html"),  # folders
        *("/.env", "/.git/config", "/%2eenv", "/engine/.", "/engine/%2e%2e/.env"),  # dots
        *("/../outside/secret.txt", "/..%2foutside%2fsecret.txt", "/%2e%2e/outside/secret.txt", "/..\\outside"),
        *("/%00", "/index.html%00", "/index.html%00.js", "/%ff%fe", "/%", "/a%0d%0aX: y", "/C:/x", "/index.html/"),
        *("http://evil.example/index.html", "index.html", "*", "http://[", "/" + "a" * 5000, "/a" * 3000),
    ],
)  # fmt: skip
def test_what_is_no_file_of_the_folder_is_a_404(port: int, path: str, capfd: pytest.CaptureFixture[str]):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode("latin-1"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(
        (b"HTTP/1.0 404 ", b"HTTP/1.0 400 ") if path.startswith("/a%0d") or " " in path else b"HTTP/1.0 404 "
    )
    assert b"secret" not in answer.partition(b"\r\n\r\n")[2]
    assert capfd.readouterr().err == ""


def test_threads_are_bounded_and_silent_connections_end(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "THREADS", 3)
    monkeypatch.setattr(module._Files, "timeout", 0.1)
    server = serve(folder)
    port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    most = []
    counting = threading.Thread(target=lambda: most.append(max(threading.active_count() for _ in range(20000))))
    counting.start()
    assert asked(port, "/manifest.json")[0] == 200  # when those before it have been silent for long enough
    counting.join()
    assert most[0] - before <= 3 + 1  # and the one that counts
    for connection in silent:
        connection.close()
    server.shutdown()
    server.server_close()


def test_a_port_that_is_taken_and_a_folder_that_is_none(folder: Path, port: int, tmp_path: Path):
    with pytest.raises(ModelError, match="cannot serve"):
        serve(folder, port)
    with pytest.raises(ModelError, match="no playground"):
        serve(tmp_path)
