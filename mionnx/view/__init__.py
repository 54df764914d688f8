"""Results as pictures: matplotlib figures, and HTML pages that work offline."""

from mionnx.view.figure import empty_figure, new_figure, to_png
from mionnx.view.framed import Framed
from mionnx.view.page import card, render
from mionnx.view.shown import Shown
from mionnx.view.table import Table

__all__ = ["Framed", "Shown", "Table", "card", "empty_figure", "new_figure", "render", "to_png"]
