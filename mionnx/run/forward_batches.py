"""`forward_batches`: a forward pass over a list of prompts, in batches of like length."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.logit_selection import Logits
from mionnx.bind.spec_rows import SpecRows, differs_by_row
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import ATTENDS_TO_PADDING
from mionnx.inputs.prompt_list import PromptList, read_prompts
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.run.batching import in_batches
from mionnx.run.forward_pass import PassModel, bind_pass, run_pass
from mionnx.run.hook_cache import HookCache
from mionnx.run.hook_caches import HookCaches, rows_of
from mionnx.run.metric_feeds import metric_feeds
from mionnx.run.pass_memory import fitting, refuse_all
from mionnx.spec.hook_spec import HookSpec


def takes_padding(model: HookedModel) -> bool:
    """Whether rows of unequal length may run as one batch."""
    return ATTENDS_TO_PADDING not in model.metadata.exporter


def forward_batches(
    model: PassModel,
    tokens: Any,
    spec: HookSpec,
    batch_size: int | str,
    *,
    attention_mask: ArrayLike | None,
    past: Past | None,
    use_cache: bool,
    prompt_length: int | Sequence[int] | None,
    logits: bool | Logits,
) -> HookCaches:
    """Run a list of prompts; arguments as `Runner.forward` takes them.

    Values, positions, tokens and limits of rows in the spec are those of the list; each batch gets its rows' part.

    Raises:
        InputError: as `forward`, and results that memory does not hold together.
        InterventionError, GradientError: as `forward`, and values that the rows of batches cannot share.
    """
    sizes = model.hooked.metadata.sizes
    bound = bind_pass(model.binder, spec, logits, use_cache)
    prompts = read_prompts(tokens, attention_mask, past, sizes)
    whole = None
    if differs_by_row(bound) or prompt_length is not None:
        whole = make_token_batch(tokens, attention_mask, past, sizes, prompt_length)
        bound.check(whole, use_cache)
        metric_feeds(model, bound, whole)
    refuse_all(bound, prompts.lengths, prompts.seen, use_cache)
    batches: list[list[int]] = []

    def run(rows: list[int]) -> list[HookCache]:
        batches.append(rows)
        batch, part, here = _part(model, prompts, rows, bound, whole, logits, use_cache)
        asked: dict[str, Any] = {"use_cache": use_cache, "logits": bool(logits), "effective": whole is not None}
        return rows_of(run_pass(model, part, batch, here, **asked), part, batch)

    fit = fitting(bound, prompts.seen, use_cache)
    padded = takes_padding(model.hooked)
    rows = in_batches(prompts.lengths, batch_size, run, stage="forward", padded=padded, fitting=fit)
    return HookCaches(rows, batches)


def _part(
    model: PassModel,
    prompts: PromptList,
    rows: list[int],
    bound: BoundSpec,
    whole: TokenBatch | None,
    logits: bool | Logits,
    use_cache: bool,
) -> tuple[TokenBatch, BoundSpec, Past | None]:
    """The tokens, spec and past of some rows."""
    ids, mask, past = prompts.part(rows)
    lengths = None if whole is None or whole.prompt_lengths is None else whole.prompt_lengths[rows].tolist()
    batch = make_token_batch(ids, mask, past, model.hooked.metadata.sizes, lengths)
    if whole is None:
        return batch, bound, past
    return batch, bind_pass(model.binder, SpecRows(bound, whole).of(rows, batch.seq), logits, use_cache), past
