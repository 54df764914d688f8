"""Edge attribution against autograd with every receiver's input apart, and against exact path patching."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from edge_oracle import KINDS, CodeGen, EdgeModel, edge_scores
from families import make_model
from sweep_pairs import prompts
from unlisted_families import make

from exporters.transformers import export
from mionnx import GradientError, MIModel
from mionnx.errors import HookError, InputError

GIFT = "When Mary and John went to the store , {} gave a drink to"
CLEAN, CORRUPTED = GIFT.format("John"), GIFT.format("Mary")
FAMILIES = [*KINDS]
TOKENS = {"answer": 5, "versus": 9}


def matrix(found, told):
    """An oracle's scores in the order of a result, 0 where there is no edge."""
    made = np.zeros(found.scores.shape)
    for i, j in np.argwhere(found.edges):
        made[i, j] = told[found.senders[i], found.receivers[j]]
    return made


@pytest.fixture
def oracle(references):
    return lambda family: EdgeModel(KINDS[family](references(family)))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("steps", [1, 3])
def test_scores_are_those_of_autograd(models, oracle, references, name, steps):
    model, torch_model, (clean, corrupted) = models(name), oracle(name), prompts(21)
    base, other = (torch.from_numpy(ids) for ids in (clean, corrupted))
    with torch.no_grad():
        whole = references(name)(base[None]).logits[0, -1]
        torch.testing.assert_close(torch_model.run(base)[0].float(), whole, atol=2e-5, rtol=1e-4)
    for direction, pair in (("noising", (base, other)), ("denoising", (other, base))):
        found = model.edge_attribution(clean, corrupted, steps=steps, patching=direction, **TOKENS)
        expected = matrix(found, edge_scores(torch_model, *pair, 5, 9, steps))
        assert np.abs(found.scores - expected).max() <= 1e-5 * np.abs(expected).max()
        assert (expected[found.edges] != 0).mean() > 0.8


