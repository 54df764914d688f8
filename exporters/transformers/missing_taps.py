"""Whether the taps fit a family that no table knows: the model without weights is run once, and must show them all."""

from typing import Any

import torch
from torch import Tensor

from exporters.transformers import trace
from exporters.transformers.families import layout_of
from mionnx.graph.hook_points import HookPoint

OUTSIDE = (HookPoint.Embed, HookPoint.Logits)
INSIDE = (
    *(
        HookPoint.ResidPre,
        HookPoint.AttnQ,
        HookPoint.AttnK,
        HookPoint.AttnV,
        HookPoint.AttnScores,
        HookPoint.AttnPattern,
    ),
    *(HookPoint.AttnZ, HookPoint.AttnOut, HookPoint.MlpPre, HookPoint.MlpPost, HookPoint.MlpOut, HookPoint.ResidPost),
)


def missing_taps(config: Any, dtype: torch.dtype) -> str | None:
    """Name what taps by the table's layout do not find in a family; None if nothing.

    Args:
        config: changed: a copy of the checkpoint's.
        dtype: of the model.
    """
    seen = set[str]()

    def listen(name: str, value: Tensor, stream: bool) -> Tensor:
        seen.add(name)
        return value

    try:
        skeleton = trace.skeleton_of(config, dtype)
        with torch.device("meta"), trace.quiet(), torch.no_grad():
            ids = torch.ones(1, 2, dtype=torch.long)
            _, cache = trace.Cached(skeleton, layout_of(config), listen)(ids, ids, ids, [])
    except Exception as error:  # whatever a family's code raises where it is laid out otherwise
        return f"{config.model_type!r}: {error}"
    wanted = [*OUTSIDE, *(point(layer) for layer in range(len(cache)) for point in INSIDE)]
    absent = [str(point) for point in wanted if str(point) not in seen]
    return f"{config.model_type!r} shows no {absent[0]} where taps look for it" if absent else None
