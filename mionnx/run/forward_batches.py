"""`forward_batches`: a forward pass over a list of prompts, in batches of like length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.logit_selection import Logits
from mionnx.bind.spec_rows import SpecRows, differs_by_row
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import ATTENDS_TO_PADDING
from mionnx.inputs.prompt_list import PromptList, read_prompts
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.run.batching import AUTO, PER_BATCH, BatchSize, in_batches
from mionnx.run.call_graph import bind_pass
from mionnx.run.forward_pass import metric_feeds, run_pass
from mionnx.run.hook_cache import HookCache
from mionnx.run.hook_caches import joined, rows_of
from mionnx.run.open_model import OpenModel
from mionnx.run.pass_memory import fitting, refuse_all
from mionnx.spec.hook_spec import HookSpec

T = TypeVar("T")


def takes_padding(model: HookedModel) -> bool:
    """Whether rows of unequal length may run as one batch."""
    return ATTENDS_TO_PADDING not in model.metadata.exporter


@dataclass(frozen=True)
class ListRequest:
    """A pass over a list of prompts.

    Attributes:
        tokens, attention_mask, past, prompt_length, logits, use_cache: as `Runner.forward` takes them.
        spec: captures and interventions; its values, positions, tokens and limits of rows are those of the list.
        batch_size: most rows of a batch, or "auto"; None for one batch.
    """

    tokens: Any
    spec: HookSpec
    batch_size: BatchSize
    attention_mask: ArrayLike | None = None
    past: Past | None = None
    prompt_length: int | Sequence[int] | None = None
    logits: bool | Logits = True
    use_cache: bool = False


# of the spec, tokens and past of some rows, whether its effects are known, and the rows' numbers
Run = Callable[[HookSpec, TokenBatch, Past | None, bool, list[int]], HookCache]


def in_one_pass(bound: BoundSpec, batch: TokenBatch, batch_size: BatchSize, use_cache: bool = False) -> bool:
    """Whether all rows run at once: they fit into memory, and few are padding."""
    if batch_size != AUTO or batch.batch == 1:
        return batch_size is None or batch.batch == 1
    sparse = 2 * batch.real.sum() < batch.real.size > PER_BATCH
    return not sparse and batch.batch <= fitting(bound, batch.total - batch.seq, use_cache)(batch.seq)


def forward_batches(model: OpenModel, request: ListRequest) -> HookCache:
    """Run a list of prompts in batches; the results are those of one batch."""
    rows = map_rows(model, request, lambda _, cache: cache, "forward", keep=True)
    sizes = model.hooked.metadata.sizes
    batch = make_token_batch(request.tokens, request.attention_mask, request.past, sizes, request.prompt_length)
    return joined(rows, bind_pass(model.binder, request.spec, request.logits, request.use_cache), batch)


def map_rows(
    model: OpenModel,
    request: ListRequest,
    read: Callable[[int, HookCache], T],
    stage: str,
    *,
    run: Run | None = None,
    keep: bool = False,
    progress: bool | None = None,
) -> list[T]:
    """Run a list of prompts in batches, and make something of the results of each.

    Args:
        read: makes something of a prompt's number and its results, [1, seq, ...] without padding.
        run: runs one batch; a forward pass if left out.
        keep: whether all results are kept, padded, so that memory must hold them together.

    Returns:
        what `read` made, in the order given.
    """
    prompts = _Prompts.of(model, request)
    bound = prompts.bound
    if keep:
        refuse_all(bound, [max(prompts.rows.lengths)] * len(prompts.rows), prompts.rows.seen, request.use_cache)
    run_batch = run or partial(_forward, model, request)

    def run_rows(rows: list[int]) -> list[T]:
        spec, batch, past = prompts.part(model, rows)
        cache = run_batch(spec, batch, past, prompts.batch is not None, rows)
        return [read(row, one) for row, one in zip(rows, rows_of(cache, bound, batch), strict=True)]

    return in_batches(
        prompts.rows.lengths,
        request.batch_size,
        run_rows,
        stage=stage,
        padded=takes_padding(model.hooked),
        fitting=fitting(bound, prompts.rows.seen, request.use_cache),
        progress=progress,
    )


@dataclass(frozen=True)
class _Prompts:
    """The prompts of a request.

    Attributes:
        batch: all of them as one batch, where the spec has something by row; its effects are known then.
    """

    bound: BoundSpec
    rows: PromptList
    batch: TokenBatch | None

    @classmethod
    def of(cls, model: OpenModel, request: ListRequest) -> Self:
        """Read the prompts, and check the spec on all of them where it has something by row."""
        bound = bind_pass(model.binder, request.spec, request.logits, request.use_cache)
        tokens = request.tokens, request.attention_mask, request.past, model.hooked.metadata.sizes
        prompts, batch = read_prompts(*tokens), None
        if differs_by_row(bound) or request.prompt_length is not None:
            batch = make_token_batch(*tokens, request.prompt_length)
            bound.check(batch, request.use_cache)
            metric_feeds(model, bound, batch)
        return cls(bound, prompts, batch)

    def part(self, model: OpenModel, rows: list[int]) -> tuple[HookSpec, TokenBatch, Past | None]:
        """The spec, tokens and past of some rows."""
        ids, mask, past = self.rows.part(rows)
        lengths = None if self.batch is None else self.batch.prompt_lengths
        prompts = None if lengths is None else lengths[rows].tolist()
        batch = make_token_batch(ids, mask, past, model.hooked.metadata.sizes, prompts)
        spec = self.bound.spec if self.batch is None else SpecRows(self.bound, self.batch).of(rows, batch.seq)
        return spec, batch, past


def _forward(
    model: OpenModel,
    request: ListRequest,
    spec: HookSpec,
    batch: TokenBatch,
    past: Past | None,
    effective: bool,
    rows: list[int],
) -> HookCache:
    """Run one batch."""
    bound = bind_pass(model.binder, spec, request.logits, request.use_cache)
    logits = bool(request.logits)
    return run_pass(model, bound, batch, past, use_cache=request.use_cache, logits=logits, effective=effective)
