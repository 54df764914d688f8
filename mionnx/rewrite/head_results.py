"""Rewrite: `hook_result`, each head's share of the attention output, which only its capture brings in.

1. result[b, s, h] = z[b, s, h] W_O[h], where W_O is the output projection's weight as [n_heads, value_dim, hidden];
   of a quantised one, the numbers that it stands for (`mionnx.rewrite.dequantise`).
2. The sum over the heads, plus the projection's bias, is the attention's output, but where a
   quantised projection rounds what it reads (dynamic int8, MatMulNBits of accuracy level 4).
3. A weight of another dtype multiplies in that one; the result has the dtype of z.
"""

from collections.abc import Mapping

from mionnx.errors import ModelError
from mionnx.graph.builder import Builder, Tensor, Variable, numpy_dtype
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import Metadata
from mionnx.rewrite.dequantise import dequantised


def head_results(op: Builder, point: HookPoint, tensors: Mapping[str, Tensor], metadata: Metadata) -> Variable:
    """Add the nodes of one layer's `hook_result`: [batch, seq, n_heads, hidden].

    Raises:
        ModelError: no node reads the output projection that the metadata name, or it is integers without scales.
    """
    sizes, attention = metadata.sizes, metadata.attention[point.layer or 0]
    if attention.output_projection not in tensors:
        raise ModelError(f"no node of the graph reads {attention.output_projection}, the projection behind {point}")
    weight = dequantised(op, tensors[attention.output_projection])
    if not attention.output_is_rows:
        weight = op.Transpose(weight, perm=[1, 0])
    heads = op.Reshape(weight, [sizes.num_heads, metadata.heads(point.layer or 0)[2], sizes.hidden_size])
    z = tensors[str(point.source)]
    other = bool(metadata.hook_dtypes) and numpy_dtype(z.dtype) != numpy_dtype(heads.dtype)
    read = op.Cast(z, to=numpy_dtype(heads.dtype)) if other else z
    results = op.Transpose(op.MatMul(op.Transpose(read, perm=[0, 2, 1, 3]), heads), perm=[0, 2, 1, 3])
    results = op.Cast(results, to=numpy_dtype(z.dtype)) if other else results
    results.shape = ["batch", "seq", sizes.num_heads, sizes.hidden_size]
    return results
