"""Dead hooks: no returned value depends on the hooked one, so a function may read it but not change it."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InterventionError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel

STATE = "RwkvState"


def dead_hooks(model: HookedModel, hooks: Collection[str], returned: Collection[str]) -> set[str]:
    """Find hooked values that no returned value, and no other function's, is computed from.

    Args:
        hooks: names of the hook points with functions.
        returned: outputs of the graph and captured hook points. If there are none, functions only read, and their
            changes are theirs to know: nothing is refused.
    """
    ends = {_source(name) for name in returned}
    doubtful = [name for name in hooks if "logits" not in ends or HookPoint.parse(name).variant == STATE]
    if not returned or not doubtful or any(_of_a_splice(name) for name in returned):
        return set()
    flow = Dataflow(model.proto)
    return {
        name for name in doubtful if name not in ends and flow.descendants([name]).isdisjoint({*ends, *hooks} - {name})
    }


def _of_a_splice(name: str) -> bool:
    """Whether a captured value lies within a splice, outside the model's own graph."""
    return HookPoint.parse(name).variant == "Custom" and "hook_" in name


def _source(name: str) -> str:
    """The value of the graph from which a captured one is derived."""
    return str(HookPoint.parse(name).source)


def refuse_change(name: str, before: NDArray[np.floating], after: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return a value on which nothing depends, if it is unchanged.

    Raises:
        InterventionError: it was changed.
    """
    if np.array_equal(before, after):
        return after
    instead = "run_with_cache returns the state" if HookPoint.parse(name).variant == STATE else "ask for more"
    raise InterventionError(f"a function changed {name}, and nothing that is returned depends on it: {instead}")
