"""What the rewriter makes of the shipped models does not change by accident: SHA-256 of rewritten graphs.

Names that nobody can address (values and nodes between hook points) do not count; operators, their order, attributes,
constants, weights, inputs, outputs and metadata do. `python tests/laws/test_rewritten_graphs.py` writes the hashes
anew, for a change that is meant.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import onnx
import pytest

from mionnx import (
    HookPoint,
    HookSpec,
    Intervention,
    KnockoutSpec,
    Logits,
    MIModel,
    StateKnockoutSpec,
    create_knockout_mask,
)

HASHES = Path(__file__).with_name("rewritten_graphs.json")
MODELS = Path(__file__).parents[2] / "models"
PROMPT = "The capital of France is"
FRAGMENT = """<ir_version: 10, opset_import: ["": 23]>
twice (float[batch, seq, 128] x) => (float[batch, seq, 128] y) {
  hook_doubled = Add(x, x)
  y = Relu(hook_doubled)
}"""


def vector(width: int = 128) -> np.ndarray:
    return np.linspace(-1, 1, width, dtype=np.float32)


def knockout() -> Intervention:
    return Intervention.Knockout(create_knockout_mask(KnockoutSpec().edge(4, 3), 8, 5))


def splice() -> HookSpec:
    point = "blocks.2.hook_resid_post"
    spec = HookSpec().intervene(point, Intervention.Splice(onnx.parser.parse_model(FRAGMENT), positions=-1))
    return spec.intervene(f"{point}.hook_doubled", Intervention.Zero()).capture(f"{point}.hook_doubled")


# name -> model, spec, logits
SPECS: dict[str, tuple[str, Callable[[], HookSpec], bool | Logits]] = {
    "captures": (
        "world-llama",
        lambda: HookSpec().capture("blocks.*.hook_resid_post").capture("blocks.1.attn.hook_pattern"),
        True,
    ),
    "steer": (
        "world-llama",
        lambda: HookSpec().intervene("blocks.2.hook_resid_mid", Intervention.Add(vector(), positions=-1)),
        True,
    ),
    "two at one hook": (
        "world-llama",
        lambda: (
            HookSpec()
            .intervene("blocks.1.attn.hook_z", Intervention.Scale(0.5, heads=[1, 2]))
            .intervene("blocks.1.attn.hook_z", Intervention.Zero(rows=0, heads=0, positions=[0, 1]))
            .capture("blocks.1.attn.hook_z", before=True)
            .capture("blocks.1.attn.hook_z")
        ),
        True,
    ),
    "knockout": (
        "world-llama",
        lambda: (
            HookSpec()
            .intervene("blocks.2.attn.hook_scores", knockout())
            .intervene("blocks.3.attn.hook_scores", Intervention.Scale(2.0))
        ),
        True,
    ),
    "project out": (
        "world-llama",
        lambda: HookSpec().intervene("blocks.0.hook_resid_post", Intervention.ProjectOut(vector())),
        Logits(positions=-1, k=3),
    ),
    "low rank": (
        "world-llama",
        lambda: HookSpec().intervene("blocks.0.hook_resid_post", Intervention.LowRank(vector(), vector(), positions=0)),
        Logits(positions=-1, k=3),
    ),
    "parts": (
        "world-llama",
        lambda: HookSpec().capture("blocks.*.attn.hook_pattern", positions=-1, heads=[0, 3]),
        False,
    ),
    "result": ("world-llama", lambda: HookSpec().capture("blocks.2.attn.hook_result"), Logits(token_ids=[5, 7])),
    "splice": ("world-llama", splice, True),
    "replace": (
        "world-gpt2",
        lambda: HookSpec().intervene("blocks.1.hook_attn_out", Intervention.Replace(vector(), positions=[0])),
        Logits(positions=[0, -1], token_ids=[1, 2, 3]),
    ),
    "logits hooked": (
        "world-gpt2",
        lambda: HookSpec().intervene("hook_logits", Intervention.Scale(0.5)).capture("hook_embed", before=True),
        Logits(positions=-1),
    ),
    "states": (
        "world-rwkv7",
        lambda: HookSpec().capture("blocks.1.rwkv.hook_states").capture("blocks.2.rwkv.hook_effective_attn"),
        True,
    ),
    "recurrence": (
        "world-rwkv7",
        lambda: HookSpec().intervene("blocks.1.rwkv.hook_k", Intervention.Scale(0.5, positions=2, heads=0)),
        True,
    ),
    "baked": (
        "world-llama",
        lambda: HookSpec().intervene("blocks.2.hook_resid_post", Intervention.Add(vector(), positions="generated")),
        True,
    ),
    "baked state": (
        "world-rwkv7",
        lambda: HookSpec().set_state_knockout(StateKnockoutSpec().position(1).layer(2)),
        True,
    ),
}


def rewritten(name: str) -> onnx.ModelProto:
    """The graph of one of the specs."""
    source, make, logits = SPECS[name]
    model, spec = MIModel.from_pretrained(MODELS / source, threads=1), make()
    if name.startswith("baked"):
        with tempfile.TemporaryDirectory() as made:
            knobs = {"strength": None} if name == "baked" else None
            return onnx.load(
                model.compile(spec, Path(made) / "out", knobs=knobs) / "model.onnx", load_external_data=False
            )
    model.forward(PROMPT, spec, logits=logits)
    (graph,) = model.compiled.values()
    return onnx.ModelProto.FromString(graph.model)


def digest(model: onnx.ModelProto) -> str:
    """SHA-256 of a model, names that nobody can address left out."""
    lines = hashlib.sha256()
    for line in _lines(model.graph, {}, count()):
        lines.update(line.encode() + b"\n")
    for entry in sorted(model.metadata_props, key=lambda entry: entry.key):
        lines.update(f"{entry.key}={entry.value}\n".encode())
    lines.update(f"{sorted((entry.domain, entry.version) for entry in model.opset_import)} {model.ir_version}".encode())
    return lines.hexdigest()


def _lines(graph: onnx.GraphProto, outer: dict[str, str], numbers: Iterator[int]) -> Iterator[str]:
    ends = [value.name for value in (*graph.input, *graph.output)]
    names = {**outer, **{name: name for name in ends}}
    for tensor in graph.initializer:
        names[tensor.name] = tensor.name if tensor.external_data else _constant(tensor)
    for value in (*graph.input, *graph.output):
        yield str(onnx.helper.printable_type(value.type))
    for node in graph.node:
        for name in node.output:
            addressed = name in ends or HookPoint.parse(name).variant != "Custom" or not name
            names[name] = name if addressed else f"%{next(numbers)}"
        read = [names.get(name, name) for name in node.input]
        yield f"{node.domain}.{node.op_type}({read}) -> {[names[name] for name in node.output]}"
        for attribute in sorted(node.attribute, key=lambda entry: entry.name):
            if attribute.HasField("g"):
                yield f"{attribute.name}:"
                yield from _lines(attribute.g, names, numbers)
            else:
                yield attribute.SerializeToString(deterministic=True).hex()


def _constant(tensor: onnx.TensorProto) -> str:
    array = onnx.numpy_helper.to_array(tensor)
    return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


@pytest.mark.parametrize("name", SPECS)
def test_a_rewritten_graph_is_what_it_was(name: str) -> None:
    assert digest(rewritten(name)) == json.loads(HASHES.read_text())[name]


if __name__ == "__main__":
    HASHES.write_text(json.dumps({name: digest(rewritten(name)) for name in SPECS}, indent=1) + "\n")
