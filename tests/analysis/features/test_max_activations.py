"""Dashboards of features: equal to a loop over all tokens, whatever the pieces, and the same after an interruption."""

import numpy as np
import pytest
from saelens_fixture import random_weights
from safetensors.numpy import load_file, save_file
from transcoder_files import write_set

from mionnx import (
    SAE,
    Activations,
    FeatureDashboards,
    HookError,
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    MIModel,
    SpecFileError,
    TranscoderSet,
)
from mionnx.analysis.features import max_activations as module
from mionnx.analysis.features.config import Config
from mionnx.analysis.features.promoted import top_tokens

PATH, PRE, K = "models/world-llama", "blocks.{}.mlp.hook_pre", 3
FEATURES = ["2_9", "0_17_4", "2_30"]  # the second is a node of a graph
COUNTRIES = ["France", "Spain", "Japan", "Kenya", "Italy", "Norway"]


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained(PATH, threads=1)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboards")
    texts = [f"The capital of {one} is" for one in COUNTRIES] + [f"{one} has its capital in" for one in COUNTRIES]
    write_set(model, folder / "transcoders", texts=texts)
    for path in (folder / "transcoders").glob("*.safetensors"):
        file = load_file(path)
        save_file({**file, "b_enc": file["b_enc"] + np.float32(0.01)}, path)  # no token is on a threshold
    model.harvest(texts, ["blocks.0.mlp.hook_pre", "blocks.2.mlp.hook_pre"], folder / "made")
    return folder


@pytest.fixture
def given(folder) -> tuple[Activations, TranscoderSet]:
    return Activations(folder / "made"), TranscoderSet.load(folder / "transcoders")


def expected(made: Activations, layer: int, coder, feature: int) -> np.ndarray:
    """Activations [tokens] of one feature, in float64."""
    x = np.asarray(made[PRE.format(layer)]).astype(np.float64)
    return np.maximum(x @ coder.encoder[feature].astype(np.float64) + coder.bias[feature], 0)


def check(got: FeatureDashboards, made: Activations, transcoders: TranscoderSet) -> None:
    assert got.features == ("0_17", "2_9", "2_30")
    assert got.tokens == made.tokens
    for i, name in enumerate(got.features):
        layer, feature = map(int, name.split("_"))
        acts = expected(made, layer, transcoders.layer(layer), feature)
        assert got.counts[i] == (acts > 0).sum() > 0
        assert got.largest[i] == pytest.approx(acts.max(), rel=1e-5)
        assert got.means[i] == pytest.approx(acts[acts > 0].mean(), rel=1e-5)
        assert got.histogram[i].sum() == (acts > 0).sum()
        counts, _ = np.histogram(acts[acts > 0], got.edges)
        assert np.abs(got.histogram[i] - counts).sum() <= 2  # one on an edge
        own = np.flatnonzero(got.of == i)
        by_text = [acts[made.text_index[:] == text].max() for text in range(made.texts)]
        best = np.sort(by_text)[::-1][:K]
        peaks = [got.values[n][got.peaks[n]] for n in own]
        assert np.allclose(peaks, best[best > 0], rtol=1e-5)
        assert all(len(got.windows[n]) == np.isfinite(got.values[n]).sum() for n in own)
        decoder = transcoders.layer(layer).decoder[feature, 0]
        assert len(got.raised[i]) == len(decoder[:8])


def test_they_are_those_of_a_loop_over_all_tokens(model, given, monkeypatch):
    for size in (2**14, 7):
        monkeypatch.setattr(module, "AT_ONCE", size)
        check(model.max_activations(*given, FEATURES, k=K, before=4), *given)


def test_tokens_are_those_that_the_decoder_raises(model, given):
    got = model.max_activations(*given, FEATURES, k=K)
    norm = np.asarray(model.weights.reader.read("ln_final_w"), np.float32)
    row = given[1].layer(2).decoder[30, 0] * norm
    order = np.argsort(-(row @ model.W_U), kind="stable")
    assert got.raised[2] == tuple(model.to_string(token) for token in order[:8])
    assert got.lowered[2] == tuple(model.to_string(token) for token in order[::-1][:8])


