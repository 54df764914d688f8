"""Checkpoints and hooked models that tests share: each is made once a run, by whichever worker needs it first.

torch, transformers and playwright are imported by the fixtures that need them, when they are first asked for.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from families import CONFIGS, REPRESENTATIVE, make_checkpoint, single_threaded
from filelock import FileLock
from recurrent_families import make_recurrent
from repository import REPOSITORY, SHARED

from mionnx import MIModel
from mionnx.machine import memory
from mionnx.run.graph_memory import all_pools

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
    from transformers import PreTrainedModel

EVERYTHING = "-m 'slow or not slow'"
INSTALLING = 300  # seconds that a test waits for packages; where there is no network, pip itself tries for half an hour
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch in processes of tests; as many of them run as there are cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-part", help="K/N: of the slow tests, the Kth of N parts; a family's are in one part")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test of a family that is not among the representative ones is slow, and parameters beyond the first few are."""
    others = {*CONFIGS} - {*REPRESENTATIVE}
    parts: dict[pytest.Item, str] = {}
    seen: Counter[str] = Counter()  # of each function its parameters so far
    for item in items:
        seen[name := item.nodeid.partition("[")[0]] += 1
        first = item.get_closest_marker("slow_beyond")
        if first and seen[name] > first.args[0]:
            item.add_marker(pytest.mark.slow)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        family = next((value for value in parameters.values() if isinstance(value, str) and value in others), None)
        if family:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):
            parts[item] = str(family or parameters.get("family") or item.nodeid.partition("[")[0])
    if chosen := config.option.slow_part:
        number, count = map(int, chosen.split("/"))
        left = [item for item, key in parts.items() if zlib.crc32(key.encode()) % count != number - 1]
        config.hook.pytest_deselected(items=left)
        gone = {*left}
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:  # imported by a module of tests
        single_threaded()


@pytest.fixture(scope="module", autouse=True)
def _closed_graphs() -> Iterator[None]:
    """Close graphs when a module's tests end: of hundreds of models that live as long as the run, 11 GB stayed open."""
    yield
    for pool in [*all_pools]:
        pool.close([*pool.open])
    memory.release()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeftOut(config), "left out")


class LeftOut:
    """Counts the slow tests that a run leaves out, and says at its end how they are run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.count = config, 0

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        if self.config.option.markexpr == "not slow":
            self.count += sum(item.get_closest_marker("slow") is not None for item in items)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["left out"] = self.count

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.count = max(self.count, getattr(node, "workeroutput", {}).get("left out", 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.count:
            terminalreporter.write_line(f"{self.count} slow tests left out: {EVERYTHING} runs them too")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of one run share; `MIONNX_TEST_MODELS` names one that several runs do."""
    if kept := os.environ.get("MIONNX_TEST_MODELS"):
        return Path(kept)
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session")
def checkpoint(shared: Path) -> Callable[[str], Path]:
    """Family -> its checkpoint's folder."""

    def find(family: str) -> Path:
        folder = shared / "checkpoints" / family
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                make_checkpoint(family, folder)
        return folder

    return find


@pytest.fixture(scope="session")
def hooked(shared: Path, checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    """Family -> its hooked model's folder."""

    def find(family: str) -> Path:
        folder = shared / "hooked" / family
        folder.parent.mkdir(parents=True, exist_ok=True)
        source = checkpoint(family)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                from exporters.transformers import export

                single_threaded()
                export(source, folder)
        return folder

    return find


@pytest.fixture(scope="session")
def models(hooked: Callable[[str], Path]) -> Callable[[str], MIModel]:
    """Family -> the hooked model, open; one a worker, so that its sessions are shared."""
    opened: dict[str, MIModel] = {}

    def find(family: str) -> MIModel:
        if family not in opened:
            opened[family] = MIModel.from_pretrained(hooked(family), threads=1)
        return opened[family]

    return find


@pytest.fixture(scope="session")
def hybrid(shared: Path) -> Callable[[str], MIModel]:
    """Family with recurrent layers -> its hooked model, open."""
    opened: dict[str, MIModel] = {}

    def find(family: str) -> MIModel:
        folder = shared / "hybrids" / family
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "hooked").exists():
                from exporters.transformers import export

                make_recurrent(family, folder / "checkpoint")
                export(folder / "checkpoint", folder / "hooked")
        if family not in opened:
            opened[family] = MIModel.from_pretrained(folder / "hooked", threads=1)
        return opened[family]

    return find


@pytest.fixture(scope="session")
def shipped() -> MIModel:
    """The small trained Llama that ships, open."""
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama", threads=1)


@pytest.fixture(scope="session")
def recurrent() -> MIModel:
    """The small trained RWKV-7 that ships, open."""
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-rwkv7", threads=1)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the small trained Llama that ships, to be damaged."""
    return Path(shutil.copytree(REPOSITORY / "models" / "world-llama", tmp_path / "model"))


