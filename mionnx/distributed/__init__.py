"""Harvests and sweeps on many processes and machines, by Ray."""

from mionnx.distributed.analyses import harvest, patch_sweep

__all__ = ["harvest", "patch_sweep"]
