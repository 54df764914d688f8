"""The model card of a compiled folder."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.compile.interface import Port
from mionnx.compile.knobs import sentence
from mionnx.compile.layouts.layout import ClientLayout, Content
from mionnx.engine.session import UNSTABLE_FUSIONS
from mionnx.errors import ModelError
from mionnx.graph.folder_file import inside
from mionnx.graph.io_names import PASTS, PRESENTS
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
KEPT_ENTRIES = ("license", "license_name", "license_link", "language", "datasets")  # of the checkpoint's own card
OWN_TAGS = ("onnx", "mionnx", "intervention")
LONGEST_CARD = 2**20  # characters
# What a model is for -> the Hub's name of that task.
TASKS = {
    "next_token": "text-generation",
    "masked_lm": "fill-mask",
    "classes": "text-classification",
    "token_classes": "token-classification",
    "span": "question-answering",
    "embedding": "sentence-similarity",
    "none": "feature-extraction",
}
# Standard operators of opset 23 came with ONNX Runtime 1.23, and level 4 of 8 bits with 1.22.
LEAST_RUNTIME = "1.23"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def _narrowed(metadata: Metadata) -> str:
    """A paragraph on how a model was made of one in a wider dtype; nothing of any other."""
    facts = metadata.narrowed
    if not facts:
        return ""
    powers = ", ".join(f"`{value}` and what is added to it times 2^{one}" for value, one in facts["exponents"].items())
    islands = f", {facts['islands']} values kept in float32" if facts["islands"] else ""
    cost = f"forecast {facts.get('measure', 'KL in nats')} {facts['after'].get('kl', float('nan')):.1e}"
    done = f"{powers or 'nothing rescaled'}{islands}; {cost} over {facts['tokens']} tokens"
    return f"\nIt was narrowed from float32 to {facts['dtype']}: {done}.\n"


def card(content: Content, spec: HookSpec, layout: ClientLayout, target: str) -> str:
    """The text of the card."""
    facts, metadata, interface = content.facts, content.model.metadata, content.interface
    done = [f"| {edit.kind} | `{point}` | {_value(edit)} | {_limits(edit)} |" for point, edit in spec.interventions]
    for state in (*spec.state_steerings, *spec.state_knockouts):
        done.append(f"| {state.title} | the recurrent state | {', '.join(state.terms)} | {_targets(state)} |")
    what = "changed" if done else "instrumented" if _instrumented(facts) else "plain"
    bound = ", for the version of ONNX Runtime that it was made with; it holds operators of that runtime"
    table = "\n| intervention | where | value | limits |\n|---|---|---|---|\n" + "\n".join(done)
    text = f"""{_entries(content, layout)}
# {content.model.name}, {what}

{_headline(content, what)}
{_narrowed(metadata)}{table * bool(done)}

`spec.safetensors` is the spec, as mionnx reads it. Negative positions count from the end of the prompt, which
is the call that token 0 stands in; "generated" means every later call.

- weights, sha256: {f"`{digest}`" if (digest := facts["weights_sha256"]) else NO_WEIGHTS}
- original graph, sha256: `{facts["graph_sha256"]}`
- spec, sha256: `{facts["spec_sha256"]}`; all files: `sha256sum -c SHA256SUMS`
- target: {target}{bound * target.startswith("ort-")}; layout: {layout.name}, for {layout.client}
- activations: {metadata.dtype}; {_least(content)}
{_metric(facts)}{_blocks(facts)}{_fused(facts)}{_verified(facts)}
## Running it

With {layout.client}, in this folder:

```{layout.language}
{layout.loop(content)}
```
{_bits(content)}
| input | dtype | shape |
|---|---|---|
{_rows(content, interface.inputs)}

| output | dtype | shape |
|---|---|---|
{_rows(content, interface.outputs)}
"""
    return text + _monitors(facts) + _optional(content)


def _instrumented(facts: Mapping[str, Any]) -> bool:
    return bool(facts["captures"] or facts.get("monitors") or "metric" in facts)


def _entries(content: Content, layout: ClientLayout) -> str:
    """The entries at the head of the card, as the Hugging Face Hub reads them."""
    own, tags = _own_entries(content.model.folder)
    names = (content.config.get("_name_or_path"), content.facts["source"])
    base = next((name for name in names if isinstance(name, str) and HUB_NAME.fullmatch(name)), None)
    lines = [
        f"library_name: {layout.client if layout.name != 'plain' else 'onnx'}",
        f"pipeline_tag: {TASKS[content.model.metadata.head]}",
    ]
    if base is not None:
        lines.append(f"base_model: {base}")
    lines += own
    lines.append(f"tags: [{', '.join(dict.fromkeys((*OWN_TAGS, *tags)))}]")
    return "---\n" + "\n".join(lines) + "\n---\n"


def _own_entries(folder: Path) -> tuple[list[str], list[str]]:
    """Lines of licence and language, and tags, of the checkpoint's own card."""
    path = folder / "README.md"
    if not path.is_file():
        return [], []
    try:
        text = inside(folder, "README.md").read_text("utf-8", errors="replace")[:LONGEST_CARD]
    except (OSError, ModelError):
        return [], []
    head = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    entries: dict[str, list[str]] = {}
    name = ""
    for line in head[1].splitlines() if head else ():
        if match := re.match(r"(\w+):", line):
            entries[name := match[1]] = []
        if name:
            entries[name].append(line)
    lines = [line for name in KEPT_ENTRIES for line in entries.get(name, ())]
    tags = re.findall(r"[\w.:/-]+", " ".join(entries.get("tags", ())).replace("tags:", "").replace("- ", " "))
    return lines, tags


