"""Sweeps: activation patching, ablation and path patching over every place of a model, exact and many at once."""

from mionnx.sweep.engine import Shortcuts
from mionnx.sweep.result import SweepResult
from mionnx.sweep.sweep import Sweep, SweepEstimate
from mionnx.sweep.verbs import Sweeps

__all__ = ["Shortcuts", "Sweep", "SweepEstimate", "SweepResult", "Sweeps"]
