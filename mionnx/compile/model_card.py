"""Files beside a compiled graph: the model card, and the configuration of Triton Inference Server."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import onnx

from mionnx.engine.session import UNSTABLE_FUSIONS
from mionnx.errors import InputError
from mionnx.graph.metadata import Metadata
from mionnx.rewrite.plan import METRIC
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.limits import LIMITS

NO_WEIGHTS = "none: the graph was exported from a config alone, and cannot run"
QUIET = """
What may be left out is an input with a default value. ONNX Runtime warns of each ("Initializer ... appears in graph
inputs"), which means just that and is harmless. Without the warnings:

```python
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
session = onnxruntime.InferenceSession("model.onnx", options)
```
"""
TRITON = {"FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "DOUBLE": "FP64", "BOOL": "BOOL"}


class Port(NamedTuple):
    """An input or output: the dtype by its ONNX name, the shape in numbers and names."""

    name: str
    dtype: str
    shape: list[Any]


class GraphInterface(NamedTuple):
    """The inputs of a graph, those that have a default, and its outputs."""

    inputs: list[Port]
    optional: list[Port]
    outputs: list[Port]


def interface_of(graph: onnx.GraphProto) -> GraphInterface:
    """The interface of a graph."""
    defaults = {tensor.name for tensor in graph.initializer}
    inputs = [_port(value) for value in graph.input]
    needed = [port for port in inputs if port.name not in defaults]
    return GraphInterface(needed, [port for port in inputs if port.name in defaults], [*map(_port, graph.output)])


def _port(value: onnx.ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim]
    return Port(value.name, onnx.TensorProto.DataType.Name(tensor.elem_type), dims)


def _narrowed(metadata: Metadata) -> str:
    """A paragraph on how a model was made of one in a wider dtype; nothing of any other."""
    made = metadata.narrowed
    if not made:
        return ""
    powers = ", ".join(f"`{value}` and what is added to it times 2^{one}" for value, one in made["exponents"].items())
    islands = f", {made['islands']} values kept in float32" if made["islands"] else ""
    cost = f"forecast KL(float32 || {made['dtype']}) {made['after'].get('kl', float('nan')):.1e} nats"
    done = f"{powers or 'nothing rescaled'}{islands}; {cost} over {made['tokens']} tokens"
    return f"\nIt was narrowed from float32 to {made['dtype']}: {done}.\n"


def card(facts: Mapping[str, Any], spec: HookSpec, metadata: Metadata, interface: GraphInterface, target: str) -> str:
    """The text of the card."""
    done = [f"| {edit.kind} | `{point}` | {_value(edit)} | {_limits(edit)} |" for point, edit in spec.interventions]
    for state in (*spec.state_steerings, *spec.state_knockouts):
        done.append(f"| {state.title} | the recurrent state | {', '.join(state.terms)} | {_targets(state)} |")
    title = "changed" if done else "instrumented"
    bound = ", for the version of ONNX Runtime that it was made with; it holds operators of that runtime"
    text = f"""---
tags: [onnx, mionnx, intervention]
---

# A {title} {metadata.family} model

**This is not the original model.** It is a compiled intervention graph, made by mionnx {facts["mionnx"]} from a
{metadata.family} model of {metadata.sizes.num_layers} layers, {metadata.sizes.hidden_size} wide. It was changed so:
{_narrowed(metadata)}
| intervention | where | value | limits |
|---|---|---|---|
{chr(10).join(done) or "| none | | | |"}

`spec.safetensors` is the spec, as mionnx reads it. Negative positions count from the end of the prompt, which
is the call that token 0 stands in; "generated" means every later call.

- weights, sha256: {f"`{digest}`" if (digest := facts["weights_sha256"]) else NO_WEIGHTS}
- original graph, sha256: `{facts["graph_sha256"]}`
- spec, sha256: `{facts["spec_sha256"]}`
- target: {target}{bound * target.startswith("ort-")}
{_metric(facts)}{_blocks(facts)}{_fused(facts)}
## Running it

```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
```

On the CPU this session gives the bits of `forward` of a model that was opened with `fast=True`. Where the graph has
layer norms, ONNX Runtime fuses the sum before them into them (SkipLayerNormFusion), which moves the last bits; mionnx
leaves such fusions out by default. A session with these settings gives the bits of mionnx' default:

```python
session = onnxruntime.InferenceSession("model.onnx", disabled_optimizers={list(UNSTABLE_FUSIONS)})
```

| input | dtype | shape |
|---|---|---|
{_rows(interface.inputs)}

| output | dtype | shape |
|---|---|---|
{_rows(interface.outputs)}
"""
    return text + _optional(facts, interface.optional)


def _metric(facts: Mapping[str, Any]) -> str:
    if "metric" not in facts:
        return ""
    by = f", and its gradients: {', '.join(f'`{name}`' for name in facts['gradients'])}" * bool(facts["gradients"])
    return f"- `{METRIC}` is {facts['metric']} of each row{by}\n"


def _blocks(facts: Mapping[str, Any]) -> str:
    if not facts.get("blocks"):
        return ""
    bits, levels = (" and ".join(map(str, facts["blocks"][name])) for name in ("bits", "accuracy_level"))
    rounds = ": what they read is rounded to 8 bits" if facts["blocks"]["accuracy_level"] == [4] else ""
    return (
        f"- weights in blocks of {bits} bits: products by `MatMulNBits` of com.microsoft (ONNX Runtime) at accuracy "
        f"level {levels}{rounds}\n"
    )


def _fused(facts: Mapping[str, Any]) -> str:
    if not facts.get("fused"):
        return ""
    padding = "; texts must not be padded, and calls of several tokens after a past have one row"
    return (
        f"- fused operators: {facts['fused']} of ONNX Runtime's own (com.microsoft), as in the file that the model was "
        f"adopted from: the graph runs in ONNX Runtime only{padding * facts['unpadded']}\n"
    )


def _optional(facts: Mapping[str, Any], optional: list[Port]) -> str:
    text = ""
    if facts["knobs"]:
        text += "\nKnobs, which may be left out:\n\n"
        text += "".join(f"- `{name}`: the strength at {', '.join(hooks)}\n" for name, hooks in facts["knobs"].items())
    gates = [port.name for port in optional if port.name not in facts["knobs"]]
    if gates:
        text += f"\nGates of the recurrence, which may be left out: {', '.join(f'`{name}`' for name in gates)}\n"
    return text + (QUIET if optional else "")


def _rows(ports: list[Port]) -> str:
    return "\n".join(f"| `{port.name}` | {port.dtype.lower()} | [{_list(port.shape)}] |" for port in ports)


def _value(edit: Intervention) -> str:
    if edit.fragment is not None:
        return f"an ONNX fragment of {len(edit.fragment.structure.graph.node)} nodes"
    return ", ".join(
        ("" if name == "value" else f"{name} ")
        + (f"{value.item():g}" if value.size == 1 else f"{value.dtype} {list(value.shape)}")
        for name, value in zip(edit.rules.values, edit.values, strict=True)
    )


def _limits(edit: Intervention) -> str:
    limits = {name: getattr(edit, name) for name in LIMITS if name != "rows"}
    return "; ".join(f"{name} {_list(value)}" for name, value in limits.items() if value is not None)


def _list(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value))


def _targets(state: Any) -> str:
    layers = "every layer" if state.layers_ is None else f"layers {_list(state.layers_)}"
    return f"positions {_list(state.positions_)}; {layers}"


def triton_config(name: str, interface: GraphInterface) -> str:
    """`config.pbtxt` for Triton's ONNX Runtime backend; batches are one of the model's own axes."""
    if not re.fullmatch(r"[\w.-]+", name):
        raise InputError(f"{name!r} is no name for a Triton model: letters, digits, '.', '-' and '_' only")
    entries = [_entry("input", port) for port in interface.inputs]
    entries += [_entry("input", port, "optional: true") for port in interface.optional]
    entries += [_entry("output", port) for port in interface.outputs]
    return "\n".join([f'name: "{name}"', 'backend: "onnxruntime"', "max_batch_size: 0", *entries]) + "\n"


def _entry(kind: str, port: Port, more: str = "") -> str:
    dims = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in port.shape) or "1"
    reshape = "" if port.shape else " reshape { shape: [ ] }"  # Triton has no scalars of its own
    dtype = TRITON.get(port.dtype, port.dtype)
    return f'{kind} [ {{ name: "{port.name}" data_type: TYPE_{dtype} dims: [ {dims} ]{reshape} {more} }} ]'