@pytest.mark.slow
def test_a_graph_that_takes_queries_and_keys_apart_after_stacking_them_has_edges(tmp_path):
    """CodeGen's keys seem to lead to its queries: a trial tells that they do not."""
    reference, (clean, corrupted) = make("codegen"), prompts(21)
    reference.save_pretrained(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model, torch_model = MIModel.from_pretrained(tmp_path / "hooked", threads=1), EdgeModel(CodeGen(reference))
    good, bad = (torch.from_numpy(ids) for ids in (clean, corrupted))
    with torch.no_grad():
        logits, whole = torch_model.run(good)[0], reference(good[None]).logits[0, -1]
        torch.testing.assert_close(logits.float(), whole, atol=2e-5, rtol=1e-4)
    found = model.edge_attribution(clean, corrupted, patching="noising", **TOKENS)
    expected = matrix(found, edge_scores(torch_model, good, bad, 5, 9, 1))
    assert np.abs(found.scores - expected).max() <= 1e-5 * np.abs(expected).max()
    sizes = [0, 10, 60, found.count]
    values = model.circuit(clean, corrupted, sizes, scores=found, **TOKENS).values
    with torch.no_grad():
        its = torch_model.run(bad)[1]
        for size, value in zip(sizes, values, strict=True):
            kept = {(sender, receiver) for sender, receiver, _ in found.top(size)}
            logits, _ = torch_model.run(good, its, lambda *edge, kept=kept: edge in kept)
            assert value == pytest.approx(float(logits[5] - logits[9]), abs=5e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_scores_along_activations_are_those_of_autograd(models, oracle, name):
    """Every layer's heads and every MLP move from one prompt's values to the other's, one after the other."""
    model, torch_model, (clean, corrupted) = models(name), oracle(name), prompts(21)
    pair = (torch.from_numpy(ids) for ids in (clean, corrupted))
    found = model.edge_attribution(clean, corrupted, steps=3, along="activations", **TOKENS)
    expected = matrix(found, edge_scores(torch_model, *pair, 5, 9, 3, "activations"))
    assert np.abs(found.scores - expected).max() <= 1e-5 * np.abs(expected).max()
    inputs = model.edge_attribution(clean, corrupted, steps=3, **TOKENS)
    assert np.abs(found.scores - inputs.scores).max() > 1e-3 * np.abs(expected).max()
    assert found.how == "EAP-IG-activations, 3 steps"
    with pytest.raises(InputError, match=r"along='activation'; one of .* did you mean"):
        model.edge_attribution(clean, corrupted, along="activation", **TOKENS)


@pytest.mark.parametrize("along", ["inputs", "activations"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_shared_keys_are_receivers_of_each_head(models, references, name, along):
    """Scores by query head are autograd's, and those of a group are their sum."""
    model, (clean, corrupted) = models(name), prompts(21)
    torch_model = EdgeModel(KINDS[name](references(name)), ungrouped=True)
    pair = [torch.from_numpy(ids) for ids in (clean, corrupted)]
    grouped = model.edge_attribution(clean, corrupted, steps=3, along=along, **TOKENS)
    found = model.edge_attribution(clean, corrupted, steps=3, along=along, ungrouped=True, **TOKENS)
    assert (grouped.ungrouped, found.ungrouped) == (False, True)
    expected = matrix(found, edge_scores(torch_model, *pair, 5, 9, 3, along))
    assert np.abs(found.scores - expected).max() <= 1e-5 * np.abs(expected).max()
    group = model.num_heads // model.num_kv_heads
    assert group > 1
    for column, label in enumerate(grouped.receivers):
        layer, _, rest = label.partition(".kv")
        number, _, role = rest.partition("<")
        own = [f"{layer}.h{int(number) * group + one}<{role}" for one in range(group)] if rest else [label]
        columns = [found.receivers.index(one) for one in own]
        total = found.scores[:, columns].sum(axis=1)
        np.testing.assert_allclose(total, grouped.scores[:, column], atol=1e-5 * np.abs(expected).max())
        # Heads of a group differ, or there were no point.
        assert len(columns) == 1 or np.ptp(found.scores[0, columns]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_small_change_is_what_path_patching_gives(tmp_path, name):
    """Two tokens whose embeddings hardly differ: the first order is all there is."""
    torch_model = make_model(name)
    weights = torch_model.get_input_embeddings().weight
    with torch.no_grad():
        weights[11] = weights[10] + 1e-3 * torch.randn(weights.shape[1], generator=torch.Generator().manual_seed(0))
    torch_model.save_pretrained(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    clean, corrupted = np.array([3, 10, 20, 30, 40]), np.array([3, 11, 20, 30, 40])
    given = {**TOKENS, "patching": "noising"}
    found = model.edge_attribution(clean, corrupted, "z", **given)
    for point in ("blocks.1.attn.hook_q", "blocks.1.attn.hook_v", "blocks.1.mlp.hook_pre", "hook_final_norm"):
        heads = [head for hook, head in found.receiving if hook == point]
        receiver = point if heads == [None] else (point, heads[-1])
        exact = model.path_patch(clean, corrupted, [receiver], **given).effect.ravel()
        told = found.scores[:, found.receiving.index((point, heads[-1]))]
        assert np.abs(told - exact).max() < 0.02 * np.abs(exact).max() + 2e-6


def test_edges_tell_what_exact_paths_do(shipped):
    receivers = ["blocks.3.attn.hook_k", "blocks.3.attn.hook_v"]
    for direction, least in (("denoising", 0.998), ("noising", 0.988)):
        exact = shipped.path_patch(CLEAN, CORRUPTED, receivers, patching=direction)
        found = shipped.edge_attribution(CLEAN, CORRUPTED, "z", receivers, patching=direction)
        told = found.scores.sum(axis=1).reshape(exact.values.shape)
        assert np.corrcoef(told.ravel(), exact.effect.ravel())[0, 1] > least
        assert (found.clean, found.corrupted) == pytest.approx((exact.clean, exact.corrupted), abs=1e-4)


def test_a_part_of_the_edges_is_that_part_of_all(shipped):
    every = shipped.edge_attribution(CLEAN, CORRUPTED)
    assert every.scores.shape == (37, 69)
    assert every.count == 1055
    some = shipped.edge_attribution(
        CLEAN,
        CORRUPTED,
        [("result", [1, 5]), "hook_embed", "blocks.[01].hook_mlp_out"],
        ["*.hook_q", "hook_final_norm"],
    )
    assert some.senders[:3] == ("embed", "a0.h1", "a0.h5")
    assert len(some.receivers) == 4 * 8 + 1
    rows, columns = ([whole.index(name) for name in part] for whole, part in zip(
        (every.senders, every.receivers), (some.senders, some.receivers), strict=True
    ))  # fmt: skip
    assert (some.scores == every.scores[np.ix_(rows, columns)]).all()
    sender, receiver, score = every.top(1)[0]
    assert every.score(sender, receiver) == score == every.scores.flat[np.abs(every.scores).argmax()]
    assert not every.scores[~every.edges].any()


def test_pairs_are_averaged_and_metrics_differ(shipped):
    clean, corrupted = ["The capital of France is", CLEAN], ["The capital of Germany is", CORRUPTED]
    for given in ({"metric": "probability"}, {"metric": "kl", "steps": 3}, {"metric": "log_probability"}):
        both = shipped.edge_attribution(clean, corrupted, **given)
        alone = [shipped.edge_attribution(*pair, **given) for pair in zip(clean, corrupted, strict=True)]
        np.testing.assert_allclose(both.scores, np.mean([one.scores for one in alone], axis=0), atol=1e-5)
    seed = np.zeros(shipped.vocab_size)
    seed[[shipped.token_id("John"), shipped.token_id("Mary")]] = -1, 1
    own = shipped.edge_attribution(CLEAN, CORRUPTED, metric=lambda logits: logits[:, 0], cotangent=seed, steps=2)
    named = shipped.edge_attribution(CLEAN, CORRUPTED, answer="Mary", versus="John", steps=2)
    np.testing.assert_allclose(own.scores, named.scores, rtol=1e-3, atol=1e-4)


def test_what_has_no_edges_is_refused_before_anything_runs(shipped, monkeypatch):
    monkeypatch.setattr(type(shipped), "forward", None)
    cases = {
        "no edge is possible": (InputError, {"senders": "blocks.3.hook_mlp_out", "receivers": "blocks.1.mlp.hook_pre"}),
        "'blocks.1.hook_resid_pre' sends nothing": (HookError, {"senders": "blocks.1.hook_resid_pre"}),
        "did you mean 'blocks.1.hook_mlp_out'": (HookError, {"senders": "blocks.1.hook_mlp_ot"}),
        "which has 8": (InputError, {"senders": [("z", 8)]}),
        "which has none": (InputError, {"senders": [("mlp_out", 0)]}),
        "nothing would send": (InputError, {"senders": []}),
        "a pair of one and its heads": (InputError, {"senders": [("z", 1, 2)]}),
        "receives nothing": (HookError, {"receivers": "blocks.1.attn.hook_z"}),
        "patching='noise'": (InputError, {"patching": "noise"}),
        "steps": (InputError, {"steps": 0}),
        "patterns for constant": (InputError, {"rules": "relp_frozen_pattern"}),
        "no rules 'rel'": (GradientError, {"rules": "rel"}),
        "a rank changes in steps": (GradientError, {"metric": "rank"}),
        "least at the clean prompt": (GradientError, {"metric": "kl"}),
        "cotangent= takes its derivative": (GradientError, {"metric": lambda logits: logits[:, 0]}),
        "none of `path_patch`": (InputError, {"metric": "loss"}),
        "13 tokens, the corrupted one 14": (InputError, {"clean": CLEAN.removesuffix(" to")}),
        "the same up to": (InputError, {"corrupted": CLEAN}),
    }
    for message, (kind, given) in cases.items():
        prompt = {"clean": CLEAN, "corrupted": CORRUPTED} | given
        with pytest.raises(kind, match=message.replace("(", r"\(")):
            shipped.edge_attribution(**prompt)


@pytest.mark.parametrize(
    ("hook", "operator", "message"),
    [
        ("blocks.2.mlp.hook_pre", "Add", "blocks.2.mlp.hook_pre depends on the tokens by another way"),
        ("blocks.2.hook_resid_mid", "Scale", "blocks.2.hook_resid_mid is not what the stream before"),
    ],
)
def test_models_whose_parts_are_not_apart_are_refused_by_name(copy, hook, operator, message):
    """A value that reads the embedding besides, and a stream that is scaled."""
    proto = onnx.load(copy / "model.onnx", load_external_data=False)
    at, node = next((i, node) for i, node in enumerate(proto.graph.node) if hook in node.output)
    node.output[list(node.output).index(hook)] = f"{hook}.old"
    if operator == "Add":
        added = onnx.helper.make_node("Add", [f"{hook}.old", "hook_embed"], [hook], "added")
    else:
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2), "two"))
        added = onnx.helper.make_node("Mul", [f"{hook}.old", "two"], [hook], "scaled")
    proto.graph.node.insert(at + 1, added)
    onnx.save(proto, copy / "model.onnx")
    with pytest.raises(InputError, match=message):
        MIModel.from_pretrained(copy).edge_attribution(CLEAN, CORRUPTED)


def test_a_recurrent_model_has_no_edges(recurrent):
    with pytest.raises(HookError, match="attention heads or mixers; rwkv7 has none"):
        recurrent.edge_attribution(CLEAN, CORRUPTED)


def test_a_page_of_many_edges_shows_the_nodes_of_the_leading_ones(shipped):
    """FINDINGS, part 2, 15: the page of SmolLM2's 70,651 edges took 2.19 MB."""
    found = shipped.edge_attribution("The capital of France is", "The capital of Italy is")
    senders, receivers = 571, 1023  # as many nodes as SmolLM2 has
    edges = np.ones((senders, receivers), bool)
    scores = np.random.default_rng(0).normal(size=edges.shape)
    scores[500, 1000] = 99.0
    large = replace(
        found,
        scores=scores,
        edges=edges,
        senders=tuple(f"s{i}" for i in range(senders)),
        receivers=tuple(f"r{i}" for i in range(receivers)),
    )
    page = large.page()
    assert len(page) < 400_000
    assert '"s500"' in page
    assert "of 571 senders and 1023 receivers, the 128 and 128 of the leading edges" in page
    assert "of the leading edges" not in found.page()
