"""Small tables in a notebook: of a model, its sizes and hook points; of results, what `print` shows."""

from itertools import islice
from typing import TYPE_CHECKING

from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.tokens import Tokens
from mionnx.machine.brief import Brief
from mionnx.run.hook_cache import HookCache
from mionnx.spec.hook_spec import HookSpec
from mionnx.view import card

if TYPE_CHECKING:
    from mionnx.run.runner import Runner


TABLE_ROWS = 100  # of a table


def brief_html(result: Brief) -> str:
    """The lines of a printed result as rows, as HTML without scripts."""
    return _table(result, [(name, text, "") for name, _, text in (line.partition(": ") for line in result._lines())])


def tokens_html(tokens: Tokens) -> str:
    """The tokens of a text: position, piece and id."""
    ids = map(str, tokens.ids.tolist())
    return _table(tokens, [*zip(map(str, range(len(tokens.pieces))), tokens.pieces, ids, strict=True)])


def _table(result: Brief, rows: list[tuple[str, str, str]]) -> str:
    more = [(f"… and {len(rows) - TABLE_ROWS} more", "", "")] * (len(rows) > TABLE_ROWS)
    return card(repr(result), [*islice(rows, TABLE_ROWS), *more])


# Rooms beside `view` cannot draw tables, and a model, which this file draws too, is made with the cache's.
for _kind, _html in ((HookSpec, brief_html), (HookCache, brief_html), (Tokens, tokens_html)):
    setattr(_kind, "_repr_html_", _html)  # noqa: B010


def model_html(model: "Runner") -> str:
    """The model's folder, dtype and hook points with their axes, as HTML without scripts."""
    hooked = model.hooked
    rows = [("folder", str(hooked.folder), ""), ("weights", hooked.metadata.dtype, "")]
    points = dict.fromkeys(_row(hooked, point) for point in hooked.hook_points())
    return card(repr(model), [*rows, *((name, shape, "") for name, shape in points)])


def _row(hooked: HookedModel, point: HookPoint) -> tuple[str, str]:
    """Name of a hook point with {i} for the layer, and its axes."""
    name = point.name if point.layer is None else point.name.replace(f".{point.layer}.", ".{i}.", 1)
    sizes = zip(point.axes or (), hooked.axes(point), strict=True)
    return name, "[" + ", ".join(str(size) if axis == size else f"{axis}={size}" for axis, size in sizes) + "]"
