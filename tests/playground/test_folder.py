"""The folder: what is in it, where it comes from, what a browser makes of a damaged one and of no network."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command_line import succeeded

from mionnx import HookSpec, InputError, Intervention, MIModel, ModelError
from mionnx.errors import HookError, InterventionError, MIError, RuntimeMissingError
from mionnx.playground import npm_files, playground
from mionnx.playground.graph import build_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser, Page


def test_everything_in_the_folder_is_listed_with_its_hash(playground_folder: Path):
    manifest = json.loads((playground_folder / "manifest.json").read_text())
    found = {path.relative_to(playground_folder).as_posix() for path in playground_folder.rglob("*") if path.is_file()}
    assert found - {"manifest.json"} == {*manifest["files"]}
    assert {"index.html", "sw.js", "engine/engine.js", "spec.safetensors", "examples.json"} < found
    for name, facts in manifest["files"].items():
        data = (playground_folder / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (facts["bytes"], facts["sha256"])
        assert len(data) <= 25e6
    assert sum(facts["bytes"] for facts in manifest["files"].values()) < 15e6
    assert manifest["title"] == "<b>Capitals</b>"
    assert manifest["model"]["end_tokens"] == [1]


def test_vendored_files_are_the_pinned_ones(playground_folder: Path):
    """Each package with its licence; WASM unpacked."""
    for package in npm_files.PACKAGES:
        folder = playground_folder / "vendor" / package.folder
        assert len((folder / "LICENSE").read_text()) > 1000
        for path, sha256 in package.files.items():
            name = Path(path).name
            packed = path.endswith(".wasm")
            data = gzip.decompress((folder / f"{name}.gz").read_bytes()) if packed else (folder / name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == sha256


@pytest.mark.slow
def test_another_package_than_the_pinned_one_is_refused(tmp_path: Path):
    small = npm_files.PACKAGES[1]
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed here")
    try:
        npm_files._download(small, tmp_path)
    except RuntimeMissingError as error:
        pytest.skip(str(error))
    with pytest.raises(RuntimeMissingError, match=r"archive's SHA-512 is LidM.* and AAAA is pinned"):
        npm_files._download(replace(small, integrity="AAAA"), tmp_path)
    with pytest.raises(RuntimeMissingError, match="LICENSE is not the pinned file"):
        npm_files._download(replace(small, files={"LICENSE": "0" * 64}), tmp_path)


def test_without_npm_or_network_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeMissingError, match="npm is not installed: install Node 20 with npm"):
        npm_files._download(npm_files.PACKAGES[0], tmp_path)
    broken = tmp_path / "npm"
    broken.write_text("#!/bin/sh\necho ENOTFOUND >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(RuntimeMissingError, match=r"npm cannot download it \(a network is needed once\): ENOTFOUND"):
        npm_files._download(npm_files.PACKAGES[0], tmp_path)


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        (HookSpec().intervene("hook_final_norm", Intervention.Zero()), HookError, r"blocks\.3\.hook_resid_post"),
        (HookSpec().intervene("blocks.0.hook_attn_out", Intervention.Zero(rows=0)), InterventionError, "one prompt"),
        (HookSpec().intervene("blocks.0.attn.hook_scores", Intervention.Scale(2)), InterventionError, "add, knockout"),
        (HookSpec().intervene("blocks.0.hook_attn_out", Intervention.Clamp(0, 1, positions=1)), MIError, "everywhere"),
    ],
)
def test_what_a_page_cannot_change_is_refused(shipped: MIModel, spec: HookSpec, error: type[MIError], says: str):
    with pytest.raises(error, match=says):
        build_graph(shipped.hooked, spec)


def test_models_that_a_page_cannot_run_are_refused(shipped: MIModel, recurrent: MIModel, tmp_path: Path):
    with pytest.raises(ModelError, match="recurrent"):
        build_graph(recurrent.hooked, HookSpec())
    with pytest.raises(ModelError, match="exists already"):
        playground(shipped, tmp_path)
    with pytest.raises(HookError, match=r"no hook point 'blocks\.9"):
        build_graph(shipped.hooked, HookSpec(), ["blocks.9.attn.hook_q"])
    assert "blocks.3.attn.hook_q" in build_graph(shipped.hooked, HookSpec(), ["blocks.*.attn.hook_q"]).sites


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ({"name": "a"}, 'needs "name" and "prompt"'),
        ({"name": "a", "prompt": "x", "promt": "y"}, "field 'promt'; did you mean 'prompt'"),
        ({"name": "a", "prompt": " "}, "has no tokens"),
        ({"name": "a", "prompt": "x", "layer": 4}, "layer 4 of 4"),
        (
            {"name": "a", "prompt": "x", "interventions": [{"hook": "blocks.0.hook_mlp", "kind": "zero"}]},
            "hook_mlp_out",
        ),
        (
            {"name": "a", "prompt": "x", "interventions": [{"hook": "blocks.0.*_out", "kind": "knockout"}]},
            "'knockout' at",
        ),
    ],
)
def test_examples_that_do_not_fit_are_refused(shipped: MIModel, tmp_path: Path, example: dict, says: str):
    path = tmp_path / "examples.json"
    path.write_text(json.dumps({"examples": [example]}))
    with pytest.raises((InputError, MIError), match=says):
        playground(shipped, tmp_path / "made", examples=path)
    assert not (tmp_path / "made").exists()


def test_the_command_writes_the_folder(playground_folder: Path, tmp_path: Path):
    """With the spec that the fixture's folder was made of, it is the same graph."""
    target = tmp_path / "made"
    spec = str(playground_folder / "spec.safetensors")
    options = ["-o", str(target), "--hooks", spec, "--title", "<b>Capitals</b>", "--json"]
    made = json.loads(succeeded("playground", "world-llama", *options))
    assert made["folder"] == str(target)
    assert made["bytes"] < 15e6
    one, other = (json.loads((folder / "manifest.json").read_text()) for folder in (target, playground_folder))
    assert one["files"] == other["files"]


