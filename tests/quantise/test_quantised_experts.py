"""Experts in blocks: every hook point and gradient against transformers with the same numbers in its stacks."""

from functools import cache

import numpy as np
import pytest
import torch
from families import VOCAB, make_checkpoint
from family_batches import batch, differences
from gradient_oracle import gradients as by_autograd
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM

from mionnx import HookPoint, HookSpec, Intervention, MIModel
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.matrices import embedding
from mionnx.graph.quantised_weight import weight_numbers
from mionnx.machine.progress import silent
from mionnx.quantise import Quantisation, quantise
from mionnx.quantise.matrices import EXPERT, find_weights
from mionnx.run.exporting import export

TOLERANCE = 5e-5
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
families = pytest.mark.parametrize(
    "family", [one if one == "mixtral" else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Family -> its quantised model, the model of floats, and transformers with the numbers of the blocks."""

    @cache
    def find(family: str):
        folder = tmp_path_factory.mktemp("experts")
        more = {"num_experts": 128} if family == "qwen3_moe" else {}  # as many as its models have
        config = {} if family == "mixtral" else {**tiny_config(family), **more}
        make_checkpoint(family, folder / "checkpoint", **config)
        export(folder / "checkpoint", folder / "floats", "float32", silent)
        floats = HookedModel.open(folder / "floats")
        small = MIModel.from_pretrained(quantise(floats, folder / "made", Quantisation(block_size=16)), threads=1)
        eager = AutoModelForCausalLM.from_pretrained(
            folder / "checkpoint", attn_implementation="eager", dtype=torch.float32
        )
        _take_numbers(eager, small.hooked, floats)
        return small, floats, eager.eval()

    return find


def _take_numbers(eager, made: HookedModel, floats: HookedModel) -> None:
    """Put what the blocks stand for into the weights of a model in transformers."""
    state, found = eager.state_dict(), find_weights(floats)
    turned = {name: stack.turned for stack in found.stacks for name in stack.experts}
    held = [one.name for one in made.proto.graph.initializer if one.name.endswith("_blocks")]
    assert {name.removesuffix("_blocks") for name in held} >= set(turned)
    assert turned
    for name in held:
        weight, numbers = name.removesuffix("_blocks"), torch.from_numpy(weight_numbers(made.proto, made.folder, name))
        stack, _, number = weight.rpartition(EXPERT)
        if number.isdigit():
            state[stack][int(number)].copy_(numbers if turned[weight] else numbers.T)
        else:
            state[weight].copy_(numbers)
    if found.table is not None and any(one.name == f"{found.table}_table" for one in made.proto.graph.initializer):
        state[found.table].copy_(torch.from_numpy(embedding(made)))


@families
def test_every_hook_point_is_that_of_eager_transformers_with_the_same_numbers(family, pair):
    model, floats, eager = pair(family)
    assert not [node for node in model.hooked.proto.graph.node if node.op_type == "Scan"]
    sizes = [sum(file.stat().st_size for file in one.folder.glob("*.safetensors")) for one in (model.hooked, floats)]
    assert sizes[0] < 0.3 * sizes[1]
    inputs = batch("left past")
    edit = HookPoint.MlpExpertOut(1), Intervention.Scale(0.3)
    for edits in ([], [edit]):
        off = differences(model, eager, inputs, edits)
        assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


@pytest.mark.slow
@families
def test_every_gradient_is_that_of_autograd(family, pair):
    model, _, eager = pair(family)
    inputs = batch("plain")
    seed = np.random.default_rng(0).normal(size=(*inputs.ids.shape, VOCAB))
    exact, single = (by_autograd(eager, inputs, seed, dtype) for dtype in (torch.float64, torch.float32))
    grad = model.forward(inputs.ids, HookSpec().gradient("*").set_metric("seed", seed=seed), logits=False).grad
    assert set(grad) == set(exact)
    off, own = (
        {name: np.abs(one[name] - exact[name]).max() / np.abs(exact[name]).max() for name in exact}
        for one in (grad, single)
    )
    assert {name: d for name, d in off.items() if not d <= max(3 * max(own.values()), 2e-6)} == {}


def test_a_tokens_result_does_not_depend_on_those_beside_it(pair):
    model, _, _ = pair("mixtral")
    ids = batch("plain").ids[:1]
    other = ids.copy()
    other[0, -3:] = (other[0, -3:] + 7) % VOCAB
    one, changed = (model.forward(given).output()[0, :-3] for given in (ids, other))
    np.testing.assert_array_equal(one, changed)


def test_stacks_stay_in_floats_where_they_are_kept(pair, tmp_path):
    _, floats, _ = pair("mixtral")
    made = HookedModel.open(quantise(floats, tmp_path / "made", Quantisation(keep=("*experts*",))))
    assert sum(node.op_type == "Scan" for node in made.proto.graph.node) == len(find_weights(floats).stacks) == 4
