"""The version of mionnx, as files that it writes name it."""

from importlib.metadata import PackageNotFoundError, version

UNINSTALLED = "0+uninstalled"  # of a checkout on PYTHONPATH, which has no metadata


def own_version() -> str:
    """Version of the installed package; `UNINSTALLED` where there is none."""
    try:
        return version("mionnx")
    except PackageNotFoundError:
        return UNINSTALLED
