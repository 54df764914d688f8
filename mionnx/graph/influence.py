"""`Influence`: the hook points, outputs and positions that the value at a hook point can change.

A token's value reaches later tokens only through what is carried from call to call: keys and values, or a recurrent
state. What does not lead there changes its own position alone. Keys and values do so in a graph without a cache too,
and those of an encoder reach all tokens, the earlier ones as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import onnx

from mionnx.graph.dataflow import Dataflow, attributes, reads
from mionnx.graph.hook_points import HookPoint, layer_of
from mionnx.graph.io_names import PRESENTS
from mionnx.graph.metadata import Metadata


@dataclass(frozen=True)
class Reach:
    """The hook points and outputs that one hook point can change.

    Attributes:
        arrives: by what flows into them, before their interventions.
        passes: and after these.
        spread: those of them that it can change at other positions than its own: later ones, and in an encoder any.
    """

    arrives: frozenset[str]
    passes: frozenset[str]
    spread: frozenset[str]

    @property
    def carried(self) -> bool:
        """Whether keys and values, or a state, can change."""
        return any(name.startswith(PRESENTS) for name in self.passes)

    @property
    def next_token_only(self) -> bool:
        """Whether what is carried goes to the next token's channel mix alone."""
        return self.carried and all(name.endswith(".ffn_shift") for name in self.passes if name.startswith(PRESENTS))


class Influence:
    """The reach of the hook points of one model; each is worked out once."""

    def __init__(self, proto: onnx.ModelProto, metadata: Metadata) -> None:
        self.proto, self.metadata = proto, metadata
        self._known: dict[tuple[str, frozenset[str]], Reach] = {}
        self._tokens_read: dict[str, str | None] = {}
        self._leading: dict[str, frozenset[str]] = {}

    @cached_property
    def _flow(self) -> Dataflow:
        return Dataflow(self.proto)

    @cached_property
    def _named(self) -> frozenset[str]:
        return frozenset((*self.metadata.hooks, *(output.name for output in self.proto.graph.output)))

    def of(self, hook: str, overwritten: frozenset[str] = frozenset()) -> Reach:
        """The reach of a hook point; nothing passes those whose values are replaced as a whole (`overwritten`)."""
        key = hook, overwritten
        if key not in self._known:
            arrives = self._after([hook], overwritten)
            passes = arrives - overwritten
            # a hook point changes its own value at its own position alone, whatever it does elsewhere
            spread = self._spread({hook, *passes}, overwritten) - {hook}
            self._known[key] = Reach(arrives, passes, spread)
        return self._known[key]

    def leading(self, value: str) -> frozenset[str]:
        """The values that one is computed of."""
        if value not in self._leading:
            self._leading[value] = frozenset(self._flow.read_by(self._flow.ancestors([value])))
        return self._leading[value]

    def _after(self, sources: Iterable[str], overwritten: frozenset[str]) -> frozenset[str]:
        sources = {*sources}
        return frozenset((self._flow.descendants(sources, overwritten) - sources) & self._named)

    def _spread(self, changed: set[str], overwritten: frozenset[str]) -> frozenset[str]:
        mixed = [name for layer in range(self.metadata.sizes.num_layers) for name in self._keys_and_values(layer)]
        mixing = changed.intersection(mixed)
        # A graph without a cache carries nothing out; where all keys and values have names, these tell.
        uniform = self._every_layer_names_them and not mixing
        if not any(name.startswith(PRESENTS) for name in changed) and (self._has_cache or uniform):
            return frozenset()
        if not mixing or not self._every_layer_names_them:
            return frozenset(changed)
        # other positions read keys and values, so all behind these can change there; those of the first changed layer
        # have nothing changed before them, and change at their own positions alone
        first = min(layer_of(name) or 0 for name in mixing)
        return self._after(mixing, overwritten).union(mixing).difference(self._keys_and_values(first))

    def token_read(self, output: str) -> str | None:
        """The "first" or "last" token of each text, where a value that has none is made of that one's stream alone.

        Classes and embeddings may be: both are gathered where the mask of the text begins or ends.
        """
        if output not in self._tokens_read:
            self._tokens_read[output] = self._token_read(output)
        return self._tokens_read[output]

    def _token_read(self, output: str) -> str | None:
        ends, ahead, seen = set[str](), [output], {output}
        while ahead:
            name = ahead.pop()
            if "seq" in self.metadata.hooks.get(name, ()):
                return None  # a stream, of all tokens
            node = self._flow.producer(name)
            if node is None or node.op_type == "Shape":
                continue
            read = reads(node)
            if (token := self._token_taken(node)) is not None:
                ends.add(token)
                continue
            ahead += {*read} - seen
            seen |= {*read}
        return ends.pop() if len(ends) == 1 else None

    def _token_taken(self, node: onnx.NodeProto) -> str | None:
        """Which token of each text a node takes: by the mask, or as files of other tools do, the first column."""
        if node.op_type not in ("GatherElements", "Gather", "Slice"):
            return None
        if node.op_type == "GatherElements" and attributes(node).get("axis") == 1:
            nodes = [self._flow.nodes[n] for n in self._flow.ancestors([node.input[1]])]
            before = {one.op_type for one in nodes}
            if any("input_ids" in one.input and one.op_type != "Shape" for one in nodes):
                return None  # the last token but those for padding, which a text may end with
            return ("last" if "CumSum" in before else "first") if "ArgMax" in before else None
        numbers = [self._flow.facts.number(name) for name in node.input[1:4]]
        operands = [None if one is None else one.ravel().tolist() for one in numbers]
        if node.op_type == "Gather":
            return "first" if attributes(node).get("axis", 0) == 1 and operands == [[0]] else None
        return "first" if node.op_type == "Slice" and operands == [[0], [1], [1]] else None

    @cached_property
    def _has_cache(self) -> bool:
        return any(name.startswith(PRESENTS) for name in self._named)

    @cached_property
    def _every_layer_names_them(self) -> bool:
        layers = range(self.metadata.sizes.num_layers)
        needed = {str(point(layer)) for layer in layers for point in (HookPoint.AttnK, HookPoint.AttnV)}
        return needed <= self.metadata.hooks.keys()

    def _keys_and_values(self, layer: int) -> list[str]:
        points = HookPoint.AttnK(layer), HookPoint.AttnRotK(layer), HookPoint.AttnV(layer)
        return [point.name for point in points if point.name in self.metadata.hooks]
