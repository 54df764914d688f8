"""`Flow`: the origin of every value of a decoder's graph, the dominators of those that carry the text, linear maps.

No name is read. A value comes from constants, from the call (positions, masks, shapes), from a past, or from the text:
those are the values that follow from the embedding's rows. A dominator of a value lies on every path to it. Unlike
`mionnx.graph.dataflow` it reads onnx_ir's own links between values, since adoption edits the graph as it goes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from enum import IntEnum

import onnx_ir as ir

from mionnx.errors import ExportError

CONTENT_KEEPING = frozenset(
    ("Identity", "Cast", "CastLike", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Tile", "Flatten")
)
KEEPING = frozenset(("Identity", "Cast"))
TABLES = KEEPING | {"DequantizeLinear", "Transpose", "Reshape", "Mul"}  # a factor is the scale of integers
SIZE_OPERATORS = frozenset(("Shape", "Size"))
ROW_LOOKUPS = frozenset(("Gather", "GatherBlockQuantized"))
FEW_ROWS = 16  # of a table of token types, at most
INDEX_TYPES = (ir.DataType.INT64, ir.DataType.INT32)
LINEAR_PRODUCTS = frozenset(
    ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulBnb4", "MatMulInteger", "DynamicQuantizeMatMul")
) | {"MatMulIntegerToFloat", "QLinearMatMul"}
SHAPE_OPERATORS = KEEPING | {"Reshape"}
ROUNDING_OPERATORS = frozenset(("DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear"))


class Origin(IntEnum):
    """The latest of the origins of a value's inputs."""

    CONSTANT = 0
    CALL = 1
    PAST = 2
    TEXT = 3


