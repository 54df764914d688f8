"""Results as tables, frames, pictures and offline pages, drawn from panels that each result declares once."""

from mionnx.view.page import card, readable
from mionnx.view.panels import (
    Bars,
    Each,
    Examples,
    Graph,
    HeatMap,
    Lines,
    MarkedText,
    Patterns,
    Series,
    Table,
    Text,
    Trace,
    TraceNode,
    View,
    short_point,
)
from mionnx.view.shown import Columns, Shown, long_form

__all__ = [
    "Bars",
    "Columns",
    "Each",
    "Examples",
    "Graph",
    "HeatMap",
    "Lines",
    "MarkedText",
    "Patterns",
    "Series",
    "Shown",
    "Table",
    "Text",
    "Trace",
    "TraceNode",
    "View",
    "card",
    "long_form",
    "readable",
    "short_point",
]
