"""Experts beside transformers: its own modules, called with what a token chose, and its own routers."""

from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from families import CONFIGS, make_checkpoint
from family_batches import batch, difference, forward, interventions
from oracle import run
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM

from exporters.transformers import export
from exporters.transformers.experts import GROUPED_DOMAIN
from exporters.transformers.grouped import expand_grouped
from mionnx import HookPoint, HookSpec, Intervention, InterventionError, MIModel

TOLERANCE = 5e-5
FAMILIES = (
    "afmoe",
    "dots1",
    "ernie4_5_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "llama4_text",
    "longcat_flash",
    "minimax_m2",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
)


def grouped_session(stack, rows, partial=False):
    """A session of one GroupedMatMul over a stack of matrices."""
    shape = (stack, 5, 7) if rows else (stack, 7, 5)
    attributes = f"rows = {int(rows)}, partial = {int(partial)}"
    text = (
        f'<ir_version: 10, opset_import: ["" : 23, "{GROUPED_DOMAIN}" : 1]> g '
        f"(float[n, 5] x, float[{', '.join(map(str, shape))}] w, int64[n] chosen) => (float[n, 7] y) "
        f"{{ z = {GROUPED_DOMAIN}.GroupedMatMul<{attributes}>(x, w, chosen) y = Identity(z) }}"
    )
    model = ir.from_onnx_text(text)
    expand_grouped(model.graph)
    return ort.InferenceSession(ir.to_proto(model).SerializeToString()), shape


@pytest.mark.parametrize("rows", [False, True])
def test_each_row_is_multiplied_with_the_matrix_that_it_chose(rows):
    session, shape = grouped_session(9, rows)
    rng = np.random.default_rng(0)
    matrices = rng.normal(size=shape).astype(np.float32)
    for count in (1, 2, 13, 40):
        x, chosen = rng.normal(size=(count, 5)).astype(np.float32), rng.integers(0, 9, count)
        expected = np.einsum("ni,nio->no" if rows else "ni,noi->no", x, matrices[chosen])
        (found,) = session.run(None, {"x": x, "w": matrices, "chosen": chosen})
        assert np.abs(found - expected).max() < 1e-5
        for row in range(count):  # to the last bit, whatever stands beside it
            alone = {"x": x[row : row + 1], "w": matrices, "chosen": chosen[row : row + 1]}
            assert np.array_equal(session.run(None, alone)[0][0], found[row])


def test_a_row_that_chose_no_matrix_becomes_zero():
    session, shape = grouped_session(4, rows=False, partial=True)
    rng = np.random.default_rng(0)
    matrices = rng.normal(size=shape).astype(np.float32)
    for chosen in ([6], [4, 5, 4], [0, 5, 3, 3, 4, 1], [2, 4, 4, 4, 4, 4], rng.integers(0, 7, 40)):
        chosen, x = np.array(chosen), rng.normal(size=(len(chosen), 5)).astype(np.float32)
        expected = np.einsum("ni,noi->no", x, np.concatenate([matrices, np.zeros((3, 7, 5), np.float32)])[chosen])
        (found,) = session.run(None, {"x": x, "w": matrices, "chosen": chosen})
        assert np.abs(found - expected).max() < 1e-5
        assert not found[chosen >= 4].any()


@contextmanager
def seen(model, block):
    """What transformers' own modules of a block are given and give."""
    found = {}
    hooks = [
        block.gate.register_forward_hook(lambda _m, _args, out: found.update(zip("lwi", out, strict=True))),
        block.experts.register_forward_hook(lambda _m, args, out: found.update(hidden=args[0], out=out)),
    ]
    yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.slow
