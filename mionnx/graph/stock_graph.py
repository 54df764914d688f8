"""The graph of an adopted file as it came, with its fused operators, by the names of the hooked model's interface.

The metadata hold it, packed and without weights. Where a spec touches nothing it runs instead of the hooked graph, in
the kinds of calls in which it gives the same (`mionnx.run.stock_calls`): bits and speed are then those of the file.
"""

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.graph import onnx_file, validate
from mionnx.graph.operator_table import DOMAIN
from mionnx.graph.output_head import LOGITS

STOCK_LIMIT = 2**26  # bytes of the graph, unpacked
# Of a call: several rows, a past, several tokens a row, padding on the left.
ROWS_BIT, PAST_BIT, SEVERAL_BIT, PADDED_BIT = 1, 2, 4, 8
KINDS_OF_CALLS = ROWS_BIT + PAST_BIT + SEVERAL_BIT + PADDED_BIT + 1
PAST_TOKENS, SEVERAL_TOKENS = 4, 3  # tokens of a past, and of a call of several, where a kind is tried


@dataclass(frozen=True)
class StockGraph:
    """The graph of a file as it came."""

    proto: onnx.ModelProto
    expanded: bool  # whether the hooked graph has other nodes in the place of some of its operators
    allowed: float  # the difference of the two graphs' results that rounding explains, relative to the largest number

    @cached_property
    def outputs(self) -> frozenset[str]:
        return frozenset(value.name for value in self.proto.graph.output)

    def gives(self, presents: Iterable[str]) -> bool:
        """Whether these keys and values are among its outputs."""
        return self.outputs.issuperset(presents)


def example(kind: int) -> tuple[int, int, int]:
    """Rows, tokens and past of a call of a kind."""
    return 1 + bool(kind & ROWS_BIT), SEVERAL_TOKENS if kind & SEVERAL_BIT else 1, PAST_TOKENS * bool(kind & PAST_BIT)


def described(kind: int) -> str:
    """A kind of call in words."""
    rows = "several rows" if kind & ROWS_BIT else "one row"
    tokens = "several tokens" if kind & SEVERAL_BIT else "one token"
    after = " after a past" if kind & PAST_BIT else ""
    return f"{rows} of {tokens}{after}{', padded on the left' if kind & PADDED_BIT else ''}"


def difference(left: NDArray[Any], right: NDArray[Any]) -> float:
    """The largest difference of two arrays, by the largest number if that is above 1."""
    one, other = np.asarray(left, np.float64), np.asarray(right, np.float64)
    # absolute below 1, relative above: a difference of tiny numbers says nothing
    scale = max(1.0, float(np.abs(one).max(initial=0)), float(np.abs(other).max(initial=0)))
    return float(np.abs(one - other).max(initial=0)) / scale


def packed(stock: StockGraph) -> dict[str, Any]:
    """A stock graph as the metadata hold it."""
    # metadata are text; the names in a graph repeat, so it shrinks well
    text = base64.b64encode(zlib.compress(stock.proto.SerializeToString(deterministic=True), 9)).decode("ascii")
    return {"graph": text, "expanded": stock.expanded, "allowed": stock.allowed}


def unpacked(table: Mapping[str, Any]) -> StockGraph:
    """Read what `packed` wrote."""
    try:
        reader = zlib.decompressobj()
        # a limit: a small text may unpack to gigabytes
        data = reader.decompress(base64.b64decode(table["graph"], validate=True), STOCK_LIMIT)
        if not reader.eof:
            raise ModelError(f"the stock graph in the metadata is cut, or has more than {STOCK_LIMIT:,} bytes: refused")
        proto = onnx.ModelProto.FromString(data)
        onnx_file.check_texts(proto, "the stock graph in the metadata")
    except (binascii.Error, zlib.error, DecodeError, ValueError, KeyError, TypeError) as error:
        raise ModelError("the stock graph in the metadata is damaged") from error
    return StockGraph(proto, table["expanded"], table["allowed"])


def is_table(value: object) -> bool:
    """Whether metadata are such a table, or an empty one."""
    if value == {}:
        return True
    if not isinstance(value, dict) or {*value} != {"graph", "expanded", "allowed"}:
        return False
    bounded = type(value["allowed"]) is float and 0 <= value["allowed"] < inf
    return bounded and isinstance(value["graph"], str) and isinstance(value["expanded"], bool)


def checkable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the operators unknown to onnx in the domain of ONNX Runtime's own."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    version = onnx_file.opset(proto)
    for node in shown.graph.node:
        if node.domain in ("", "ai.onnx") and not _registered(node.op_type, version):
            node.domain = DOMAIN
    if DOMAIN not in {entry.domain for entry in shown.opset_import}:
        shown.opset_import.extend([onnx.helper.make_opsetid(DOMAIN, 1)])
    return shown


@cache
def _registered(operator: str, version: int) -> bool:
    try:
        onnx.defs.get_schema(operator, version, "")
    except onnx.defs.SchemaError:
        return False
    return True


def check_stock(stock: StockGraph, hooked: onnx.ModelProto, folder: Path, kind: int = SEVERAL_BIT) -> None:
    """Check the graph of an adopted file as it came, as the hooked graph is checked."""
    inputs, outputs = onnx_file.interface(stock.proto)
    initializers = {tensor.name for tensor in stock.proto.graph.initializer}
    strange = sorted({*inputs} - initializers - {value.name for value in hooked.graph.input})
    if strange or LOGITS not in outputs:
        raise ModelError(f"the stock graph in the metadata takes {', '.join(strange)[:200]} and gives {outputs[:9]}")
    shown = checkable(stock.proto)
    validate.check(shown, folder, [validate.input_shapes(shown, *example(kind))])
