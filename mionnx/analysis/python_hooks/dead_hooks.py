"""Functions on whose values nothing that is returned depends: they may look, and what they change is refused."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InterventionError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel

STATE = "RwkvState"


def idle(model: HookedModel, hooks: Collection[str], returned: Collection[str]) -> set[str]:
    """The hooked values that nothing returned, and no other function, is computed from.

    Args:
        model: the hooked model.
        hooks: where there are functions.
        returned: outputs of the graph and captured hook points. If there are none, functions are there to look, and
            what they make of a value is theirs to know.
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
    """Whether a captured value lies within a splice, of which the model's own graph knows nothing."""
    return HookPoint.parse(name).variant == "Custom" and "hook_" in name


def _source(name: str) -> str:
    """The value of the graph that a captured one is computed from."""
    return str(HookPoint.parse(name).source)


def refuse_change(name: str, before: NDArray[np.floating], after: NDArray[np.floating]) -> NDArray[np.floating]:
    """A value that nothing depends on, if it is as it was.

    Raises:
        InterventionError: it was changed.
    """
    if np.array_equal(before, after):
        return after
    instead = "run_with_cache returns the state" if HookPoint.parse(name).variant == STATE else "ask for more"
    raise InterventionError(f"a function changed {name}, and nothing that is returned depends on it: {instead}")