def test_hook_points_are_what_transformers_own_modules_compute(models, checkpoint):
    model, inputs = models("mixtral"), batch("left")
    plain = AutoModelForCausalLM.from_pretrained(
        checkpoint("mixtral"), attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    values = forward(model, inputs, HookSpec().capture("blocks.1.mlp.*")).values
    names = ("router_logits", "expert_indices", "expert_weights", "expert_out", "post")
    logits, indices, weights, out, post = (values[f"blocks.1.mlp.hook_{name}"][inputs.real] for name in names)
    block = plain.model.layers[1].mlp
    given = (torch.from_numpy(array) for array in (inputs.ids, inputs.mask, inputs.positions))
    with torch.no_grad(), seen(plain, block) as found:
        plain(**dict(zip(("input_ids", "attention_mask", "position_ids"), given, strict=True)))
        real = torch.from_numpy(inputs.real.reshape(-1))
        theirs = {name: value[real] for name, value in found.items()}
        assert np.array_equal(indices, theirs["i"].numpy())
        assert np.abs(logits - theirs["l"].numpy()).max() < TOLERANCE
        assert np.abs(weights - theirs["w"].numpy()).max() < TOLERANCE
        assert np.abs(post - theirs["out"].numpy()).max() < TOLERANCE
        for place in range(indices.shape[-1]):
            one = slice(place, place + 1)
            alone = block.experts(theirs["hidden"], theirs["i"][:, one], theirs["w"][:, one])
            assert np.abs(out[:, place] - alone.numpy()).max() < TOLERANCE


@pytest.mark.slow
def test_an_expert_is_knocked_out_before_and_after_the_choice(models):
    model, ids, mlp = models("mixtral"), batch("plain").ids, "blocks.0.mlp"
    plain = model.forward(ids, HookSpec().capture(f"{mlp}.*"))
    expert = int(np.bincount(plain["expert_indices", 0].ravel()).argmax())

    def changed(name, edit):
        return model.forward(ids, HookSpec().capture(f"{mlp}.*").intervene(f"{mlp}.{name}", edit))

    without = changed("hook_expert_weights", Intervention.Zero(experts=expert))
    of_it = plain["expert_indices", 0] == expert
    assert not without["expert_weights", 0][of_it].any()
    lost = np.where(of_it[..., None], plain["expert_out", 0], 0).sum(2)
    assert np.abs(plain["post", 0] - lost - without["post", 0]).max() < 1e-5
    other = changed("hook_router_logits", Intervention.Replace(-1e9, experts=expert))
    assert not (other["expert_indices", 0] == expert).any()
    assert np.abs(other["expert_weights", 0].sum(-1) - 1).max() < 1e-5  # another one took its place
    forced = changed("hook_expert_indices", Intervention.Replace(expert, positions=3))
    assert (forced["expert_indices", 0][:, 3] == expert).all()


def test_a_limit_to_experts_is_kept_in_files_and_in_compiled_graphs(models, tmp_path):
    model, ids = models("mixtral"), batch("plain").ids
    spec = HookSpec().intervene("blocks.1.mlp.hook_expert_out", Intervention.Scale(3.0, experts=[0, 2]))
    changed = model.forward(ids, spec).output()
    assert np.abs(changed - model.forward(ids).output()).max() > 1e-3
    spec.save(tmp_path / "spec.safetensors")
    assert np.array_equal(model.forward(ids, HookSpec.load(tmp_path / "spec.safetensors")).output(), changed)
    model.compile(spec, tmp_path / "compiled")
    session, ones = ort.InferenceSession(tmp_path / "compiled" / "model.onnx"), np.ones_like(ids)
    feeds = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(1) - 1}
    sizes = model.hooked.metadata.sizes
    past = np.zeros((len(ids), sizes.num_kv_heads, 0, sizes.head_dim), np.float32)
    feeds |= {value.name: past for value in session.get_inputs() if value.name not in feeds}
    assert np.array_equal(session.run(["logits"], feeds)[0], changed)


@pytest.mark.parametrize(
    ("hook", "edit", "message"),
    [
        ("hook_expert_indices", Intervention.Add(1), "can only be replaced.*hook_expert_weights"),
        ("hook_expert_indices", Intervention.Replace(4, positions=0), "4 is no expert; the model has 4"),
        ("hook_expert_indices", Intervention.Replace(0.5, positions=0), "0.5 is no expert"),
        ("hook_router_logits", Intervention.Zero(experts=4), "expert 4 of 4"),
        ("hook_post", Intervention.Zero(experts=1), "have no experts; hook points that do: blocks.0.mlp.hook_router"),
    ],
)
def test_refusals_name_what_there_is(models, hook, edit, message):
    spec = HookSpec().intervene(f"blocks.0.mlp.{hook}", edit)
    with pytest.raises(InterventionError, match=message):
        models("mixtral").forward([[3, 4, 5]], spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_experts(name, tmp_path, monkeypatch):
    """Every hook point, and an intervention of each kind at every hook point of experts."""
    monkeypatch.setitem(CONFIGS, name, tiny_config(name))
    reference = make_checkpoint(name, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model, inputs = MIModel.from_pretrained(tmp_path / "hooked"), batch("left past")
    expected = run(reference, inputs)
    found = forward(model, inputs, HookSpec().capture(lambda hook: not hook.endswith("hook_result")))
    assert set(found.values) == set(expected.values)
    points = [HookPoint.parse(hook) for hook in found.values]
    for point in points:
        assert difference(point, found.values[point.name], expected.values[point.name], inputs) < TOLERANCE
    routed = [point for point in points if {"n_experts", "n_chosen"} & {*point.axes} and point.layer == 1]
    assert len(routed) == 7
    for point in routed:
        for edit in interventions(point, expected.values[point.name].shape, whole=False):
            changed = run(reference, inputs, [(point, edit)]).logits
            logits = forward(model, inputs, HookSpec().intervene(point, edit)).logits
            assert np.abs(logits - changed)[inputs.real].max() < TOLERANCE * max(1, np.abs(changed).max())
