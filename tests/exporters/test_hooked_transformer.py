"""TransformerLens' own checkpoints beside the activations that TransformerLens gives for them."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hooked_transformer_fixture import FOLDER, IDS, KINDS

from exporters.hooked_transformer import choose, recognises
from exporters.hooked_transformer.settings import converted, read_settings
from mionnx import ExportError, HookSpec, Intervention, MIModel

RENAMED = {  # TransformerLens' word -> ours
    "mlp.hook_pre": "mlp.hook_up",
    "mlp.hook_post": "mlp.hook_act",
    "hook_attn_scores": "hook_scores",
}
FAST = ("attention-only", "interpbench")
HIDDEN = -1e4  # scores below this are masked
BY_HEAD = ("hook_q", "hook_k", "hook_v")  # [batch, seq, head, width] there


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Kind -> its checkpoint, open."""
    store, models = tmp_path_factory.mktemp("store"), dict[str, MIModel]()

    def find(kind: str) -> MIModel:
        if kind not in models:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MIONNX_CACHE", str(store))
                models[kind] = MIModel.from_pretrained(FOLDER / kind, threads=1)
        return models[kind]

    return find


@pytest.fixture
def own(tmp_path):
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(FOLDER / "layer-norms", tmp_path / "own"))


def changed(folder: Path, **changes: object) -> Path:
    """Write other settings into a config."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def ours(name: str) -> str:
    """The hook point of TransformerLens' name."""
    for word, other in RENAMED.items():
        name = name.replace(word, other)
    return name


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in FAST else pytest.mark.slow) for kind in KINDS])
def test_every_activation_is_that_of_transformer_lens(opened, kind):
    model = opened(kind)
    cache = model.forward(np.array(IDS), HookSpec().capture("*"))
    expected = np.load(FOLDER / kind / "expected.npz")
    np.testing.assert_allclose(cache.output(), expected["logits"], atol=1e-5)
    shared = [name for name in expected.files if ours(name) in cache]
    assert len(shared) >= 20
    for name in shared:
        value = expected[name].swapaxes(1, 2) if name.endswith(BY_HEAD) else expected[name]
        seen = np.isfinite(value) & (value > HIDDEN)
        np.testing.assert_allclose(cache[ours(name)][seen], value[seen], atol=1e-5, err_msg=name)


def test_weights_are_those_of_the_file(opened):
    saved = torch.load(FOLDER / "interpbench" / "ll_model.pth", weights_only=True)
    weights = opened("interpbench").weights
    for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
        np.testing.assert_array_equal(getattr(weights, name)[1], saved[f"blocks.1.attn.{name}"], err_msg=name)
    for name in ("W_in", "W_out", "b_in", "b_out"):
        np.testing.assert_array_equal(getattr(weights, name)[1], saved[f"blocks.1.mlp.{name}"], err_msg=name)
    for name, stored in {"W_E": "embed.W_E", "W_U": "unembed.W_U", "b_U": "unembed.b_U"}.items():
        np.testing.assert_array_equal(getattr(weights, name), saved[stored], err_msg=name)


def test_logits_of_something_else_than_tokens_are_tags(opened):
    """As many as the file says; they are patched, edited and attributed like any tags."""
    model = opened("interpbench")
    assert list(model.hooked.metadata.labels) == ["0", "1", "2", "3"]
    tags = {"answer": "2", "versus": "0", "position": -1}
    clean, corrupted = np.array(IDS)
    swept = model.patch_sweep(clean, corrupted, hook="resid_pre", **tags)
    edited = model.forward(clean, HookSpec().intervene("blocks.0.hook_resid_pre", Intervention.Scale(0)))
    assert np.ptp(swept.values) > 1e-3
    assert not np.allclose(edited.output(), model.forward(clean).output())
    ranking = model.edge_attribution(clean, corrupted, **tags)
    found = model.circuit(clean, corrupted, [0, ranking.count], scores=ranking, **tags)
    assert found.values == pytest.approx([found.corrupted, found.clean], abs=1e-5)


def test_text_goes_on_as_its_own_logits_say(opened):
    model = opened("attention-only")
    ids = list(IDS[0])
    for _ in range(3):
        ids.append(int(model.forward(np.array([ids])).output()[0, -1].argmax()))
    assert model.generate(np.array(IDS[0]), max_new_tokens=3, eos_token_id=[]).ids[0].tolist() == ids


