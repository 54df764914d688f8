"""Evidence for circuits: MIB's areas and files, random circuits, intervals; true edges of compiled programs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from edge_oracle import KINDS, EdgeModel
from repository import REPOSITORY
from scipy import stats
from sweep_pairs import prompts

from mionnx import EdgeAttribution, InputError, MIModel, SpecFileError
from mionnx.analysis.circuits.circuit_result import MIB_SHARES

TOKENS = {"answer": 5, "versus": 9}
GIFT = "When {} and {} went to the store , {} gave a drink to"
NAMES = [("Mary", "John"), ("John", "Mary"), ("Anna", "Paul"), ("Paul", "Anna"), ("Mary", "Paul"), ("Anna", "John")]
CLEAN, CORRUPTED = ([GIFT.format(a, b, who) for (a, b), who in zip(NAMES, giver, strict=True)] for giver in (
    [b for _, b in NAMES], [a for a, _ in NAMES]))  # fmt: skip
RIGHT, WRONG = ([pair[i] for pair in NAMES] for i in (0, 1))
TRACR = REPOSITORY / "models" / "tracr"


@pytest.fixture(scope="module")
def track(shipped):
    """Circuits at MIB's shares over six pairs of the names task, with random ones."""
    return shipped.circuit(CLEAN, CORRUPTED, "mib", answer=RIGHT, versus=WRONG, rank="score", steps=2, controls=5)


@pytest.mark.slow
def test_the_areas_are_mibs(shipped, track):
    edges = track.attribution.count
    assert track.sizes.tolist() == sorted({int(share * edges) for share in MIB_SHARES})
    shares = dict(zip(track.sizes.tolist(), track.faithfulness, strict=True))
    f = np.array([shares[int(share * edges)] for share in MIB_SHARES])
    middles, widths = (f[1:] + f[:-1]) / 2, np.diff(MIB_SHARES)
    assert track.cpr == pytest.approx((middles * widths).sum())
    distance = np.abs(1 - f)
    assert track.cmd == pytest.approx(((distance[1:] + distance[:-1]) / 2 * widths).sum())
    with pytest.raises(InputError, match=r"circuit\(\.\.\., edges='mib'\)"):
        shipped.circuit(CLEAN[0], CORRUPTED[0], [5], steps=1).cpr  # noqa: B018
    with pytest.raises(InputError, match="'mib' for the shares"):
        shipped.circuit(CLEAN[0], CORRUPTED[0], "mob")


def test_ranked_by_score_helpful_edges_lead(track):
    ranking = track.attribution
    order = ranking.ranked("score")
    costs = -ranking.scores[tuple(order.T)]
    assert (np.diff(costs) <= 0).all()
    assert costs[0] > 0 > costs[-1]
    assert track.leading(3) == ranking.top(3, "score")
    with pytest.raises(InputError, match=r"rank='scores'.*did you mean"):
        ranking.ranked("scores")


def test_random_circuits_of_equal_size_are_less_faithful(shipped, track):
    middle = [*track.sizes].index(int(0.1 * track.attribution.count))
    assert track.controls.shape == (5, len(track.sizes))
    assert track.faithfulness[middle] > track.control_faithfulness[:, middle].max()
    assert track.beyond_controls[middle] == pytest.approx(1 / 6)
    assert track.beyond_controls[-1] == 1  # all edges are all edges
    np.testing.assert_allclose(track.control_faithfulness[:, [0, -1]], [[0, 1]] * 5, atol=1e-3)
    with pytest.raises(InputError, match="controls=20"):
        shipped.circuit(CLEAN[0], CORRUPTED[0], [5], steps=1).control_faithfulness  # noqa: B018


def test_random_circuits_are_what_torch_gives(models, references):
    """The same permutation of the edges, every edge apart in torch."""
    model, (clean, corrupted) = models("gpt2"), prompts(22)
    torch_model = EdgeModel(KINDS["gpt2"](references("gpt2")))
    good, bad = (torch.from_numpy(ids) for ids in (clean, corrupted))
    found = model.circuit(clean, corrupted, [25], steps=1, controls=2, seed=7, **TOKENS)
    ranking, random = found.attribution, np.random.default_rng(7)
    for value in found.controls[:, 0]:
        some = random.permutation(ranking.ranked())[:25]
        inside = {(ranking.senders[i], ranking.receivers[j]) for i, j in some.tolist()}
        with torch.no_grad():
            _, its = torch_model.run(bad)
            logits, _ = torch_model.run(good, its, lambda *edge, inside=inside: edge in inside)
        assert value == pytest.approx(float(logits[5] - logits[9]), abs=5e-5)


