"""Attention heads by what they do on repeated random sequences."""

from mionnx.heads.model import Heads
from mionnx.heads.scores import HeadScores

__all__ = ["HeadScores", "Heads"]
