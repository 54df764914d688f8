"""The output head: the matrix product that the logits come from."""

from mionnx.graph.builder import Node, Tensor
from mionnx.graph.io_names import LOGITS as LOGITS
from mionnx.graph.offset_products import offset_nodes

HEAD_ELEMENTWISE = frozenset({"Identity", "Cast", "Mul", "Div", "Add", "Tanh", "CastLike"})
PRODUCTS = frozenset({"MatMul", "Gemm", "MatMulNBits"})


def find_head(value: Tensor) -> Node | None:
    """The matrix product that a value comes from through elementwise nodes."""
    return head_and_tail(value)[0]


def head_and_tail(value: Tensor, through: frozenset[str] = HEAD_ELEMENTWISE) -> tuple[Node | None, list[Node]]:
    """The matrix product that a value comes from, and the elementwise nodes after it."""
    passed: list[Node] = []
    while value.inputs:
        node = value.inputs[0]
        if node.op in PRODUCTS:
            return node, passed
        if node.op == "Add" and (product := _with_offsets(node)) is not None:
            return product, passed
        computed = [entry for entry in node.inputs if entry.inputs]
        # two computed inputs: a sum of two things, no head with something behind it
        if node.op not in through or len(computed) != 1:
            break
        passed.append(node)
        value = computed[0]
    return None, passed


def _with_offsets(node: Node) -> Node | None:
    """The MatMulNBits whose offsets' share an Add adds; None for any other."""
    made_by = [entry.inputs[0] for entry in node.inputs if entry.inputs]
    return next((one for one in made_by if node in offset_nodes(one)), None)


def feed_head(head: Node, value: Tensor) -> None:
    """Let a matrix product, and the share of its offsets, read another value."""
    nodes = offset_nodes(head)
    # the share of the offsets begins with a Reshape of the same input
    for node in [head, *nodes[-1:]]:
        node.inputs[0] = value
