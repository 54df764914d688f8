"""The graph of an adopted file as it came, with its fused operators, by the names of the hooked model's interface.

An adopted model keeps it in its metadata, packed and without weights: where a spec touches nothing it runs in the
place of the hooked graph, so that bits and speed are those of the file. Beside it stand the kinds of calls for which it
was tried and gave what the hooked graph gives. Metadata may come from anybody: the graph is checked as every graph is.
"""

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from mionnx.errors import ModelError
from mionnx.graph import onnx_file, validate
from mionnx.graph.contrib_shapes import DOMAIN
from mionnx.graph.output_head import LOGITS

LARGEST = 2**26  # bytes of the graph, unpacked
ROWS, PAST, SEVERAL, PADDED = 1, 2, 4, 8  # of a call: several rows, a past, several tokens a row, padding on the left
KINDS = ROWS + PAST + SEVERAL + PADDED + 1


@dataclass(frozen=True)
class StockGraph:
    """The graph of a file as it came.

    Attributes:
        proto: the graph; its inputs are some of the hooked model's.
        calls: the kinds of calls, sums of the flags above, for which it gives what the hooked graph gives.
        expanded: whether the hooked graph has other nodes in the place of some of its operators.
    """

    proto: onnx.ModelProto
    calls: frozenset[int]
    expanded: bool

    @cached_property
    def outputs(self) -> frozenset[str]:
        """The names of its outputs."""
        return frozenset(value.name for value in self.proto.graph.output)

    @property
    def examples(self) -> list[tuple[int, int, int]]:
        """Rows, tokens and past of calls that it serves, the largest two kinds."""
        kinds = sorted((kind for kind in self.calls if not kind & PADDED), key=int.bit_count, reverse=True)[:2]
        return [(1 + bool(kind & ROWS), 3 if kind & SEVERAL else 1, 5 * bool(kind & PAST)) for kind in kinds]

    def serves(self, kind: int, presents: Iterable[str]) -> bool:
        """Whether it is right for a kind of call, and gives these keys and values."""
        return kind in self.calls and self.outputs.issuperset(presents)


def packed(proto: onnx.ModelProto, calls: frozenset[int], expanded: bool) -> dict[str, Any]:
    """A stock graph as the metadata hold it."""
    text = base64.b64encode(zlib.compress(proto.SerializeToString(deterministic=True), 9)).decode("ascii")
    return {"graph": text, "calls": sorted(calls), "expanded": expanded}


def unpacked(table: Mapping[str, Any]) -> StockGraph:
    """Read what `packed` wrote.

    Raises:
        ModelError: it is damaged or too large.
    """
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.b64decode(table["graph"], validate=True), LARGEST)
        if not reader.eof:
            raise ModelError(f"the stock graph in the metadata is cut, or has more than {LARGEST:,} bytes: refused")
        proto = onnx.ModelProto.FromString(data)
    except (binascii.Error, zlib.error, DecodeError, ValueError, KeyError, TypeError) as error:
        raise ModelError("the stock graph in the metadata is damaged") from error
    return StockGraph(proto, frozenset(table["calls"]), table["expanded"])


def is_table(value: object) -> bool:
    """Whether metadata are such a table, or an empty one."""
    if value == {}:
        return True
    if not isinstance(value, dict) or {*value} != {"graph", "calls", "expanded"}:
        return False
    calls = value["calls"]
    known = isinstance(calls, list) and all(type(kind) is int and 0 <= kind < KINDS for kind in calls)
    return known and isinstance(value["graph"], str) and isinstance(value["expanded"], bool)


def checkable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the operators unknown to onnx in the domain of ONNX Runtime's own."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    version = max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    for node in shown.graph.node:
        if node.domain in ("", "ai.onnx") and not _registered(node.op_type, version):
            node.domain = DOMAIN
    if DOMAIN not in {entry.domain for entry in shown.opset_import}:
        shown.opset_import.extend([onnx.helper.make_opsetid(DOMAIN, 1)])
    return shown


@cache
def _registered(operator: str, version: int) -> bool:
    """Whether onnx has an operator in a version of its standard domain."""
    try:
        onnx.defs.get_schema(operator, version, "")
    except onnx.defs.SchemaError:
        return False
    return True


def check_stock(stock: StockGraph, hooked: onnx.ModelProto, folder: Path) -> None:
    """Check the graph of an adopted file as it came, as the hooked graph is checked.

    Args:
        stock: the graph.
        hooked: the hooked one.
        folder: of their weights.

    Raises:
        ModelError: it takes what the hooked model does not, gives no logits, or is refused by `validate.check`.
    """
    inputs, outputs = onnx_file.interface(stock.proto)
    held = {tensor.name for tensor in stock.proto.graph.initializer}
    strange = sorted({*inputs} - held - {value.name for value in hooked.graph.input})
    if strange or LOGITS not in outputs:
        raise ModelError(f"the stock graph in the metadata takes {', '.join(strange)[:200]} and gives {outputs[:9]}")
    shown = checkable(stock.proto)
    validate.check(shown, folder, [validate.input_shapes(shown, *tokens) for tokens in stock.examples])
