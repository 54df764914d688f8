"""Harvests and sweeps on many processes and machines, by Ray."""

from mionnx.distributed.harvest import harvest

__all__ = ["harvest"]
