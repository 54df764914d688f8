"""Harvests and sweeps on many processes and machines, by Ray."""

from mionnx.distributed.harvest import harvest
from mionnx.distributed.sweeps import patch_sweep

__all__ = ["harvest", "patch_sweep"]
