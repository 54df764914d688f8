"""Sentence embeddings: every pooling and module behind it, beside transformers and sentence-transformers itself."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import encoder_batch, graph_values, make_encoder, run_encoder
from safetensors.torch import save_file
from transformers import AutoConfig, Gemma3TextConfig, Gemma3TextModel

from exporters.transformers import export
from exporters.transformers.config import native_config
from exporters.transformers.eager import load
from exporters.transformers.encoder_families import reads_both_ways
from exporters.transformers.heads import head_of
from mionnx import ExportError, HookPoint, HookSpec, Intervention, MIModel
from mionnx.graph.metadata import POOLINGS
from mionnx.run.source_path import PACKAGED

TOLERANCE = 5e-5
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
WIDTH = 32
has_package = pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="pip install sentence-transformers")
minilm_installed = pytest.mark.skipif(find_spec("all_minilm_l6_v2") is None, reason=PACKAGED["minilm"].command)
TEXTS = [
    "A man is playing a guitar on stage.",
    "Someone performs music for an audience.",
    "",
    "Die Katze schläft. 猫が寝ている。 🐈",
    "word " * 400,
    "?!",
]


def write_modules(folder: Path, poolings: list[str], behind: list[str], **texts) -> None:
    """Make a sentence-transformers folder of a checkpoint's."""
    names = ["Transformer", "Pooling", *behind]
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(names[1:], 1))]
    kinds = [f"sentence_transformers.models.{name}" for name in names]
    modules = [{"idx": i, "name": str(i), "path": path, "type": kinds[i]} for i, path in enumerate(paths)]
    (folder / "modules.json").write_text(json.dumps(modules))
    width = WIDTH * len(poolings)
    flags = {flag: mode in poolings for mode, flag in FLAGS.items()}
    for path, name in zip(paths[1:], names[1:], strict=True):
        (folder / path).mkdir()
        if name == "Pooling":
            config, weights = {"word_embedding_dimension": WIDTH, **flags}, {}
        elif name == "Dense":
            activation = "torch.nn.modules.activation.Tanh"
            config = {"in_features": width, "out_features": 24, "bias": True, "activation_function": activation}
            weights = {"linear.weight": torch.randn(24, width) * 0.2, "linear.bias": torch.randn(24) * 0.1}
            width = 24
        elif name == "LayerNorm":
            config = {"dimension": width}
            weights = {"norm.weight": torch.randn(width) * 0.1 + 1, "norm.bias": torch.randn(width) * 0.1}
        else:
            continue
        (folder / path / "config.json").write_text(json.dumps(config))
        if weights:
            save_file(weights, folder / path / "model.safetensors")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(texts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every pooling and every module in one sentence-transformers folder."""
    folder = tmp_path_factory.mktemp("sentence") / "checkpoint"
    make_encoder("bert", folder, "none")
    prompts = {"query": "query: ", "document": ""}
    facts = {"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    write_modules(folder, [*POOLINGS], ["Dense", "LayerNorm", "Normalize"], **facts)
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    """Its transformer and modules in torch, weights included."""
    config = native_config(folder)
    head = head_of(config, folder)
    return load(folder, config, "float32", head)[0], head


@pytest.fixture(scope="module")
def model(folder):
    export(folder, folder.parent / "hooked")
    return MIModel.from_pretrained(folder.parent / "hooked", threads=1)


def test_the_metadata_and_the_files_say_how_texts_are_embedded(model):
    pooling = model.hooked.metadata.pooling
    assert pooling["modes"] == [*POOLINGS]
    assert pooling["normalize"] is True
    assert pooling["prompts"] == {"query": "query: ", "document": ""}
    assert (pooling["default_prompt"], pooling["similarity"], pooling["include_prompt"]) == ("query", "dot", True)
    assert model.hooked.metadata.context_length == 16
    assert model.hooked.axes(HookPoint.Pooled) == ["batch", WIDTH * len(POOLINGS)]
    assert model.hooked.axes(HookPoint.Embedding) == ["batch", 24]
    assert (model.hooked.folder / "1_Pooling" / "config.json").is_file()
    assert not any("pooler" in name for name in model.hooked.metadata.hooks)


@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_each_pooling_is_that_of_the_rows_own_tokens(model, padding):
    inputs = encoder_batch(padding)
    values = graph_values(model, inputs)
    stream, mask = values["blocks.1.hook_resid_post"], inputs["attention_mask"].astype(bool)
    parts = np.split(values["hook_pooled"], len(POOLINGS), 1)
    for row, real in enumerate(mask):
        own = stream[row][real].astype(np.float64)
        steps = np.arange(1, len(own) + 1)[:, None]
        expected = {
            "cls": own[0],
            "max": own.max(0),
            "mean": own.mean(0),
            "mean_sqrt_len": own.sum(0) / np.sqrt(len(own)),
            "weightedmean": (own * steps).sum(0) / steps.sum(),
            "lasttoken": own[-1],
        }
        for mode, part in zip(POOLINGS, parts, strict=True):
            assert np.abs(part[row] - expected[mode]).max() < TOLERANCE, mode
    assert np.allclose(np.linalg.norm(values["embedding"], axis=1), 1)


def test_the_modules_behind_have_the_checkpoints_weights(model, reference):
    for padding in ("right", "left"):
        inputs = encoder_batch(padding)
        values, expected = graph_values(model, inputs), run_encoder(reference[0], inputs, head=reference[1])
        for name in ("hook_pooled", "hook_embedding"):
            assert np.abs(values[name] - expected.values[name]).max() < TOLERANCE


def test_an_edit_of_the_pooled_vector_reaches_the_embedding(model, reference):
    inputs = encoder_batch("right")
    inputs["token_type_ids"] = np.zeros_like(inputs["token_type_ids"])
    spec = HookSpec().intervene("hook_pooled", Intervention.Scale(0.5)).capture("hook_embedding")
    found = model.forward(inputs["input_ids"], spec, attention_mask=inputs["attention_mask"])["hook_embedding"]
    expected = run_encoder(reference[0], inputs, ("hook_pooled", 0.5), reference[1]).logits
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m[1].update(type="custom_st.Pooling"), "brings code of its own for the module custom_st.Pooling"),
        (lambda m: m[2].update(type="sentence_transformers.models.LSTM"), "has a module 'LSTM'; mionnx knows"),
        (lambda m: m.pop(1), "no transformer with one pooling"),
        (lambda m: m[0].pop("type"), "is damaged: an entry has no type"),
    ],
)
def test_modules_that_are_not_known_are_refused(folder, tmp_path, change, words):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    modules = json.loads((copy / "modules.json").read_text())
    change(modules)
    (copy / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ExportError, match=words):
        export(copy, tmp_path / "hooked")


@minilm_installed
@pytest.mark.slow
def test_minilm_is_that_of_transformers():
    from transformers import AutoModel, AutoTokenizer

    from mionnx.run.find_model import checkpoint_folder

    folder = checkpoint_folder("minilm")
    model = MIModel.from_pretrained("minilm", threads=1)
    tokenizer, eager = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        stream = eager(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None].float()
    expected = torch.nn.functional.normalize((stream * mask).sum(1) / mask.sum(1), dim=-1).numpy()
    assert np.abs(model.embed(TEXTS) - expected).max() < 1e-6


@has_package
@minilm_installed
@pytest.mark.slow
def test_minilm_is_that_of_sentence_transformers_on_1000_texts():
    from sentence_transformers import SentenceTransformer

    from mionnx.run.find_model import checkpoint_folder

    rng = np.random.default_rng(0)
    words = [*("the", "a", "cat", "dog", "plays", "music", "loud", "quiet", "river", "stone", "naïve", "東京")]
    texts = [" ".join(rng.choice(words, rng.integers(1, 60))) for _ in range(994)] + TEXTS
    expected = SentenceTransformer(str(checkpoint_folder("minilm")), device="cpu").encode(texts)
    assert np.abs(MIModel.from_pretrained("minilm").embed(texts) - expected).max() < 1e-6


@has_package
@pytest.mark.parametrize("pooling", POOLINGS)
def test_poolings_are_those_of_sentence_transformers(pooling):
    from sentence_transformers.models import Pooling

    from exporters.transformers.sentence import pooled

    stream, mask = torch.randn(3, 9, 8), torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = mask[2, 1:] = 0
    mode = "mean_sqrt_len_tokens" if pooling == "mean_sqrt_len" else pooling
    expected = Pooling(8, pooling_mode=mode)({"token_embeddings": stream, "attention_mask": mask})
    assert torch.allclose(pooled(stream, mask, pooling), expected["sentence_embedding"], atol=1e-6)


@pytest.mark.parametrize("family", ["gemma4_text", "gemma4_unified_text"])
def test_a_text_is_causal_where_images_alone_are_read_both_ways(family):
    """Such models were taken for encoders: no generation, and a forward pass without a cache failed."""
    directions = {"all": True, "vision": False, None: False}
    for setting, both in directions.items():
        assert reads_both_ways(AutoConfig.for_model(family, use_bidirectional_attention=setting)) is both


@pytest.mark.slow
@pytest.mark.parametrize("both", [True, False])
def test_a_decoder_that_embeds_reads_as_its_config_says(both, tmp_path):
    """EmbeddingGemma's form: windows to both sides, or to the left, and the mean of the stream."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 1}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **{**sizes, "vocab_size": 99, "head_dim": 8, "num_hidden_layers": 3, "layer_types": kinds, "pad_token_id": 0},
        **{"sliding_window": 6, "use_bidirectional_attention": both, "max_position_embeddings": 64},
    )
    checkpoint = tmp_path / "checkpoint"
    Gemma3TextModel(config).save_pretrained(checkpoint)
    write_modules(checkpoint, ["mean"], ["Normalize"])
    reference = Gemma3TextModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    export(checkpoint, tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    assert model.hooked.metadata.direction == ("both" if both else "left")
    for padding in ("none", "right", "left"):
        inputs = {name: torch.from_numpy(array) for name, array in encoder_batch(padding).items()}
        del inputs["token_type_ids"]
        with torch.no_grad():
            stream = reference(**inputs).last_hidden_state
        real = inputs["attention_mask"][:, :, None].float()
        expected = torch.nn.functional.normalize((stream * real).sum(1) / real.sum(1), dim=-1).numpy()
        found = graph_values(model, {name: array.numpy() for name, array in inputs.items()})["embedding"]
        assert np.abs(found - expected).max() < TOLERANCE
