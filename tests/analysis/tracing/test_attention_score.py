"""Scores of attention as sums over pairs of nodes: equal to the equations in float64, and whole."""

import numpy as np
import pytest
import torch
from local_llama import LocalLlama
from safetensors.numpy import load_file, save_file
from transcoder_files import write_set
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from mionnx import InputError, MIModel, TranscoderSet
from mionnx.analysis.tracing.attention_score import scale_of

TEXT, PATH = "Mary and John went to the store", "models/world-llama"
LAYER, HEAD, QUERY, KEY = 2, 5, 7, 3


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained(PATH, threads=1)


def test_pairs_are_those_of_the_equations(model, tmp_path):
    layers = write_set(model, tmp_path)
    transcoders = TranscoderSet.load(tmp_path)
    graph = model.trace(TEXT, transcoders)
    got = graph.attention(model, transcoders, LAYER, HEAD, QUERY, KEY)
    oracle, seen = LocalLlama(PATH, layers, "blocks.{}.mlp.hook_pre", graph.token_ids), {}
    for name in ("q_proj", "k_proj"):
        module = getattr(oracle.model.model.layers[LAYER].self_attn, name)
        module.register_forward_hook(lambda module, args, out, name=name: seen.__setitem__(name, out[0]))
    oracle.run("patterns", "norms", "mlps")
    width = model.head_dim
    ends = seen["q_proj"][QUERY].view(-1, width)[HEAD], seen["k_proj"][KEY].view(-1, width)[HEAD // 2]
    parts = torch.tensor(oracle.effects([*ends[0], *ends[1]])).T
    cos, sin = oracle.model.model.rotary_emb(parts[None], torch.tensor([[QUERY, KEY]]))
    turned = [
        apply_rotary_pos_emb(part[None, None], part[None, None], cos[:, [i]], sin[:, [i]])[0][0, 0].numpy()
        for i, part in enumerate((parts[:, :width], parts[:, width:]))
    ]
    expected = turned[0] @ turned[1].T / np.sqrt(width)
    places = [graph.sources.index(name) for name in got.nodes[:-1]]
    pairs = got.queries.astype(float) @ got.keys.T.astype(float)
    assert np.abs(pairs[:-1, :-1] - expected[np.ix_(places, places)]).max() < 1e-5 * np.abs(expected).max()
    others = np.delete(np.arange(len(expected)), places)
    assert not expected[others].any()
    assert not expected[:, others].any()
    first = got.top(3)
    assert [share for *_, share in first] == sorted((share for *_, share in first), key=abs, reverse=True)
    assert abs(first[0][2]) == pytest.approx(np.abs(pairs).max())


def test_pairs_sum_to_the_score_and_nothing_is_left_over(model, tmp_path):
    """Where transcoders have no bias and all positions have features, nodes are everything."""
    write_set(model, tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        file = load_file(path)
        save_file({**file, "b_dec": np.zeros_like(file["b_dec"])}, path)
    transcoders = TranscoderSet.load(tmp_path)
    graph = model.trace(TEXT, transcoders, skip=0)
    for layer, head, query, key in ((0, 1, 5, 5), (1, 0, 7, 0), (3, 7, -1, 2)):
        got = graph.attention(model, transcoders, layer, head, query, key)
        rest = got.nodes.index("rest")
        largest = np.abs(got.queries).max()
        assert np.abs(got.queries[rest]).max() < 1e-5 * largest
        assert np.abs(got.keys[rest]).max() < 1e-5 * np.abs(got.keys).max()
        assert got.of_nodes()[0].sum() == pytest.approx(got.of_nodes()[1].sum())
        assert abs(got.gap) < 1e-5 * max(1, abs(got.score))
    few = graph.prune(0.5)  # what is no node goes into the rest
    part = few.attention(model, transcoders, 3, 7, -1, 2)
    assert len(part.nodes) < len(got.nodes)
    assert abs(part.gap) < 1e-5 * max(1, abs(part.score))


def test_frames_and_pages_name_nodes(model, tmp_path):
    write_set(model, tmp_path)
    transcoders = TranscoderSet.load(tmp_path)
    got = model.trace(TEXT, transcoders).attention(model, transcoders, LAYER, HEAD, QUERY, KEY)
    frame = got.to_frame()
    assert {*frame.in_query} <= {*got.nodes}
    assert frame.share.abs().is_monotonic_decreasing
    assert "Pairs of leading nodes" in got.page()


def test_what_is_no_score_of_pairs_is_refused(model, tmp_path):
    write_set(model, tmp_path / "a")
    transcoders = TranscoderSet.load(tmp_path / "a")
    graph = model.trace(TEXT, transcoders)
    with pytest.raises(InputError, match="key 5 is behind query 3"):
        graph.attention(model, transcoders, 0, 0, 3, 5)
    with pytest.raises(InputError, match="head"):
        graph.attention(model, transcoders, 0, 8, 5, 3)
    write_set(model, tmp_path / "b", seed=1)
    with pytest.raises(InputError, match="other active features than the graph"):
        graph.attention(model, TranscoderSet.load(tmp_path / "b"), 3, 0, 5, 3)
    queries, keys = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    scores = np.where(np.tri(5) > 0, 3 * queries @ keys.T, np.finfo(np.float32).min)
    assert scale_of(queries, keys, scores, "it") == pytest.approx(3)
    with pytest.raises(InputError, match="no product of queries and keys alone"):
        scale_of(queries, keys, 10 * np.tanh(scores / 10), "it")  # capped, as Gemma 2's
