"""Nodes of a transformer's computational graph: senders to the residual stream, and receivers.

1. Senders write to the stream: the embedding, each head, each recurrent mixer or head of it, each MLP. Receivers read
   it: each head's queries, keys and values, each mixer, each MLP, and the final norm, and so the logits. The receivers
   are those of path patching.
2. Stage 2 l is the stream before layer l, 2 l + 1 the one in its middle. Where blocks are parallel, the MLP reads at
   stage 2 l too, and what attention writes is read from 2 l + 2 on.
3. An edge is a sender and a receiver that reads at a stage at which the sender has written.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.path_runs import depends
from mionnx.analysis.sweep.receivers import INTO_ATTENTION, Receiver, entries_of, lesser_key, make_receivers
from mionnx.errors import HookError, InputError, nearest
from mionnx.graph.axes import heads_axis
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.lacking import refuse_normed_stream
from mionnx.run.runner import Runner
from mionnx.run.segments import Segments
from mionnx.spec.limits import indices_of

ROLES = dict(zip(INTO_ATTENTION, "qkkvg", strict=True))
POINTS = ("ResidPre", "ResidMid", "ResidPost", "AttnZ", "AttnOut", "MlpPre", "MlpOut")


@dataclass(frozen=True)
class Node:
    """A sender or a receiver."""

    # "embed", "a2.h3", "r2.h1" (a head of a recurrent mixer), "r2" (one without heads), "m1"; of receivers "a2.h3<q>",
    # "r2" (all of a mixer), "m1", "logits"; keys and values of grouped heads are called "a2.kv1<k>", or "a2.h3<k>"
    # where each head that reads them is a node.
    label: str
    hook: str  # the hook point of its value
    head: int | None  # which head of it; None where a value has no heads
    stage: int  # at which it reads, or from which on it is read

    @property
    def layer(self) -> int | None:
        """The layer; None outside the blocks."""
        return HookPoint.parse(self.hook).layer


@dataclass(frozen=True)
class Nodes:
    """The nodes of a model, in execution order."""

    senders: tuple[Node, ...]
    receivers: tuple[Node, ...]
    layers: int
    parallel: bool  # whether attention and MLP of a layer read the same stream, or there is one of the two
    mlps: frozenset[int]  # layers with an MLP
    attends: frozenset[int] = frozenset()  # layers with attention
    mixers: frozenset[int] = frozenset()  # layers with a recurrent mixer in the place of attention
    headed: frozenset[int] = frozenset()  # those of them whose mixer has heads
    normed: bool = False  # whether the stream is normed after each addition
    # Hook point of keys or values -> heads that share one of them, and are nodes of their own all the same.
    shared: Mapping[str, int] = field(default_factory=dict)
    # Value -> the stream that its nodes read besides its sources, and of which it takes nothing.
    idle: Mapping[str, str] = field(default_factory=dict)

    def own_head(self, node: Node) -> int | None:
        """The head of its hook point that a node reads."""
        return None if node.head is None else node.head // self.shared.get(node.hook, 1)

    def heads_point(self, layer: int) -> str | None:
        """The hook point of what a layer's heads write; None of a mixer without heads."""
        if layer in self.attends:
            return str(HookPoint.AttnZ(layer))
        return str(HookPoint.SsmZ(layer)) if layer in self.headed else None

    def attention_inputs(self, layer: int) -> tuple[str, ...]:
        """The hook points of a layer's queries, keys and values, and of its heads' gates where it has some."""
        names = (str(getattr(HookPoint, variant)(layer)) for variant in ROLES)
        return tuple(name for name in names if name in self.read)

    @cached_property
    def read(self) -> frozenset[str]:
        """The hook points that receive."""
        return frozenset(node.hook for node in self.receivers)

    def outputs(self, layer: int) -> list[str]:
        """The hook points of what a layer's halves add, of one or both."""
        first, second = str(HookPoint.AttnOut(layer)), str(HookPoint.MlpOut(layer))
        return [*([first] if layer in self.attends | self.mixers else []), *([second] if layer in self.mlps else [])]

    @property
    def with_heads(self) -> dict[int, str]:
        """Layer -> the hook point of what its heads write."""
        points = ((layer, self.heads_point(layer)) for layer in range(self.layers))
        return {layer: point for layer, point in points if point is not None}

    @cached_property
    def edges(self) -> NDArray[np.bool_]:
        """[senders, receivers]: whether the receiver reads what the sender writes."""
        writes, reads = ([node.stage for node in nodes] for nodes in (self.senders, self.receivers))
        readable: NDArray[np.bool_] = np.less_equal.outer(writes, reads)
        return readable

    def stream(self, stage: int) -> str:
        """The hook point of the stream at a stage."""
        layer, middle = divmod(stage, 2)
        if layer == self.layers:
            return str(HookPoint.ResidPost(layer - 1))
        return str((HookPoint.ResidMid if middle else HookPoint.ResidPre)(layer))

    def sum_point(self, half: int) -> str:
        """The hook point of the sum that is normed to the stream behind half a layer."""
        layer, middle = divmod(half, 2)
        return str((HookPoint.ResidPostSum if middle else HookPoint.ResidMidSum)(layer))

    def out_point(self, half: int) -> str:
        """The hook point of what half a layer adds."""
        layer, middle = divmod(half, 2)
        return str((HookPoint.MlpOut if middle else HookPoint.AttnOut)(layer))

    def mlp_stage(self, layer: int) -> int:
        """The stage at which a layer's MLP reads."""
        return 2 * layer + (0 if self.parallel else 1)