@pytest.fixture(scope="session")
def references(checkpoint: Callable[[str], Path]) -> Callable[[str], PreTrainedModel]:
    """Family -> the same checkpoint in transformers, eager, fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    import exporters.transformers.hooked_transformer  # noqa: F401 - transformers learns of the family

    single_threaded()
    loaded: dict[str, PreTrainedModel] = {}

    def find(family: str) -> PreTrainedModel:
        if family not in loaded:
            loaded[family] = AutoModelForCausalLM.from_pretrained(
                checkpoint(family), attn_implementation="eager", dtype=torch.float32
            ).eval()
        loaded[family].config._attn_implementation = "eager"  # the oracle leaves its own
        return loaded[family]

    return find


@pytest.fixture(scope="session")
def text_encoder(shared: Path) -> Callable[[str], tuple[MIModel, PreTrainedModel]]:
    """Head -> a small encoder that reads words, as a hooked model and in transformers."""
    opened: dict[str, tuple[MIModel, PreTrainedModel]] = {}

    def find(head: str) -> tuple[MIModel, PreTrainedModel]:
        if head not in opened:
            from encoder_texts import make_text_encoder

            from exporters.transformers import export

            folder = shared / "text_encoders" / head
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                source = folder / "checkpoint"
                shutil.rmtree(source, ignore_errors=True)
                source.mkdir()
                reference = make_text_encoder(head, source)
                if not (folder / "hooked").exists():
                    single_threaded()
                    export(source, folder / "hooked")
            opened[head] = MIModel.from_pretrained(folder / "hooked", threads=1), reference
        return opened[head]

    return find


@pytest.fixture(scope="session")
def rwkv(shared: Path) -> Callable[[str], MIModel]:
    """Layout of an RWKV checkpoint -> its model, exported once."""
    opened: dict[str, MIModel] = {}

    def find(layout: str) -> MIModel:
        folder = shared / "rwkv" / layout
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                from rwkv_checkpoints import write

                from exporters.rwkv import export

                write(layout, folder / "checkpoint")
                export(folder / "checkpoint", folder / "hooked")
        if layout not in opened:
            opened[layout] = MIModel.from_pretrained(folder / "hooked", threads=1)
        return opened[layout]

    return find


def install(command: Sequence[object], folder: Path) -> None:
    """Installs packages into a folder once a run; where they cannot be had, each test that needs them skips at once."""
    refusal = folder / "refusal"
    if not refusal.exists():
        try:
            ran = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=INSTALLING)
            if ran.returncode == 0:
                (folder / "done").touch()
                return
            refusal.write_text(ran.stderr[-300:])
        except subprocess.TimeoutExpired:
            refusal.write_text(f"not done in {INSTALLING} s")
    pytest.skip(f"{folder.name} cannot be installed here: {refusal.read_text()}")


@pytest.fixture(scope="session")
def environment(shared: Path) -> Callable[[str], Path]:
    """A package, or several -> the Python of a virtual environment with them, and all that is installed here.

    A second argument names packages whose own requirements are not to be met.
    """

    def find(package: str, alone: str = "") -> Path:
        folder = shared / "environments" / f"{package} {alone}".strip()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "done").exists():
                if not (folder / "pyvenv.cfg").exists():
                    venv.create(folder, with_pip=True)
                packages = next((folder / "lib").glob("python3*/site-packages"))
                here = next(path for path in sys.path if path.endswith("site-packages"))
                (packages / "zz_here.pth").write_text(here + "\n")  # torch and onnxruntime, which are large
                pip = f"{shlex.quote(str(folder / 'bin' / 'python'))} -m pip install -q"
                commands = [f"{pip} {shlex.join(package.split())}", *([f"{pip} --no-deps {alone}"] if alone else [])]
                install(["sh", "-c", " && ".join(commands)], folder)
        return folder / "bin" / "python"

    return find


@pytest.fixture(scope="session")
def beside_lens(environment: Callable[[str], Path]) -> Callable[..., dict[str, Any]]:
    """Runs one of the programs that compare with TransformerLens, and gives the JSON that it prints."""
    lens = environment("transformer-lens==4.3.0")

    def run(program: str, *arguments: object, python: Path = lens) -> dict[str, Any]:
        command = [python, SHARED / program, *map(str, arguments)]
        known = os.pathsep.join([str(REPOSITORY), str(SHARED)])
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": known})
        assert ran.returncode == 0, ran.stderr[-3000:]
        return json.loads(ran.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def web(shared: Path) -> Path:
    """A folder in which Node finds onnxruntime-web."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("Node and npm are not installed here")
    folder = shared / "web"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            install(["npm", "install", "--silent", "onnxruntime-web@1.30.0"], folder)
    return folder


@pytest.fixture(scope="session")
def javascript(shared: Path) -> Path:
    """A folder in which Node finds transformers.js and onnxruntime-node."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("Node and npm are not installed here")
    folder = shared / "javascript"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            (folder / "package.json").write_text("{}")
            # Without scripts: that of onnxruntime-node fetches CUDA from elsewhere.
            npm = ["npm", "install", "--silent", "--ignore-scripts", "@huggingface/transformers@4.3.1"]
            install(npm, folder)
    return folder


@pytest.fixture(params=list(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return request.param


@pytest.fixture(scope="session")
def headless() -> Iterator[Browser]:
    """Headless Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def chromium(headless: Browser) -> Callable[[Path], Page]:
    """HTML file -> the page, open in headless Chromium from `file://`; its `troubles` are errors and requests."""

    def open_page(path: Path) -> Page:
        page = headless.new_page(viewport={"width": 1200, "height": 800})
        page.troubles = []
        page.on("pageerror", lambda error: page.troubles.append(str(error)))
        page.on("console", lambda said: page.troubles.append(said.text) if said.type == "error" else None)
        page.on("request", lambda asked: page.troubles.append(asked.url) if asked.url != path.as_uri() else None)
        page.goto(path.as_uri())
        return page

    return open_page
