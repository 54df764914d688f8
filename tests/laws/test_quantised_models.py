"""Quantised foreign models: matrices, heads and attribution are those of the numbers; sweeps are forward passes."""

import itertools
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from quantised_files import KINDS, foreign_file

from mionnx import DynamicRoundingWarning, HookSpec, Intervention, MIModel
from mionnx.analysis.sweep.patched_runs import Shortcuts

PROMPT, OTHER = "The capital of France is", "The capital of Germany is"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], MIModel]:
    opened: dict[str, MIModel] = {}

    def model(kind: str) -> MIModel:
        if kind not in opened:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DynamicRoundingWarning)
                opened[kind] = MIModel.from_pretrained(foreign_file(tmp_path_factory.mktemp(kind) / kind, kind))
        return opened[kind]

    return model


@pytest.mark.parametrize(
    ("kind", "step"), [("plain", 0), ("int4", 1 / 12), ("int8", 1 / 200), ("qdq", 1 / 12), ("dynamic", 1 / 200)]
)
@pytest.mark.slow_beyond(2)
def test_matrices_are_within_half_a_step_of_the_models_own(quantised, shipped, kind, step):
    """Blocks of 32 have a scale of their own; half a step is at most the range / 2 / 15, or / 255."""
    for name in ("W_E", "W_U", "b_U", "W_O"):
        expected, found = getattr(shipped, name), getattr(quantised(kind), name)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert np.abs(found - expected).max() <= step * np.ptp(expected)
        assert getattr(quantised(kind), name) is found, "kept"
    assert (quantised(kind).W_U == shipped.W_U).all() == (kind == "plain")


# QDQ in ONNX Runtime, and dynamic int8, round what a product reads, too.
@pytest.mark.parametrize(
    ("kind", "most"), [("plain", 2e-6), ("int4", 2e-6), ("int8", 2e-6), ("qdq", 0.1), ("dynamic", 0.1)]
)
@pytest.mark.slow_beyond(2)
def test_weights_by_name_give_the_hooked_values(quantised, kind, most):
    model = quantised(kind)
    cache, layer = model.forward(PROMPT, HookSpec().capture("blocks.2.*")), 2
    pairs = {
        "W_O": (np.einsum("bshk,hkd->bsd", cache["z", layer], model.W_O[layer]), cache["attn_out", layer]),
        **{
            name: (cache[f"blocks.2.mlp.{read}"] @ getattr(model, name)[layer], cache[f"blocks.2.mlp.{given}"])
            for name, read, given in (
                ("W_in", "hook_pre", "hook_up"),
                ("W_gate", "hook_pre", "hook_gate"),
                ("W_out", "hook_act", "hook_post"),
            )
        },
    }
    # the norm before attention has no epsilon that an operator names: at this stream it does not count
    stream = cache["resid_pre", layer].astype(np.float64)
    x = stream / np.sqrt((stream**2).mean(axis=-1, keepdims=True) + 1e-6) * model.weights.ln1_w[layer]
    for letter in "QKV":
        heads = np.einsum("bsd,hdk->bhsk", x, getattr(model, f"W_{letter}")[layer])
        pairs[f"W_{letter}"] = (heads, cache[f"blocks.2.attn.hook_{letter.lower()}"])
    for name, (found, expected) in pairs.items():
        assert np.abs(found - expected).max() <= max(most, 2e-5) * np.abs(expected).max(), name


@pytest.mark.parametrize(
    ("kind", "most"), [("plain", 2e-6), ("int4", 2e-6), ("int8", 2e-6), ("qdq", 0.03), ("dynamic", 0.02)]
)
@pytest.mark.slow_beyond(2)
def test_heads_lens_and_attribution_add_up(quantised, kind, most):
    """Dynamic int8, and QDQ in ONNX Runtime, round what a projection reads: sums of heads differ by that."""
    model = quantised(kind)
    spec = HookSpec().capture("*hook_result").capture("*hook_attn_out").capture("hook_final_norm")
    cache = model.forward(PROMPT, spec)
    outs = cache.stack("attn_out")
    assert np.abs(cache.stack("result").sum(axis=3) - outs).max() <= most * np.abs(outs).max()
    logits = cache["hook_final_norm"] @ model.W_U + model.b_U
    assert np.abs(logits - cache.output()).max() <= most * np.abs(logits).max()
    parts = model.attribute(PROMPT, "Paris", versus="Berlin")
    assert parts.total == pytest.approx(parts.logit, abs=most * float(np.abs(logits).max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow_beyond(2)
def test_the_capture_of_heads_leaves_the_logits_alone(quantised, kind):
    """A DequantizeLinear with a second reader is not fused with its product, which rounds what it reads."""
    plain = quantised(kind).forward(PROMPT).output()
    assert np.array_equal(quantised(kind).forward(PROMPT, HookSpec().capture("*hook_result")).output(), plain)


def test_dynamic_rounding_is_said_when_a_model_is_opened(quantised):
    with pytest.warns(DynamicRoundingWarning, match="Sweeps run one cell a call") as told:
        MIModel.from_pretrained(quantised("dynamic").hooked.folder)
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", DynamicRoundingWarning)
        MIModel.from_pretrained(quantised("int8").hooked.folder)


def test_cells_of_a_sweep_are_forward_passes_to_the_bit(quantised):
    model = quantised("dynamic")
    swept = model.patch_sweep(PROMPT, OTHER, "resid_mid", layers=[0, 2])
    donors = model.forward(PROMPT, HookSpec().capture("*resid_mid"))
    answers = [model.tokenizer.encode(word).ids[-1] for word in ("Paris", "Berlin")]
    for (place, layer), position in itertools.product(enumerate((0, 2)), range(3, 5)):
        hook = f"blocks.{layer}.hook_resid_mid"
        put = HookSpec().intervene(hook, Intervention.Replace(donors[hook], positions=position))
        logits = model.forward(OTHER, put).output()[0, -1].astype(np.float64)
        assert swept.values[place, position] == pytest.approx(logits[answers[0]] - logits[answers[1]], abs=1e-5)
    together = model.patch_sweep(PROMPT, OTHER, "resid_mid", layers=[0, 2], shortcuts=Shortcuts())
    assert np.abs(together.values - swept.values).max() > 1e-3, "rows of one call change each other"