WEIGHTS = "model/weights-0.000.bin"
BROKEN = """async () => {
  const { open } = await import("./engine/engine.js");
  try { await open("./"); return "opened"; } catch (error) { return `${error.code}: ${error.message}`; }
}"""


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (WEIGHTS, lambda data: data[:-8] + bytes(8), f"broken-file: {WEIGHTS} is not"),
        pytest.param(WEIGHTS, lambda data: data[:1000], f"broken-file: {WEIGHTS} is not", marks=pytest.mark.slow),
        pytest.param(
            WEIGHTS, None, f"network: {WEIGHTS} cannot be loaded: the server says 404", marks=pytest.mark.slow
        ),
        ("manifest.json", lambda data: data[:100], "broken-file: manifest.json is damaged"),
    ],
    ids=["changed", "cut", "missing", "no JSON"],
)
def test_a_damaged_folder_is_a_sentence(
    playground_folder: Path, bare: Callable[..., Page], tmp_path: Path, name: str, damage: object, says: str
):
    folder = Path(shutil.copytree(playground_folder, tmp_path / "damaged"))
    if callable(damage):
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
    else:
        (folder / name).unlink()
    assert says in bare(folder).evaluate(BROKEN)


@pytest.mark.slow
def test_a_runtime_with_other_numbers_is_refused(playground_folder: Path, bare: Callable[..., Page], tmp_path: Path):
    """The check against the logits of `forward`."""
    folder = Path(shutil.copytree(playground_folder, tmp_path / "other"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["engine"]["check"]["runs"][1]["logits"][3] += 0.1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "engine: its logits differ by 0.10" in bare(folder).evaluate(BROKEN).replace("Its", "its")


NEXT = "async () => (await lab.run({ tokens: await lab.encode('The capital of France is') })).next[0].text"


@pytest.mark.slow
def test_a_second_visit_needs_no_network_and_a_plain_server_gets_threads(
    headless: Browser, playground_folder: Path, served: Callable[..., str], opening: str
):
    """The service worker keeps the page and isolates it; all that is asked for lies on the page's own server."""
    context = headless.new_context()
    page = context.new_page()
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    address = served(playground_folder, isolated=False)
    page.goto(address)
    assert not page.evaluate("crossOriginIsolated")
    with page.expect_navigation():  # once, by the engine
        page.evaluate(f"({opening})().catch(() => null), null")
    page.evaluate(opening)
    assert page.evaluate("[crossOriginIsolated, lab.backend.note]") == [True, None]
    assert page.evaluate(NEXT) == " Paris"
    assert asked
    assert all(url.startswith((address, f"blob:{address}")) for url in asked)
    context.set_offline(True)
    page.reload()
    page.evaluate(opening)
    assert page.evaluate("seen.filter((step) => step.total > 0 && step.cached).length") > 3
    assert page.evaluate(NEXT) == " Paris"
    context.close()


def test_a_disk_that_fills_up_is_a_sentence(shipped: MIModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Finding 12: it was shutil's list of files and reasons."""

    def full(*paths: object, **_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(ModelError, match=r"cannot write .*site: .*No space left") as refused:
        playground(shipped, tmp_path / "site")
    assert "[(" not in str(refused.value)
    assert [*tmp_path.iterdir()] == []
