"""The output head: the matrix product that the logits come from."""

from mionnx.graph.builder import Node, Tensor

ELEMENTWISE = frozenset({"Identity", "Cast", "Mul", "Div", "Add", "Tanh", "CastLike"})
PRODUCTS = frozenset({"MatMul", "Gemm", "MatMulNBits"})
LOGITS = "logits"


def find_head(value: Tensor) -> Node | None:
    """The matrix product that a value comes from through elementwise nodes."""
    return head_and_tail(value)[0]


def head_and_tail(value: Tensor, through: frozenset[str] = ELEMENTWISE) -> tuple[Node | None, list[Node]]:
    """The matrix product that a value comes from, and the elementwise nodes after it.

    Args:
        value: the logits.
        through: operators that may follow the product.
    """
    passed: list[Node] = []
    while value.inputs:
        node = value.inputs[0]
        if node.op in PRODUCTS:
            return node, passed
        computed = [entry for entry in node.inputs if entry.inputs]
        if node.op not in through or len(computed) != 1:
            break
        passed.append(node)
        value = computed[0]
    return None, passed
