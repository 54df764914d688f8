"""matplotlib figures, made without its global state: no window, no backend, safe in any thread."""

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes as long to import as all the rest
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS = 120  # per inch


def empty_figure(width: float, height: float) -> "Figure":
    """A figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DOTS, layout="constrained")


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """A figure of this size in inches, and the axes that fill it."""
    figure = empty_figure(width, height)
    return figure, figure.add_subplot()


def to_png(figure: "Figure") -> bytes:
    """A figure as a PNG image."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def token_label(token: str, most: int | None = None) -> str:
    """A token as a label: white space made visible, and `$` escaped against mathtext.

    Args:
        token: its text.
        most: characters; a longer label is cut and ends in "…".
    """
    label = token.replace("\n", "⏎").replace("\t", "⇥").replace("$", r"\$")
    label = label if label.strip() else "␣" * len(label)
    return label if most is None or len(label) <= most else label[: most - 1] + "…"