def test_a_pass_that_was_interrupted_goes_on(model, given, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 7)
    monkeypatch.setattr(module, "SAVED", 1)
    whole, read, state = model.max_activations(*given, FEATURES, k=K), [], tmp_path / "state.npz"
    acts = module.LayerFeatures.acts

    def failing(layer, values):
        read.append(len(values))
        if len(read) == 6:
            raise KeyboardInterrupt
        return acts(layer, values)

    monkeypatch.setattr(module.LayerFeatures, "acts", failing)
    with pytest.raises(KeyboardInterrupt):
        model.max_activations(*given, FEATURES, k=K, path=state)
    read.append(0)
    again = model.max_activations(*given, FEATURES, k=K, path=state)
    pieces = -(-given[0].tokens // 7)
    assert sum(size > 1 for size in read[7:]) >= 2 * (pieces - 2)  # two layers, two pieces were done
    assert again.windows == whole.windows
    assert np.array_equal(again.histogram, whole.histogram)
    assert np.array_equal(again.values, whole.values, equal_nan=True)
    with pytest.raises(SpecFileError, match="another pass"):
        model.max_activations(*given, FEATURES[:2], k=K, path=state)
    state.write_bytes(b"x")
    with pytest.raises(SpecFileError, match="no state"):
        model.max_activations(*given, FEATURES, k=K, path=state)


def test_a_text_that_is_active_throughout_hides_no_other():
    """Its tokens have larger activations than the others' best, and it goes on from piece to piece."""
    draw = np.random.default_rng(0)
    texts = np.repeat(np.arange(6), [3, 2, 60, 4, 1, 5])
    acts = draw.random((len(texts), 2), np.float32)
    acts[texts == 2] += 5
    acts[texts == 4] = 0
    for size in (1, 7, 50, 100):
        seen = module.Seen.nothing(2, 5)
        for begin in range(0, len(texts), size):
            seen.add(acts[begin : begin + size], texts[begin : begin + size])
        for feature in range(2):
            best = [acts[texts == text, feature].max() for text in range(6)]
            order = np.argsort(best)[::-1][:5]
            assert seen.texts[feature].tolist() == order.tolist()
            assert seen.best[feature].tolist() == [best[text] for text in order]
            assert acts[seen.places[feature], feature].tolist() == seen.best[feature].tolist()


def test_features_of_an_sae_are_read_too(model, folder):
    made = Activations(folder / "made")
    weights = {name: one for name, one in random_weights("standard", d_in=128).items() if name != "b_pre"}
    sae = SAE(Config("standard", subtracts_bias=True, hook=PRE.format(2)), weights)
    got = model.max_activations(made, sae, [3, 1], k=2)
    x = np.asarray(made[PRE.format(2)]).astype(np.float64) - weights["b_dec"]
    acts = np.maximum(x @ weights["W_enc"] + weights["b_enc"], 0)[:, [3, 1]]
    assert got.features == ("3", "1")
    assert got.counts.tolist() == (acts > 0).sum(axis=0).tolist()
    assert np.allclose(got.largest, acts.max(axis=0), rtol=1e-4)


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2"])
def test_raised_tokens_are_those_that_the_model_raises(name):
    """Beside a step along each vector in the last stream, of vectors whose mean a LayerNorm takes out."""
    model, random = MIModel.from_pretrained(f"models/{name}", threads=1), np.random.default_rng(0)
    last, prompt = HookPoint.ResidPost(model.num_layers - 1), "The capital of France is"
    vectors = (random.normal(size=(8, 128)) / 11 + 1).astype(np.float32)
    stream = model.forward(prompt, HookSpec().capture(last))[last][0, -1].astype(np.float64)
    along = (vectors @ stream / (stream @ stream))[:, None] * stream
    vectors = (vectors - along + (vectors @ np.ones(128) / 128)[:, None]).astype(np.float32)
    steps = []
    for vector in vectors:
        size = 0.01 * np.linalg.norm(stream) / np.linalg.norm(vector)
        ends = [
            model.forward(prompt, HookSpec().intervene(last, Intervention.Add(sign * size * vector, positions=-1)))
            for sign in (1, -1)
        ]
        steps.append(np.argsort(ends[1].output()[0, -1] - ends[0].output()[0, -1])[:3])
    found = [
        len({*ours} & {*theirs}) for ours, theirs in zip(top_tokens(model, vectors, 3).tolist(), steps, strict=True)
    ]
    assert np.mean(found) > 2.2  # a norm's scale moves too


def test_features_that_do_not_write_to_the_stream_raise_no_tokens(model, folder, tmp_path):
    neurons, stream = "blocks.2.mlp.hook_act", "blocks.2.hook_mlp_out"
    made = model.harvest(["The capital of Peru is"], [neurons, stream, PRE.format(2)], tmp_path / "made")
    for hook, writes in ((neurons, False), (PRE.format(2), False), (stream, True)):
        sae = SAE(
            Config("standard", hook=hook),
            random_weights("standard", d_in=made[hook].shape[1], d_out=made[hook].shape[1]),
        )
        got = model.max_activations(made, sae, [0, 1])
        assert [bool(words) for words in got.raised] == [writes] * 2
        assert "raises" in got.page()


def test_a_state_of_other_thresholds_is_refused(model, folder, tmp_path):
    made, weights = Activations(folder / "made"), random_weights("jumprelu", d_in=128)
    one, other = (
        SAE(Config("jumprelu", hook=PRE.format(2)), {**weights, "threshold": weights["threshold"] + t}) for t in (0, 1)
    )
    model.max_activations(made, one, [0], path=tmp_path / "state.npz")
    with pytest.raises(SpecFileError, match="the state of another pass"):
        model.max_activations(made, other, [0], path=tmp_path / "state.npz")


def test_values_of_another_width_are_refused(model, folder):
    sae = SAE(Config("standard", hook=PRE.format(2)), random_weights("standard", d_in=96, d_out=96))
    with pytest.raises(HookError, match=r"values \[128\], and the features read vectors \[96\]"):
        model.max_activations(Activations(folder / "made"), sae, [0])


def test_graphs_tell_the_texts_of_their_features(model, given, folder):
    made, transcoders = given
    graph = model.trace("The capital of France is", transcoders)
    nodes = [name for name, _ in graph.top(80) if name.startswith(("0_", "2_"))][:4]
    seen = model.max_activations(made, transcoders, nodes, k=K)
    told = graph.describe(seen)
    best = seen.texts(nodes[0], 1)[0]
    assert best in told.excited["_".join(nodes[0].split("_")[:2])]
    assert "[" in best
    assert best.split("[")[1].split("]")[0] in told.page()


def test_what_is_no_feature_is_refused(model, given):
    for features, words in (([], "a list of numbers"), (["x"], "names no feature"), (["9_1"], "layer 9")):
        with pytest.raises(InputError, match=words):
            model.max_activations(*given, features)
