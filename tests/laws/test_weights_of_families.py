"""x W + b is the hooked value: of each weight by name, in every family of the table."""

from pathlib import Path

import numpy as np
import pytest
from families import VOCAB, make_checkpoint, single_threaded
from tiny_configs import tiny_config
from weights_law import APART, check_attention, check_mlp, close, normed

from exporters.transformers import export
from mionnx import HookError, HookSpec, Intervention, MIModel

# keys picked by number; values that are joined and parted again; a stack of matrices in one; biases of experts; a bias
# that is spread over all tokens; norms of several operators
ODD = ("falcon", "codegen", "dbrx", "gpt_oss", "gpt_neox_japanese", "helium")
IDS = np.random.default_rng(0).integers(3, VOCAB, (2, 7))


def tiny(family: str, folder: Path) -> MIModel:
    """A small random model of a family."""
    single_threaded()
    make_checkpoint(family, folder / "checkpoint", **tiny_config(family))
    export(folder / "checkpoint", folder / "hooked")
    return MIModel.from_pretrained(folder / "hooked", threads=1)


def check(model: MIModel, ids: np.ndarray = IDS, most: float = APART) -> None:
    cache = model.forward(ids, HookSpec().capture("*"))
    for layer in range(model.num_layers):
        check_attention(model, cache, layer, most)
        check_mlp(model, cache, layer, most)


def test_every_weight_gives_its_hooked_value(family, models):
    check(models(family))


@pytest.mark.parametrize(
    "name", ["falcon", *(pytest.param(one, marks=pytest.mark.slow) for one in ODD if one != "falcon")], ids=str
)
def test_every_weight_of_a_family_whose_graph_is_another(name, tmp_path):
    check(tiny(name, tmp_path))


@pytest.mark.slow
def test_an_expert_that_all_tokens_share(tmp_path):
    """W_in and W_gate are its own; its output is added to that of the others, so no one weight gives the sum."""
    model = tiny("dots1", tmp_path)
    cache = model.forward(IDS, HookSpec().capture("blocks.*.mlp.*"))
    for name, point in (("W_in", "hook_up"), ("W_gate", "hook_gate")):
        found = cache["blocks.1.mlp.hook_pre"].astype(np.float64) @ getattr(model.weights, name)[1]
        close(found, cache[f"blocks.1.mlp.{point}"], name)
    with pytest.raises(HookError, match=r"dots1: no W_out in layer 1: .*hook_post' is a sum of several parts"):
        model.weights.W_out[1]


def test_the_final_norm_and_the_embeddings(family, models):
    """Norms by name are those of the graph: before the MLP, where it is not shared, and before the head."""
    model = models(family)
    cache = model.forward(IDS, HookSpec().capture("*"))
    weights, graph = model.weights, model.weights.graph
    final = normed(graph.norm("ln_final"), cache["resid_post", model.num_layers - 1].astype(np.float64))
    close(final, cache["hook_final_norm"], "ln_final")
    if "hook_pos_embed" in {str(point) for point in model.hook_points()}:
        places = np.broadcast_to(weights.W_pos[: IDS.shape[1]], (*IDS.shape, model.hidden_size))
        np.testing.assert_array_equal(places, cache["hook_pos_embed"])
        assert weights.W_E_pos.shape == (len(weights.W_E) + len(weights.W_pos), model.hidden_size)
    middle = "resid_mid" if "blocks.0.hook_resid_mid" in {str(point) for point in model.hook_points()} else "resid_pre"
    if family != "olmo2":  # whose norms stand behind attention and MLP
        close(normed(graph.norm("ln2"), cache[middle, 0].astype(np.float64)), cache["blocks.0.mlp.hook_pre"], "ln2")


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_scores_are_those_of_the_circuit_at_their_distance(family, models, distance):
    """Biases aside: queries and keys of the graph, less their biases, turned by the graph."""
    model = models(family)
    points = {str(point) for point in model.hook_points()}
    if model.weights.graph.product("W_Q", 0).normed:
        pytest.skip("each token has a scale of its own")
    rotary = "blocks.0.attn.hook_rot_q" in points
    if distance and not rotary:
        return
    random = np.random.default_rng(distance)
    circuit = model.weights.QK(layer=0, distance=distance)
    rows, seq = random.normal(size=(2, 6, model.hidden_size)).astype(np.float32), 6
    queries, keys = (
        np.einsum("sd,hdk->hsk", one, np.repeat(matrix, model.num_heads // len(matrix), axis=0))
        for one, matrix in zip(rows, (model.W_Q[0], model.W_K[0]), strict=True)
    )
    own = keys[:: model.num_heads // len(model.W_K[0])]
    spec = HookSpec()
    if rotary:
        spec.intervene("blocks.0.attn.hook_q", Intervention.Replace(queries[None]))
        spec.intervene("blocks.0.attn.hook_k", Intervention.Replace(own[None]))
        cache = model.forward(IDS[:1, :seq], spec.capture("blocks.0.attn.hook_rot_*"), logits=False)
        queries, keys = cache["rot_q", 0][0], np.repeat(cache["rot_k", 0][0], model.num_heads // len(own), axis=0)
    for at in range(distance, seq):
        expected = np.einsum("hk,hk->h", queries[:, at], keys[:, at - distance])
        found = np.array([rows[0, at] @ circuit[head].AB @ rows[1, at - distance] for head in range(model.num_heads)])
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_an_encoder(text_encoder):
    model, _ = text_encoder("masked_lm")
    ids = np.random.default_rng(0).integers(3, model.vocab_size, (2, 6))
    cache = model.forward(ids, HookSpec().capture("*"))
    for layer in range(model.num_layers):
        check_attention(model, cache, layer)
        check_mlp(model, cache, layer)
        for norm, end, parts in (
            ("ln1", "resid_mid", ("resid_pre", "attn_out")),
            ("ln2", "resid_post", ("resid_mid", "mlp_out")),
        ):
            total = sum(cache[part, layer].astype(np.float64) for part in parts)
            close(normed(model.weights.graph.norm(norm, layer), total), cache[end, layer], norm)


@pytest.mark.parametrize("layout", ["6-pth"])
def test_a_recurrent_model_has_the_products_behind_its_hook_points(rwkv, layout):
    """Receptance reads a mixture of two tokens, of which no hook point is x; attention's weights are refused."""
    model = rwkv(layout)
    found = model.weights.behind("blocks.1.rwkv.hook_r")
    assert (found.shape[0], found.reads, found.bias()) == (model.hidden_size, "", None)
    assert found.initializer.endswith("att.receptance.weight")
    for name in ("W_Q", "W_O", "W_in", "W_gate", "ln1_w"):
        with pytest.raises(HookError, match=r"rwkv6: .*`weights.behind` has the products of blocks\.0\."):
            getattr(model.weights, name)