def _headline(content: Content, what: str) -> str:
    facts, metadata = content.facts, content.model.metadata
    sizes = f"{metadata.sizes.num_layers} layers, {metadata.sizes.hidden_size} wide"
    of = f"`{content.model.name}`, a {metadata.family} model of {sizes}"
    if what == "plain":
        return f"The model {of}, as a plain ONNX file, made by mionnx {facts['mionnx']}: nothing in it was changed."
    was = "It was changed so:" if what == "changed" else "Nothing in it was changed; it has outputs of its own."
    return (
        f"**This is not the original model.** It is a compiled intervention graph, made by mionnx {facts['mionnx']} "
        f"from {of}. {was}"
    )


def _least(content: Content) -> str:
    """The opsets, and the least ONNX Runtime."""
    opsets = ", ".join(f"{one.domain or 'ai.onnx'} {one.version}" for one in content.proto.opset_import)
    return f"opsets {opsets}: ONNX Runtime {LEAST_RUNTIME} or later"


def _verified(facts: Mapping[str, Any]) -> str:
    if "verified" not in facts:
        return ""
    rows = "\n".join(f"| {' | '.join(row)} |" for row in facts["verified"]["rows"])
    return f"""
Verified when it was written, against {facts["verified"]["against"]}, on random tokens:

| call | tokens | largest difference of logits | mean KL, nats | the same top token |
|---|---|---|---|---|
{rows}
"""


def _bits(content: Content) -> str:
    """How sessions of ONNX Runtime are opened for the bits of mionnx."""
    if not {port.name for port in content.interface.inputs} or content.facts["blocks"]:
        return ""
    return f"""
On the CPU a plain session of onnxruntime gives the bits of `forward` of a model that was opened with `fast=True`. Where
the graph has layer norms, ONNX Runtime fuses the sum before them into them (SkipLayerNormFusion), which moves the last
bits; mionnx leaves such fusions out by default. A session with these settings gives the bits of mionnx' default:

```python
session = onnxruntime.InferenceSession("model.onnx", disabled_optimizers={list(UNSTABLE_FUSIONS)})
```
"""


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
    where = ", as in the file that the model was adopted from" if facts["adopted"] else ", attention of whole layers"
    limits = ["texts must not be padded"] * facts["unpadded"]
    limits += ["texts must not be padded on the left, nor be longer than the model's context"] * facts["right"]
    limits += ["calls of several tokens after a past have one row"] * facts["one_row"]
    return (
        f"- fused operators: {facts['fused']} of ONNX Runtime's own (com.microsoft){where}: the graph runs in ONNX "
        f"Runtime only{'; ' * bool(limits)}{', and '.join(limits)}\n"
    )


def _monitors(facts: Mapping[str, Any]) -> str:
    monitors = facts.get("monitors") or {}
    lines = "".join(f"- `{name}`: {about}\n" for name, about in monitors.items())
    return f"\nMonitors, outputs of their own, for every token of a call:\n\n{lines}" if lines else ""


def _optional(content: Content) -> str:
    facts, text = content.facts, ""
    if facts["knobs"]:
        text += "\nKnobs, inputs of one number each:\n\n"
        text += "".join(f"- {sentence(f'`{name}`', one)}\n" for name, one in facts["knobs"].items())
    for name, doses in facts["doses"].items():
        text += f"\nA file for each dose of `{name}`: {', '.join(f'{dose:g}' for dose in doses)}\n"
    optional = content.interface.optional
    gates = [port.name for port in optional if port.name not in facts["knobs"]]
    if gates:
        text += f"\nGates of the recurrence, which may be left out: {', '.join(f'`{name}`' for name in gates)}\n"
    return text + (QUIET if optional else "")


def _rows(content: Content, ports: list[Port]) -> str:
    """A row for each input or output; of the parts of the past one in a line for all layers."""
    rows: list[tuple[str, str, str]] = []
    for port in ports:
        prefix, _, rest = port.name.partition(".")
        layer, _, part = rest.partition(".")
        name = port.name
        if f"{prefix}." in (*PASTS, *PRESENTS) and layer.isdecimal():
            name = f"{prefix}.{{i}}.{part}"
        row = (name, port.dtype.lower(), _list(port.shape))
        if row not in rows:
            rows.append(row)
    last = content.model.metadata.sizes.num_layers - 1
    return "\n".join(
        f"| `{name}`{f', i from 0 to {last}' if '{i}' in name else ''} | {dtype} | [{shape}] |"
        for name, dtype, shape in rows
    )


def _value(edit: Intervention) -> str:
    if edit.fragment is not None:
        return f"an ONNX fragment of {len(edit.fragment.structure.graph.node)} nodes"
    return ", ".join(
        ("" if name == "value" else f"{name} ")
        + (f"{value.item():g}" if value.size == 1 else f"{value.dtype} {list(value.shape)}{_norm(value)}")
        for name, value in zip(edit.rules.values, edit.values, strict=True)
    )


def _norm(value: NDArray[Any]) -> str:
    """The length of a vector, which is its strength."""
    return (
        f", norm {np.linalg.norm(value.astype(np.float64)):.3g}" if value.ndim == 1 and value.dtype.kind == "f" else ""
    )


def _limits(edit: Intervention) -> str:
    limits = {name: getattr(edit, name) for name in LIMITS if name != "rows"}
    return "; ".join(f"{name} {_list(value)}" for name, value in limits.items() if value is not None)


def _list(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value))


def _targets(state: Any) -> str:
    layers = "every layer" if state.layers_ is None else f"layers {_list(state.layers_)}"
    return f"positions {_list(state.positions_)}; {layers}"
