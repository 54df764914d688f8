"""`Flow`: the origin of every value of a decoder's graph, and the dominators of those that carry the text.

No name is read. A value comes from constants, from the call (positions, masks, shapes), from a past, or from the text:
those are the values that follow from the embedding's rows. A dominator of a value lies on every path to it.
"""

from collections.abc import Collection, Iterator
from enum import IntEnum

import onnx_ir as ir

from mionnx.errors import ExportError

CONTENT_KEEPING = frozenset(
    ("Identity", "Cast", "CastLike", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Tile", "Flatten")
)
KEEPING = frozenset(("Identity", "Cast"))
TABLES = KEEPING | {"DequantizeLinear", "Transpose", "Reshape"}
SIZE_OPERATORS = frozenset(("Shape", "Size"))
ROW_LOOKUPS = frozenset(("Gather", "GatherBlockQuantized"))
INDEX_TYPES = (ir.DataType.INT64, ir.DataType.INT32)


class Origin(IntEnum):
    """The latest of the origins of a value's inputs."""

    CONSTANT = 0
    CALL = 1
    PAST = 2
    TEXT = 3


class Flow:
    """Origins and dominators of a graph's values.

    Attributes:
        nodes: in an order in which they can run; `order` has the place of each.
        tokens: the input of token ids.
        embedding: the value that rows of the embedding are looked up as.
        logits: the output of logits.

    Raises:
        ExportError: no embedding, or several, or no logits follow from it.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, self.nodes = graph, list(graph)
        self.order = {node: place for place, node in enumerate(self.nodes)}
        self.origin: dict[ir.Value, Origin] = dict.fromkeys(graph.initializers.values(), Origin.CONSTANT)
        for value in graph.inputs:
            floating = value.dtype is not None and value.dtype.is_floating_point()
            self.origin.setdefault(value, Origin.PAST if floating else Origin.CALL)
        self._above: dict[ir.Value, ir.Value | None] = {}
        self._depth: dict[ir.Value, int] = {}
        lookup = find_embedding(graph)
        self.tokens, self.embedding = climb(lookup.inputs[1]), lookup.outputs[0]
        for node in self.nodes:
            self._follow(node)
        self.logits = self._logits()

    def _follow(self, node: ir.Node) -> None:
        inputs = [value for value in node.inputs if value is not None]
        origin = max((self.origin.get(value, Origin.CONSTANT) for value in inputs), default=Origin.CONSTANT)
        if node.op_type in SIZE_OPERATORS:
            origin = min(origin, Origin.CALL)
        self.origin.update(dict.fromkeys(node.outputs, origin))
        if self.embedding in node.outputs:
            self.origin[self.embedding], self._above[self.embedding] = Origin.TEXT, None
            self._depth[self.embedding] = 0
        elif origin == Origin.TEXT:
            top, *others = self.text(node)
            for other in others:
                top = self.meet(top, other)
            for value in node.outputs:
                self._above[value], self._depth[value] = top, self._depth[top] + 1

    def _logits(self) -> ir.Value:
        """The last output of text with three axes, or with an unknown number."""
        outputs = [
            value
            for value in self.graph.outputs
            if self.origin.get(value) == Origin.TEXT and rank(value) in (3, None) and value.producer() is not None
        ]
        if not outputs:
            raise ExportError("no output with three axes follows from the embedding: there are no logits")
        return max(outputs, key=lambda value: self.order[value.producer()])

    def is_text(self, value: ir.Value | None) -> bool:
        """Whether a value follows from the text."""
        return value is not None and self.origin.get(value) == Origin.TEXT

    def text(self, node: ir.Node) -> list[ir.Value]:
        """The inputs of a node that follow from the text."""
        return [value for value in node.inputs if value is not None and self.origin.get(value) == Origin.TEXT]

    def meet(self, one: ir.Value, other: ir.Value) -> ir.Value:
        """The last value that dominates two values."""
        while one is not other:
            if self._depth[one] < self._depth[other]:
                one, other = other, one
            above = self._above[one]
            if above is None:
                raise ExportError("values meet nowhere above: the graph has two sources of text")
            one = above
        return one

    def above(self, value: ir.Value) -> ir.Value:
        """The immediate dominator of a value.

        Raises:
            ExportError: the embedding itself.
        """
        dominator = self._above[value]
        if dominator is None:
            raise ExportError(f"nothing lies above the embedding {value.name}")
        return dominator

    def chain(self, value: ir.Value, top: ir.Value | None = None) -> list[ir.Value]:
        """The dominators of a value, itself last, from below `top` on.

        Raises:
            ExportError: `top` is none of them.
        """
        dominators: list[ir.Value] = []
        at: ir.Value | None = value
        while at is not None and at is not top:
            dominators.append(at)
            at = self._above[at]
        if at is not top:
            raise ExportError(f"{value.name} does not follow from {top.name if top is not None else None} alone")
        return dominators[::-1]

    def between(self, top: ir.Value, bottom: ir.Value) -> list[ir.Node]:
        """The nodes on all paths of text from one value to another, in order."""
        seen: set[ir.Node] = set()
        waiting = [bottom]
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if value is not top and node is not None and node not in seen:
                seen.add(node)
                waiting += self.text(node)
        return sorted(seen, key=self.order.__getitem__)

    def readers(self, value: ir.Value) -> list[ir.Node]:
        """The nodes that read a value for more than its size, in order."""
        nodes = dict.fromkeys(node for node, _ in value.uses() if node.op_type not in SIZE_OPERATORS)
        return sorted((node for node in nodes if node in self.order), key=self.order.__getitem__)


def find_embedding(graph: ir.Graph) -> ir.Node:
    """The look-up of the tokens' embedding: rows of a matrix with a row for each logit.

    Raises:
        ExportError: none, or several that nothing tells apart.
    """
    constants, vocabularies = set(graph.initializers.values()), {*_vocabularies(graph)}
    lookups: list[tuple[int | None, ir.Value, ir.Node]] = []
    for node in graph:
        if node.op_type in ROW_LOOKUPS and node.inputs[0] is not None and node.inputs[1] is not None:
            (table, rows), source = table_of(node.inputs[0]), climb(node.inputs[1])
            indices = source.is_graph_input() and source.dtype in INDEX_TYPES
            if table in constants and indices and rank(table) in (2, 3) and axis_of(node) == 0:
                lookups.append((static(table, rows), source, node))
    if not lookups:
        raise ExportError("no integer input picks rows of a matrix: the graph has no token embedding")
    wide = [entry for entry in lookups if entry[0] in vocabularies] or lookups
    named = [entry for entry in wide if entry[1].name == "input_ids"] or wide
    sources = {entry[1] for entry in named}
    if len(sources) > 1:
        names = ", ".join(f"{source.name} ({rows} rows)" for rows, source, _ in named)
        raise ExportError(f"several inputs pick rows of matrices, and none is known to be the tokens: {names}")
    return named[0][2]


def table_of(value: ir.Value) -> tuple[ir.Value, int]:
    """The stored matrix of a look-up, and the axis of its rows: 1 where it is turned first."""
    rows = 0
    while (node := value.producer()) is not None and node.op_type in TABLES and node.inputs[0] is not None:
        rows ^= node.op_type == "Transpose"
        value = node.inputs[0]
    return value, rows


def _vocabularies(graph: ir.Graph) -> Iterator[int]:
    """Sizes of the last axis of the outputs with three axes."""
    for value in graph.outputs:
        size = static(value, -1) if rank(value) == 3 else None
        if size is not None:
            yield size


def climb(value: ir.Value, operators: Collection[str] = CONTENT_KEEPING) -> ir.Value:
    """The value that a chain of operators with one source each begins with."""
    while (node := value.producer()) is not None and node.op_type in operators and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def rank(value: ir.Value) -> int | None:
    """Number of axes; None if unknown."""
    return None if value.shape is None else value.shape.rank()


def static(value: ir.Value, axis: int) -> int | None:
    """Size of an axis; None if it is dynamic or unknown."""
    size = None if value.shape is None or not value.shape.rank() else value.shape[axis]
    return size if isinstance(size, int) else None


def axis_of(node: ir.Node, default: int = 0) -> int:
    """The attribute `axis` of a node."""
    return node.attributes.get_int("axis", default)


def perm_of(node: ir.Node) -> tuple[int, ...]:
    """The order of axes of a `Transpose`; empty where it is the reverse."""
    perm = node.attributes.get("perm")
    return tuple(perm.as_ints()) if perm is not None else ()
