"""Plans with the operators of an adopted file as it came, as far as they are right for a call.

1. A spec that touches nothing runs the file's own graph, for the kinds of calls in which it gives what the hooked graph
   gives (`stock_calls`): with `fast`, or where the hooked graph has standard nodes in place of the file's operators.
2. Otherwise fused operators stand where nothing inside them is touched. Fused attention takes lengths from the number
   of ones in the mask: padding is not where it looks for it, and with a past it takes one row or one token at a time.
   Such calls run the standard nodes instead, which are right for all.
"""

from collections.abc import Sequence
from dataclasses import replace

from mionnx.engine.kernels import without_kernel
from mionnx.engine.options import ONNX_RUNTIME, PROVIDERS, Options
from mionnx.graph import stock_graph
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.inputs.token_batch import TokenBatch
from mionnx.rewrite.plan import ALL, PADDED, STOCK, Plan
from mionnx.run import stock_calls


def with_fused(
    plan: Plan,
    model: HookedModel,
    options: Options,
    batch: TokenBatch | None = None,
    outputs: Sequence[str] = (),
    *,
    continues: bool = False,
) -> Plan:
    """The plan with the operators of its file, those that are right for a call.

    They stand in ONNX Runtime alone. They are compared with the nodes that stand for them on the CPU; on another
    provider they stand if it has kernels for all of them in the model's dtype.

    Args:
        plan: the structure.
        model: the hooked model.
        options: how its graphs are opened.
        batch: the tokens; one text of several tokens if left out.
        outputs: of the model's own, those that are fetched.
        continues: whether calls of one token follow.
    """
    if options.engine != ONNX_RUNTIME or not options.fused or plan.starts or plan.gradients:
        return plan
    if not (model.metadata.fused or model.metadata.stock) or not _has_kernels(model, options):
        return plan
    if not plan.touches and _stock_serves(model, options, batch, outputs, continues):
        return replace(plan, fused=STOCK)
    if not model.metadata.fused:
        return plan
    return replace(plan, fused=ALL if batch is None or _attends(batch) else PADDED)


def _has_kernels(model: HookedModel, options: Options) -> bool:
    """Whether the provider computes all fused operators of the file."""
    provider = PROVIDERS.get(options.provider, options.provider)
    return provider == PROVIDERS["cpu"] or not without_kernel(model.fused_kinds, provider, model.metadata.dtype)


def _stock_serves(
    model: HookedModel, options: Options, batch: TokenBatch | None, outputs: Sequence[str], continues: bool
) -> bool:
    """Whether the file's own graph serves a call, and those that follow."""
    stock = model.stock
    if stock is None or not (options.fast or stock.expanded):
        return False
    kind = stock_graph.SEVERAL if batch is None else kind_of(batch)
    if kind is None:
        return False
    if not stock.gives(name for name in outputs if name.startswith(KEYS_AND_VALUES.present)):
        return False
    later = kind & ~stock_graph.SEVERAL | stock_graph.PAST
    return stock_calls.serves(model, kind) and (not continues or stock_calls.serves(model, later))


def kind_of(batch: TokenBatch) -> int | None:
    """The kind of a call, by the flags of `stock_graph`; None if it is of none that are tried.

    That is padding behind a text, or so much before it that a call holds nothing else.
    """
    kind = stock_graph.ROWS * (batch.batch > 1) | stock_graph.PAST * (batch.total > batch.seq)
    kind |= stock_graph.SEVERAL * (batch.seq > 1)
    mask = batch.attention_mask
    if mask.all():
        return kind
    return kind | stock_graph.PADDED if (mask[:, 1:] >= mask[:, :-1]).all() else None


def _attends(batch: TokenBatch) -> bool:
    """Whether fused attention is right for a call."""
    past = batch.total - batch.seq
    return not batch.padded and (past == 0 or batch.seq == 1 or batch.batch == 1)