def test_intervals_are_over_pairs(shipped, track):
    low, high = track.interval(0.9)
    assert ((low <= track.faithfulness + 1e-6) & (track.faithfulness - 1e-6 <= high)).all()
    middle = len(track.sizes) // 2
    rng = np.random.default_rng(0)
    by_hand = []
    for _ in range(2000):
        some = rng.integers(0, len(NAMES), len(NAMES))
        base, whole = track.corrupted_by_pair[some].mean(), track.clean_by_pair[some].mean()
        by_hand.append((track.by_pair[some, middle].mean() - base) / (whole - base))
    expected = np.quantile(by_hand, [0.05, 0.95])
    np.testing.assert_allclose([low[middle], high[middle]], expected, atol=0.1 * np.ptp(expected) + 0.01)
    with pytest.raises(InputError, match="an interval over 1 pair"):
        shipped.circuit(CLEAN[0], CORRUPTED[0], [5], steps=1).interval()
    sweep = shipped.patch_sweep(CLEAN, CORRUPTED, "z", ["layer", "head"], answer=RIGHT, versus=WRONG)
    bounds = sweep.interval()
    assert bounds[0].shape == sweep.values.shape
    assert ((bounds[0] - 1e-9 <= sweep.effect) & (sweep.effect <= bounds[1] + 1e-9)).all()
    exact = stats.permutation_test((sweep.effect_by_pair[:, 3, 1],), np.mean, permutation_type="samples")
    assert sweep.p_value()[3, 1] == pytest.approx(exact.pvalue)
    leads = shipped.get_logit_diff(CLEAN, RIGHT, WRONG)
    assert leads.interval()[0] <= leads.mean <= leads.interval()[1]
    assert leads.p_value() == 2 / 64
    assert leads.accuracy_interval() == pytest.approx(stats.binomtest(6, 6).proportion_ci(0.95, "exact"), abs=1e-9)