@pytest.mark.slow
def test_the_end_of_a_training_is_opened_and_any_point_of_it(own, opened, monkeypatch, tmp_path):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    (own / "checkpoints").mkdir()
    earlier = own / "checkpoints" / "model_100.pth"
    saved = torch.load(own / "model_final.pth", weights_only=True)
    torch.save({name: value * 0.5 for name, value in saved.items()}, earlier)
    torch.save(saved, own / "model_200.pth")
    assert choose(own).name == "model_final.pth"
    ids, hooks = np.array(IDS[:1]), HookSpec().capture("hook_embed")
    last, first = (MIModel.from_pretrained(at, threads=1).forward(ids, hooks)["hook_embed"] for at in (own, earlier))
    np.testing.assert_array_equal(first, last * np.float32(0.5))
    (own / "model_final.pth").unlink()
    torch.save(saved, own / "model_300.pth")
    with pytest.raises(ExportError, match=r"holds 2 files of weights: give one of them, as .*model_200\.pth"):
        choose(own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positional_embedding_type": "rotary"}, "positional_embedding_type='rotary': mionnx takes 'standard'"),
        ({"gated_mlp": True}, "gated_mlp=True"),
        ({"attention_dir": "bidirectional"}, "attention_dir='bidirectional'"),
        ({"output_logits_soft_cap": 30.0}, "output_logits_soft_cap=30.0"),
        ({"n_key_value_heads": 1}, "n_key_value_heads=1"),
        ({"act_fn": "gelu_neu"}, "act_fn='gelu_neu', none of .* did you mean 'gelu_new'"),
        ({"normalization_type": "Ln"}, "normalization_type='Ln', none of .* did you mean 'LN'"),
        ({"d_model": None}, "lacks a number for d_model"),
        ({"d_model": 24}, r"embed.W_E is \[11, 12\], the config says \[11, 24\]"),
        ({"n_layers": 3}, "lacks the tensor blocks.2.ln1.w"),
        ({"n_layers": 1}, "no part of such a model reads blocks.1"),
        ({"n_heads": 2**30}, "n_head"),
        ({"d_vocab_out": 2**40}, "vocab_size"),
    ],
)
def test_what_has_no_place_is_refused_by_name(own, tmp_path, monkeypatch, changes, message):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    with pytest.raises(ExportError, match=message):
        MIModel.from_pretrained(changed(own, **changes))
    assert not [*(tmp_path / "store").rglob("*.onnx")]


def test_a_folder_with_weights_of_transformers_is_not_taken(own):
    assert recognises(own)
    (own / "pytorch_model.bin").touch()
    assert not recognises(own)


def test_a_tokenizer_that_the_config_names_is_asked_for(own, tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    changed(own, tokenizer_name="EleutherAI/gpt-neox-20b", n_layers=1)  # refused behind the warning, without a tracing
    with pytest.warns(UserWarning, match=r"names the tokenizer of EleutherAI/gpt-neox-20b"), pytest.raises(ExportError):
        MIModel.from_pretrained(own)


def test_a_pickled_config_that_wants_to_run_something_is_refused(own, tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    (own / "model_final_cfg.pkl").write_bytes(pickle.dumps({"n_layers": Evil()}))
    with pytest.raises(ExportError, match=r"it names .*: nothing was run"):
        read_settings(own / "model_final.pth")
    (own / "model_final_cfg.pkl").write_bytes(b"\x80\x04damaged")
    with pytest.raises(ExportError, match="is no config that is read"):
        read_settings(own / "model_final.pth")
    assert not (tmp_path / "ran").exists()
    (own / "model_final_cfg.pkl").unlink()
    (own / "config.json").unlink()
    with pytest.raises(ExportError, match=r"its config is neither in model_final_cfg.pkl nor in config.json"):
        read_settings(own / "model_final.pth")


def test_both_pickles_are_read_as_they_were_written():
    """One is an object with numbers of numpy, one a table."""
    found = [converted(read_settings(FOLDER / kind / "ll_model.pth"), FOLDER) for kind in ("interpbench", "rms")]
    assert [one["attn_scale"] for one in found] == [pytest.approx(5**0.5), 1.0]
    assert [one["normalization"] for one in found] == [None, "RMS"]
