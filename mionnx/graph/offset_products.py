"""Products with blocks that have more than scales: offsets, and an order of the inputs. `mionnx.quantise` writes them.

1. y = MatMulNBits(x, ...) + MatMul(ReduceSum(Reshape(x)), o): to each number of a block its offset is added; o is
   [blocks, outputs], what is summed are the inputs of each block.
2. Rows of a table: y = GatherBlockQuantized(...) + Reshape(Expand(Unsqueeze(Gather(o, ids)))), o being [rows, blocks].
3. x = Gather(inputs, order) along the last axis, each input as often as any other: the weight's columns stand in that
   order, and those of one input are added. Rows of x, a Slice of the first axis, may stand between.

They are recognised by what the nodes compute, not by names.
"""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.graph import onnx_file
from mionnx.graph.builder import Constant, Node
from mionnx.graph.dataflow import Dataflow, attributes

CHAIN = ("MatMul", "ReduceSum", "Reshape")  # the offsets' share, from its end to x

ROWS_ALONE = 3  # inputs of a Slice that names no axes: it begins with the first
ROW_OPERATORS = ("Reshape", "Expand", "Unsqueeze", "Gather")  # the offsets of picked rows


def offsets_of(flow: Dataflow, node: onnx.NodeProto) -> str | None:
    """The name of the offsets [blocks, outputs] of a MatMulNBits; None if it has none."""
    for user in flow.readers(node.output[0]):
        if user.op_type == "Add":
            parts = _parts(flow, user)
            if parts is not None and parts[0] is node:
                return parts[1]
    return None


def product_of_sum(flow: Dataflow, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The MatMulNBits of an Add that adds its offsets' share; None for any other node."""
    parts = _parts(flow, node) if node.op_type == "Add" else None
    return None if parts is None else parts[0]


def row_offsets_of(flow: Dataflow, node: onnx.NodeProto) -> str | None:
    """The name of the offsets [rows, blocks] of a GatherBlockQuantized; None if it has none."""
    for user in flow.readers(node.output[0]):
        name = next((entry for entry in user.input if entry != node.output[0]), "")
        chain = [one for one in [flow.producer(name)] if one is not None and user.op_type == "Add"]
        while chain and len(chain) < len(ROW_OPERATORS) and (before := flow.producer(chain[-1].input[0])) is not None:
            chain.append(before)
        if tuple(one.op_type for one in chain) == ROW_OPERATORS and chain[-1].input[1] == node.input[1]:
            return chain[-1].input[0]
    return None


def _parts(flow: Dataflow, node: onnx.NodeProto) -> tuple[onnx.NodeProto, str] | None:
    """The MatMulNBits and the name of the offsets that an Add joins."""
    # an Add may have the product on either side
    for name, other in (tuple(node.input), tuple(node.input)[::-1]):
        product, share = flow.producer(name), flow.producer(other)
        if product is None or product.op_type != "MatMulNBits" or share is None:
            continue
        chain = [share]
        while len(chain) < len(CHAIN) and (before := flow.producer(chain[-1].input[0])) is not None:
            chain.append(before)
        if tuple(one.op_type for one in chain) == CHAIN and chain[-1].input[0] == product.input[0]:
            return product, share.input[1]
    return None


def order_of(flow: Dataflow, folder: Path, node: onnx.NodeProto) -> NDArray[np.int64] | None:
    """The order of a MatMulNBits' inputs, int64 [inputs]; None if they stand as they come."""
    maker = flow.producer(node.input[0])
    if maker is not None and maker.op_type == "Slice" and len(maker.input) == ROWS_ALONE:
        maker = flow.producer(maker.input[0])
    if maker is None or maker.op_type != "Gather" or maker.input[1] not in flow.initializers:
        return None
    order = onnx_file.weight(flow.proto, folder, maker.input[1])
    width = attributes(node)["K"]
    if attributes(maker).get("axis", 0) != -1 or order.shape != (width,):
        return None
    inputs = int(order.max()) + 1
    # a permutation, or several in one: sorted, each input stands as often as any other
    if inputs < 1 or width % inputs or not np.array_equal(np.sort(order), np.arange(width) // (width // inputs)):
        return None
    return order.astype(np.int64)


def unordered_input(flow: Dataflow, folder: Path, node: onnx.NodeProto) -> str:
    """What a MatMulNBits reads, before its numbers are put in the order of the weight (`order_of`)."""
    if order_of(flow, folder, node) is None:
        return node.input[0]
    maker = flow.producer(node.input[0])
    if maker is not None and maker.op_type == "Slice":
        maker = flow.producer(maker.input[0])
    assert maker is not None
    return maker.input[0]


def offset_nodes(node: Node) -> list[Node]:
    """The nodes of a MatMulNBits' offsets: Add, MatMul, ReduceSum, Reshape; none without."""
    for user in node.outputs[0].outputs if node.op == "MatMulNBits" else ():
        others = [entry for entry in user.inputs if entry is not node.outputs[0]]
        chain = [user]
        while user.op == "Add" and len(chain) <= len(CHAIN) and others and others[0].inputs:
            chain.append(others[0].inputs[0])
            others = chain[-1].inputs
        if tuple(one.op for one in chain[1:]) == CHAIN and others[0] is node.inputs[0]:
            return chain
    return []


def order_node(node: Node) -> Node | None:
    """The Gather that puts the inputs of a MatMulNBits in order; None without one."""
    maker = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
    if maker is not None and maker.op == "Slice" and len(maker.inputs) == ROWS_ALONE:
        maker = maker.inputs[0].inputs[0] if maker.inputs[0].inputs else None
    if maker is None or maker.op != "Gather" or maker.attrs.get("axis", 0) != -1:
        return None
    order = maker.inputs[1]
    return maker if isinstance(order, Constant) and list(order.shape) == [node.attrs["K"]] else None
