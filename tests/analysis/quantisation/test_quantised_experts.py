"""Experts in blocks: every hook point and gradient against transformers with the same numbers in its stacks."""

from functools import cache

import numpy as np
import pytest
import torch
from families import VOCAB, make_checkpoint
from family_batches import batch, differences
from gradient_oracle import gradients as by_autograd
from quantised_files import bits_of
from scipy.special import log_softmax, softmax
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM

from mionnx import HookPoint, HookSpec, InputError, Intervention, MIModel
from mionnx.graph.blocks import EXPERT
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.matrices import embedding
from mionnx.graph.weight_value import weight_numbers
from mionnx.machine.progress import silent
from mionnx.quantise import Quantisation, quantise
from mionnx.quantise.matrices import expert_of, find_weights
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
        more = {"num_local_experts": 128} if family == "qwen3_moe" else {}  # as many as its models have
        config = {} if family == "mixtral" else {**tiny_config(family), **more}
        make_checkpoint(family, folder / "checkpoint", **config)
        export(folder / "checkpoint", folder / "floats", "float32", silent)
        floats = HookedModel.open(folder / "floats")
        assert {stack.count for stack in find_weights(floats).stacks} == {128 if more else 4}
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
    grad = model.forward(
        inputs.ids, HookSpec().gradient("*").set_metric("cotangent", cotangent=seed), logits=False
    ).grad
    assert set(grad) == set(exact)
    off, own = (
        {name: np.abs(one[name] - exact[name]).max() / np.abs(exact[name]).max() for name in exact}
        for one in (grad, single)
    )
    assert {name: d for name, d in off.items() if not d <= max(3 * max(own.values()), 2e-6)} == {}


@pytest.mark.slow
def test_a_tokens_result_does_not_depend_on_those_beside_it(pair):
    model, _, _ = pair("mixtral")
    ids = batch("plain").ids[:1]
    other = ids.copy()
    other[0, -3:] = (other[0, -3:] + 7) % VOCAB
    one, changed = (model.forward(given).output()[0, :-3] for given in (ids, other))
    np.testing.assert_array_equal(one, changed)


@pytest.mark.slow
def test_stacks_stay_in_floats_where_they_are_kept(pair, tmp_path):
    _, floats, _ = pair("mixtral")
    made = HookedModel.open(quantise(floats, tmp_path / "made", Quantisation(keep=("*experts*",))))
    assert sum(node.op_type == "Scan" for node in made.proto.graph.node) == len(find_weights(floats).stacks) == 4


