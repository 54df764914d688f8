"""Files beside a compiled graph: the model card, and the configuration of Triton Inference Server."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from mionnx.engine.session import UNSTABLE_FUSIONS
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
Typed = Sequence[tuple[onnx.ValueInfoProto, tuple[str, list[Any]]]]


def card(
    facts: Mapping[str, Any],
    spec: HookSpec,
    metadata: Metadata,
    inputs: Typed,
    optional: Typed,
    outputs: Typed,
    target: str,
) -> str:
    """The text of the card."""
    done = [f"| {edit.kind} | `{point}` | {_value(edit)} | {_limits(edit)} |" for point, edit in spec.interventions]
    for state in (*spec.state_steerings, *spec.state_knockouts):
        done.append(f"| {state.title} | the recurrent state | {', '.join(state.terms)} | {_targets(state)} |")
    title = "changed" if done else "instrumented"
    text = f"""---
tags: [onnx, mionnx, intervention]
---

# A {title} {metadata.family} model

**This is not the original model.** It is a compiled intervention graph, made by mionnx {facts["mionnx"]} from a
{metadata.family} model of {metadata.sizes.num_layers} layers, {metadata.sizes.hidden_size} wide. It was changed so:

| intervention | where | value | limits |
|---|---|---|---|
{chr(10).join(done) or "| none | | | |"}

`spec.safetensors` is the spec, as mionnx reads it. Negative positions count from the end of the prompt, which
is the call that token 0 stands in; "generated" means every later call.

- weights, sha256: {f"`{digest}`" if (digest := facts["weights_sha256"]) else NO_WEIGHTS}
- original graph, sha256: `{facts["graph_sha256"]}`
- spec, sha256: `{facts["spec_sha256"]}`
- target: {target}{_bound(target)}
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
{_rows(inputs)}

| output | dtype | shape |
|---|---|---|
{_rows(outputs)}
"""
    return text + _optional(facts, optional)


def _metric(facts: Mapping[str, Any]) -> str:
    """A line on the metric and its gradients."""
    if "metric" not in facts:
        return ""
    by = f", and its gradients: {', '.join(f'`{name}`' for name in facts['gradients'])}" * bool(facts["gradients"])
    return f"- `{METRIC}` is {facts['metric']} of each row{by}\n"


def _blocks(facts: Mapping[str, Any]) -> str:
    """A line on weights in blocks."""
    if not facts.get("blocks"):
        return ""
    bits, levels = (" and ".join(map(str, facts["blocks"][name])) for name in ("bits", "accuracy_level"))
    rounds = ": what they read is rounded to 8 bits" if facts["blocks"]["accuracy_level"] == [4] else ""
    return (
        f"- weights in blocks of {bits} bits: products by `MatMulNBits` of com.microsoft (ONNX Runtime) at accuracy "
        f"level {levels}{rounds}\n"
    )


def _fused(facts: Mapping[str, Any]) -> str:
    """A line on fused operators of the file that the model was adopted from."""
    if not facts.get("fused"):
        return ""
    padding = "; texts must not be padded, and calls of several tokens after a past have one row"
    return (
        f"- fused operators: {facts['fused']} of ONNX Runtime's own (com.microsoft), as in the file that the model was "
        f"adopted from: the graph runs in ONNX Runtime only{padding * facts['unpadded']}\n"
    )


def _optional(facts: Mapping[str, Any], optional: Typed) -> str:
    """The inputs that may be left out."""
    text = ""
    if facts["knobs"]:
        text += "\nKnobs, which may be left out:\n\n"
        text += "".join(f"- `{name}`: the strength at {', '.join(hooks)}\n" for name, hooks in facts["knobs"].items())
    gates = [value.name for value, _ in optional if value.name not in facts["knobs"]]
    if gates:
        text += f"\nGates of the recurrence, which may be left out: {', '.join(f'`{name}`' for name in gates)}\n"
    return text + (QUIET if optional else "")


def _rows(values: Typed) -> str:
    return "\n".join(f"| `{value.name}` | {dtype.lower()} | [{_list(shape)}] |" for value, (dtype, shape) in values)


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


def _bound(target: str) -> str:
    if not target.startswith("ort-"):
        return ""
    return ", for the version of ONNX Runtime that it was made with; it holds operators of that runtime"


def triton_config(name: str, inputs: Typed, optional: Typed, outputs: Typed) -> str:
    """`config.pbtxt` for Triton's ONNX Runtime backend; batches are one of the model's own axes."""
    entries = [_entry("input", value, typed) for value, typed in inputs]
    entries += [_entry("input", value, typed, "optional: true") for value, typed in optional]
    entries += [_entry("output", value, typed) for value, typed in outputs]
    return "\n".join([f'name: "{name}"', 'backend: "onnxruntime"', "max_batch_size: 0", *entries]) + "\n"


TRITON = {"FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "DOUBLE": "FP64", "BOOL": "BOOL"}


def _entry(kind: str, value: onnx.ValueInfoProto, typed: tuple[str, list[Any]], more: str = "") -> str:
    dtype, shape = typed
    dims = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in shape) or "1"
    reshape = "" if shape else " reshape { shape: [ ] }"  # Triton has no scalars of its own
    return (
        f'{kind} [ {{ name: "{value.name}" data_type: TYPE_{TRITON.get(dtype, dtype)} dims: [ {dims} ]{reshape} '
        f"{more} }} ]"
    )
