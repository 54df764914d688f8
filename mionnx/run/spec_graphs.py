"""Verbs of a model about the graph that a spec makes of it."""

from dataclasses import replace

from mionnx.bind.estimate import Estimate
from mionnx.bind.logit_selection import Logits
from mionnx.graph import onnx_file
from mionnx.inputs.lacking import refuse_without_cache
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.rewrite import Report, rewrite
from mionnx.rewrite.plan import Outputs
from mionnx.run.batching import pass_bytes
from mionnx.run.call_graph import bind_pass, open_call
from mionnx.run.graph_memory import NODE, SESSION, idle_limit
from mionnx.run.open_graphs import OpenGraph
from mionnx.run.open_model import OpenModel
from mionnx.spec.hook_spec import HookSpec

SECONDS, PACKED = 2e-4, 2**29  # of opening a node, and bytes packed a second: one core of 2026, GPT-2's shape
COPIES = 2  # of each weight that the products of a gradient graph pack: as it is, and turned


@typed()
def compile_graph(model: OpenModel, hooks: HookSpec | None = None, outputs: Outputs | None = None) -> OpenGraph:
    """The open graph of a spec that `forward` runs on one text; opened on first use.

    Args:
        outputs: the model's own outputs to compute; those of `forward` if left out.

    Raises:
        HookError, InterventionError: the spec does not fit the model.
    """
    spec = hooks or HookSpec()
    if outputs is None:
        bound = bind_pass(model.binder, spec, True, False)
    else:
        bound = model.binder.bind(spec, outputs, differentiated=True)
    return open_call(model.variants, bound, outputs=bound.outputs(outputs is not None and outputs.carried))


@typed()
def warm(model: OpenModel, hooks: HookSpec, logits: bool | Logits = True) -> None:
    """Open the graph of a spec now, so that the first `forward` does not wait for it.

    Example:
        model.warm(HookSpec().capture("blocks.*.attn.hook_pattern"))
    """
    bound = bind_pass(model.binder, hooks, logits, False)
    open_call(model.variants, bound, outputs=bound.outputs(False))


def prepare(model: OpenModel) -> bool:
    """Make the prepacked base of this model: graphs open quickly and share its weights.

    It takes about twice the size of the weights in the store, and serves every later process on this machine; see
    `mionnx.run.prepacked`.

    Returns:
        whether there is one: not if the store cannot hold it, or the provider is not the CPU.
    """
    return model.variants.prepare()


@typed()
def report(model: OpenModel, hooks: HookSpec) -> Report:
    """The nodes, inputs and outputs that a spec's rewrite adds and removes.

    Example:
        print(model.report(HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero())))
    """
    hooked = model.binder.model
    if not hooked.has_weights:  # no graph of it can be opened
        return rewrite(hooked.proto, model.binder.bind(hooks).plan, hooked.metadata)[1]
    return compile_graph(model, hooks).report


@typed()
def estimate(
    model: OpenModel,
    hooks: HookSpec,
    batch: int,
    seq: int,
    past: int = 0,
    *,
    use_cache: bool = False,
    logits: bool | Logits = True,
) -> Estimate:
    """Estimate a spec's captures, its pass, the opening of its gradients' graph, and what weights take.

    A graph without weights can be asked too, such as that of a model which does not fit here.

    Args:
        batch, seq: of the call.
        past: tokens in the cache.
        use_cache, logits: as `forward` is given them: `passing` counts what it refuses.

    Raises:
        InputError: no rows, no tokens, a negative past, or one of a graph without a cache.
        GradientError: an operator without a rule.

    Example:
        model.estimate(HookSpec().capture("*"), batch=1, seq=128).total
    """
    for name, number, least in (("batch", batch, 1), ("seq", seq, 1), ("past", past, 0)):
        at_least(name, number, least)
    if past:
        refuse_without_cache(model.binder.model, "a past")
    bound = bind_pass(model.binder, hooks, logits, use_cache)
    sizes = bound.estimate(batch, seq, past + seq)
    hooked, variants = model.binder.model, model.variants
    passing = pass_bytes(bound, batch, seq, past + seq, use_cache)
    sizes = replace(sizes, passing=passing, weights=variants.weights, store=variants.base_to_come)
    if not bound.gradients:
        return sizes
    nodes = len(onnx_file.parse(rewrite(hooked.proto, bound.plan, hooked.metadata)[0]).graph.node)
    packed = COPIES * variants.weights * (variants.packs_gradients and variants.packs(batch * seq))
    return replace(sizes, graph=SESSION + NODE * nodes + packed, opening=SECONDS * nodes + packed / PACKED)


@typed()
def give_back(model: OpenModel, *, later: bool = False) -> None:
    """Return memory in use no more: idle graphs, free arenas.

    Analyses do so themselves when they end. Call it where large captures are no longer needed.

    Args:
        later: keep free memory until no graph has been used for two seconds, as analyses do: the next one needs it.

    Example:
        cache = model.forward("The capital of France is", HookSpec().capture("*"))
        del cache
        model.give_back()
    """
    allowed = idle_limit(model.variants.weights)
    for pool in model.pools:
        pool.close_idle(allowed)
    model.idle.release(allowed, model.release_memory, later)
