"""Attribution graphs: equal to autograd in float64 from the equations, whatever the transcoders and the family are."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from local_llama import LocalLlama
from safetensors.numpy import load_file, save_file
from transcoder_files import KINDS, write_set

from mionnx import (
    AttributionGraph,
    HookError,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    MIModel,
    TranscoderSet,
)
from mionnx.analysis.tracing.influence import influence, shares

TEXT, PATH = "Mary and John went to the store", "models/world-llama"
PRE, MID = "blocks.{}.mlp.hook_pre", "blocks.{}.hook_resid_mid"
NEEDED = {PRE.format(0), "blocks.0.hook_mlp_out", "blocks.0.attn.hook_pattern", "hook_final_norm"}
HOOKS = {"plt": PRE, "jump_skip": PRE, "clt": MID}


@dataclass
class Case:
    """A graph, and the oracle of the same prompt."""

    transcoders: TranscoderSet
    graph: AttributionGraph
    oracle: LocalLlama


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained(PATH, threads=1)


def test_a_trace_of_nnsight_is_answered(model):
    with pytest.raises(InputError, match="give a TranscoderSet; what nnsight traces are"):
        model.trace(TEXT)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, model: MIModel, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, hook = tmp_path_factory.mktemp(request.param), HOOKS[request.param]
    layers = write_set(model, folder, request.param, hook)
    transcoders = TranscoderSet.load(folder)
    graph = model.trace(TEXT, transcoders)
    return Case(transcoders, graph, LocalLlama(PATH, layers, hook, graph.token_ids))


def close(one: np.ndarray, other: np.ndarray, tolerance: float = 1e-5) -> None:
    """Alike to a share of the largest number."""
    assert one.shape == other.shape
    assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


def test_effects_are_those_of_autograd(case):
    graph, few = case.graph, len(case.graph.features)
    assert graph.token_ids[0] == 1
    assert graph.tokens[0] == "<eos>"
    assert [(i, p, f) for i, p, f, _ in case.oracle.active] == [*map(tuple, graph.features.tolist())]
    close(graph.activations, np.array([value for *_, value in case.oracle.active]))
    probabilities = torch.softmax(case.oracle.clean["logits"][0][-1], -1)
    tokens = graph.target_ids[:, 0].tolist()
    close(graph.probabilities, probabilities[tokens].numpy())
    assert probabilities[tokens[:-1]].sum() < 0.95 or len(tokens) == 1
    targets = [*range(0, few, 7), *range(few, few + len(tokens))]
    close(graph.effects[targets], case.oracle.rows(targets, tokens))


def test_patterns_may_carry_derivative(case, model):
    """Through queries and keys too: autograd's, with the scales of norms and MLPs held alone."""
    graph, few = model.trace(TEXT, case.transcoders, rules="frozen_norm"), len(case.graph.features)
    assert np.array_equal(graph.features, case.graph.features)
    targets, tokens = [few - 1, few // 2, *range(few, len(graph.effects))], graph.target_ids[:, 0].tolist()
    close(graph.effects[targets], case.oracle.rows(targets, tokens, ("norms", "mlps")))
    assert np.abs(graph.effects - case.graph.effects).max() > 0.01 * np.abs(graph.effects).max()
    with pytest.raises(InputError, match="did you mean 'frozen_norm'"):
        model.trace(TEXT, case.transcoders, rules="frozen_norms")


def test_a_column_is_what_its_feature_does_with_all_else_held(case, model):
    """Patterns, scales of norms and MLPs of the oracle; and with norms live, what `confirm` measures."""
    graph, oracle, few = case.graph, case.oracle, len(case.graph.features)
    best = int(np.argmax(np.abs(graph.effects[few:, :few]).max(axis=0)))
    layer, position, feature = graph.features[best].tolist()
    tokens = graph.target_ids[:, 0].tolist()
    before = np.array([one.item() for one in oracle.numbers(oracle.clean, tokens)])
    oracle.setting = {layer: [(position, feature, 0.0)]}
    try:
        after, live, free = (
            np.array([one.item() for one in oracle.numbers(oracle.run(*hold), tokens)])
            for hold in (("patterns", "norms", "mlps"), ("patterns", "mlps"), ("patterns",))
        )
    finally:
        oracle.setting = {}
    got = graph.confirm(model, case.transcoders, graph.sources[best])
    close(got.predicted, after - before)
    close(got.constrained, live - before, 1e-4)
    close(got.free, free - before, 1e-4)
    assert got.difference > 0  # norms are live there


def test_interventions_that_change_nothing_change_nothing(case, model):
    graph, node = case.graph, case.graph.sources[3]
    clean = model.forward(graph.token_ids).output()
    for constrained, frozen in ((None, True), (None, False), ([0, 1, 2, 3], True)):
        spec = graph.intervene(model, case.transcoders, scale={node: 1.0}, constrained=constrained, frozen=frozen)
        close(model.forward(graph.token_ids, spec).output(), clean)


@pytest.mark.parametrize("memory", [None, "less"])
def test_fewer_features_are_those_of_most_influence_and_have_the_same_effects(case, model, memory, monkeypatch):
    graph, few = case.graph, len(case.graph.features)
    monkeypatch.setattr("mionnx.analysis.tracing.trace.STEP", 16)
    share = 0.49 if case.transcoders.across else 0.6  # too little for all rows, and for the vectors of all sources
    limit = {"max_features": few // 3} if memory is None else {"memory": int(share * graph.cost["bytes"])}
    part = model.trace(TEXT, case.transcoders, **limit)
    assert 0 < len(part.features) < few
    assert part.active == few
    assert memory or len(part.features) == few // 3
    rows = [graph.receivers.index(name) for name in part.receivers]
    columns = [graph.sources.index(name) for name in part.sources]
    close(part.effects, graph.effects[np.ix_(rows, columns)])
    own = graph.influence()[:few]
    assert np.isin(np.argsort(-own)[:3], columns).all()


def test_targets_may_be_an_answer_a_difference_and_another_feature(case, model):
    two = model.trace(TEXT, case.transcoders, answer=[5, 9])
    one = model.trace(TEXT, case.transcoders, answer=5, versus=9)
    few = len(two.features)
    close(one.effects[few], two.effects[few] - two.effects[few + 1], 1e-4)
    assert one.target_ids.tolist() == [[5, 9]]
    assert one.probabilities.tolist() == [1]
    node = case.graph.sources[few - 1]
    assert {name for name, share in case.graph.top(3, toward=node) if share} <= {*case.graph.prune(toward=node).sources}


def test_influence_is_the_whole_series(case):
    """A solve with the matrix of all shares; pruning nothing leaves all that has influence."""
    graph, few = case.graph, len(case.graph.features)
    part = shares(graph.effects.astype(np.float64))
    square = np.zeros((part.shape[1],) * 2)
    square[:few] = part[:few]
    exact = np.linalg.solve(np.eye(len(square)) - square.T, graph._weights()[few:] @ part[few:])
    own = influence(part, graph.features[:, 0], np.arange(few), graph._weights())
    assert np.abs(own - exact).max() < 1e-12
    everything = graph.leading(1, 1)
    assert everything.nodes[own > 1e-6].all()
    assert 0 < graph.replacement_score < 1
    assert 0 < graph.completeness_score < 1


def test_effects_are_gradients_with_mlps_replaced_in_every_family(family, models, tmp_path):
    model, ids = models(family), np.random.default_rng(0).integers(3, 60, 7)
    if NEEDED - {*model.hooked.metadata.hooks}:
        pytest.skip("it has no attention patterns, or MLPs without an input of their own")
    if model.bidirectional:
        write_set(model, tmp_path, features=24, texts=[ids])
        with pytest.raises(InputError, match="both ways"):
            model.trace(ids, TranscoderSet.load(tmp_path))
        return
    check_against_gradients(model, ids, tmp_path)


def test_effects_of_weights_in_blocks_are_gradients_too(model, tmp_path):
    """Products of integers are dequantised on the way back."""
    blocks = MIModel.from_pretrained(model.quantise(tmp_path / "int4"), threads=1)
    check_against_gradients(blocks, np.array([1, 5, 9, 12, 4]), tmp_path / "transcoders")


def check_against_gradients(model: MIModel, ids: np.ndarray, folder: Path) -> None:
    layers = write_set(model, folder, features=24, texts=[ids])
    graph = model.trace(ids, TranscoderSet.load(folder))
    few, last = len(graph.features), model.num_layers - 1
    points = [f"blocks.{i}.hook_mlp_out" for i in range(last)]
    clean = model.forward(ids, HookSpec().capture(points))
    spec = HookSpec()
    for point in points:
        spec.intervene(point, Intervention.Replace(clean[point]))
    targets = [i for i in range(few) if graph.features[i, 0] == last][:2]
    assert targets
    for i in targets:
        _, position, feature = graph.features[i].tolist()
        seed = np.zeros((1, len(ids), model.hidden_size), np.float32)
        seed[0, position] = layers[last]["W_enc"][feature]
        grad = model.gradients(
            ids, points, of=PRE.format(last), cotangent=seed, rules="frozen_norm_pattern", hooks=spec
        ).grad
        expected = [
            float(grad[points[layer]][0, p] @ layers[layer]["W_dec"][f, 0] * value) if layer < last else 0.0
            for (layer, p, f), value in zip(graph.features.tolist(), graph.activations, strict=True)
        ]
        close(graph.effects[i, :few], np.array(expected))


def test_features_may_read_the_norm_before_its_weight(model, tmp_path):
    """TransformerLens' `ln2.hook_normalized`, of Gemma Scope, is no value of the graph: the weight is divided out."""
    write_set(model, tmp_path / "one")
    write_set(model, tmp_path / "other")
    for i in range(model.num_layers):
        path = tmp_path / "other" / f"layer_{i}.safetensors"
        file = load_file(path)
        save_file({**file, "W_enc": file["W_enc"] * model.weights.reader.read("ln2_w", i)}, path)
    one = model.trace(TEXT, TranscoderSet.load(tmp_path / "one"))
    transcoders = TranscoderSet.load(tmp_path / "other", hook="ln2.hook_normalized")
    other = model.trace(TEXT, transcoders)
    assert np.array_equal(one.features, other.features)
    close(other.effects, one.effects)
    spec = other.intervene(model, transcoders, scale={other.sources[0]: 1.0})
    close(model.forward(other.token_ids, spec).output(), model.forward(other.token_ids).output())


def test_what_cannot_be_traced_is_refused(model, tmp_path):
    write_set(model, tmp_path / "a")
    transcoders = TranscoderSet.load(tmp_path / "a")
    with pytest.raises(HookError, match=r"did you mean 'blocks.0.mlp.hook_pre'"):
        model.trace(TEXT, TranscoderSet.load(tmp_path / "a", hook="mlp.hook_prre"))
    with pytest.raises(InputError, match="recurrent layers"):
        MIModel.from_pretrained("models/world-rwkv7", threads=1).trace(TEXT, transcoders)
    with pytest.raises(InputError, match="leaves no room"):
        model.trace(TEXT, transcoders, memory=1)
    with pytest.raises(InputError, match="give answer= too"):
        model.trace(TEXT, transcoders, versus=5)
    graph = model.trace(TEXT, transcoders)
    for node, words in (("9_1_1", "layer 9 of 4"), ("0_999_1", "feature 999 of 64"), ("E_1", "names no feature")):
        with pytest.raises(InterventionError, match=words):
            graph.intervene(model, transcoders, fix={node: 1.0})
