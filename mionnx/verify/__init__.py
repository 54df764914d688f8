"""Reproducibility: where runtimes, machines, dtypes or two models disagree, hook point by hook point."""

from mionnx.verify.bisect import Bisection
from mionnx.verify.difference import Repeat
from mionnx.verify.losses import MatrixLosses, ModelLosses
from mionnx.verify.result import Beside, Fault, Verification

__all__ = ["Beside", "Bisection", "Fault", "MatrixLosses", "ModelLosses", "Repeat", "Verification"]
