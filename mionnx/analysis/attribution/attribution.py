"""`Attribution`: the direct contribution of each component of a model to a logit."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.view import Framed, empty_figure, render
from mionnx.view.figure import token_label, write_numbers
from mionnx.view.framed import Columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLD = 6  # components of a printed result
BARS = 24  # components that a figure shows
_PLACE = re.compile(r"L(\d+)H(\d+)|(\d+)_")  # of a label with a layer
WIDE = 16  # heads from which on a figure's cells are too small for numbers


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class Attribution(Framed):
    """Direct logit attribution at one position: a logit, or a difference of two, as a sum.

    The final norm is taken as the linear map that it is at this position's stream (see
    `mionnx.analysis.attribution.linear_norm`), so that contributions add up exactly. What a component does through
    later layers is not in its contribution: this is its direct effect. With a soft cap (Gemma 2) the
    logits are those before it.

    Attributes:
        labels: of the components in the order in which they are added: "embed", "pos_embed", "L0H0", "0_attn_bias",
            "0_mlp_out", ..., "final_norm_bias", "head_bias"; "0_attn_out" where heads have no shares (RWKV, JetMoE).
        values: [component] contributions, in logits.
        num_heads: heads a layer; 0 where they have no shares.
        num_layers: layers.
        logit: the model's own logit, or difference, which the contributions add up to.
        capped: whether the model's logits are soft-capped after this.
        answer, versus: the tokens' texts; versus is None where the logit itself is taken apart.
        tokens: the prompt's.
        position: at which the next token is predicted.
    """

    labels: list[str]
    values: NDArray[np.float64]
    num_heads: int
    num_layers: int
    logit: float
    capped: bool
    answer: str
    versus: str | None
    tokens: list[str]
    position: int

    def __getitem__(self, label: str) -> float:
        """The contribution of one component.

        Raises:
            KeyError: there is none of this label.
        """
        return dict(zip(self.labels, self.values.tolist(), strict=True))[label]

    def _facts(self) -> Iterator[str]:
        yield f"{self.what}: {decimal(self.logit, 4)}"
        yield count(len(self.labels), "component")

    def _lines(self) -> Iterator[str]:
        yield f"at position {self.position}, after {self.tokens[self.position]!r}; the largest contributions:"
        for label, value in self.top(TOLD):
            yield f"{decimal(value, 3, sign=True):>9}  {label}"

    @property
    def heads(self) -> NDArray[np.float64] | None:
        """[layer, head]: the contributions of the heads; None where they have no shares."""
        return heads_of(self.labels, self.values, self.num_layers)

    @property
    def total(self) -> float:
        """The sum of all contributions."""
        return float(self.values.sum())

    def top(self, k: int | None = None) -> list[tuple[str, float]]:
        """The components with the largest contributions of either sign; all if `k` is left out."""
        at_least("n", 0 if k is None else k, 0)
        order = np.argsort(-np.abs(self.values), kind="stable")[:k]
        return [(self.labels[i], float(self.values[i])) for i in order]

    @property
    def what(self) -> str:
        """The logit or difference of logits, in words."""
        asked = f"{self.answer!r}" + ("" if self.versus is None else f" minus that of {self.versus!r}")
        return f"logit of {asked}" + (" before the soft cap" if self.capped else "")

    def to_dict(self) -> dict[str, Any]:
        """Everything."""
        return {
            "tokens": self.tokens,
            "position": self.position,
            "answer": self.answer,
            "versus": self.versus,
            "logit": self.logit,
            "total": self.total,
            "capped": self.capped,
            "labels": self.labels,
            "values": self.values,
            "heads": self.heads,
        }

    def page(self) -> str:
        """Bars, sorted or in order, and the heads as a map."""
        checked = {"what": self.what, "gap": abs(self.total - self.logit)}
        return render("attribution.html", "Direct logit attribution", data={**self.to_dict(), **checked})

    def figure(self) -> "Figure":
        """The largest contributions as bars, and the heads as a map."""
        return draw(self.top(), self.heads, f"{self.what}: {decimal(self.logit, 3)}")

    def _columns(self) -> Columns:
        """One row for each component."""
        return {**places_of(self.labels), "contribution": self.values}


def heads_of(labels: list[str], values: NDArray[np.float64], layers: int) -> NDArray[np.float64] | None:
    """[layer, head]: the contributions of heads among those of components; None without any."""
    chosen = [value for label, value in zip(labels, values, strict=True) if label.startswith("L")]
    return np.array(chosen).reshape(layers, -1) if chosen else None


def places_of(labels: list[str]) -> dict[str, list[Any]]:
    """Component, layer and head of each label; None where it has none."""
    found = [_PLACE.match(label) for label in labels]
    layers = [None if one is None else int(one[1] or one[3]) for one in found]
    heads = [None if one is None or one[2] is None else int(one[2]) for one in found]
    return {"component": labels, "layer": layers, "head": heads}


def draw(
    components: list[tuple[str, float]],
    heads: NDArray[np.float64] | None,
    title: str,
    errors: NDArray[np.float64] | None = None,
) -> "Figure":
    """Draw contributions as bars, and those of heads as a map.

    Args:
        components: label and contribution, the largest first; some of them are shown.
        heads: [layer, head].
        title: of the figure.
        errors: [component], the standard error of each.
    """
    shown = components[:BARS]
    tall = max(2.2, 0.7 + 0.2 * len(shown), 0.9 + 0.3 * (0 if heads is None else len(heads)))
    wide = 5.2 if heads is None else 5.6 + max(2.6, 0.45 * heads.shape[1])
    figure = empty_figure(wide, tall)
    widths = [5.0] if heads is None else [5.0, wide - 5.0]
    panels = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    _draw_bars(panels[0], shown, len(components), None if errors is None else errors[:BARS])
    if heads is not None:
        _draw_heads(figure, panels[1], heads)
    figure.suptitle(token_label(title), fontsize=10)
    return figure


def _draw_bars(
    axes: Any, shown: list[tuple[str, float]], count: int, errors: NDArray[np.float64] | None = None
) -> None:
    values = [value for _, value in shown]
    colours = ["#b2182b" if value > 0 else "#2166ac" for value in values]
    axes.barh(range(len(shown)), values, color=colours, xerr=errors, error_kw={"elinewidth": 0.8})
    axes.set_yticks(range(len(shown)), [label for label, _ in shown], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_xlabel("contribution (logits)")
    axes.set_title(f"the largest {len(shown)} of {count}" if len(shown) < count else "all components", fontsize=9)


def _draw_heads(figure: "Figure", axes: Any, heads: NDArray[np.float64]) -> None:
    limit = float(np.abs(heads).max()) or 1.0
    image = axes.imshow(heads, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    layers, count = heads.shape
    if count <= WIDE:
        write_numbers(axes, heads, limit)
    axes.set_xticks(range(count), [str(head) for head in range(count)], fontsize=8)
    axes.set_yticks(range(layers), [str(layer) for layer in range(layers)], fontsize=8)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.set_title("heads", fontsize=9)
    figure.colorbar(image, ax=axes, fraction=0.05, label="logits")
