"""HTML pages in one file: style, script and data inside, nothing loaded from anywhere.

Text is escaped by jinja2; data for scripts is JSON in which no character can end the element that holds it, and
scripts put text on the page by `textContent` only.
"""

import base64
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.text import Text as Styled

from mionnx.errors import InputError
from mionnx.machine.memory import format_bytes
from mionnx.view.panels import Panel, Patterns, Series, Table, View

NO_NUMBER = "\u2013"  # a number that is not there
DIGITS = 5  # significant digits of numbers on a page
WEIGHT_LEVELS = 255  # a weight on a page is (level / 255)^2, which keeps small weights apart
SCRIPTS = {
    "HeatMap": "heatmap.js",
    "Bars": "charts.js",
    "Lines": "charts.js",
    "Graph": "charts.js",
    "Patterns": "patterns.js",
    "Trace": "trace.js",
    "Text": "texts.js",
    "MarkedText": "texts.js",
    "Examples": "texts.js",
    "Table": "texts.js",
}
MOST_WEIGHTS = 2**26  # bytes of weights that a page may hold


def render_view(view: View) -> str:
    """A page of panels, with the scripts of their kinds."""
    data = _embedded(vars(view))
    # The data names the kinds of its panels: a page holds the scripts of these alone.
    scripts = ["page.js", *dict.fromkeys(file for kind, file in SCRIPTS.items() if f'"kind":"{kind}"' in data)]
    return _environment().get_template("page.html").render(view=view, data=data, scripts=scripts)


def card(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """A small table of (name, text, text in bold) for a notebook, without scripts."""
    return _environment().get_template("card.html").render(title=title, rows=rows)


@cache
def _environment() -> Environment:
    return Environment(loader=PackageLoader("mionnx.view"), autoescape=True, undefined=StrictUndefined)


def _embedded(data: Any) -> Markup:
    text = json.dumps(plain(data), separators=(",", ":"), allow_nan=False)
    # "</script>" or a comment in a text would end the element; as escapes they are the same JSON.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def plain(data: Any, digits: int | None = DIGITS) -> Any:
    """Data as JSON can hold it, floats with so many significant digits; NaN and infinities become null."""
    if isinstance(data, dict):
        return {str(key): plain(value, digits) for key, value in data.items()}
    if isinstance(data, np.ndarray):
        return plain(data.tolist(), digits)
    if isinstance(data, list | tuple | range):
        return [plain(value, digits) for value in data]
    if isinstance(data, float | np.floating):
        if not np.isfinite(data):
            return None
        return float(data) if digits is None else float(f"{data:.{digits}g}")
    if isinstance(data, Panel | Series | Table):
        return plain({"kind": type(data).__name__, **_contents(data)}, digits)
    return data.item() if isinstance(data, np.generic) else data


def readable(value: float | None) -> str:
    """A number as people read it, with four digits; a dash for what is not finite."""
    if value is None or not np.isfinite(value):
        return NO_NUMBER
    if value == 0:
        return "0"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def _contents(panel: Panel | Series | Table) -> dict[str, Any]:
    if isinstance(panel, Table):
        cells = [[_cell(cell) for cell in column.cells] for column in panel.columns]
        heads = [_cell(column.header)[0] for column in panel.columns]
        return {**panel.on_page, "heads": heads, "rows": [*zip(*cells, strict=True)]}
    return _weights(panel) if isinstance(panel, Patterns) else vars(panel)


def _cell(markup: Any) -> list[str]:
    text = markup if isinstance(markup, Styled) else Styled.from_markup(str(markup))
    return [text.plain, str(text.spans[0].style) if text.spans else str(text.style)]


def _weights(panel: Patterns) -> dict[str, Any]:
    """Patterns in 8 bits; of causal ones the lower triangles."""
    # At least half is left where patterns are causal: before their triangles are looked for, too much is refused.
    _refuse_too_large(panel, panel.patterns.size // 2)
    causal = not any(np.triu(layer, 1).any() for layer in panel.patterns)
    weights = panel.patterns[..., *np.tril_indices(len(panel.tokens))] if causal else panel.patterns
    _refuse_too_large(panel, weights.size)
    levels = np.rint(np.sqrt(np.clip(weights, 0, 1)) * WEIGHT_LEVELS).astype(np.uint8)
    return {**vars(panel), "patterns": base64.b64encode(levels.tobytes()).decode(), "causal": causal}


def _refuse_too_large(panel: Patterns, size: int) -> None:
    if size > MOST_WEIGHTS:
        layers, heads, tokens = len(panel.layers), len(panel.heads), len(panel.tokens)
        raise InputError(
            f"a page of {layers} layers, {heads} heads and {tokens} tokens would hold {format_bytes(size)} of "
            f"weights, and {format_bytes(MOST_WEIGHTS)} are the most: choose layers= or heads="
        )
