"""Python functions in a generation with the cache: against torch's forward hooks, and against an RWKV loop."""

import numpy as np
import pytest
import torch
from families import VOCAB
from rwkv_checkpoints import blinkdl
from rwkv_loop import Loop
from transformers import AutoModelForCausalLM

from mionnx import HookError, HookSpec, Intervention, InterventionError

TOLERANCE = 5e-5
POINT = "blocks.1.hook_mlp_out"
TEXTS = ["The capital of France is", "Paris", "The capital of Kenya is a city . The capital of Japan is"]
MLPS = {
    "llama": lambda model: model.model.layers[1].mlp,
    "gpt2": lambda model: model.transformer.h[1].mlp,
    "qwen3": lambda model: model.model.layers[1].mlp,
}


def bent(value, positions):
    """A function of the value and of where its tokens stand."""
    return value * 1.5 + 0.2 * positions[..., None]


def bend(value, hook):
    return bent(value, hook.positions.astype(np.float32))


@pytest.mark.parametrize("family", [*MLPS])
@pytest.mark.parametrize("padding", [0, 3])
def test_functions_act_as_the_forward_hooks_of_torch(models, checkpoint, family, padding):
    ids, new = np.random.default_rng(3).integers(3, VOCAB, (2, 8)), 6
    mask = np.ones_like(ids)
    mask[0, :padding] = 0
    peer = AutoModelForCausalLM.from_pretrained(checkpoint(family), attn_implementation="eager").eval()
    seen = {"columns": 0}

    def hook(_, inputs, output):
        """Positions of the columns, of which each call computes the next."""
        whole = np.concatenate([mask, np.ones((2, new), int)], axis=1)
        positions = np.where(whole == 1, whole.cumsum(axis=1) - 1, -1)
        first = seen["columns"]
        seen["columns"] += output.shape[1]
        return bent(output, torch.from_numpy(positions[:, first : seen["columns"]]).float())

    MLPS[family](peer).register_forward_hook(hook)
    given = {"attention_mask": torch.from_numpy(mask), "pad_token_id": 0, "eos_token_id": None}
    asked = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = peer.generate(torch.from_numpy(ids), **given, **asked)
    found = models(family).generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        eos_token_id=[],
        output_logits=True,
        fwd_hooks=[(POINT, bend)],
    )
    for row in range(2):
        assert found.new_ids[row].tolist() == expected.sequences[row, 8:].tolist()
    for step, logits in zip(found.steps, expected.logits, strict=True):
        assert np.abs(step.output()[:, -1] - logits.numpy()).max() < TOLERANCE


def test_functions_act_as_in_an_rwkv_loop(rwkv):
    model, ids = rwkv("7-pth"), [5, 9, 17, 3, 44]
    oracle = Loop({name: tensor.numpy().astype(np.float64) for name, tensor in blinkdl(7).items()}, 7)

    def edit(name, t, value):
        return value * 1.5 + 0.2 * t if name == POINT else value

    found = model.generate(
        np.array(ids), max_new_tokens=6, eos_token_id=[], output_logits=True, fwd_hooks=[(POINT, bend)]
    )
    for step in found.steps:
        logits = oracle.run(ids, edit=edit)[-1]
        assert np.abs(step.output()[0, -1] - logits).max() < TOLERANCE * max(1, np.abs(logits).max())
        ids = [*ids, int(logits.argmax())]
    assert found.ids[0].tolist() == ids


