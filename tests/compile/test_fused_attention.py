"""Attention as one node in compiled graphs: where nothing inside is touched, with the numbers of `forward`."""

import json
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest

from mionnx import HookSpec, InputError, Intervention
from mionnx.compile import fused_attention

FUSED = "GroupQueryAttention"
NORM = "SkipSimplifiedLayerNormalization"
ROTATED = {"llama", "mixtral"}  # queries and keys as their products give them
NORMS = {"llama": 2, "qwen3": 2, "gemma3_text": 2, "mixtral": 2}
SPEC = HookSpec().intervene("blocks.1.attn.hook_z", Intervention.Scale(0.5))
# Plain, norms of heads, windows, no rotation and biases, experts.
FAMILIES = [
    "llama",
    "qwen3",
    "gemma3_text",
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpt2", "mixtral")),
]


def operators(folder) -> Counter:
    return Counter(node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node)


def decoded(folder, model, ids, mask, prompt: int) -> np.ndarray:
    """Logits of a prompt, and of one token after another."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    past = {name: np.zeros(shape, np.float32) for name, shape in model.hooked.metadata.past_shapes(len(ids), 0).items()}
    positions, parts = np.maximum(mask.cumsum(1) - 1, 0), []
    for begin, end in [(0, prompt), *((at, at + 1) for at in range(prompt, ids.shape[1]))]:
        feeds = {
            "input_ids": ids[:, begin:end],
            "attention_mask": mask[:, :end],
            "position_ids": positions[:, begin:end],
            "mionnx.token_positions": np.tile(np.arange(begin, end), (len(ids), 1)),
        }
        feeds = {one.name: feeds[one.name] for one in session.get_inputs() if one.name in feeds}
        out = dict(zip(names, session.run(None, feeds | past), strict=True))
        past = {name: out[name.replace("past_key_values", "present")] for name in past}
        parts.append(out["logits"])
    return np.concatenate(parts, 1)


@pytest.mark.parametrize(("side", "fused"), [("left", "padded"), ("right", "all")])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_texts_and_decoding_give_the_logits_of_forward(family, side, fused, models, tmp_path):
    model = models(family)
    ids = np.random.default_rng(0).integers(3, model.vocab_size, (2, 14))
    mask = np.ones_like(ids)
    mask[0, slice(4) if side == "left" else slice(5, 9)] = 0  # of a prompt of 9
    folder = model.compile(HookSpec(), tmp_path / "plain", plain=True, fused=fused)
    assert operators(folder)[FUSED] == model.num_layers
    rotates = fused == "all" and family in ROTATED
    assert operators(folder)["RotaryEmbedding"] == 0 or not rotates
    # every norm behind a sum, that of the last stream too, but not that of the embedding; gpt2's are no RMS norms
    assert operators(folder)[NORM] == NORMS.get(family, 0) * model.num_layers
    assert not operators(folder)["Softmax"] or family == "mixtral"  # routers have one
    real = mask.astype(bool)
    expected = np.concatenate([model.forward(row[one][None]).output()[0] for row, one in zip(ids, real, strict=True)])
    found = decoded(folder, model, ids, mask, 9)[real]
    assert np.abs(found - expected).max() < 5e-5 * max(1, np.abs(expected).max())
    card = (folder / "README.md").read_text()
    assert f"{model.num_layers} of ONNX Runtime's own (com.microsoft), attention of whole layers" in card
    assert "calls of several tokens after a past have one row" in card
    assert ("texts must not be padded on the left" in card) == rotates


def test_keys_that_the_graph_repeats_for_the_heads_that_share_them_are_fused(shipped, tmp_path):
    """As older exports have them, the shipped one among these."""
    ids = np.random.default_rng(0).integers(3, shipped.vocab_size, (1, 9))
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Scale(0.9))
    folder = shipped.compile(spec, tmp_path / "shipped", fused="padded")
    assert operators(folder)[FUSED] == shipped.num_layers
    assert not operators(folder)["Softmax"]
    expected = shipped.forward(ids, spec).output()
    assert np.abs(decoded(folder, shipped, ids, np.ones_like(ids), 6) - expected).max() < 5e-5


def test_a_layer_that_is_changed_or_read_keeps_its_nodes(models, tmp_path):
    model = models("llama")
    ids = np.random.default_rng(0).integers(3, model.vocab_size, (1, 9))
    folder = model.compile(SPEC, tmp_path / "changed", fused="padded")
    assert operators(folder)[FUSED] == model.num_layers - 1
    expected = model.forward(ids, SPEC).output()
    assert np.abs(decoded(folder, model, ids, np.ones_like(ids), 6) - expected).max() < 5e-5
    around = (
        HookSpec().capture("blocks.*.attn.hook_rot_k").capture("blocks.*.attn.hook_v").capture("blocks.*.hook_attn_out")
    )
    assert operators(model.compile(around, tmp_path / "around", fused="all"))[FUSED] == model.num_layers
    inside = HookSpec().capture("blocks.0.attn.hook_pattern")
    folder = model.compile(inside, tmp_path / "inside", fused="all")
    assert operators(folder)[FUSED] == model.num_layers - 1
    facts = {one.key: one.value for one in onnx.load(folder / "model.onnx", load_external_data=False).metadata_props}
    assert json.loads(facts["mionnx.compiled"])["fused"] == model.num_layers - 1


def test_a_norm_is_fused_with_the_sum_that_it_reads_unless_something_stands_between(models, tmp_path):
    """A stream may still be read; a changed one keeps its nodes, and one that all tokens share is no stream."""
    model = models("llama")
    ids = np.random.default_rng(0).integers(3, model.vocab_size, (1, 9))
    point, direction = "blocks.1.hook_resid_mid", np.cos(np.arange(model.hidden_size)).astype(np.float32)
    spec = HookSpec().capture("blocks.*.hook_resid_post").intervene(point, Intervention.Add(direction))
    folder = model.compile(spec, tmp_path / "steered", fused="all")
    assert operators(folder)[NORM] == 2 * model.num_layers - 1
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    past = {name: np.zeros(shape, np.float32) for name, shape in model.hooked.metadata.past_shapes(1, 0).items()}
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(9)[None], **past}
    names = ["logits", *(f"blocks.{i}.hook_resid_post" for i in range(model.num_layers))]
    expected = model.forward(ids, spec)
    for name, found in zip(names, session.run(names, feeds), strict=True):
        right = expected.output() if name == "logits" else expected[name]
        assert np.abs(found - right).max() < 5e-5 * max(1, np.abs(right).max()), name


def test_what_gives_other_numbers_or_has_no_attention_is_refused(models, recurrent, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="none can stand"):
        recurrent.compile(HookSpec(), tmp_path / "out", plain=True, fused="all")
    monkeypatch.setattr(fused_attention, "FUSED_TOLERANCE", -1.0)
    with pytest.raises(InputError, match="none can stand"):
        models("llama").compile(HookSpec(), tmp_path / "out", plain=True, fused="all")
    assert not [*tmp_path.iterdir()]
