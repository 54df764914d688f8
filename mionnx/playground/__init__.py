"""A model in the reader's browser, with interventions: one static folder."""

from mionnx.playground.folder import playground
from mionnx.playground.server import serve

__all__ = ["playground", "serve"]