def all_nodes(runner: Runner, ungrouped: bool = False) -> Nodes:
    """All nodes of a model; `ungrouped`: keys and values that heads share are nodes of each of these heads."""
    model = runner.hooked
    reading = make_receivers(model, "all")
    layers, parallel, normed = reading.layers, reading.parallel, reading.normed
    if normed and (parallel or str(HookPoint.ResidMidSum(0)) not in model.metadata.hooks):  # nothing is added apart
        refuse_normed_stream(model, "edges between nodes")
    mixers = frozenset(i for i in range(layers) if str(HookPoint.SsmPre(i)) in model.metadata.hooks)
    headed = frozenset(i for i in mixers if _has_heads(model, str(HookPoint.SsmZ(i))))
    attends = frozenset(i for i, layer in enumerate(model.metadata.layers) if layer.attention) - mixers
    mlps = frozenset(i for i in range(layers) if str(HookPoint.MlpOut(i)) in model.metadata.hooks)
    final = str(HookPoint.ResidPost(layers - 1) if normed else HookPoint.FinalNorm)
    inputs = {layer: tuple(_attention_inputs(model, layer)) for layer in attends}
    idle = _idle_streams(runner, _ways(layers, parallel, mlps, inputs, mixers, headed, final))
    senders = [Node("embed", str(HookPoint.Embed), None, 0)]
    receivers: list[Node] = []
    shared: dict[str, int] = {}
    for layer in range(layers):
        # A parallel layer's attention is read from the next layer on: one stage later.
        z, stage = str(HookPoint.AttnZ(layer)), 2 * layer + 1 + parallel
        if layer in mixers:
            mixed = str(HookPoint.SsmZ(layer))
            if layer in headed:
                senders += [Node(f"r{layer}.h{head}", mixed, head, stage) for head in range(_heads(model, mixed))]
            else:
                senders.append(Node(f"r{layer}", str(HookPoint.AttnOut(layer)), None, stage))
            receivers.append(Node(f"r{layer}", str(HookPoint.SsmPre(layer)), None, 2 * layer))
        elif layer in attends:
            senders += [Node(f"a{layer}.h{head}", z, head, stage) for head in range(_heads(model, z))]
            groups = _groups(model, layer) if ungrouped else {}
            receivers += _attention(model, layer, groups)
            shared |= groups
        if layer in mlps:
            senders.append(Node(f"m{layer}", str(HookPoint.MlpOut(layer)), None, 2 * layer + 2))
            receivers.append(Node(f"m{layer}", str(HookPoint.MlpPre(layer)), None, 2 * layer + 1 - parallel))
    receivers.append(Node("logits", final, None, 2 * layers))
    return Nodes(
        tuple(senders), tuple(receivers), layers, parallel, mlps, attends, mixers, headed, normed, shared, idle
    )


