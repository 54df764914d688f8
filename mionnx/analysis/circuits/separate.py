"""Refusals of models with parts that are not separate: edges between them would say nothing."""

from collections.abc import Collection, Iterator

from mionnx.errors import InputError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS

Way = tuple[str, tuple[str, ...]]  # a value, and those that it may be computed from


def refuse_inseparable(model: HookedModel, parallel: bool) -> None:
    """Refuse a model whose parts read something besides the stream, by its graph's structure.

    Raises:
        InputError: a hook point that is missing, or a value that is computed from the tokens by a further way; or
            activations that are rounded with one scale for all rows of a call.
    """
    family = model.metadata.family
    if model.rounds_by_call:
        raise InputError(f"edges: {family!r} rounds activations with one scale for a whole call, so rows are not apart")
    flow = Dataflow(model.proto)
    entries = {entry.name for entry in model.proto.graph.input} - {"attention_mask", "position_ids"}
    entries = {name for name in entries if not name.startswith("past")}
    entries -= {tensor.name for tensor in model.proto.graph.initializer}
    shapes = {name for node in flow.nodes if node.op_type in ("Shape", "Size") for name in node.output}
    for value, sources in _ways(model.metadata.sizes.num_layers, parallel):
        for name in (value, *sources):
            if name != LOGITS and name not in model.metadata.hooks:
                raise InputError(f"edges: {family!r} has no hook point {name}, by which its parts would be told apart")
        if entries & flow.read_by(flow.ancestors([value], {*sources, *shapes} - {value})):
            raise InputError(
                f"edges: in {family!r}, {value} depends on the tokens by another way than {', '.join(sources)}, so "
                "what it reads is no sum of what others send. Patching sweeps, captures and gradients work"
            )


def _ways(layers: int, parallel: bool) -> Iterator[Way]:
    """Each value, and the values that it is computed from."""
    for layer in range(layers):
        pre, mid, post, q, k, v, z, out, into, mlp = (
            str(getattr(HookPoint, variant)(layer))
            for variant in (
                *("ResidPre", "ResidMid", "ResidPost", "AttnQ", "AttnK", "AttnV"),
                *("AttnZ", "AttnOut", "MlpPre", "MlpOut"),
            )
        )
        middle = pre if parallel else mid
        yield from ((one, (pre,)) for one in (q, k, v))
        yield z, (q, k, v)
        yield out, (z,)
        if not parallel:
            yield mid, (pre, out)
        yield into, (middle,)
        yield mlp, (into,)
        yield post, (pre, out, mlp) if parallel else (mid, mlp)
        if layer + 1 < layers:
            yield str(HookPoint.ResidPre(layer + 1)), (post,)
    yield str(HookPoint.FinalNorm), (str(HookPoint.ResidPost(layers - 1)),)
    yield LOGITS, (str(HookPoint.FinalNorm),)


LINEAR = frozenset(
    (
        "MatMul",
        "Gemm",
        "Add",
        "Sub",
        "Mul",
        "Reshape",
        "Transpose",
        "Identity",
        "Squeeze",
        "Unsqueeze",
        "Cast",
        "Concat",
    )
)


def writes_linearly(model: HookedModel, layer: int) -> bool:
    """Whether an attention's output is a sum over its heads, by linear operators alone.

    Gemma 2, for one, norms the sum of all heads before it is added to the stream.
    """
    z, out = str(HookPoint.AttnZ(layer)), str(HookPoint.AttnOut(layer))
    flow = Dataflow(model.proto)
    moving = flow.descendants([z])
    nodes = (flow.nodes[i] for i in flow.ancestors([out], [z]) if moving & {*flow.reads[i]})
    return all(node.op_type in LINEAR and sum(name in moving for name in node.input) == 1 for node in nodes)


def differing(names: Collection[str], family: str) -> InputError:
    """The refusal of a stream that is no sum, found by its numbers."""
    return InputError(
        f"edges: in {family!r}, {', '.join(names)} is not what the stream before and the outputs of its layer add up "
        "to, so no edge can be told from another. Patching sweeps, captures and gradients work"
    )
