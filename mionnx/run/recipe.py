"""`Recipe`: a model as its folder and its options, which is how it is pickled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from mionnx.engine.options import Options
from mionnx.errors import ModelError
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.machine.disk_cache import DiskCache
from mionnx.run.find_model import cache_folder


class Opened(Protocol):
    """An open model: its folder and its options, from which its class makes it."""

    hooked: HookedModel
    options: Options

    def __init__(self, hooked: HookedModel, options: Options) -> None: ...


M = TypeVar("M", bound=Opened)


@dataclass(frozen=True)
class Recipe(Generic[M]):
    """Folder and options of a model, to open it again in any process with that folder.

    Attributes:
        kind: the model's class, made from a `HookedModel` and `Options`.
        folder: of the hooked model, absolute.
        options: how its graphs are opened.
    """

    kind: type[M]
    folder: Path
    options: Options

    @classmethod
    def of(cls, model: M) -> Recipe[M]:
        """The recipe of an open model."""
        return cls(type(model), model.hooked.folder.absolute(), model.options)

    def open(self) -> M:
        """Open the model: read and check its graph; sessions are made when it first runs.

        Raises:
            ModelError: its folder is not there any more, or is damaged.
        """
        if not (self.folder / GRAPH).is_file():
            raise ModelError(
                f"{self.folder} has no {GRAPH}: a model is pickled as its folder and options, without weights, and can "
                "be opened where that folder is"
            )
        DiskCache(cache_folder()).use(self.folder)
        return self.kind(HookedModel.open(self.folder), self.options)