def lost_by_transformers(checkpoint, made: HookedModel, turned: bool, name: str, ids: np.ndarray) -> float:
    """KL by scipy, of transformers with the numbers of a stack's blocks, or of one expert's, in place of its own."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32).eval()
    expert = expert_of(name)
    stack = expert[0] if expert else name
    weight = model.get_parameter(stack)
    places = [expert[1]] if expert else range(len(weight))
    with torch.no_grad():
        before = model(torch.from_numpy(ids)).logits.numpy().astype(np.float64)
        for place in places:
            held = f"{stack}{EXPERT}{place}_blocks"
            numbers = torch.from_numpy(weight_numbers(made.proto, made.folder, held))
            weight[place].copy_(numbers if turned else numbers.T)
        after = model(torch.from_numpy(ids)).logits.numpy().astype(np.float64)
    return float((softmax(before, -1) * (log_softmax(before, -1) - log_softmax(after, -1))).sum(-1).mean())


@families
def test_a_stack_and_each_expert_costs_what_transformers_says(family, pair):
    model, hooked, _ = pair(family)
    floats, ids = (
        MIModel.from_pretrained(hooked.folder, threads=1),
        np.random.default_rng(1).integers(3, VOCAB, (2, 24)),
    )
    whole = floats.verify([ids], other=model, greedy=0, local=False).matrices
    found = floats.verify([ids], other=model, greedy=0, local=False, experts=True)
    turned = {stack.weight: stack.turned for stack in find_weights(hooked).stacks}
    stacks = {one.name: one for one in found.matrices if one.name in turned}
    experts = [one for one in found.matrices if expert_of(one.name)]
    assert [one for one in found.matrices if not expert_of(one.name)] == whole
    assert stacks.keys() == turned.keys()
    assert len(experts) == sum(stack.count for stack in find_weights(hooked).stacks)
    for name, stack in stacks.items():
        assert stack.bytes == sum(one.bytes for one in experts if one.name.startswith(name + EXPERT))
    idle = [one for one in experts if one.output_error == 0]
    assert bool(idle) == (family == "qwen3_moe"), "of its 128 experts some are chosen by no token"
    assert all((one.kl, one.top_1) == (0, 1) for one in idle)
    assert [
        note for note in found.notes if f"{len(idle)} of the experts' matrices were chosen by no" in note
    ] or not idle
    checkpoint = hooked.folder.parent / "checkpoint"
    for one in [*list(stacks.values())[:2], *experts[:3], *idle[:1]]:
        stack, _ = expert_of(one.name) or (one.name, None)
        kl = lost_by_transformers(checkpoint, model.hooked, turned[stack], one.name, ids)
        assert one.kl == pytest.approx(kl, rel=5e-3, abs=1e-9), one.name


@pytest.mark.slow
def test_experts_that_are_not_there_are_not_measured(shipped, pair, tmp_path):
    model, hooked, _ = pair("mixtral")
    made = MIModel.from_pretrained(shipped.quantise(tmp_path / "made"), threads=1)
    with pytest.raises(InputError, match="experts=True: made has no stack of experts in blocks"):
        shipped.verify("Paris is", other=made, greedy=0, local=False, experts=True)
    with pytest.raises(InputError, match="experts=True: other= must be the floats"):
        shipped.verify("Paris is", greedy=0, experts=True)
    with pytest.raises(InputError, match="experts=True with matrices=False"):
        model.verify(
            [[5, 6]], other=MIModel.from_pretrained(hooked.folder), matrices=False, experts=True, greedy=0, local=False
        )


@pytest.mark.slow
def test_a_bound_moves_whole_stacks_and_a_name_one_expert(pair, tmp_path):
    """Stacks count in what is measured, so that the written model is within the bound."""
    _, hooked, _ = pair("mixtral")
    floats = MIModel.from_pretrained(hooked.folder, threads=1)
    made = MIModel.from_pretrained(floats.quantise(tmp_path / "made", budget=0.002, block_size=16), threads=1)
    said = made.hooked.metadata.quantised["budget"]
    stacks = [name for name in said["moved_to_8_bits"] if "experts" in name]
    assert said["kl"] <= 0.002 < said["kl_without"]
    assert 0 < len(stacks) < 4
    assert {name for name, bits in bits_of(made).items() if bits == 8 and expert_of(name)} == {
        f"{name}{EXPERT}{number}" for name in stacks for number in range(4)
    }
    one = f"{stacks[0]}{EXPERT}2"
    single = MIModel.from_pretrained(floats.quantise(tmp_path / "one", in_8_bits=[one], block_size=16), threads=1)
    assert [name for name, bits in bits_of(single).items() if bits == 8] == [one]
    with pytest.raises(InputError, match="a budget moves the experts of"):
        floats.quantise(tmp_path / "both", in_8_bits=[one], budget=0.002, block_size=16)


@pytest.mark.slow
def test_models_of_experts_part_at_the_products_that_differ(pair, tmp_path):
    """Beside the Scan of floats nothing but the rounding: places that no row stands at are zeros in both."""
    _, hooked, _ = pair("mixtral")
    floats = MIModel.from_pretrained(hooked.folder, threads=1)
    ids = np.random.default_rng(1).integers(3, VOCAB, (1, 9))
    kept = {"keep": ["*self_attn*", "*layers.0*"], "embedding": False, "unembedding": False, "block_size": 16}
    expert = "model.layers.1.mlp.experts.down_proj.expert2"
    made, other = (
        MIModel.from_pretrained(floats.quantise(tmp_path / str(number), **kept, **more), threads=1)
        for number, more in enumerate(({}, {"in_8_bits": [expert]}))
    )
    for one, beside in ((floats, made), (made, floats)):
        found = one.bisect(ids, ["ort-cpu"], other=beside)
        assert found.value == "model.layers.1.mlp.experts.gate_up_proj.grouped.steps"
        assert 0.01 < found.relative < 0.1
    found = made.bisect(ids, ["ort-cpu"], other=other)
    assert len(found.nodes) == 1
    assert "down_proj.grouped.steps.expert2" in found.nodes[0]


@pytest.mark.parametrize("runtime", ["reference", pytest.param("onnxruntime-web", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_other_runtimes_compute_experts_in_blocks(runtime, pair, request, monkeypatch):
    if runtime == "onnxruntime-web":
        monkeypatch.setenv("MIONNX_NODE", str(request.getfixturevalue("web")))
    model, _, _ = pair("mixtral")
    (beside,) = model.verify([batch("plain").ids], ["ort-cpu", runtime], points="*", greedy=0, local=False).besides
    assert beside.worst.relative < 5e-6
