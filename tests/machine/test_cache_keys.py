"""Cache keys hold the sources of whatever made the entry: a changed file makes another key."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mionnx.machine.cache_keys import source_digest
from mionnx.run import find_model, open_graphs, prepacked


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two files, one of them in a room."""
    folder = tmp_path / "exporter_of_a_test"
    (folder / "room").mkdir(parents=True)
    for path in (folder, folder / "room"):
        (path / "__init__.py").write_text("")
    (folder / "room" / "export.py").write_text("FACTOR = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    source_digest.cache_clear()
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def test_a_changed_source_changes_the_digest(package):
    before = source_digest(package.name)
    assert source_digest(package.name) == before
    (package / "room" / "export.py").write_text("FACTOR = 2\n")
    assert source_digest(package.name) == before  # read once a process
    source_digest.cache_clear()
    after = source_digest(package.name)
    assert after != before
    (package / "room" / "export.py").rename(package / "room" / "other.py")
    source_digest.cache_clear()
    assert source_digest(package.name) not in (before, after)


def test_a_module_has_a_digest_of_its_own():
    assert source_digest("mionnx.machine.files") != source_digest("mionnx.machine.memory")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        source_digest("nowhere_at_all")


def test_a_changed_exporter_exports_anew(package, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    exporter = SimpleNamespace(__name__=f"{package.name}.room")
    before = find_model._fingerprint(tmp_path / "checkpoint", "float32", exporter)
    (package / "__init__.py").write_text("SHARED = True\n")
    source_digest.cache_clear()
    assert find_model._fingerprint(tmp_path / "checkpoint", "float32", exporter) != before


def test_a_changed_rewriter_rewrites_anew(package, tmp_path, monkeypatch):
    monkeypatch.setattr(open_graphs, "REWRITING", (package.name,))
    base = SimpleNamespace(folder=tmp_path)
    before = open_graphs._key_of(base, "plan")
    (package / "room" / "export.py").write_text("FACTOR = 2\n")
    source_digest.cache_clear()
    assert open_graphs._key_of(base, "plan") != before


def test_the_rooms_that_make_entries_are_in_their_keys():
    rooms = {*open_graphs.REWRITING, *find_model.EXPORTING, *prepacked.PREPARING}
    assert rooms >= {"mionnx.rewrite", "mionnx.graph", "mionnx.spec.kinds", "mionnx.run.prepacked"}
    assert all(source_digest(room) for room in rooms)
