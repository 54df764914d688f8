"""What a model lost of another one: `ModelLosses` at hook points and in layers, `MatrixLosses` of single matrices."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from mionnx.analysis.quantisation.matrix_loss import MatrixLoss
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.typed import typed
from mionnx.verify.difference import HookDifference, LayerLoss
from mionnx.view import Bars, Columns, Lines, Series, Shown, Table, View, readable
from mionnx.view.page import NO_NUMBER


@dataclass(repr=False)
@typed(InputError)
class ModelLosses(Shown):
    """Distance of a model from another one at each hook point, and what each layer adds to it.

    Attributes:
        reference, other: the model, and the one beside it.
        logits: KL in nats and shares of equal top tokens, as `Beside` has them.
    """

    reference: str
    other: str
    rows: list[HookDifference]
    layers: list[LayerLoss]
    logits: dict[str, float]
    INSIDE: ClassVar = (HookDifference, LayerLoss)
    POINTS: ClassVar = ("point",)

    @property
    def heaviest(self) -> LayerLoss:
        """The layer that adds most."""
        return max(self.layers, key=lambda one: one.added)

    def _facts(self) -> Iterator[str]:
        most = self.heaviest
        yield f"distance from {self.other}"
        yield f"layer {most.layer} adds most, {readable(most.added)}"

    def _columns(self) -> Columns:
        added = {str(HookPoint.ResidPost(one.layer)): one.added for one in self.layers}
        return {
            "point": [row.name for row in self.rows],
            "distance": [row.lost for row in self.rows],
            "added": np.array([added.get(row.name, np.nan) for row in self.rows]),
            "relative": [row.relative for row in self.rows],
            "local": np.array([np.nan if row.local is None else row.local for row in self.rows]),
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def layer_table(self) -> Table:
        """The distance before and after each layer."""
        logits, name = self.logits, self.other
        note = (
            f"Length of the difference of the residual streams, as a share of the length of {name}'s. KL({name} || "
            f"{self.reference}): {readable(logits['kl_back_mean'])} nats on average, {readable(logits['kl_back_max'])} "
            f"at most; the same top token at {percent(logits['top_1'])} of {logits['positions']:g} positions."
        )
        cells = {
            "layer": [str(one.layer) for one in self.layers],
            "before": [readable(one.before) for one in self.layers],
            "after": [readable(one.after) for one in self.layers],
            "added": [readable(one.added) for one in self.layers],
            "": ["[red]most" if one is self.heaviest else "" for one in self.layers],
        }
        return Table.fitting(cells, on_page={"heading": f"Layers, distance from {name}", "note": note})

    def view(self) -> View:
        """The distance at each hook point, and each layer's share of it."""
        curve = Series("distance", [row.lost for row in self.rows])
        share = "length of the difference / length of the value"
        lines = Lines([row.name for row in self.rows], [curve], "", share, 0, heading="Distance")
        return View(
            f"Distance from {self.other}", [lines, self.layer_table()], self.reference, ", ".join(self._facts())
        )


@dataclass(repr=False)
@typed(InputError)
class MatrixLosses(Shown):
    """What each quantised matrix costs alone in the model of floats, the heaviest first."""

    losses: list[MatrixLoss]
    INSIDE: ClassVar = (MatrixLoss,)
    LEAST: ClassVar = ("bytes", "top_1")

    def _facts(self) -> Iterator[str]:
        yield f"{count(len(self.losses), 'quantised weight')} alone"
        yield f"{self.losses[0].name} costs most, {readable(self.losses[0].kl)} nats"

    def _columns(self) -> Columns:
        names = ("name", "bits", "bytes", "weight_error", "output_error", "kl", "top_1")
        return {name: [getattr(one, name) for one in self.losses] for name in names}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def view(self) -> View:
        """KL of each as bars, and the table."""
        bars = Bars(
            [one.name for one in self.losses],
            np.array([one.kl for one in self.losses]),
            "KL, nats",
            heading="Each matrix alone",
            order="the heaviest first",
        )
        table = self.table(len(self.losses))
        note = (
            "Each quantised matrix alone in the model of floats: the relative error of its numbers and of its "
            "product's output, KL (floats || with this matrix) in nats, and the share of positions with the same "
            "top token."
        )
        table.title, table.on_page = None, {"heading": "Matrices", "note": note, "most": 24}
        return View("Matrices, each alone", [bars, table], facts=", ".join(self._facts()))


def percent(share: float | None) -> str:
    """A share in percent; a dash where there is none."""
    return NO_NUMBER if share is None else f"{decimal(100 * share, 1)} %"