def _has_heads(model: HookedModel, z: str) -> bool:
    """Whether a mixer has heads, several, by what its output projection reads."""
    return z in model.metadata.hooks and _heads(model, z) > 1


def _idle_streams(runner: Runner, ways: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    """Value -> the stream that its nodes read and of which, by a trial, it takes nothing.

    Raises:
        InputError: parts of the model read something besides the stream.
    """
    model, idle = runner.hooked, dict[str, str]()
    family = model.metadata.family
    if model.rounds_by_call:
        raise InputError(f"edges: {family!r} rounds activations with one scale for a whole call, so rows are not apart")
    flow = Dataflow(model.proto)
    entries = {entry.name for entry in model.proto.graph.input} - {"attention_mask", "position_ids"}
    # Masks, positions and caches come to every layer beside the stream, and do not depend on what senders write.
    entries = {name for name in entries if not name.startswith("past")}
    entries -= {tensor.name for tensor in model.proto.graph.initializer}
    # Shapes depend on the tokens' number alone, so the way through them does not count.
    shapes = {name for node in flow.nodes if node.op_type in ("Shape", "Size") for name in node.output}
    for value, sources in ways:
        for name in (value, *sources):
            if name != LOGITS and name not in model.metadata.hooks:
                raise InputError(f"edges: {family!r} has no hook point {name}, by which its parts would be told apart")
        ends = {*sources, *shapes} - {value}
        if not entries & flow.read_by(flow.ancestors([value], ends)):
            continue
        # The stream before a layer may be read besides, and thrown away again.
        stream = str(HookPoint.ResidPre(HookPoint.parse(value).layer or 0))
        beside = stream in sources or entries & flow.read_by(flow.ancestors([value], ends | {stream}))
        if beside or depends(runner.opened(Segments.of_sweep), value, stream, sources):
            raise InputError(
                f"edges: in {family!r}, {value} depends on the tokens by another way than {', '.join(sources)}, so "
                "what it reads is no sum of what others send. Patching sweeps, captures and gradients work"
            )
        idle[value] = stream
    return idle


def _ways(
    layers: int,
    parallel: bool,
    mlps: frozenset[int],
    attends: Mapping[int, tuple[str, ...]],
    mixers: frozenset[int],
    headed: frozenset[int],
    final: str,
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each value, and the values that it is computed from."""
    for layer in range(layers):
        pre, mid, post, z, out, into, mlp = (str(getattr(HookPoint, kind)(layer)) for kind in POINTS)
        middle = pre if parallel else mid
        if layer in mixers:
            mixed = str(HookPoint.SsmPre(layer))
            heads = (str(HookPoint.SsmZ(layer)),) if layer in headed else ()
            yield mixed, (pre,)
            yield from ((one, (mixed,)) for one in heads)
            yield out, heads or (mixed,)
        elif layer in attends:
            yield from ((one, (pre,)) for one in attends[layer])
            yield z, attends[layer]
            yield out, (z,)
        if not parallel:
            yield mid, (pre, out)
        if layer in mlps:
            yield into, (middle,)
            yield mlp, (into,)
        first = (out,) if layer in attends or layer in mixers else ()
        ends = (pre, *first) if parallel else (mid,)
        yield post, (*ends, mlp) if layer in mlps else ends
        if layer + 1 < layers:
            yield str(HookPoint.ResidPre(layer + 1)), (post,)
    last = str(HookPoint.ResidPost(layers - 1))
    if final != last:
        yield final, (last,)
    yield LOGITS, (final,)


def _groups(model: HookedModel, layer: int) -> dict[str, int]:
    """Hook point of keys or values -> how many heads share one of them, where several do."""
    heads = _heads(model, str(HookPoint.AttnZ(layer)))
    groups = {
        hook: heads // _heads(model, hook) for hook, role in _attention_inputs(model, layer).items() if role in "kv"
    }
    return {hook: group for hook, group in groups.items() if group > 1}


def _attention_inputs(model: HookedModel, layer: int) -> dict[str, str]:
    """The hook points of what a layer's heads compute with, each with its role; few attentions have a gate."""
    names = {str(getattr(HookPoint, variant)(layer)): role for variant, role in ROLES.items()}
    del names[lesser_key(model, layer)]
    # queries, keys and values are named even where they are lacking: the refusal tells of it
    return {name: role for name, role in names.items() if role != "g" or name in model.metadata.hooks}


def _attention(model: HookedModel, layer: int, groups: Mapping[str, int]) -> Iterator[Node]:
    heads = _heads(model, str(HookPoint.AttnZ(layer)))
    for hook, role in _attention_inputs(model, layer).items():
        count = _heads(model, hook) * groups.get(hook, 1)
        kind = "h" if count == heads else "kv"
        for head in range(count):
            yield Node(f"a{layer}.{kind}{head}<{role}>", hook, head, 2 * layer)


def _heads(model: HookedModel, name: str) -> int:
    point = HookPoint.parse(name)
    axis = heads_axis(point.axes or ())
    return int(model.axes(point)[axis]) if axis is not None else 0


def chosen_receivers(model: HookedModel, nodes: Nodes, receivers: str | HookPoint | Iterable[Receiver]) -> list[int]:
    """The numbers of the receivers that a request means; see `path_patch`."""
    reading = make_receivers(model, receivers)
    of = {**reading.heads, **({nodes.receivers[-1].hook: None} if reading.final else {})}

    def meant(node: Node) -> bool:
        heads = of.get(node.hook, ())
        return node.hook in of and (heads is None or nodes.own_head(node) in heads)

    return [number for number, node in enumerate(nodes.receivers) if meant(node)]


def chosen_senders(nodes: Nodes, senders: str | HookPoint | Iterable[Receiver]) -> list[int]:
    """The numbers of the senders that a request means; see `edge_attribution`."""
    entries = entries_of("sender", senders, "would send")
    return sorted({number for entry in entries for number in _meant(nodes, *entry)})


def _meant(nodes: Nodes, point: str, heads: int | Iterable[int] | None) -> set[int]:
    glob = point.replace("hook_result", "hook_z") if point != "result" else "z"  # `hook_result` is what `hook_z` sends
    names = dict.fromkeys(node.hook for node in nodes.senders)
    matching = [name for name in names if fnmatchcase(name, glob) or _short(name, glob)]
    if not matching:
        raise HookError(
            f"{point!r} sends nothing; senders are hook_embed, attn.hook_z (a head), ssm.hook_z (a head "
            "of a mixer) or hook_attn_out (a mixer), and "
            f"hook_mlp_out of a layer"
            f"{nearest(point, [*names])}"
        )
    own = {number for number, node in enumerate(nodes.senders) if node.hook in matching}
    if heads is None:
        return own
    chosen = indices_of("heads", heads)
    for name in matching:
        count = sum(node.hook == name and node.head is not None for node in nodes.senders)
        if max(chosen, default=0) >= count:
            raise InputError(f"heads {list(chosen)} of {name}, which has {count or 'none'}")
    return {number for number in own if nodes.senders[number].head in chosen}


def _short(name: str, glob: str) -> bool:
    point = HookPoint.parse(name)
    return glob in (point.short, f"hook_{point.short}")
