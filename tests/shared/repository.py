"""Folders that tests read."""

from pathlib import Path

SHARED = Path(__file__).parent
REPOSITORY = SHARED.parents[1]
