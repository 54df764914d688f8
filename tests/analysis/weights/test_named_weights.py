"""Weights by name on the models that ship: views of the weight files, refusals, circuits, foldings, neurons."""

from mmap import mmap

import numpy as np
import pytest
from repository import REPOSITORY

from mionnx import FactoredMatrix, HookError, HookSpec, InputError, Intervention, MIModel, ModelError
from mionnx.analysis.weights.head_circuits import effective_embedding


@pytest.fixture(scope="module")
def gpt2() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-gpt2", threads=1)


def mapped(array: np.ndarray) -> bool:
    """Whether an array's numbers lie in a file."""
    base: object = array
    while getattr(base, "base", None) is not None:
        base = base.base
    return isinstance(base, mmap)


def test_weights_stay_in_their_files(shipped, gpt2):
    """Each layer is a view: of a turned weight, and of a third of a fused one."""
    for model, names in ((shipped, ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out")), (gpt2, ("W_Q", "W_V"))):
        for name in names:
            weight = getattr(model, name)[1]
            assert mapped(weight), name
            assert not weight.flags.writeable, name


def test_a_stack_is_an_array_that_is_read_when_asked_for(shipped):
    stack = shipped.W_Q
    whole = np.asarray(stack)
    assert stack.shape == whole.shape == (4, 8, 128, 16)
    assert (len(stack), stack.ndim, stack.size, stack.dtype) == (4, 4, whole.size, np.float32)
    for index in (1, -1, (2, 3), (slice(1, 3), 0), ..., ([0, 2], 1), (slice(None), slice(None), 5)):
        np.testing.assert_array_equal(stack[index], whole[index])
    assert stack[3:3].shape == (0, 8, 128, 16)
    np.testing.assert_array_equal(np.stack([*stack]), whole)
    np.testing.assert_array_equal(stack * 2 - stack, whole)
    np.testing.assert_array_equal(np.ones(128) @ stack, np.ones(128) @ whole)
    assert "W_Q [layer, head, d_model, d_head], 4 layers, float32" in repr(stack)
    with pytest.raises(InputError, match=r"W_Q\[4\]: the model has layers 0 to 3"):
        stack[4]


def test_what_a_model_does_not_have_is_refused_with_what_it_has(shipped, gpt2, recurrent):
    for model, name, message in (
        (shipped, "W_pos", r"llama: no W_pos: positions rotate queries and keys, weights\.QK\(distance=\)"),
        (gpt2, "W_gate", r"gpt2: layer 0 has no blocks\.0\.mlp\.hook_gate, and so no W_gate; it has W_in"),
        (recurrent, "W_Q", r"rwkv7: layer 0 has no blocks\.0\.attn\.hook_q.*`weights\.behind` has"),
    ):
        with pytest.raises(HookError, match=message):
            getattr(model, name)
    with pytest.raises(HookError, match=r"no norm ln1_post in layer 0; it has ln1, ln2"):
        shipped.weights.ln1_post_w  # noqa: B018
    with pytest.raises(AttributeError, match="weights have no 'W_X'; there are W_E"):
        shipped.weights.W_X  # noqa: B018
    with pytest.raises(ModelError, match=r"hook_pattern is a product of values that depend on the text"):
        shipped.weights.behind("blocks.0.attn.hook_pattern")
    with pytest.raises(HookError, match="the stream is normed, no bias stays in it"):
        MIModel.from_pretrained(REPOSITORY / "models" / "world-bert").accumulated_bias(1)
    assert repr(shipped.weights.behind("blocks.0.attn.hook_q")).endswith("[128, 8, 16], reads blocks.0.hook_resid_pre>")
    with pytest.raises(ModelError, match="hook_embed comes from no product with a weight"):
        shipped.weights.behind("hook_embed")
    with pytest.raises(HookError, match="distance=2, but no queries and keys turn"):
        gpt2.weights.QK(distance=2)
    for call, message in (
        (lambda: shipped.weights.composition_scores("X"), "one of Q, K, V"),
        (lambda: shipped.weights.QK(layer=9), "layer 9 of 4"),
        (lambda: shipped.weights.QK(distance=-1), "distance must be 0 or above"),
        (lambda: shipped.weights.neuron(0, 352), "neuron 352 of 352"),
        (lambda: shipped.weights.singular_vectors("OV", 0), "give head="),
        (lambda: shipped.weights.singular_vectors("W_in", 0, head=1), "no head"),
        (lambda: shipped.weights.singular_vectors("W_int", 0), "did you mean"),
        (lambda: shipped.accumulated_bias(5), "layers are 0 to 4"),
        (lambda: gpt2.weights.neuron(0, 1).reads(gate=True), "has no gate"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_the_product_behind_a_hook_point(shipped):
    found = shipped.weights.behind("blocks.1.mlp.hook_gate")
    assert (found.reads, found.initializer, found.normed) == (
        "blocks.1.mlp.hook_pre",
        "model.layers.1.mlp.gate_proj.weight",
        False,
    )
    np.testing.assert_array_equal(found.weight(), shipped.W_gate[1])
    assert found.bias() is None


def test_parameters_by_the_names_of_transformer_lens(shipped, gpt2):
    parameters = shipped.tl_parameters()
    np.testing.assert_array_equal(parameters["blocks.2.attn.W_O"], shipped.W_O[2])
    np.testing.assert_array_equal(parameters["blocks.2.attn.W_K"][[0, 1, 7]], shipped.W_K[2][[0, 0, 3]])
    np.testing.assert_array_equal(parameters["ln_final.w"], shipped.weights.ln_final_w)
    assert {"pos_embed.W_pos", "blocks.3.ln2.b", "blocks.0.mlp.b_in"} <= {*gpt2.tl_parameters()}
    assert "pos_embed.W_pos" not in parameters
    assert len([*parameters]) == len(parameters)
    with pytest.raises(InputError, match=r"no parameter 'blocks\.9\.attn\.W_Q'"):
        parameters["blocks.9.attn.W_Q"]


def test_composition_is_the_norm_of_the_product(shipped):
    """The definition, with the matrices multiplied out in float64."""
    scores = shipped.weights.composition_scores("K")
    ov, qk = (one.AB.astype(np.float64) for one in (shipped.OV, shipped.QK))
    for (first, head), (second, other) in (((2, 4), (3, 1)), ((0, 0), (1, 7)), ((1, 3), (3, 6))):
        left, right = ov[first, head], qk[second, other].T
        expected = np.linalg.norm(left @ right) / np.linalg.norm(left) / np.linalg.norm(right)
        assert scores[first, head, second, other] == pytest.approx(expected, rel=1e-5)
    assert not scores[[1, 2], :, [1, 1]].any()


def test_copying_is_that_of_the_whole_vocabulary(shipped):
    """Eigenvalues of W_E OV W_U, [vocab, vocab], as the definition has them."""
    scores = shipped.weights.copying_scores()
    for layer, head in ((3, 1), (0, 6)):
        full = shipped.W_E.astype(np.float64) @ shipped.OV[layer, head].AB @ shipped.W_U
        values = np.linalg.eigvals(full)
        assert scores[layer, head] == pytest.approx(values.sum().real / np.abs(values).sum(), abs=2e-3)


def test_effective_embeddings_are_the_stream_behind_the_first_mlp_without_attention(gpt2):
    spec = HookSpec().intervene("hook_pos_embed", Intervention.Zero())
    spec.intervene("blocks.0.hook_attn_out", Intervention.Zero()).capture("blocks.0.hook_resid_post")
    found = effective_embedding(gpt2.weights)
    assert found.shape == gpt2.W_E.shape
    for token in (5, 100):
        np.testing.assert_allclose(gpt2.forward([token], spec)["resid_post", 0][0, 0], found[token], atol=1e-5)


def test_weights_alone_find_the_induction_heads(shipped, gpt2):
    """Beside the heads' attention on repeated sequences: K-composition with earlier heads, and copying."""
    for model in (shipped, gpt2):
        weights = model.weights
        scores = weights.composition_scores("K").max(axis=(0, 1)) * np.maximum(
            weights.copying_scores(effective=True), 0
        )
        found = {divmod(int(at), model.num_heads) for at in np.argsort(-scores, axis=None)[:2]}
        assert found == {(layer, head) for layer, head, _ in model.head_scores().top("induction", 2)}


def streams_logits(weights, streams: np.ndarray) -> np.ndarray:
    """Logits of streams by numpy: final norm, as it is named there, and unembedding."""
    norm = weights.graph.norm("ln_final")
    rows = streams.astype(np.float64)
    rows = rows - rows.mean(axis=-1, keepdims=True) if norm.centred else rows
    rows = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + norm.epsilon)
    return (rows * weights.ln_final_w + weights.ln_final_b) @ weights.W_U + weights.b_U


def test_foldings_leave_what_they_may_not_change(shipped, gpt2):
    """Neurons of the same stream, logits up to a number that all share, circuits; hook points keep their numbers."""
    for model in (shipped, gpt2):
        raw, folded = model.weights, model.weights.process_weights()
        streams = np.random.default_rng(0).normal(size=(5, model.hidden_size))
        one, other = (streams_logits(weights, streams) for weights in (raw, folded))
        np.testing.assert_allclose(one - one.mean(-1, keepdims=True), other, atol=2e-4)
        norm = raw.graph.norm("ln2", 1)
        rows = streams - streams.mean(axis=-1, keepdims=True) if norm.centred else streams
        rows = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + norm.epsilon)
        expected = (rows * raw.ln2_w[1] + raw.ln2_b[1]) @ raw.W_in[1] + raw.b_in[1]
        np.testing.assert_allclose(rows @ folded.W_in[1] + folded.b_in[1], expected, atol=1e-4)
        assert (folded.ln2_w[1] == 1).all()
        assert not folded.ln2_b[1].any()
        assert not folded.b_V[1].any()
        np.testing.assert_array_equal(model.weights.W_in[1], raw.W_in[1])


def test_foldings_that_change_the_model_are_refused(shipped, models):
    with pytest.raises(
        HookError, match=r"llama: ln1 of layer 0 takes out no mean, so writing weights cannot be centred"
    ):
        shipped.weights.center_writing_weights()
    with pytest.raises(HookError, match="turns, norms or groups queries and keys"):
        shipped.weights.refactor_factored_attn_matrices()
    with pytest.raises(HookError, match="logits are capped"):
        models("gemma2").weights.center_unembed()


def test_circuits_made_even_are_the_same_circuits(gpt2):
    raw, even = gpt2.weights, gpt2.weights.refactor_factored_attn_matrices()
    for layer in range(gpt2.num_layers):
        np.testing.assert_allclose(even.QK(layer).AB, raw.QK(layer).AB, atol=2e-5)
        np.testing.assert_allclose(even.OV(layer).AB, raw.OV(layer).AB, atol=2e-5)
        rows = np.swapaxes(even.W_Q[layer], -1, -2) @ even.W_Q[layer] + np.einsum(
            "hk,hl->hkl", even.b_Q[layer], even.b_Q[layer]
        )
        off = rows * (1 - np.eye(rows.shape[-1]))
        assert np.abs(off).max() < 1e-4 * np.abs(rows).max()
    z = np.random.default_rng(0).normal(size=(gpt2.num_heads, gpt2.head_dim))
    x = np.random.default_rng(1).normal(size=gpt2.hidden_size)
    one, other = (
        sum((x @ w.W_V[2][h] + w.b_V[2][h]) @ w.W_O[2][h] for h in range(len(z))) + w.b_O[2] for w in (raw, even)
    )
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_neuron_reads_and_writes(shipped):
    neuron = shipped.weights.neuron(2, 7)
    np.testing.assert_array_equal(neuron.output, shipped.W_out[2][7])
    np.testing.assert_array_equal(neuron.gate, shipped.W_gate[2][:, 7])
    direction = neuron.input * shipped.weights.ln2_w[2]
    assert [token for token, _ in neuron.reads(3)] == [t for t, _ in shipped.embedding_neighbors(direction, k=3)]
    assert neuron.writes(3) == shipped.project_through_unembed(neuron.output, k=3)
    assert neuron.reads(3, gate=True) != neuron.reads(3)


def test_singular_vectors_have_one_sign(shipped):
    found = shipped.weights.singular_vectors("OV", 3, head=1, k=4)
    full = shipped.OV[3, 1].AB.astype(np.float64)
    _, values, vectors = np.linalg.svd(full)
    np.testing.assert_allclose(found.values, values[:4], rtol=1e-4)
    np.testing.assert_allclose(np.abs((found.vectors * vectors[:4]).sum(axis=1)), 1, atol=1e-4)
    assert (found.vectors[range(4), np.abs(found.vectors).argmax(axis=1)] > 0).all()
    np.testing.assert_allclose(found.logits, found.vectors @ shipped.W_U, atol=1e-6)
    assert found.tokens(0, 2)[0][1] == found.logits[0].max()
    assert found.tokens(0, 2, lowest=True)[0][1] == found.logits[0].min()


def test_a_factored_matrix_is_its_product():
    random = np.random.default_rng(0)
    left, right = random.normal(size=(2, 3, 12, 4)), random.normal(size=(3, 4, 12))
    matrix, full = FactoredMatrix(left, right), left @ right
    square, vector = random.normal(size=(12, 12)), random.normal(size=12)
    for found, expected in (
        (matrix.AB, full),
        (matrix.T.AB, np.swapaxes(full, -1, -2)),
        ((matrix @ square).AB, full @ square),
        ((square @ matrix).AB, square @ full),
        ((matrix @ matrix.T).AB, full @ np.swapaxes(full, -1, -2)),
        (matrix @ vector, full @ vector),
        (vector @ matrix, vector @ full),
        ((2 * matrix).AB, 2 * full),
        (matrix.norm(), np.linalg.norm(full, axis=(-2, -1))),
        (matrix.S, np.linalg.svd(full)[1][..., :4]),
        (matrix.make_even().AB, full),
        (matrix.U @ matrix.collapse_l(), full),
        (matrix.collapse_r() @ np.swapaxes(matrix.V, -1, -2), full),
        (matrix[1, 2, 3:5, -1].AB, full[1, 2, 3:5, -1:]),
        (matrix[..., 2].AB, full[..., 2:3]),
        (matrix.get_corner(2), full[..., :2, :2]),
        (matrix.eigenvalues.sum(-1).real, np.trace(full, axis1=-2, axis2=-1)),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-9)
    assert (matrix @ square).mdim == (square @ matrix).mdim == 4  # the smaller of the two inner axes
    for wrong, message in (
        (lambda: FactoredMatrix(left, left), "A's last axis"),
        (lambda: matrix @ np.ones(3), "inner axes differ"),
        (lambda: np.ones((2, 3)) @ matrix, "inner axes differ"),
        (lambda: matrix * np.ones(2), "@ multiplies matrices"),
        (lambda: matrix[0, 0, 0, 0, 0], "5 indices"),
        (lambda: matrix[None], "no new axes"),
        (lambda: FactoredMatrix([1.0], left), "must be numbers"),
        (lambda: matrix[0, 0, :, :3].BA, "must be square"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()
