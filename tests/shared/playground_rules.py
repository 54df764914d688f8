"""A model in Python and its playground's engine in Node: what both make of the same entries.

The inputs that the engine makes run in the playground's graph, in ONNX Runtime.
"""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from playground_cases import ACT, CLAMPED, POST, PROMPT, SCORES, SECOND, TOKENS, Entry
from repository import SHARED

from mionnx import HookSpec, Intervention, KnockoutSpec, MIModel, create_knockout_mask
from mionnx.errors import MIError
from mionnx.playground.folder import manifest_of
from mionnx.playground.graph import build_graph

Array = np.ndarray


def file_spec(model: MIModel) -> HookSpec:
    """The spec that the playground is written with."""
    mask = create_knockout_mask(KnockoutSpec().edge(4, 3).edge(2, 0), model.num_heads, TOKENS)
    spec = HookSpec().intervene(CLAMPED, Intervention.Clamp(-0.5, 0.9))
    spec.intervene(SCORES, Intervention.Knockout(mask)).intervene(
        SCORES, Intervention.Knockout(mask[:, :, [4, 2]], positions=[4, 2])
    )
    spec.intervene(
        SCORES,
        Intervention.Knockout(np.stack([mask[0, 0], 0 * np.nan_to_num(mask[0, 0], neginf=0)])[None], heads=[6, 1]),
    )
    return spec.intervene(POST, Intervention.Scale(1.5)).intervene(ACT, Intervention.Zero())


