"""Compiled encoders in the clients that people run encoders with: each opens the folder as its card says.

Every client is the real one: sentence-transformers, fastembed and optimum-onnx in environments of their own,
transformers.js under Node. What the folders hold, and what they refuse, is looked at without them.
"""

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from client_programs import CLIENTS, OPTIMUM, loop_of, run
from safetensors.numpy import save_file

from mionnx import HookSpec, InputError, Intervention, Knob, MIModel
from mionnx.compile.layouts.layout import CARD_PROMPT
from mionnx.verify.plain_model import export_plain

# The releases of datasets that are imported with it want the newest huggingface_hub, and optimum's transformers not.
SENTENCES = f"sentence-transformers==5.4.1 {OPTIMUM} datasets==4.4.1"
FASTEMBED = "fastembed==0.9.1"
LAYOUTS = ("optimum", "sentence-transformers", "transformers.js")
TEXTS = [
    "the man plays a guitar on the stage .",
    "music",
    "someone performs music for the audience , it rains in paris the capital of france and ann lives in rome now",
]
PAIRS = [("where does ann live ?", "ann lives in rome now"), ("music", "it rains .")]
SPEC = (
    HookSpec()
    .intervene("blocks.1.hook_resid_post", Intervention.ProjectOut(np.arange(32.0), positions=[0, 1, -1]))
    .intervene("blocks.0.hook_mlp_out", Intervention.Add(np.cos(np.arange(32.0))))
)
ENDS = {"optimum": "model.onnx", "sentence-transformers": "onnx/model.onnx", "transformers.js": "onnx/model.onnx"}


