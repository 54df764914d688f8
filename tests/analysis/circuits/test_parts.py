"""The parts of a model run one by one: what the whole graph gives, and what torch's own modules give."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from mionnx import HookSpec, MIModel
from mionnx.analysis.circuits.circuit import ladder
from mionnx.analysis.circuits.node_values import node_values
from mionnx.analysis.circuits.nodes import all_nodes
from mionnx.analysis.circuits.parts import Parts
from mionnx.analysis.sweep.comparison import Pair

IDS, OTHER = np.array([3, 4, 5, 6]), np.array([3, 7, 5, 6])


def parts_of(model: MIModel) -> Parts:
    return Parts(model, all_nodes(model), len(IDS))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox"])
def test_each_part_gives_what_the_whole_graph_gives(models, family: str) -> None:
    model = models(family)
    parts, cache = parts_of(model), model.forward(IDS, HookSpec().capture("blocks.*"))
    for layer in range(model.num_layers):
        names = parts.nodes.attention_inputs(layer)
        own = parts.heads_in(layer, cache["resid_pre", layer])
        for name in names:
            assert np.abs(own[name] - cache[name]).max() < 5e-5, name
        z = parts.attention(layer, {name: cache[name] for name in names})
        assert np.abs(z - cache["z", layer]).max() < 5e-5
        out = parts.attention_out({layer: cache["z", layer]})[layer]
        assert np.abs(out - cache["attn_out", layer]).max() < 5e-5
        stream = cache[parts.nodes.stream(parts.nodes.mlp_stage(layer))]
        assert np.abs(parts.mlp_out(layer, stream) - cache["mlp_out", layer]).max() < 5e-5
    logits = parts.logits(cache["resid_post", model.num_layers - 1], [5, 9])
    assert np.abs(logits - cache.output()[:, -1, [5, 9]]).max() < 5e-5


@pytest.mark.parametrize(("family", "linear"), [("llama", True), ("gpt2", True), ("gpt_neox", True), ("gemma2", False)])
def test_heads_add_up_where_nothing_norms_their_sum(models, family: str, linear: bool) -> None:
    model = models(family)
    parts, values = parts_of(model), node_values(model, all_nodes(model), Pair(IDS, OTHER))
    assert parts.linear == [linear] * model.num_layers
    changes = dict(zip((node.label for node in parts.nodes.senders), values.changes(parts), strict=True))
    for layer in range(model.num_layers):
        name = f"blocks.{layer}.hook_attn_out"
        together = values.of(name, 1) - values.of(name, 0)
        alone = sum(changes[f"a{layer}.h{head}"] for head in range(model.num_heads))
        assert (np.abs(alone - together).max() < 1e-5) == linear
        assert np.abs(together).max() > 1e-3
        mlp = f"blocks.{layer}.hook_mlp_out"
        assert np.array_equal(changes[f"m{layer}"], values.of(mlp, 1) - values.of(mlp, 0))


@pytest.mark.parametrize("rules", ["gradient", "frozen_norm"])
def test_gradients_of_a_part_are_those_of_torch(models, references, rules: str) -> None:
    """The MLP of a Llama's second layer behind its norm, in float64, and with that norm's scale held constant."""
    model, layer = models("llama"), references("llama").model.layers[1]
    parts, draw = parts_of(model), np.random.default_rng(0)
    stream, seeds = draw.normal(size=(2, 3, len(IDS), model.hidden_size)).astype(np.float32)
    begin, end = "blocks.1.hook_resid_mid", "blocks.1.hook_mlp_out"
    found = parts.gradients([end], [begin], {begin: stream}, {end: seeds}, rules)[begin]
    norm, variable = layer.post_attention_layernorm, torch.from_numpy(stream).double().requires_grad_()
    scale = torch.rsqrt(variable.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    read = norm.weight.double() * variable * (scale if rules == "gradient" else scale.detach())
    gate, up, down = (getattr(layer.mlp, f"{name}_proj").weight.double() for name in ("gate", "up", "down"))
    written = (torch.nn.functional.silu(read @ gate.T) * (read @ up.T)) @ down.T
    (expected,) = torch.autograd.grad((written * torch.from_numpy(seeds).double()).sum(), variable)
    assert np.abs(found - expected.numpy()).max() < 1e-5 * np.abs(expected.numpy()).max()


@pytest.mark.parametrize("most", [1, 2, 7, 10, 1055])
def test_a_ladder_climbs_from_no_edge_to_all(most: int) -> None:
    steps = ladder(most)
    assert steps == sorted({*steps})
    assert (steps[0], steps[-1]) == (0, most)
    assert all(str(step)[0] in "125" and set(str(step)[1:]) <= {"0"} for step in steps[1:-1])
    assert all(later <= 2.5 * step for step, later in pairwise(steps[1:]))
