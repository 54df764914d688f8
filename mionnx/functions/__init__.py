"""Python functions as hooks: the graph is cut at the hooked values, and the functions act in between."""

from mionnx.functions.hook import Hook
from mionnx.functions.model import Functions
from mionnx.functions.sizes import ModelSizes

__all__ = ["Functions", "Hook", "ModelSizes"]
