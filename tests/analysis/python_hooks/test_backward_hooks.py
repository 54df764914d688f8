"""Functions at gradients: they see and change what torch's hooks on tensors see and change."""

import numpy as np
import pytest
from families import VOCAB
from family_batches import batch
from gradient_oracle import gradients as by_autograd

from mionnx import GradientError, HookError, HookSpec, InterventionError

PROMPT = "The capital of France is"
LAST, MIDDLE, FIRST = "blocks.1.hook_resid_mid", "blocks.1.attn.hook_z", "blocks.0.hook_mlp_out"


def test_changed_gradients_go_on_as_in_torch(models, references):
    inputs, model = batch("plain"), models("llama")
    answer = np.zeros((*inputs.ids.shape, VOCAB))
    answer[:, -1, 7] = 1
    changes = {LAST: lambda grad: grad * 3, MIDDLE: lambda grad: grad * 0.5}
    expected = by_autograd(references("llama"), inputs, answer, changes=changes)
    seen = {}

    def change(grad, hook):
        if hook.name in changes:
            grad *= 3 if hook.name == LAST else 0.5
        seen[hook.name] = grad.copy()

    hooks = [(name, change) for name in (FIRST, MIDDLE, LAST)]
    model.run_with_hooks(inputs.ids, bwd_hooks=hooks, metric="logit", answer=7)
    assert [*seen] == [LAST, MIDDLE, FIRST]
    for name, value in seen.items():
        np.testing.assert_allclose(value, expected[name], atol=3e-6 * np.abs(expected[name]).max(), err_msg=name)


def test_functions_that_only_read_get_the_gradients_of_the_loss(shipped):
    seen = {}

    def keep(grad, hook):
        seen[hook.name] = grad

    logits, loss = shipped.run_with_hooks(PROMPT, bwd_hooks=[("blocks.*.hook_mlp_out", keep)], return_type="both")
    cache = shipped.gradients(PROMPT, "blocks.*.hook_mlp_out", "loss")
    assert loss == pytest.approx(float(cache.metric[0]), rel=1e-5)
    assert logits.shape == (1, 5, 471)
    for name, value in seen.items():
        np.testing.assert_allclose(value, cache.grad[name], rtol=1e-5, atol=1e-7)
    assert len(seen) == shipped.num_layers


def test_what_cannot_go_backwards_is_refused(shipped):
    read = ("blocks.1.hook_mlp_out", lambda value, hook: None)
    cases = {
        "no graph can differentiate a Python function": (GradientError, {"fwd_hooks": [read], "bwd_hooks": [read]}),
        "changes in steps": (GradientError, {"bwd_hooks": [read], "metric": "rank"}),
        "left NaN": (GradientError, {"bwd_hooks": [(read[0], lambda value, hook: value * np.nan)]}),
        "returned shape": (InterventionError, {"bwd_hooks": [(read[0], lambda value, hook: value[0])]}),
        "metric=, answer= and versus= are what": (GradientError, {"fwd_hooks": [read], "metric": "loss"}),
        "and there are none": (GradientError, {"answer": 7, "bwd_hooks": []}),
        "no logits tell them": (GradientError, {"hooks": HookSpec().gradient("hook_embed").set_metric("loss")}),
        "hook_mlp_out": (HookError, {"bwd_hooks": [("blocks.1.hook_mlp_uot", read[1])]}),
    }
    for message, (error, given) in cases.items():
        with pytest.raises(error, match=message):
            shipped.run_with_hooks(PROMPT, **given)
