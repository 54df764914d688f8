"""Attention of other kinds than Llama's: latents, partial rotation, shared keys and values, gates, chunks, streams."""

from pathlib import Path

import numpy as np
import pytest
import torch
from families import make_checkpoint
from family_batches import batch, difference, forward, interventions
from oracle import Inputs, run
from recurrent_families import make_recurrent
from tiny_configs import tiny_config
from transformers import PreTrainedModel

from exporters.transformers import export
from mionnx import HookError, HookPoint, HookSpec, InputError, Intervention, InterventionError, MIModel

TOLERANCE = 5e-5
LATENTS = ["deepseek_v2", "deepseek_v3", "longcat_flash", "youtu"]
SPARSE = ["doge", "glm_moe_dsa"]
FAMILIES = [
    *LATENTS,
    *SPARSE,
    "gemma4_text",
    "llama4_text",
    "phi",
    "stablelm",
    "diffllama",
    "gpt_neox_japanese",
    "granite",
    "granitemoeshared",
    "jetmoe",
]
Pair = tuple[MIModel, PreTrainedModel]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """Family -> its hooked model and the same in torch, made once a module."""
    pairs: dict[str, Pair] = {}

    def find(family: str) -> Pair:
        if family not in pairs:
            folder: Path = tmp_path_factory.mktemp(family)
            reference = make_checkpoint(family, folder / "checkpoint", **tiny_config(family))
            export(folder / "checkpoint", folder / "hooked")
            pairs[family] = MIModel.from_pretrained(folder / "hooked", threads=1), reference
        return pairs[family]

    return find


each = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "youtu" else pytest.mark.slow) for name in FAMILIES]
)


@each
@pytest.mark.slow
def test_every_hook_point_and_the_cache_equal_eager(family, made):
    model, reference = made(family)
    for kind in ("left", "left past"):
        inputs = batch(kind)
        expected = run(reference, inputs)
        found = forward(model, inputs, HookSpec().capture(lambda name: not name.endswith("hook_result")))
        assert {*found.values} == {*expected.values}
        off = {
            name: difference(HookPoint.parse(name), found.values[name], expected.values[name], inputs)
            for name in found.values
        }
        assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}
        assert [[part.shape for part in layer] for layer in found.cache] == [
            [part.shape for part in layer] for layer in expected.cache
        ]


@each
def test_eager_with_taps_equals_plain_transformers_with_and_without_its_own_cache(family, made):
    _, reference = made(family)
    ids = batch("plain").ids
    inputs = Inputs(ids, np.ones_like(ids), past=9)
    tapped, whole = run(reference, inputs).logits, run(reference, Inputs(ids, np.ones_like(ids))).logits
    reference.config._attn_implementation = "eager"
    reference.config._experts_implementation = "eager"
    with torch.no_grad():
        plain = reference(torch.from_numpy(ids)).logits.numpy()
        first = reference(torch.from_numpy(ids[:, :9]), use_cache=True)
        rest = reference(torch.from_numpy(ids[:, 9:]), past_key_values=first.past_key_values).logits.numpy()
    assert np.abs(whole - plain).max() < TOLERANCE
    assert np.abs(tapped - rest).max() < TOLERANCE


@each
@pytest.mark.slow
def test_interventions_in_the_last_layer_equal_the_same_edits_in_torch(family, made):
    model, reference = made(family)
    inputs = batch("left past")
    plain = run(reference, inputs)
    for point in [point for point in model.hook_points() if not point.derived and point.layer == model.num_layers - 1]:
        if "expert" in point.name:
            continue
        edit = next(interventions(point, plain.values[str(point)].shape))
        expected = run(reference, inputs, [(point, edit)]).logits[inputs.real]
        found = forward(model, inputs, HookSpec().intervene(point, edit)).logits[inputs.real]
        assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max()), str(point)


@pytest.mark.parametrize("family", [pytest.param(n, marks=() if n == "youtu" else pytest.mark.slow) for n in LATENTS])
def test_latents_are_hook_points_and_keys_may_be_of_another_size_than_values(family, made):
    model, reference = made(family)
    config = reference.config
    cache = model.forward(batch("plain").ids, HookSpec().capture("*"), use_cache=True)
    assert cache["q_latent", 0].shape[-1] == config.q_lora_rank
    assert cache["kv_latent", 0].shape[-1] == config.kv_lora_rank
    keys, values = cache.kv_cache.layers[0]
    assert keys.shape[-1] == config.qk_nope_head_dim + config.qk_rope_head_dim
    assert values.shape[-1] == config.v_head_dim != keys.shape[-1]
    assert model.W_O.shape == (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.v_head_dim,
        config.hidden_size,
    )
    assert cache["result", 0].shape[-2:] == (config.num_attention_heads, config.hidden_size)
    changed = model.forward(batch("plain").ids, HookSpec().intervene(HookPoint.AttnKvLatent(0), Intervention.Zero()))
    assert np.abs(changed.output() - cache.output()).max() > 1e-3


