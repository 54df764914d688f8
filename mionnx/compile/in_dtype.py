"""`in_dtype`: a model as it is, or narrowed with the remedy as long as something is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar

from mionnx.engine.options import Options
from mionnx.errors import InputError, ModelError
from mionnx.graph.hooked_model import HookedModel


class NarrowingModel(Protocol):
    """A model that can be written in a narrow dtype; `MIModel.narrow` stands on a higher floor."""

    hooked: HookedModel
    options: Options
    source: tuple[str, str | None] | None

    def __init__(self, hooked: HookedModel, options: Options | None = None) -> None: ...

    def narrow(
        self, folder: str | Path, *, dtype: str = ..., texts: str | Sequence[str] | None = ..., bound: float = ...
    ) -> Path:
        """Write the model in a narrow dtype; see `mionnx.analysis.numerics.narrow_model`."""


AnyModel = TypeVar("AnyModel", bound=NarrowingModel)


@contextmanager
def in_dtype(
    model: AnyModel, dtype: str | None, texts: str | Sequence[str] | None, bound: float | None, beside: Path
) -> Iterator[AnyModel]:
    """The model itself without a dtype, or where it has that one; else narrowed, in a folder beside another.

    On the same disk, so that its weights can be linked to; the folder goes when the body ends.
    """
    own = model.hooked.metadata.dtype
    useless = [name for name, value in (("texts", texts), ("bound", bound)) if value is not None]
    if useless and dtype in (None, own):
        why = f"the model computes in {own} already" if dtype else "without dtype= nothing is narrowed"
        raise InputError(f"{useless[0]}= is of a dtype that the model is narrowed to, and {why}")
    if dtype in (None, own):
        yield model
        return
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(dir=beside.parent, prefix=f".{beside.name}.", ignore_cleanup_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write {beside}: {error}") from error
    chosen = {} if bound is None else {"bound": bound}
    with scratch as place:
        folder = model.narrow(Path(place) / model.hooked.name, dtype=str(dtype), texts=texts, **chosen)
        narrowed = type(model)(HookedModel.open(folder, check="none"), model.options)
        narrowed.source = model.source
        yield narrowed
