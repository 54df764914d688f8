"""The weights of a hooked model that can be blocks: matrices of products, and the table of the tokens.

A product is a MatMul or a Gemm whose second factor is a weight [in, out], or one [out, in] that a Transpose turns. The
router of a mixture of experts stays as it is: a rounded one chooses other experts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx

from mionnx.graph import onnx_file
from mionnx.graph.blocks import EXPERT
from mionnx.graph.dataflow import Dataflow, attributes
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.weight_value import product_of

FLOAT_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
PASSING_ON = ("Identity", "Reshape", "Cast", "Add")  # between a product and the hook point that it gives
ROUTER = ".hook_router_logits"
SCAN_STEPS = [("Slice", one, "Concat", "Sub", "Min", "Gather") for one in ("Gemm", "MatMul")]  # of a Scan of experts


@dataclass(frozen=True)
class Product:
    """One matrix product with a weight."""

    node: onnx.NodeProto
    weight: str
    turned: bool  # whether the weight is [out, in], as MatMulNBits holds it
    head: bool = False  # whether the logits come from it


@dataclass(frozen=True)
class ExpertStack:
    """The products of rows with the matrices that they chose: a Scan over a stack of experts."""

    node: onnx.NodeProto
    weight: str
    turned: bool  # whether the weight is [experts, out, in], not [experts, in, out]
    count: int
    # rows, slots, nobody: what its body takes from outside: the rows by expert, places of an expert's rows, and the row
    # of zeros.
    rows: str
    slots: str
    nobody: str

    @property
    def experts(self) -> list[str]:
        return [f"{self.weight}{EXPERT}{number}" for number in range(self.count)]


@dataclass(frozen=True)
class WeightUses:
    """Products with weights, stacks of experts, and the look-up of the token table."""

    products: list[Product]
    lookup: onnx.NodeProto | None
    table: str | None
    stacks: list[ExpertStack] = field(default_factory=list)


def find_weights(model: HookedModel) -> WeightUses:
    """The products and the table of a hooked model."""
    flow = Dataflow(model.proto)
    floats = {tensor.name: tensor for tensor in model.proto.graph.initializer if tensor.data_type in FLOAT_TYPES}
    heads = _products_before(flow, ["logits"])
    routers = _products_before(flow, [name for name in model.metadata.hooks if name.endswith(ROUTER)])
    products = []
    for node in flow.nodes:
        product = _product(flow, node, floats)
        if product is not None and node.output[0] not in routers:
            products.append(Product(node, *product, head=node.output[0] in heads))
    lookups = [node for node in flow.nodes if node.op_type == "Gather" and _reads_tokens(flow, node)]
    # Of several look-ups it is not known which is the tokens' table.
    table = lookups[0] if len(lookups) == 1 and lookups[0].input[0] in floats else None
    stacks = [stack for node in flow.nodes if (stack := _stack(node, floats)) is not None]
    return WeightUses(products, table, None if table is None else table.input[0], stacks)


def _stack(node: onnx.NodeProto, floats: dict[str, onnx.TensorProto]) -> ExpertStack | None:
    """The stack of experts of a Scan, see `exporters.transformers.grouped`; None for others."""
    if node.op_type != "Scan" or len(node.input) != 3 or len(getattr(floats.get(node.input[0]), "dims", ())) != 3:
        return None
    body = next(entry.g for entry in node.attribute if entry.name == "body")
    if tuple(one.op_type for one in body.node) not in SCAN_STEPS:
        return None
    matrix, begin, end = (value.name for value in body.input)
    cut, product, padded, count, picked, entry_rows = body.node
    turned = product.op_type == "Gemm"
    # Each step reads what it reads in the exporter's body: no other Scan is taken for it.
    fits = (
        list(cut.input[1:]) == [begin, end],
        list(product.input) == [cut.output[0], matrix],
        not turned
        or [(entry.name, entry.i) for entry in product.attribute if entry.name[:5] == "trans"] == [("transB", 1)],
        padded.input[0] == product.output[0],
        list(count.input) == [end, begin],
        picked.input[1] == count.output[0],
        list(entry_rows.input) == [padded.output[0], picked.output[0]],
        body.output[0].name == entry_rows.output[0],
    )
    outside = (cut.input[0], picked.input[0], padded.input[1])
    count_of = floats[node.input[0]].dims[0]
    return ExpertStack(node, node.input[0], turned, count_of, *outside) if all(fits) else None


def _product(flow: Dataflow, node: onnx.NodeProto, floats: dict[str, onnx.TensorProto]) -> tuple[str, bool] | None:
    """The weight of a product, and whether it is [out, in]."""
    if node.op_type not in ("MatMul", "Gemm") or node.domain:
        return None
    facts = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    # MatMulNBits knows none of these.
    if facts.get("transA") or any(facts.get(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return None
    name, turned = node.input[1], bool(facts.get("transB", 0))
    maker = flow.producer(name)
    if maker is not None and maker.op_type == "Transpose":
        # Without `perm` the axes are reversed.
        order = next((list(entry.ints) for entry in maker.attribute if entry.name == "perm"), [1, 0])
        name, turned = maker.input[0], turned ^ (order == [1, 0])
    return (name, turned) if name in floats and len(floats[name].dims) == 2 else None


def _products_before(flow: Dataflow, values: Iterable[str]) -> set[str]:
    producers = {name: flow.producer(name) for value in values for name in _before(flow, value)}
    return {name for name, node in producers.items() if node is not None and product_of(flow, node) is node}


def _before(flow: Dataflow, value: str) -> Iterator[str]:
    """A value, and those that it is a shape, a scale or a soft cap of, up to the product."""
    waiting = [value]
    while waiting:
        name = waiting.pop()
        yield name
        node = flow.producer(name)
        if node is not None and node.op_type in (*PASSING_ON, "Mul", "Div", "Tanh"):
            waiting += [entry for entry in node.input if entry in flow.producers]


def _reads_tokens(flow: Dataflow, node: onnx.NodeProto) -> bool:
    """Whether a Gather picks rows [vocab, hidden] by the ids of the tokens."""
    name = node.input[1]
    while (maker := flow.producer(name)) is not None and maker.op_type in ("Identity", "Reshape", "Cast"):
        name = maker.input[0]
    return name == "input_ids" and attributes(node).get("axis", 0) == 0


def expert_of(name: str) -> tuple[str, int] | None:
    """The stack and the number of an expert's matrix; None of other weights."""
    stack, _, number = name.rpartition(EXPERT)
    return (stack, int(number)) if stack and number.isdigit() else None


def rows_of(model: HookedModel, name: str, turned: bool) -> np.ndarray:
    """A weight as [out, in], a stack of experts as [experts, out, in], mapped from its file."""
    stack, number = expert_of(name) or (name, ...)
    weight = onnx_file.weight(model.proto, model.folder, stack)[number]
    return weight if turned else weight.swapaxes(-1, -2)