def session_of(folder: Path, layout: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(folder / ENDS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_graph_counts_positions_and_gives_stream_and_sentence(layout, text_encoder, tmp_path):
    """Of unequal texts, padded on either side."""
    model, _ = text_encoder("embedding")
    folder = model.compile(SPEC, tmp_path / "out", layout=layout)
    session = session_of(folder, layout)
    assert [one.name for one in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    assert [one.name for one in session.get_outputs()] == ["last_hidden_state", "sentence_embedding"]
    assert [one.shape for one in session.get_outputs()] == [["batch_size", "sequence_length", 32], ["batch_size", 32]]
    rows = [model.tokenize(text).ids[:16] for text in TEXTS[:2]]
    expected = model.embed(TEXTS[:2], SPEC)
    for left in (False, True):
        ids = np.zeros([2, max(map(len, rows))], np.int64)
        mask = np.zeros_like(ids)
        for at, row in enumerate(rows):
            columns = slice(-len(row), None) if left else slice(len(row))
            ids[at, columns], mask[at, columns] = row, 1
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        stream, sentence = session.run(None, feeds)
        assert np.abs(sentence - expected).max() < 1e-6
        mean = (stream * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        assert np.abs(mean / np.linalg.norm(mean, axis=1, keepdims=True) - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("head", "layout", "outputs"),
    [
        ("classes", "sentence-transformers", ["logits"]),
        ("classes", "transformers.js", ["logits"]),
        ("masked_lm", "optimum", ["logits"]),
        ("span", "optimum", ["start_logits", "end_logits"]),
        ("span", "transformers.js", ["start_logits", "end_logits"]),
    ],
)
def test_other_heads_have_the_outputs_of_transformers(head, layout, outputs, text_encoder, tmp_path):
    """Pairs, with their token types."""
    model, _ = text_encoder(head)
    spec = HookSpec().intervene("blocks.0.hook_resid_post", Intervention.Scale(0.5))
    session = session_of(model.compile(spec, tmp_path / "out", layout=layout), layout)
    assert [one.name for one in session.get_outputs()] == outputs
    encoding = model.tokenizer.encode(*PAIRS[0])
    feeds = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}
    found = session.run(None, {name: np.array([ids]) for name, ids in feeds.items()})
    expected = model.forward([PAIRS[0]], spec).output()
    assert np.abs((np.stack(found, -1) if len(outputs) > 1 else found[0]) - expected).max() < 1e-5


@pytest.mark.slow
def test_tokenizers_cut_where_embed_does_and_name_the_inputs(text_encoder, tmp_path):
    model, _ = text_encoder("embedding")
    for layout in LAYOUTS:
        folder = model.compile(SPEC, tmp_path / layout, layout=layout)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert settings["model_max_length"] == model.hooked.longest_text == 16
        assert settings["model_input_names"] == ["input_ids", "attention_mask", "token_type_ids"]
        assert settings.get("tokenizer_class") == ("BertTokenizer" if layout == "transformers.js" else None)
        card = (folder / "README.md").read_text()
        assert "pipeline_tag: sentence-similarity" in card
        assert "| `sentence_embedding` | float | [batch_size, 32] |" in card
    config = json.loads((tmp_path / "transformers.js" / "config.json").read_text())
    assert config["model_type"] == "bert"
    assert config["transformers.js_config"] == {"dtype": "fp32", "use_external_data_format": 1}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hook", ["hook_pooled", "hook_embedding"])
def test_what_the_client_pools_past_is_refused(layout, hook, text_encoder, tmp_path):
    model, _ = text_encoder("embedding")
    spec = HookSpec().intervene(hook, Intervention.ProjectOut(np.arange(32.0)))
    message = rf"{layout}.* pools blocks.1.hook_resid_post itself, and would not show project_out at {hook}"
    with pytest.raises(InputError, match=message):
        model.compile(spec, tmp_path / "out", layout=layout)
    assert not [*tmp_path.iterdir()]


def test_what_a_layout_does_not_run_is_refused(text_encoder, shipped, tmp_path):
    spec = HookSpec().intervene("blocks.0.hook_mlp_out", Intervention.Scale(0.5))
    for model, layout, message in (
        (shipped, "sentence-transformers", "sentence-transformers runs encoders, and world-llama is a decoder"),
        (text_encoder("span")[0], "sentence-transformers", r"has the head 'span': use layout='optimum'"),
        (text_encoder("embedding")[0], "genai", r"decodes, and hooked is an encoder: use layout='plain'"),
        (text_encoder("embedding")[0], "triton", r"decodes, and hooked is an encoder: use layout='plain'"),
    ):
        with pytest.raises(InputError, match=message):
            model.compile(spec, tmp_path / "out", layout=layout)
    for layout in ("sentence-transformers", "optimum"):
        with pytest.raises(InputError, match="feeds a graph no inputs of its own"):
            text_encoder("embedding")[0].compile(spec, tmp_path / "out", layout=layout, knobs={"mlp": Knob()})
    assert not [*tmp_path.iterdir()]


def test_a_knob_and_a_capture_of_the_stream_stand_beside_the_sentence(text_encoder, tmp_path):
    """The document of a knob too, which is written for the graph that leaves."""
    model, _ = text_encoder("embedding")
    spec = HookSpec().extend(SPEC).capture("blocks.1.hook_resid_post")
    knob = Knob("blocks.0.*", low=0, high=2, meaning="how much is added")
    folder = model.compile(spec, tmp_path / "out", layout="transformers.js", knobs={"push": knob})
    graph = onnx.load(folder / "onnx/model.onnx", load_external_data=False).graph
    names = [one.name for one in graph.output]
    assert names == ["last_hidden_state", "sentence_embedding", "blocks.1.hook_resid_post"]
    (push,) = [one for one in graph.input if one.name == "push"]
    assert push.doc_string.startswith("push: how much is added")
    encoding = model.tokenizer.encode(TEXTS[1])
    feeds = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}
    feeds = {name: np.array([ids]) for name, ids in feeds.items()} | {"push": np.array(1, np.float32)}
    stream, sentence, captured = session_of(folder, "transformers.js").run(None, feeds)
    assert (stream == captured).all()
    assert np.abs(sentence - model.embed(TEXTS[1], SPEC)).max() < 1e-6


def test_a_file_a_dose_is_the_spec_of_that_strength(text_encoder, tmp_path):
    model, _ = text_encoder("embedding")
    spec = HookSpec().intervene("blocks.0.hook_mlp_out", Intervention.Add(np.cos(np.arange(32.0))))
    folder = model.compile(spec, tmp_path / "out", layout="optimum", knobs={"push": Knob(doses=[0, 1])})
    encoding = model.tokenizer.encode(TEXTS[1])
    feeds = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}
    feeds = {name: np.array([ids]) for name, ids in feeds.items()}
    for dose, hooks in ((0, None), (1, spec)):
        _, sentence = onnxruntime.InferenceSession(folder / f"model_push_{dose}.onnx").run(None, feeds)
        assert np.abs(sentence - model.embed(TEXTS[1], hooks)).max() < 1e-6


@pytest.mark.slow
def test_an_export_that_leaves_at_once_refuses_an_encoder(text_encoder, tmp_path):
    model, _ = text_encoder("embedding")
    source = model.hooked.folder.parent / "checkpoint"
    with pytest.raises(InputError, match=r"reads each text whole.*--plain --layout optimum"):
        export_plain(source, tmp_path / "out", "optimum", "float32", lambda *_: None)
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="session")
def rows(
    environment: Callable[[str], Path], javascript: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., np.ndarray]:
    """What a client makes of texts: a row of numbers for each."""
    packages = {"sentence-transformers": SENTENCES, "fastembed": FASTEMBED, "optimum": OPTIMUM}

    def find(client: str, folder: Path, texts: list[Any]) -> np.ndarray:
        asked = tmp_path_factory.mktemp("asked") / "asked.json"
        asked.write_text(json.dumps({"texts": texts}))
        if client == "transformers.js":
            file = javascript / "encoders.mjs"
            file.write_text((CLIENTS / file.name).read_text())  # Node looks for packages beside a module
            command = ["node", file]
        else:
            command = [environment(packages[client.split()[0]]), CLIENTS / "encoders.py", client]
        return np.array(json.loads(run([*command, folder, asked], asked.parent).splitlines()[-1]))

    return find