@pytest.mark.parametrize("name", ["shipped", "recurrent"])
def test_a_function_is_what_the_same_intervention_is(request, name):
    """Beside a spec, in batches, with seeds, a given cache and a text that ends early; the cache goes on."""
    model = request.getfixturevalue(name)
    spec = HookSpec().intervene("blocks.0.hook_mlp_out", Intervention.Scale(0.5, positions="generated"))
    both = HookSpec().extend(spec).intervene(POINT, Intervention.Scale(1.5))
    hooks = [(POINT, lambda value, hook: value * np.float32(1.5))]
    sampled = {"do_sample": True, "temperature": 1.5, "seed": 1, "max_new_tokens": 5}
    for asked in ({"max_new_tokens": 5}, sampled, {"max_new_tokens": 5, "stop_strings": ["."]}):
        expected = model.generate(TEXTS, both, **asked)
        for size in (None, 1, 2):
            found = model.generate(TEXTS, spec, fwd_hooks=hooks, batch_size=size, **asked)
            assert found.texts == expected.texts
    captured = HookSpec().extend(spec).capture("blocks.*.hook_resid_post")
    found, expected = (
        model.generate(TEXTS, one, fwd_hooks=functions, max_new_tokens=3)
        for one, functions in ((captured, hooks), (HookSpec().extend(both).capture("blocks.*.hook_resid_post"), []))
    )
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert all(np.abs(step[name] - other[name]).max() < TOLERANCE * 10 for name in other)
    after = [[int(row[-1])] for row in found.new_ids]
    again, more = (model.generate(after, cache=one.cache, max_new_tokens=2) for one in (found, expected))
    assert again.texts == more.texts


def test_a_function_is_told_where_it_is(shipped):
    seen = []

    def look(value, hook):
        hook.ctx["calls"] = hook.ctx.get("calls", 0) + 1
        seen.append((hook.name, hook.step, value.shape[:2], hook.positions.tolist(), hook.ctx["calls"]))

    shipped.generate([[5, 6, 7], [8]], max_new_tokens=3, eos_token_id=[], fwd_hooks=[("*.hook_mlp_out", look)])
    assert [one[0] for one in seen] == [f"blocks.{layer}.hook_mlp_out" for layer in range(4)] * 3
    assert seen[0][1:] == (0, (2, 3), [[0, 1, 2], [-1, -1, 0]], 1)
    assert seen[4][1:] == (1, (2, 1), [[3], [1]], 2)
    assert seen[8][1:] == (2, (2, 1), [[4], [2]], 3)
    shipped.run_with_hooks("The capital", [("hook_embed", look)])
    assert seen[-1][1:4] == (0, (1, 2), [[0, 1]])


def test_a_function_knows_the_rows_of_its_batch(shipped):
    def push(value, hook):
        value += np.float32(0.4) * np.array(hook.rows, np.float32)[:, None, None]

    whole = shipped.generate(TEXTS, max_new_tokens=4, fwd_hooks=[(POINT, push)])
    for size in (1, 2):
        assert shipped.generate(TEXTS, max_new_tokens=4, fwd_hooks=[(POINT, push)], batch_size=size).ids[
            2
        ].tolist() == (whole.ids[2].tolist())
    assert whole.texts != shipped.generate(TEXTS, max_new_tokens=4).texts


def test_scores_of_a_step_can_be_cut(shipped):
    """A function at the scores sees the keys of the past too: [batch, heads, 1, keys]."""
    shapes = []

    def forget(scores, hook):
        shapes.append(scores.shape)
        if scores.shape[-1] > 3:
            scores[..., 3] = -np.inf
        scores[..., -1:, -1] = 0

    made = shipped.generate(TEXTS[0], max_new_tokens=3, fwd_hooks=[("blocks.2.attn.hook_scores", forget)])
    assert shapes == [(1, 8, 5, 5), (1, 8, 1, 6), (1, 8, 1, 7)][: len(shapes)]
    assert made.texts != shipped.generate(TEXTS[0], max_new_tokens=3).texts


def test_what_no_step_can_use_is_refused(shipped):
    for hooks, error, words in (
        ([("blocks.9.hook_mlp_out", bend)], HookError, "no hook point"),
        ([("blocks.0.attn.hook_result", bend)], HookError, "captures alone"),
        ([bend], HookError, "pairs"),
        ([(POINT, lambda value, hook: value[:, :1, :5])], InterventionError, r"shape \[1, 1, 5\]"),
        ([(POINT, lambda value, hook: value * np.nan)], InterventionError, "is nan"),
        ([(POINT, lambda value, hook: value[:, :1] if hook.step else np.ones(3))], InterventionError, "shape"),
    ):
        with pytest.raises(error, match=words):
            shipped.generate(TEXTS[0], max_new_tokens=3, fwd_hooks=hooks)
