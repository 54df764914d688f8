"""Refusals where a graph has no cache, heeds no padding, or has no residual stream of the usual kind."""

from mionnx.errors import InputError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import ATTENDS_TO_PADDING, NEXT_TOKEN, NORMED_STREAM
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.once import Once

ADDING = frozenset(("Add", "Sum", "Identity", "Cast", "Reshape", "Constant"))  # operators of a plain sum
SUMMED = ("ResidPre", "ResidMid", "ResidPost", "AttnOut", "SsmOut", "MlpOut")  # and what is added to them
_plain: Once[str, bool] = Once()  # digest of a graph -> whether its stream is a plain sum


def refuse_without_cache(model: HookedModel, what: str) -> None:
    """Refuse what needs a cache, "generate" for one, if the graph takes no past."""
    if model.metadata.reads_whole:
        kind = "an encoder" if model.metadata.bidirectional else f"a model with the head {model.metadata.head!r}"
        both = " and in both directions" if model.metadata.bidirectional else ""
        raise InputError(
            f"{what} has no meaning for {kind}: {model.name} reads each text whole{both}, so that nothing can be "
            "continued or kept from one call to the next. forward, fill_mask, classify, tag, embed and the analyses "
            "run on whole texts"
        )
    if not model.has_cache:
        raise InputError(
            f"{what} needs a cache, and the graph of {model.folder} has none: it takes no past_key_values. Single "
            "passes without a cache work; adopt or export the model again from a file with a cache"
        )


def refuse_padding(model: HookedModel, batch: TokenBatch) -> None:
    """Refuse padded texts, if the graph does not heed its attention mask."""
    if ATTENDS_TO_PADDING in model.metadata.exporter and batch.padded:
        raise InputError(
            f"the graph of {model.folder} attends to padding, which its file gave no mask for: give texts of one length"
        )


def refuse_without_vocabulary(model: HookedModel, what: str) -> None:
    """Refuse to read streams as tokens, "the logit lens" for one, if the head gives none."""
    if model.metadata.head not in (NEXT_TOKEN, "masked_lm"):
        raise InputError(
            f"{what} reads a stream as tokens, and {model.name} has the head {model.metadata.head!r}, which gives "
            "none: a masked language model of the same family has such a head"
        )


def refuse_without_distribution(model: HookedModel, what: str) -> None:
    """Refuse what measures the KL of predictions, "a budget" for one, if the main output has no probabilities."""
    if not model.metadata.has_distribution:
        output = "numbers of a regression" if model.metadata.output == LOGITS else f"vectors ({model.metadata.output})"
        raise InputError(
            f"{what} measures the KL of predictions, and {model.name} gives {output}, which have no probabilities. "
            "verify(other=) compares two models by hook point and by layer"
        )


def refuse_normed_stream(model: HookedModel, what: str) -> None:
    """Refuse what takes the residual stream for a sum, "attribution" for one, if it is normed between additions."""
    if NORMED_STREAM in model.metadata.exporter:
        raise InputError(
            f"{what} takes the residual stream for the sum of what layers add to it, and {model.metadata.family!r} "
            "norms it between additions. Patching sweeps, ablation and captures work"
        )


def refuse_other_than_sums(model: HookedModel, what: str) -> None:
    """The same where the stream, or a part of it, is multiplied between additions (Doge, Gemma 4, RWKV-4) too."""
    refuse_normed_stream(model, what)
    if not adds_plainly(model):
        raise InputError(
            f"{what} takes the residual stream for the sum of what layers add to it, and {model.metadata.family!r} "
            "multiplies it by numbers between additions. Patching sweeps, ablation and captures work"
        )


def adds_plainly(model: HookedModel) -> bool:
    """Whether each stream is the one before and what a layer adds, with neither a factor nor a norm between."""
    return _plain.get(model.digest, lambda: _adds_plainly(model))


def _adds_plainly(model: HookedModel) -> bool:
    flow, hooks, layers = Dataflow(model.proto), model.metadata.hooks, model.metadata.sizes.num_layers
    operators = ADDING | ({"Mul"} if model.metadata.exponents else frozenset())  # of a rescaled file
    for layer in range(layers):
        pre, mid, post, *outputs = (str(getattr(HookPoint, kind)(layer)) for kind in SUMMED)
        sums = {mid: {pre, *outputs}, post: {mid, pre, *outputs}}
        if layer + 1 < layers:
            sums[str(HookPoint.ResidPre(layer + 1))] = {post}
        for end, parts in sums.items():
            nodes = flow.ancestors([end], parts - {end}) if end in hooks else ()
            if any(flow.nodes[node].op_type not in operators for node in nodes):
                return False
    return True


def refuse_several_streams(model: HookedModel, what: str) -> None:
    """Refuse to go on from the residual stream alone, as "the logit lens" does, if the logits read more than that."""
    last = HookPoint.ResidPost(model.metadata.sizes.num_layers - 1).name
    flow = Dataflow(model.proto)
    # masks and positions of the call say nothing of the text: reading them makes no second stream
    inputs = {entry.name for entry in model.proto.graph.input} - {"attention_mask", "position_ids"}
    # a batch size or length that is read besides is no second stream, nor which tokens are those for padding
    shapes = {name for node in flow.nodes if node.op_type in ("Shape", "Size", "Equal") for name in node.output}
    if inputs & flow.read_by(flow.ancestors([LOGITS], sources={last, *shapes})):
        raise InputError(
            f"{what} goes on from the residual stream, and {model.metadata.family!r} has several streams side by side: "
            f"its logits read more than {last}. Captures, interventions, gradients and generation work"
        )
