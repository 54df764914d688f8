"""The matrices that an analysis multiplies with, read from a hooked model's graph and weight files.

They are found by what the graph does with them, not by their names: the embedding is what `input_ids` pick rows from,
the unembedding what the logits are a product with. What comes after a product (a scale, a soft cap) and before the
first hook point (a scale of the embedding) is not part of a matrix. Weight files are mapped, not read: a matrix takes
memory as it is used.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from mionnx import graph as graphs
from mionnx.errors import HookError, ModelError
from mionnx.hooked_model import DTYPES, HookedModel
from mionnx.rewrite.restrict import ELEMENTWISE, LOGITS

SHAPING = frozenset({"Reshape", "Squeeze", "Unsqueeze"})  # what leaves every number as it is


def embedding(model: HookedModel) -> NDArray[Any]:
    """W_E [vocab, hidden], in the model's dtype: a row a token, before the scale that some families multiply with.

    Raises:
        ModelError: the graph looks tokens up in no matrix of its own.
    """
    tokens = graphs.edit(model.proto).tensors()["input_ids"]
    for node in _readers(tokens):
        if node.op == "Gather" and isinstance(node.inputs[0], gs.Constant):
            return graphs.weight(model.proto, model.folder, node.inputs[0].name)
    raise ModelError(f"the graph of {model.folder} picks no rows of a matrix by its tokens")


def _readers(value: gs.Tensor) -> Iterator[gs.Node]:
    """The nodes that read a value, or the same numbers in another shape."""
    for node in value.outputs:
        yield node
        if node.op in SHAPING | {"Identity", "Cast"}:
            yield from _readers(node.outputs[0])


def unembedding(model: HookedModel) -> NDArray[Any]:
    """W_U [hidden, vocab], in the model's dtype: what the final norm's output is multiplied with.

    Raises:
        ModelError: the logits are no product with a matrix of the graph.
    """
    product = _head(model)[-1]
    name, turned = _stored(product.inputs[1])
    found = graphs.weight(model.proto, model.folder, name)
    return found.T if turned != bool(product.attrs.get("transB", 0)) else found


def unembedding_bias(model: HookedModel) -> NDArray[Any]:
    """b_U [vocab], in the model's dtype: what is added to that product; zeros where nothing is.

    Raises:
        ModelError: the logits are no product with a matrix of the graph.
    """
    size = model.metadata.sizes.vocab_size
    for node in _head(model):
        for entry in node.inputs:
            if node.op in ("Add", "Gemm") and isinstance(entry, gs.Constant) and list(entry.shape) == [size]:
                return graphs.weight(model.proto, model.folder, entry.name)
    return np.zeros(size, DTYPES[model.metadata.dtype])


def output_projections(model: HookedModel) -> NDArray[Any]:
    """W_O [n_layers, n_heads, head_dim, hidden], in the model's dtype: `hook_z` times it is `hook_result`.

    Raises:
        HookError: a recurrent model, whose heads' outputs are gated and normed before they are projected.
    """
    sizes = model.metadata.sizes
    if not model.metadata.attention:
        raise HookError(f"a {model.metadata.family} model has no attention, and so no W_O for its heads")
    layers = []
    for attention in model.metadata.attention:
        found = graphs.weight(model.proto, model.folder, attention.output_projection)
        rows = found if attention.output_is_rows else found.T
        layers.append(rows.reshape(sizes.num_heads, sizes.head_dim, sizes.hidden_size))
    return np.stack(layers)


def _head(model: HookedModel) -> list[gs.Node]:
    """The nodes from the logits back to the matrix product that they come from, which is the last."""
    value, way = graphs.edit(model.proto).tensors()[LOGITS], []
    while value.inputs:
        node = value.inputs[0]
        way.append(node)
        if node.op in ("MatMul", "Gemm"):
            return way
        computed = [entry for entry in node.inputs if entry.inputs]
        if node.op not in ELEMENTWISE | SHAPING or not computed:
            break
        value = computed[0]
    raise ModelError(f"the logits of {model.folder} are no product with one matrix of the graph")


def _stored(factor: gs.Tensor) -> tuple[str, bool]:
    """The name of the matrix that a factor of a product is, and whether it is transposed on the way."""
    turned = False
    while factor.inputs:
        node = factor.inputs[0]
        if node.op not in ("Transpose", "Identity", "Cast"):
            raise ModelError(f"{factor.name} is no matrix of the graph, but what {node.op} makes")
        turned ^= node.op == "Transpose"
        factor = node.inputs[0]
    return factor.name, turned
