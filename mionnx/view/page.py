"""HTML pages in one file: style, script and data inside, nothing loaded from anywhere.

A page is a jinja2 template that extends `page.html`. Text is escaped by jinja2; data for scripts goes through `data=`,
as JSON in which no character can end the element that holds it, and scripts put text on the page by `textContent` only.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

DIGITS = 5  # significant digits of numbers on a page


def render(template: str, title: str, data: Any = None, **values: Any) -> str:
    """A page.

    Args:
        template: a file of `mionnx/view/templates`.
        title: of the page.
        data: what its scripts read: lists, dictionaries, numbers, texts and numpy arrays; NaN and infinities become
            null, floats have five significant digits.
        values: what the template names.
    """
    return _environment().get_template(template).render(title=title, data=_embedded(data), **values)


def card(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """A small table for a notebook, without scripts.

    Args:
        title: of the table.
        rows: (name, text, text in bold) each.
    """
    return _environment().get_template("card.html").render(title=title, rows=rows)


@cache
def _environment() -> Environment:
    return Environment(loader=PackageLoader("mionnx.view"), autoescape=True, undefined=StrictUndefined)


def _embedded(data: Any) -> Markup:
    text = json.dumps(plain(data), separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def plain(data: Any, digits: int | None = DIGITS) -> Any:
    """Data as JSON can hold it.

    Args:
        data: lists, dictionaries, numbers, texts and numpy arrays.
        digits: significant digits of floats; None for all.
    """
    if isinstance(data, dict):
        return {str(key): plain(value, digits) for key, value in data.items()}
    if isinstance(data, np.ndarray):
        return plain(data.tolist(), digits)
    if isinstance(data, list | tuple):
        return [plain(value, digits) for value in data]
    if isinstance(data, float | np.floating):
        if not np.isfinite(data):
            return None
        return float(data) if digits is None else float(f"{data:.{digits}g}")
    return data.item() if isinstance(data, np.generic) else data
