"""`Row`: a hook point beside another run; `LayerLoss`: what a layer adds to the distance of two models."""

from collections.abc import Mapping
from dataclasses import dataclass

from mionnx.graph.hook_points import HookPoint
from mionnx.machine.stored import Storable
from mionnx.verify.difference import Difference


@dataclass(frozen=True)
class Row(Storable):
    """One hook point in one runtime beside the first.

    Attributes:
        scale: the largest absolute value in the first runtime.
        relative: max_abs as a share of scale.
        max_ulp, mean_ulp: distance in units in the last place, of the coarser of the two models' dtypes.
        identical: whether all bits are.
        finite: whether the first runtime has numbers only: NaN agrees with NaN, and says nothing.
        local: what this step alone adds, as a share of scale; None where it was not measured.
        lost: length of the difference, as a share of the value's length in this runtime.
    """

    name: str
    max_abs: float
    mean_abs: float
    scale: float
    relative: float
    cosine: float
    max_ulp: float
    mean_ulp: float
    identical: bool
    finite: bool
    local: float | None = None
    lost: float = 0.0

    @classmethod
    def of(cls, name: str, difference: Difference, local: Difference | None) -> "Row":
        """From what was added up."""
        added = None if local is None else local.relative
        return cls(name, difference.max_abs, difference.mean_abs, difference.scale, difference.relative,
                   difference.cosine, difference.max_ulp, difference.mean_ulp, difference.identical, difference.finite,
                   added, difference.lost)  # fmt: skip


@dataclass(frozen=True)
class LayerLoss(Storable):
    """One layer's share of the distance of two models.

    A distance is the length of the difference of two residual streams over all positions, as a share of the length of
    the second model's stream.

    Attributes:
        added: what is after less what was before; negative where the layer mends something.
    """

    layer: int
    before: float
    after: float
    added: float


def layer_losses(lost: Mapping[str, float]) -> list[LayerLoss]:
    """The layers whose stream was compared before and after them.

    Args:
        lost: hook point -> distance.
    """
    layers = sorted({layer for name in lost if (layer := HookPoint.parse(name).layer) is not None})
    losses = []
    for layer in layers:
        before, after = lost.get(str(HookPoint.ResidPre(layer))), lost.get(str(HookPoint.ResidPost(layer)))
        if before is not None and after is not None:
            losses.append(LayerLoss(layer, before, after, after - before))
    return losses