class Rules:
    """A model in Python, and its playground's engine in Node.

    `file`: the spec that its page has from the start; `prompt`: a text of as many tokens as the cases' own.
    """

    def __init__(self, model: MIModel, folder: Path, file: HookSpec | None = None, prompt: str = PROMPT) -> None:
        if shutil.which("node") is None:
            pytest.skip("Node is not installed here")
        self.model, self.folder, self.prompt = model, folder, prompt
        self.file = file_spec(model) if file is None else file
        self.graph = build_graph(model.hooked, self.file)
        self.manifest = manifest_of(model.hooked, self.graph, self.file, "rules", {})
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(model.hooked.folder)
        )
        self.session = onnxruntime.InferenceSession(self.graph.model, options)
        self.captured: dict[tuple[str, str], Array] = {}
        self.ids = np.array([model.tokenizer.encode(prompt).ids])

    def activation(self, text: str, hook: str) -> Array:
        if (text, hook) not in self.captured:
            cache = self.model.forward(text, HookSpec().capture([*self.graph.sites]))
            self.captured |= {(text, name): cache[name] for name in self.graph.sites}
        return self.captured[text, hook]

    def tensors(self) -> dict[str, Array]:
        return {
            f"interventions.{n}.{name}": value
            for n, (_, one) in enumerate(self.file.interventions)
            for name, value in one.rules.stored(one).items()
        }

    def in_node(self, cases: list[list[Entry]]) -> list[Entry]:
        """For each list of entries {"spec", "feeds"}, or {"refused", "broken"}."""
        texts = {
            value["text"]
            for case in cases
            for one in case
            if isinstance(value := one.get("value"), dict) and "text" in value
        }
        captured = {
            text: {hook: tensor(self.activation(text, hook)) for hook in self.graph.sites}
            for text in {self.prompt, SECOND, *texts}
        }
        asked = {
            "manifest": self.manifest,
            "tensors": {name: tensor(value) for name, value in self.tensors().items()},
            "captured": captured,
            "prompt": TOKENS,
            "cases": cases,
        }
        return json.loads(node(SHARED / "playground_rules.mjs", self.folder, given=json.dumps(asked)))

    def of_feeds(self, feeds: dict[str, Entry]) -> Array:
        """The main output of the graph with the engine's inputs: logits of the last position, or of the whole text."""
        arrays = {name: floats(one["data"]).reshape(one["dims"]) for name, one in feeds.items()}
        arrays |= {
            "input_ids": self.ids,
            "attention_mask": np.ones_like(self.ids),
            "position_ids": np.arange(TOKENS)[None],
        }
        past = self.model.hooked.metadata.past_shapes(1, 0)
        arrays |= {name: np.zeros(shape, np.float32) for name, shape in past.items()}
        arrays |= {"mionnx.rows": np.array([self.model.num_layers * TOKENS - 1]), "mionnx.rows.whole": np.array([0])}
        arrays |= {"mionnx.rows.k": np.array([1]), "mionnx.rows.tracked": np.array([0])}
        arrays["token_type_ids"] = np.zeros_like(self.ids)
        known = {entry.name for entry in self.session.get_inputs()}
        given = {name: value for name, value in arrays.items() if name in known}
        return self.session.run(["logits"], given)[0].reshape(-1)

    def of_python(self, spec: HookSpec) -> Array:
        output = self.model.forward(self.prompt, spec).output()[0]
        return output[-1] if self.model.hooked.metadata.positional else output

    def spec(self, case: list[Entry]) -> HookSpec:
        """What entries mean, written with Python's own constructors."""
        spec = HookSpec()
        for one in case:
            limits = {name: one[name] for name in ("positions", "heads", "neurons") if one.get(name) is not None}
            for hook in self.hooks(one["hook"]):
                spec.intervene(hook, self.made(one, hook, limits))
        return spec

    def hooks(self, name: str) -> list[str]:
        """A glob for each hook point that it means: a value of another prompt differs from one to the next."""
        found = HookSpec().capture(name)
        return [hook for hook in self.graph.sites if found.is_captured(hook)] or [name]

    def made(self, one: Entry, hook: str, limits: Entry) -> Intervention:
        kind, value = one["kind"], one.get("value")
        if kind == "zero":
            return Intervention.Zero(**limits)
        make = {name: getattr(Intervention, name.title()) for name in ("add", "scale", "replace", "knockout", "clamp")}[
            kind
        ]
        if not isinstance(value, dict):
            return make(np.multiply(value, one["strength"]) if "strength" in one else value, **limits)
        if "edges" in value:
            asked = KnockoutSpec()
            for pair in value["edges"]:
                asked.edge(*pair)
            mask = create_knockout_mask(asked, 1, TOKENS, both=self.model.bidirectional)
            chosen = limits.get("positions")
            whole = [*dict.fromkeys(at % TOKENS for at in chosen)] if isinstance(chosen, list) else []
            # As many queries as are chosen are in the order chosen; edges are by position.
            return make(mask[:, :, whole] if len(whole) == TOKENS else mask, **limits)
        if value["from"] == "spec":
            return make(*(self.tensors()[name] for name in value.get("tensors") or [value["tensor"]]), **limits)
        if value["from"] == "contrast":
            more, less = (self.activation(value[side][0], hook)[:, [value["position"]]] for side in ("more", "less"))
            return make(one.get("strength", 1) * (more - less), **limits)
        found = self.activation(value["text"], hook)
        found = found if value.get("positions") is None else found[:, value["positions"]]
        return make(found if "heads" not in limits else found[:, :, limits["heads"]], **limits)

    def compare(self, cases: dict[str, list[Entry]], folder: Path) -> dict[str, str]:
        """Case -> "equal", "both refuse", or what is wrong."""
        found = self.in_node([*cases.values()])
        return {name: self._compare(case, one, folder) for (name, case), one in zip(cases.items(), found, strict=True)}

    def _compare(self, case: list[Entry], found: Entry, folder: Path) -> str:
        try:
            expected = self.of_python(self.spec(case))
        except MIError as error:
            if found.get("broken"):
                return f"the page breaks: {found['refused']}"
            return "both refuse" if "refused" in found else f"Python alone refuses: {error}"
        if "refused" in found:
            return f"the page alone refuses: {found['refused']}"
        (folder / "exported.safetensors").write_bytes(base64.b64decode(found["spec"]))
        exported = self.of_python(HookSpec.load(folder / "exported.safetensors"))
        worst = [float(np.abs(one - expected).max()) for one in (self.of_feeds(found["feeds"]), exported)]
        return (
            "equal"
            if max(worst) < 1e-4
            else f"logits differ by {worst[0]:.2g}, those of the exported spec by {worst[1]:.2g}"
        )


def node(*command: Any, given: str = "") -> str:
    ran = subprocess.run(["node", *map(str, command)], input=given, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def tensor(value: Array) -> Entry:
    return {"shape": list(value.shape), "data": base64.b64encode(np.ascontiguousarray(value, np.float32)).decode()}


def floats(data: str) -> Array:
    return np.frombuffer(base64.b64decode(data), np.float32)
