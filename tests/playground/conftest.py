"""Playgrounds that tests share, served on localhost, and pages of them in headless Chromium."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock
from playground_pages import idle, visit
from repository import REPOSITORY

from mionnx import HookSpec, Intervention, MIModel
from mionnx.errors import RuntimeMissingError
from mionnx.playground import playground, serve
from mionnx.playground.folder import ENGINE, PAGE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def made_spec() -> HookSpec:
    """A spec with every kind that a playground takes from a file, two of them with slots of their own."""
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Scale(0.9, positions=[1, -1]))
    spec.intervene("blocks.1.hook_resid_post", Intervention.Clamp(-0.8, 1.1))
    spec.intervene("blocks.1.hook_resid_post", Intervention.ProjectOut([float(i % 7) - 2 for i in range(128)]))
    spec.intervene("blocks.2.attn.hook_pattern", Intervention.Scale(0.7, heads=[1, 5]))
    return spec.intervene("blocks.0.mlp.hook_act", Intervention.Scale([0.2, 3.0], neurons=[200, 3], positions=2))


@pytest.fixture(scope="session")
def playground_folder(shared: Path, shipped: MIModel) -> Path:
    """The playground of the small Llama, with a spec."""
    folder = shared / "playground"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            try:
                playground(shipped, folder, hooks=made_spec(), title="<b>Capitals</b>")
            except RuntimeMissingError as error:
                pytest.skip(str(error))
    return folder


@pytest.fixture(scope="session")
def served() -> Iterator[Callable[..., str]]:
    """Folder -> the address that it is served at; `isolated=False`: as most file servers do."""
    servers = []

    def open_server(folder: Path, isolated: bool = True) -> str:
        server = serve(folder, isolated=isolated)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://localhost:{server.server_address[1]}/"

    yield open_server
    for server in servers:
        server.shutdown()
        server.server_close()


OPEN = """async () => {
  const { open, kl, probabilities } = await import("./engine/engine.js");
  window.seen = [];
  window.engine = { kl, probabilities };
  window.lab = await open("./", { onProgress: (step) => window.seen.push(step) });
}"""


HEADERS = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


@pytest.fixture(scope="session")
def opening() -> str:
    """The script that opens the playground as `lab`."""
    return OPEN


@pytest.fixture(scope="session")
def bare(headless: Browser, served: Callable[..., str]) -> Callable[[Path], Page]:
    """Folder -> a page of its address without content."""

    def open_page(folder: Path) -> Page:
        page = headless.new_context().new_page()
        address, empty = served(folder), {"body": "<!doctype html>", "content_type": "text/html", "headers": HEADERS}
        page.route(address, lambda route: route.fulfill(**empty))
        page.goto(address)
        return page

    return open_page


@pytest.fixture(scope="session")
def laboratory(bare: Callable[[Path], Page]) -> Callable[[Path], Page]:
    """Folder -> a page without content, in whose script `lab` is the open playground."""

    def open_page(folder: Path) -> Page:
        page = bare(folder)
        page.evaluate(OPEN)
        return page

    return open_page


@pytest.fixture(scope="session")
def lab(laboratory: Callable[[Path], Page], playground_folder: Path) -> Page:
    """The small Llama's playground, open in a page."""
    return laboratory(playground_folder)


LESSONS = REPOSITORY / "mionnx" / "playground" / "examples" / "world-llama.json"


@pytest.fixture(scope="session")
def lessons_folder(shared: Path, shipped: MIModel) -> Path:
    """The playground of the small Llama, with its lessons."""
    folder = shared / "lessons"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            try:
                playground(shipped, folder, title="world-llama", examples=LESSONS)
            except RuntimeMissingError as error:
                pytest.skip(str(error))
    return folder


@pytest.fixture(scope="session")
def address(served: Callable[..., str], lessons_folder: Path) -> str:
    return served(lessons_folder)


@pytest.fixture(scope="session")
def opened(headless: Browser, address: str) -> Iterator[Page]:
    context = headless.new_context(viewport={"width": 1280, "height": 900})
    page = visit(context, address)
    yield page
    assert page.troubles == []
    context.close()


@pytest.fixture
def page(opened: Page) -> Page:
    """The page as a visitor finds it, with the prompt of the first lesson."""
    opened.keyboard.press("Escape")
    opened.locator("#lesson-list button").first.click()
    return idle(opened)


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Page and engine as they lie in a playground."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "package.json").write_text('{"type": "module"}')
    shutil.copytree(PAGE, folder, dirs_exist_ok=True)
    shutil.copytree(ENGINE, folder / "engine")
    return folder