@pytest.mark.parametrize("ending", [".json", ".pt"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_scores_are_read_as_they_were_written(models, tmp_path, family, ending):
    model, (clean, corrupted) = models(family), prompts(22)
    scores = model.edge_attribution(clean, corrupted, **TOKENS)
    path = scores.to_importances(tmp_path / f"importances{ending}", model, edges=5)
    again = EdgeAttribution.from_importances(path, model)
    np.testing.assert_allclose(again.scores, scores.scores, rtol=1e-6, atol=1e-6 * np.abs(scores.scores).max())
    assert (again.senders, again.receivers, again.hooks) == (scores.senders, scores.receivers, scores.hooks)
    assert again.how == "scores of a file"
    same = [model.circuit(clean, corrupted, [20], scores=one, **TOKENS).values[0] for one in (scores, again)]
    assert same[0] == pytest.approx(same[1])
    turned = replace(scores, patching="denoising")
    back = EdgeAttribution.from_importances(turned.to_importances(tmp_path / f"turned{ending}", model), model)
    np.testing.assert_allclose(back.costs, scores.scores, rtol=1e-6, atol=1e-6 * np.abs(scores.scores).max())


def test_a_file_has_eap_igs_names(models, tmp_path):
    model, (clean, corrupted) = models("llama"), prompts(22)
    scores = model.edge_attribution(clean, corrupted, **TOKENS)
    file = json.loads(scores.to_importances(tmp_path / "x.json", model).read_text())
    heads, layers, groups = model.num_heads, model.num_layers, model.num_kv_heads
    assert file["cfg"] == {"n_layers": 2, "n_heads": heads, "parallel_attn_mlp": False, "d_model": model.hidden_size}
    # input, heads and MLPs write; each head's three inputs and each MLP read what comes before, the logits all
    count = sum((1 + layer * (heads + 1)) * 3 * heads + 1 + layer * (heads + 1) + heads for layer in range(layers))
    assert len(file["edges"]) == count + 1 + layers * (heads + 1)
    assert {*file["nodes"]} >= {"input", "a0.h0", "m1", "logits"}
    head, group = heads - 1, groups - 1
    shared = [file["edges"][f"input->a0.h{one}<k>"]["score"] for one in range(head - heads // groups + 1, heads)]
    assert sum(shared) == pytest.approx(-scores.score("embed", f"a0.kv{group}<k>"), rel=1e-5)
    tensors = torch.load(scores.to_importances(tmp_path / "x.pt", model, edges=3), weights_only=True)
    assert tensors["edges_scores"].shape == (1 + layers * (heads + 1), layers * (3 * heads + 1) + 1)
    assert tensors["edges_in_graph"].dtype == torch.bool
    row, column = tensors["src_nodes"].index("a0.h1"), tensors["dst_nodes"].index("m1")
    assert float(tensors["edges_scores"][row, column]) == pytest.approx(file["edges"]["a0.h1->m1"]["score"], rel=1e-5)


def test_files_of_other_models_are_refused(models, shipped, tmp_path):
    model, (clean, corrupted) = models("gpt2"), prompts(22)
    scores = model.edge_attribution(clean, corrupted, **TOKENS)
    path = scores.to_importances(tmp_path / "x.json", model)
    with pytest.raises(InputError, match="scores of another model"):
        EdgeAttribution.from_importances(path, shipped)
    file = json.loads(path.read_text())
    damaged = {
        "no edge from m1 to m0": lambda edges: edges.update({"m1->m0": {"score": 1.0}}),
        "is nan": lambda edges: edges.update({"input->m0": {"score": float("nan")}}),
        "scores of": lambda edges: edges.pop("input->m0"),
        "is no edge": lambda edges: edges.update({"input": {"score": 1.0}}),
        "damaged": lambda edges: edges.update({"input->m0": {}}),
    }
    for message, change in damaged.items():
        other = json.loads(json.dumps(file))
        change(other["edges"])
        (tmp_path / "y.json").write_text(json.dumps(other))
        with pytest.raises((InputError, SpecFileError), match=message):
            EdgeAttribution.from_importances(tmp_path / "y.json", model)
    with pytest.raises(InputError, match="a file has those of all"):
        model.edge_attribution(clean, corrupted, "z", **TOKENS).to_importances(tmp_path / "z.json", model)
    with pytest.raises(SpecFileError, match=r"\.json or \.pt"):
        scores.to_importances(tmp_path / "z.npz", model)


def auroc(scores: np.ndarray, truth: np.ndarray) -> float:
    """The probability that a true edge scores above another; ties count half."""
    good, other = scores[truth], scores[~truth]
    return float((good[:, None] > other).mean() + (good[:, None] == other).mean() / 2)


def attributed(name: str, **method) -> tuple[dict, EdgeAttribution, np.ndarray]:
    """The truth of a program, the last scores, the sum of all pairs' sizes of scores."""
    truth = json.loads((TRACR / name / "truth.json").read_text())
    model, total = MIModel.from_pretrained(TRACR / name, threads=1), 0.0
    for clean, other in truth["pairs"]:
        ids = np.array(clean)[None], np.array(other)[None]
        if truth["categorical"]:
            ends = [model.forward(one).output()[0, -1, : truth["output"]].argmax() for one in ids]
            metric = {"answer": int(ends[0]), "versus": int(ends[1])}
        else:
            metric = {"metric": lambda logits: logits[:, 0], "cotangent": np.eye(1, model.vocab_size)[0]}
        scores = model.edge_attribution(*ids, **metric, **method)
        total = total + np.abs(scores.scores)
    return truth, scores, total


def test_a_compiled_program_is_the_program():
    for folder in sorted(TRACR.glob("*/")):
        truth = json.loads((folder / "truth.json").read_text())
        model = MIModel.from_pretrained(folder, threads=1)
        for (clean, _), output in zip(truth["pairs"][:4], truth["outputs"], strict=False):
            logits = model.forward(np.array(clean)[None]).output()[0, -1, : truth["output"]]
            np.testing.assert_allclose(logits, output, atol=1e-4)
        assert {*map(tuple, truth["carrying"])} < {*map(tuple, truth["edges"])}


@pytest.mark.parametrize("name", ["frac_prevs", "pair_balance"])
def test_edges_that_carry_a_difference_are_told_apart_perfectly(name):
    """And those of positions and constants by no method: no pair of prompts differs in them."""
    truth, scores, total = attributed(name)
    labels = np.array([[(s, r) for r in scores.receivers] for s in scores.senders], object)[scores.edges]
    flags = {which: np.array([[*edge] in truth[which] for edge in labels.tolist()]) for which in ("edges", "carrying")}
    assert auroc(total[scores.edges], flags["carrying"]) == 1
    assert auroc(total[scores.edges], flags["edges"]) < 0.9
    silent = flags["edges"] & ~flags["carrying"]
    assert silent.any()
    assert (total[scores.edges][silent] < 1e-4 * total.max()).all()
