"""One graph for passes and generations of a model of blocks, so that its packed weights are held once.

A pass gives the logits of all positions, a generation those of the last: two graphs, and ONNX Runtime packs all blocks
for each session. Here an input says from which column on there are logits, and one session serves both, with the same
bits: what comes before the head is not touched.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.options import ONNX_RUNTIME, PROVIDERS, Options
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.rewrite.plan import LOGIT_BEGIN, NONE, Outputs, Plan

SHARED = (Outputs(), Outputs(last=True))


def with_shared_head(plan: Plan, model: HookedModel, options: Options) -> tuple[Plan, dict[str, NDArray[np.int64]]]:
    """The plan of one graph for passes and generations, and its input that tells them apart.

    Args:
        plan: the structure.
        model: the hooked model.
        options: how its graphs are opened.

    Returns:
        the plan to open, and further inputs of it; the plan itself, and none, where there is nothing to share.
    """
    if not (model.in_blocks and _packs(options) and _shares(plan)):
        return plan, {}
    begin = np.array([-1 if plan.outputs.last else 0])
    return replace(plan, outputs=replace(plan.outputs, last=False, begins=True)), {LOGIT_BEGIN: begin}


def _packs(options: Options) -> bool:
    """Whether sessions hold packed weights of their own: on the CPU."""
    return options.engine == ONNX_RUNTIME and options.provider in ("cpu", PROVIDERS["cpu"])


def _shares(plan: Plan) -> bool:
    """Whether a plan asks for all logits or the last ones, of tokens, and touches none."""
    touched = {*(edit.hook for edit in plan.edits), *(want.hook for want in plan.captures)}
    plain = plan.fused == NONE and not plan.starts and plan.gradients is None
    return plain and plan.outputs in SHARED and HookPoint.Logits.name not in touched