class Flow:
    """Origins and dominators of a graph's values."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        # Place of each node, in an order in which they can run.
        self.order = {node: place for place, node in enumerate(graph)}
        self.origin: dict[ir.Value, Origin] = dict.fromkeys(graph.initializers.values(), Origin.CONSTANT)
        for value in graph.inputs:
            floating = value.dtype is not None and value.dtype.is_floating_point()
            # ids, masks and positions are integers or booleans; only keys and values come as fractions
            self.origin.setdefault(value, Origin.PAST if floating else Origin.CALL)
        self._above: dict[ir.Value, ir.Value | None] = {}
        self._depth: dict[ir.Value, int] = {}
        self.embedding = find_embedding(graph).outputs[0]  # the rows of the embedding that the tokens pick
        for node in self.order:
            self._follow(node)
        self.logits = self._logits()

    def _follow(self, node: ir.Node) -> None:
        read = (self.origin.get(value, Origin.CONSTANT) for value in present(node.inputs))
        origin = max(read, default=Origin.CONSTANT)
        if node.op_type in SIZE_OPERATORS:
            origin = min(origin, Origin.CALL)  # the size of a text says nothing of its content
        self.origin.update(dict.fromkeys(node.outputs, origin))
        if self.embedding in node.outputs:
            self.origin[self.embedding], self._above[self.embedding] = Origin.TEXT, None
            self._depth[self.embedding] = 0
        elif origin == Origin.TEXT:
            top, *others = self.text(node)
            for other in others:
                # the last value on the ways to all inputs of text (Cooper, Harvey, Kennedy 2001)
                top = self._meet(top, other)
            for value in node.outputs:
                self._above[value], self._depth[value] = top, self._depth[top] + 1

    def _logits(self) -> ir.Value:
        """The main output of text: the last one with an entry for each text, else for each token."""
        outputs = [value for value in self.graph.outputs if self.is_text(value) and value.producer() is not None]
        texts = [value for value in outputs if rank(value) == 2]
        tokens = [value for value in outputs if rank(value) in (3, None)]
        if tokens:  # a pooler beside a stream is not what the file is for
            texts = [value for value in texts if value.producer().op_type != "Tanh"]
        if not (texts or tokens):
            raise ExportError("no output with three axes follows from the embedding: there are no logits")
        if len(texts) > 1:
            names = ", ".join(str(value.name) for value in texts)
            raise ExportError(f"{names}: several outputs with two axes, as the ends of a span: no such file is adopted")
        # hidden states have three axes as well, and are made earlier
        return max(texts or tokens, key=lambda value: self.order[value.producer()])

    def is_text(self, value: ir.Value | None) -> bool:
        return value is not None and self.origin.get(value) == Origin.TEXT

    def text(self, node: ir.Node) -> list[ir.Value]:
        """The inputs of a node that follow from the text."""
        return [value for value in present(node.inputs) if self.is_text(value)]

    def others(self, node: ir.Node) -> list[ir.Value]:
        """The inputs of a node that do not follow from the text."""
        return [value for value in present(node.inputs) if not self.is_text(value)]

    def constant(self, values: Iterable[ir.Value]) -> bool:
        return all(self.origin.get(value) == Origin.CONSTANT for value in values)

    def _meet(self, one: ir.Value, other: ir.Value) -> ir.Value:
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
        """The immediate dominator of a value; the embedding has none, and is refused."""
        dominator = self._above[value]
        if dominator is None:
            raise ExportError(f"nothing lies above the embedding {value.name}")
        return dominator

    def chain(self, value: ir.Value, top: ir.Value | None = None) -> list[ir.Value]:
        """The dominators of a value, itself last, from below `top` on; refused where `top` is none of them."""
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

        def makers(values: Iterable[ir.Value]) -> list[ir.Node | None]:
            return [value.producer() for value in values if value is not top]

        return sorted(walk(makers([bottom]), lambda node: makers(self.text(node))), key=self.order.__getitem__)

    def readers(self, value: ir.Value) -> list[ir.Node]:
        """The nodes that read a value for more than its size, in order."""
        nodes = {node for node, _ in value.uses() if node.op_type not in SIZE_OPERATORS}
        return sorted((node for node in nodes if node in self.order), key=self.order.__getitem__)


def present(values: Iterable[ir.Value | None]) -> list[ir.Value]:
    """Some inputs of a node, without those that it leaves out."""
    return [value for value in values if value is not None]


def walk(
    nodes: Iterable[ir.Node | None], following: Callable[[ir.Node], Iterable[ir.Node | None]]
) -> Iterator[ir.Node]:
    """Some nodes, and all that follow from them step by step, each once, the latest first."""
    seen, waiting = set[ir.Node](), [*nodes]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += following(node)


def makers_of(node: ir.Node) -> list[ir.Node | None]:
    """The nodes that make a node's inputs."""
    return [value.producer() for value in present(node.inputs)]


def find_embedding(graph: ir.Graph) -> ir.Node:
    """The look-up of the tokens' embedding: rows of a matrix with a row for each logit; an ambiguous one is refused."""
    constants = set(graph.initializers.values())
    vocabularies = {static(value, -1) for value in graph.outputs if rank(value) == 3} - {None}  # sizes of logits
    lookups: list[tuple[int | None, ir.Value, ir.Node]] = []
    for node in graph:
        if node.op_type in ROW_LOOKUPS and node.inputs[0] is not None and node.inputs[1] is not None:
            (table, rows), source = table_of(node.inputs[0]), climb(node.inputs[1])
            indices = source.is_graph_input() and source.dtype in INDEX_TYPES
            if table in constants and indices and rank(table) in (2, 3) and node.attributes.get_int("axis", 0) == 0:
                lookups.append((static(table, rows), source, node))
    if not lookups:
        raise ExportError("no integer input picks rows of a matrix: the graph has no token embedding")
    # positions and token types pick rows too: the table with a row for each logit is that of the tokens
    wide = [entry for entry in lookups if entry[0] in vocabularies] or lookups
    named = [entry for entry in wide if entry[1].name == "input_ids"]
    named = named or [entry for entry in wide if (entry[0] or FEW_ROWS + 1) > FEW_ROWS] or wide
    sources = {entry[1] for entry in named}
    if len(sources) > 1:
        names = ", ".join(f"{source.name} ({rows} rows)" for rows, source, _ in named)
        raise ExportError(f"several inputs pick rows of matrices, and none is known to be the tokens: {names}")
    return named[0][2]


