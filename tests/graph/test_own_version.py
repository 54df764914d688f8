"""The version that files are given, with and without an installed package."""

from importlib.metadata import PackageNotFoundError, version

import mionnx
from mionnx import HookSpec
from mionnx.graph import own_version


def test_the_version_of_the_package():
    assert mionnx.__version__ == version("mionnx")


def test_a_checkout_that_is_not_installed_compiles(monkeypatch, shipped, tmp_path):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(own_version, "version", missing)
    shipped.compile(HookSpec().capture("blocks.0.hook_resid_post"), tmp_path / "compiled")
    assert own_version.UNINSTALLED in (tmp_path / "compiled" / "README.md").read_text()
