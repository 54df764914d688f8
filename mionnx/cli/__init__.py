"""The command line."""

from mionnx.cli.main import app

__all__ = ["app"]