def short(texts: list[str]) -> list[str]:
    """Without the longest, which transformers.js cuts off in its last special token."""
    return texts[:-1]


def layout_of(client: str) -> str:
    return "sentence-transformers" if client.startswith("fastembed") else client


@pytest.mark.slow
@pytest.mark.parametrize("client", [*LAYOUTS, "fastembed", "fastembed pooling"])
def test_a_client_embeds_with_the_model_changed(client, text_encoder, rows, tmp_path):
    """Unequal texts, one of them longer than the model reads."""
    model, _ = text_encoder("embedding")
    texts = short(TEXTS) if client == "transformers.js" else TEXTS
    found = rows(client, model.compile(SPEC, tmp_path / "out", layout=layout_of(client)), texts)
    assert np.abs(found - model.embed(texts, SPEC)).max() < 1e-6
    assert np.abs(found - model.embed(texts)).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("client", LAYOUTS)
def test_a_client_classifies_pairs_with_the_model_changed(client, text_encoder, rows, tmp_path):
    model, _ = text_encoder("classes")
    folder = model.compile(SPEC, tmp_path / "out", layout=client)
    found = rows(client, folder, [*map(list, PAIRS)])
    expected, plain = model.classify(PAIRS, SPEC), model.classify(PAIRS)
    assert np.abs(np.take_along_axis(found, expected.ids, -1) - expected.logits).max() < 1e-5
    assert np.abs(np.take_along_axis(found, plain.ids, -1) - plain.logits).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "layout"),
    [
        ("embedding", "sentence-transformers"),
        ("classes", "optimum"),
        ("embedding", "transformers.js"),
        ("classes", "transformers.js"),
    ],
)
def test_the_loop_on_the_card_runs_as_it_stands(head, layout, text_encoder, environment, javascript, tmp_path):
    model, _ = text_encoder(head)
    folder = model.compile(SPEC, tmp_path / "out", layout=layout)
    code = loop_of(folder / "README.md")
    if layout == "transformers.js":
        (folder / "node_modules").symlink_to(javascript / "node_modules")
        (folder / "loop.mjs").write_text(code)
        printed = run(["node", folder / "loop.mjs"], folder)
    else:
        python = environment(SENTENCES if layout == "sentence-transformers" else OPTIMUM)
        printed = run([python, "-c", code], folder)
    assert len(code.splitlines()) <= 15
    if head == "classes":
        (expected,) = model.forward(CARD_PROMPT, SPEC).output()
    else:
        expected = model.embed(CARD_PROMPT, SPEC)[0, :8]
    numbers = [float(one) for one in re.findall(r"-?\d+\.\d+(?:e-\d+)?", printed)]
    assert np.abs(np.array(numbers) - expected).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("client", ["sentence-transformers", "fastembed"])
def test_modules_behind_the_pooling_leave_with_their_weights(client, rows, tmp_path):
    """A Dense module, which sentence-transformers computes itself, and fastembed reads off the graph."""
    from encoder_texts import make_text_encoder

    from exporters.transformers import export

    (source := tmp_path / "checkpoint").mkdir()
    make_text_encoder("embedding", source)
    modules = json.loads((source / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (source / "modules.json").write_text(json.dumps([*modules[:2], dense]))
    (source / "2_Dense").mkdir()
    activation = "torch.nn.modules.activation.Tanh"
    config = {"in_features": 32, "out_features": 24, "bias": True, "activation_function": activation}
    (source / "2_Dense" / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)
    weights = {"linear.weight": draw.normal(size=[24, 32]), "linear.bias": draw.normal(size=24)}
    save_file({name: array.astype(np.float32) for name, array in weights.items()}, source / "2_Dense/model.safetensors")
    export(source, tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    found = rows(client, model.compile(SPEC, tmp_path / "out", layout="sentence-transformers"), TEXTS)
    assert found.shape == (3, 24)
    assert np.abs(found - model.embed(TEXTS, SPEC)).max() < 5e-6


@pytest.mark.slow
@pytest.mark.skipif(find_spec("all_minilm_l6_v2") is None, reason="no MiniLM here")
@pytest.mark.parametrize("client", [*LAYOUTS, "fastembed"])
def test_a_client_embeds_with_minilm_without_a_direction(client, rows, tmp_path):
    model = MIModel.from_pretrained("minilm", threads=1)
    hook = "blocks.3.hook_resid_post"
    man, woman = (model.forward(f"A {word} plays.", HookSpec().capture(hook))[hook][0, 2] for word in ("man", "woman"))
    spec = HookSpec().intervene(hook, Intervention.ProjectOut(man - woman))
    texts = ["He is a nurse.", "She conducts the orchestra, and her brother plays the violin.", "word " * 300]
    texts = short(texts) if client == "transformers.js" else texts
    found = rows(client, model.compile(spec, tmp_path / "out", layout=layout_of(client)), texts)
    assert np.abs(found - model.embed(texts, spec)).max() < 5e-6
    assert np.abs(found - model.embed(texts)).max() > 1e-3