@pytest.mark.slow
def test_a_mixture_that_joins_half_a_block_later_is_part_of_what_the_second_half_adds(made):
    """LongCat: of two layers of one block the second has the experts, which read what the first one's MLP reads."""
    model, reference = made("longcat_flash")
    ids = batch("plain").ids
    cache = model.forward(ids, HookSpec().capture("*"))
    block = reference.model.layers[1]
    with torch.no_grad():
        apart = [block.mlp(torch.from_numpy(cache["pre", 2])), block.mlps[1](torch.from_numpy(cache["pre", 3]))]
    assert np.abs(sum(apart).numpy() - cache["mlp_out", 3]).max() < TOLERANCE
    assert np.abs(cache["expert_out", 3].sum(2) - apart[0].numpy()).max() < TOLERANCE
    identical = cache["expert_indices", 3] >= 4
    assert identical.any()
    assert not cache["expert_act", 3][identical].any()
    given = (cache["pre", 2][:, :, None] * cache["expert_weights", 3][..., None])[identical]
    assert np.abs(cache["expert_out", 3][identical] - given).max() < TOLERANCE
    assert all(("router_logits", layer) not in cache for layer in (0, 2))
    with pytest.raises(InterventionError, match="expert 5 gives back what it reads and has no neurons, as all from 4"):
        model.forward(ids, HookSpec().intervene(HookPoint.MlpExpertAct(3), Intervention.Zero(experts=5)))
    with pytest.raises(InputError, match=r"layer 1 of this longcat_flash reads blocks\.0\.mlp\.hook_pre besides"):
        model.path_patch([[5, 6, 7]], [[5, 9, 7]], "all", answer=3, versus=4)
    swept = model.patch_sweep([[5, 6, 7]], [[5, 9, 7]], "mlp.hook_pre", answer=3, versus=4).values
    for layer in (0, 1):
        point = HookPoint.MlpPre(layer)
        changed = np.array(model.forward([[5, 9, 7]], HookSpec().capture(point))[point])
        changed[:, 1] = model.forward([[5, 6, 7]], HookSpec().capture(point))[point][:, 1]
        spec = HookSpec().intervene(point, Intervention.Replace(changed))
        logits = model.forward([[5, 9, 7]], spec).output()[0, -1]
        assert swept[layer, 1] == pytest.approx(logits[3] - logits[4], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", SPARSE)
def test_a_text_of_which_attention_would_drop_keys_is_refused(family, made):
    model, reference = made(family)
    limit = getattr(reference.config, "index_topk", None) or reference.config.keep_window_size
    assert model.forward([[5] * limit]).output().shape[1] == limit
    with pytest.raises(InputError, match=f"a text of {limit + 1} tokens, but the model has positions for {limit} only"):
        model.forward([[5] * (limit + 1)])


@pytest.mark.slow
def test_a_zeroed_embedding_goes_through_a_norm_with_an_epsilon_of_1e_8(made):
    model, reference = made("helium")
    inputs = batch("plain")
    expected = run(reference, inputs, [(HookPoint.Embed, Intervention.Zero())]).logits
    found = forward(model, inputs, HookSpec().intervene(HookPoint.Embed, Intervention.Zero())).logits
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.slow
def test_layers_that_read_the_keys_and_values_of_another_keep_none(made):
    model, _ = made("gemma4_text")
    cache = model.forward(batch("plain").ids, HookSpec().capture("*"), use_cache=True).kv_cache
    assert [keys.shape[1] for keys, _ in cache.layers] == [2, 2, 0, 0]
    assert [keys.shape[-1] for keys, _ in cache.layers] == [16, 32, 16, 32]
    assert (model.W_O[0].shape, model.W_O[1].shape) == ((4, 16, 64), (4, 32, 64))
    with pytest.raises(HookError, match="other sizes"):
        _ = model.W_O.shape


@pytest.mark.slow
def test_what_goes_on_from_one_stream_is_refused_where_there_are_several(made):
    """Gemma 3n has four streams side by side; the first is the one with the hook points."""
    model, _ = made("gemma3n_text")
    one, other = [[5, 6, 7, 8]], [[5, 9, 7, 8]]
    for verb in (
        lambda: model.logit_lens(one),
        lambda: model.attribute(one, 7),
        lambda: model.patch_sweep(one, other, answer=3, versus=4),
        lambda: model.path_patch(one, other, "all", answer=3, versus=4),
        lambda: model.decompose_resid(model.forward(one, model.decomposition_hooks())),
    ):
        with pytest.raises(InputError, match="several streams side by side"):
            verb()
    hook = "blocks.1.hook_resid_pre"
    grad = model.gradients(one, hook, answer=7).grad[hook]
    direction = np.random.default_rng(0).normal(size=grad.shape).astype(np.float32)
    ends = [
        model.forward(one, HookSpec().intervene(hook, Intervention.Add(sign * 1e-2 * direction))).output()[0, -1, 7]
        for sign in (1, -1)
    ]
    assert float((grad * direction).sum()) == pytest.approx(float(ends[0] - ends[1]) / 2e-2, rel=2e-2, abs=1e-3)


@pytest.mark.slow
def test_heads_whose_tokens_choose_their_projections_have_no_results(made):
    model, _ = made("jetmoe")
    assert not [point for point in model.hook_points() if point.derived]
    with pytest.raises(HookError, match=r"no hook point 'blocks\.0\.attn\.hook_result'"):
        model.forward([[3, 4]], HookSpec().capture(HookPoint.AttnResult(0)))
    with pytest.raises(HookError, match="chooses its own projections"):
        _ = model.W_O
    found = model.attribute([3, 4, 5], 7)
    assert found.heads is None
    assert {"0_attn_out", "1_attn_out", "1_mlp_out"} <= {*found.labels}
    assert found.total == pytest.approx(model.forward([[3, 4, 5]]).output()[0, -1, 7], abs=1e-5)


@pytest.mark.slow
def test_a_stream_that_goes_on_normed_is_no_sum_of_what_layers_add(tmp_path):
    """BLOOM, where the config lets the norms' outputs skip the halves."""
    changes = {**tiny_config("bloom"), "apply_residual_connection_post_layernorm": True}
    reference, inputs = make_checkpoint("bloom", tmp_path / "checkpoint", **changes), batch("left past")
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model, expected = MIModel.from_pretrained(tmp_path / "hooked", threads=1), run(reference, inputs).values
    found = forward(model, inputs, HookSpec().capture(lambda name: not name.endswith("hook_result"))).values
    assert {*found} == {*expected}
    points = map(HookPoint.parse, found)
    assert max(difference(point, found[point.name], expected[point.name], inputs) for point in points) < TOLERANCE
    with pytest.raises(InputError, match="'bloom' norms it between additions"):
        model.attribute([[3, 4, 5]], 7)


@pytest.mark.slow
def test_latents_have_no_one_weight_of_keys(made):
    """Keys and values of DeepSeek are products with what a token's latent is: two weights, one after the other."""
    model, _ = made("deepseek_v3")
    for name in ("W_K", "W_V"):
        with pytest.raises(HookError, match=rf"no {name}.*`weights\.behind` has the products of"):
            getattr(model, name)


@pytest.mark.parametrize("family", ["granite", "granitemoehybrid", "recurrent_gemma"])
def test_embeddings_that_a_model_scales_in_its_code_are_tapped_behind_the_scale(family, tmp_path):
    """As the first layer reads them: transformers' first hidden state."""
    scale = {} if family == "recurrent_gemma" else {"embedding_multiplier": 12.0}
    if family == "granite":
        reference = make_checkpoint(family, tmp_path, **{**tiny_config(family), **scale})
    else:
        reference = make_recurrent(family, tmp_path, **scale)
    inputs = batch("plain")
    with torch.no_grad():
        first = reference(torch.from_numpy(inputs.ids), output_hidden_states=True, use_cache=False).hidden_states[0]
    table = reference.get_input_embeddings().weight[torch.from_numpy(inputs.ids)].detach()
    embedded = run(reference, inputs).values["hook_embed"]
    assert np.array_equal(embedded, first.numpy())
    assert np.abs(embedded - table.numpy()).max() > 1
