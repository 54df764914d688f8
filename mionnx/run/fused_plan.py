"""Plans with the fused operators of an adopted file, as far as they are right for a call.

Fused attention takes lengths from the number of ones in the mask: padding is not where it looks for it, and with a past
it takes one row or one token at a time. Such calls run the standard nodes instead, which are right for all.
"""

from dataclasses import replace

from mionnx.engine.options import ONNX_RUNTIME, PROVIDERS, Options
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.rewrite.plan import ALL, PADDED, Plan


def with_fused(plan: Plan, model: HookedModel, options: Options, batch: TokenBatch | None = None) -> Plan:
    """The plan with the fused operators of its file, those that are right for a call.

    They stand in ONNX Runtime on the CPU alone: that is where they are compared with the nodes that stand for them.

    Args:
        plan: the structure.
        model: the hooked model.
        options: how its graphs are opened.
        batch: the tokens; texts without padding if left out.
    """
    here = options.engine == ONNX_RUNTIME and PROVIDERS.get(options.provider, options.provider) == PROVIDERS["cpu"]
    if not (model.metadata.fused and options.fused and here) or plan.starts or plan.gradients:
        return plan
    return replace(plan, fused=ALL if batch is None or _attends(batch) else PADDED)


def _attends(batch: TokenBatch) -> bool:
    """Whether fused attention is right for a call."""
    past = batch.total - batch.seq
    return bool(batch.attention_mask.all()) and (past == 0 or batch.seq == 1 or batch.batch == 1)