def table_of(value: ir.Value) -> tuple[ir.Value, int]:
    """The stored matrix of a look-up, and the axis of its rows: 1 where it is turned first."""
    rows = 0
    while (node := value.producer()) is not None and node.op_type in TABLES and node.inputs[0] is not None:
        rows ^= node.op_type == "Transpose"  # turned twice is not turned
        value = node.inputs[0]
    return value, rows


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


def perm_of(node: ir.Node) -> tuple[int, ...]:
    """The order of axes of a `Transpose`; empty where it is the reverse."""
    perm = node.attributes.get("perm")
    return tuple(perm.as_ints()) if perm is not None else ()


def is_linear(flow: Flow, node: ir.Node) -> bool:
    """Whether a node multiplies the text with a constant matrix."""
    if node.op_type not in LINEAR_PRODUCTS or not flow.is_text(node.inputs[0]):
        return False
    weight = _operand(node)
    return weight is not None and flow.constant([weight])


def _operand(node: ir.Node) -> ir.Value | None:
    """The matrix that a product reads, as it reads it."""
    return node.inputs[3] if node.op_type == "QLinearMatMul" else node.inputs[1]


def linear_maps(flow: Flow, top: ir.Value, bottom: ir.Value) -> list[ir.Node]:
    """The linear maps between two values, in order."""
    return [node for node in flow.between(top, bottom) if is_linear(flow, node)]


def output_of(flow: Flow, node: ir.Node) -> ir.Value:
    """The value after a linear map: its scale of dequantisation, bias and reshaping included."""
    value = node.outputs[0]
    while True:
        users = [user for user, _ in value.uses() if user.op_type not in SIZE_OPERATORS]
        if len(users) != 1 or not _belongs(flow, node, value, users[0]):
            return value
        value = users[0].outputs[0]


def _belongs(flow: Flow, node: ir.Node, value: ir.Value, user: ir.Node) -> bool:
    """Whether the only reader of a linear map's value is part of the map."""
    if user.op_type in SHAPE_OPERATORS | ROUNDING_OPERATORS:
        # a reshape to four axes splits heads: the map ends before it
        return user.op_type != "Reshape" or rank(user.outputs[0]) in (3, None)
    constant = flow.constant(other for other in present(user.inputs) if other is not value)
    if user.op_type == "Add":
        return constant
    maker = value.producer()
    unscaled = maker is not None and maker.op_type in ("Cast", node.op_type)  # scales of both operands may follow
    return node.op_type == "MatMulInteger" and user.op_type == "Mul" and (constant or unscaled)


def input_of(flow: Flow, node: ir.Node) -> ir.Value:
    """The value that a linear map reads, before it is rounded or reshaped."""
    value = node.inputs[0]
    while (above := value.producer()) is not None and above.op_type in (SHAPE_OPERATORS | ROUNDING_OPERATORS):
        if not flow.is_text(above.inputs[0]):
            break
        value = above.inputs[0]
    return value


def weight_of(node: ir.Node) -> tuple[ir.Value, bool]:
    """The stored matrix of a linear map, and whether it is stored [in, out]."""
    value, rows = _operand(node), node.op_type != "MatMulNBits"  # which stores [out, in]
    if node.op_type in ("Gemm", "FusedMatMul"):
        rows = not node.attributes.get_int("transB", 0)
    while (above := value.producer()) is not None and above.inputs and above.inputs[0] is not None:
        rows ^= above.op_type == "Transpose"
        value = above.inputs[0]
    return value, rows
