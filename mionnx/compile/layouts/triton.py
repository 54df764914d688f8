"""The layout "triton": a repository of Triton Inference Server, with its ONNX Runtime backend.

`{name}/config.pbtxt`, `{name}/1/` with the graph and its weights, `{name}/` with the rest. The server is not needed to
write it; `tests/compile/test_layouts.py` checks the file by the server's own schema.
"""

import re
from pathlib import Path

from mionnx.compile.interface import GraphInterface, Port
from mionnx.compile.layouts.layout import ClientLayout, Content
from mionnx.compile.layouts.plain import decode_loop
from mionnx.graph.hooked_model import GRAPH

TRITON_VERSION = "1"
TRITON_DTYPES = {"FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "DOUBLE": "FP64", "BOOL": "BOOL"}


class TritonLayout(ClientLayout):
    """For Triton Inference Server."""

    name = "triton"
    client = "Triton Inference Server"

    def check(self, content: Content) -> None:
        if not re.fullmatch(r"[\w.-]+", content.name):
            raise self.refuse(f"{content.name!r} is no name for a Triton model: letters, digits, '.', '-' and '_' only")

    def graph(self, content: Content) -> str:
        # Triton wants each version of a model in a numbered folder.
        return f"{content.name}/{TRITON_VERSION}/{GRAPH}"

    def home(self, content: Content) -> str:
        return content.name

    def write(self, content: Content, at: Path) -> None:
        (at / "config.pbtxt").write_text(config(content.name, content.interface))

    def loop(self, content: Content) -> str:
        return decode_loop(content, f"{TRITON_VERSION}/{GRAPH}")


def config(name: str, interface: GraphInterface) -> str:
    """`config.pbtxt`; batches are one of the model's own axes."""
    entries = [_entry("input", port) for port in interface.inputs]
    entries += [_entry("input", port, "optional: true") for port in interface.optional]
    entries += [_entry("output", port) for port in interface.outputs]
    settings = [
        f'name: "{name}"',
        'backend: "onnxruntime"',
        "max_batch_size: 0",
        f"version_policy {{ specific {{ versions: [ {TRITON_VERSION} ] }} }}",
        "instance_group [ { count: 1 kind: KIND_AUTO } ]",
    ]
    return "\n".join([*settings, *entries]) + "\n"


def _entry(kind: str, port: Port, more: str = "") -> str:
    dims = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in port.shape) or "1"
    reshape = "" if port.shape else " reshape { shape: [ ] }"  # Triton has no scalars of its own
    dtype = TRITON_DTYPES.get(port.dtype, port.dtype)
    return f'{kind} [ {{ name: "{port.name}" data_type: TYPE_{dtype} dims: [ {dims} ]{reshape} {more} }} ]'
