"""Nodes and edges of a model, by counting; the stream that edges carry is the sum of what its senders write."""

import numpy as np
import pytest

from mionnx import HookError, HookSpec, InputError, MIModel
from mionnx.analysis.circuits.node_values import captures, node_values, one_head_each
from mionnx.analysis.circuits.nodes import all_nodes, chosen_receivers, chosen_senders
from mionnx.analysis.sweep.comparison import Pair

IDS = np.array([3, 4, 5, 6]), np.array([3, 7, 5, 6])


def place(label: str, receives: bool) -> tuple[int, int]:
    """Layer and order within a layer, read off a label: attention reads and writes before the MLP does."""
    if label in ("embed", "logits"):
        return (-1, 0) if label == "embed" else (99, 0)
    layer = int(label[1:].split(".")[0])
    return layer, (0 if label[0] == "a" else 2) + (0 if receives else 1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_an_edge_leads_from_what_is_written_to_what_reads_it_later(models, family: str) -> None:
    model = models(family)
    nodes = all_nodes(model)
    layers, heads = model.num_layers, model.num_heads
    assert len(nodes.senders) == 1 + layers * (heads + 1)
    labels = [node.label for node in nodes.receivers]
    assert len({*labels}) == len(labels)
    assert sum("<q>" in label for label in labels) == layers * heads
    assert sum("<k>" in label for label in labels) == sum("<v>" in label for label in labels)
    for row, sender in enumerate(nodes.senders):
        for column, receiver in enumerate(nodes.receivers):
            earlier = place(sender.label, False) < place(receiver.label, True)
            if nodes.parallel and sender.label[0] == "a" and receiver.label[0] == "m":
                earlier = place(sender.label, False)[0] < place(receiver.label, True)[0]
            assert nodes.edges[row, column] == earlier, (sender.label, receiver.label)


def test_requests_mean_the_nodes_that_plain_names_mean(shipped: MIModel) -> None:
    nodes = all_nodes(shipped)

    def senders(given: object) -> list[str]:
        return [nodes.senders[at].label for at in chosen_senders(nodes, given)]

    assert chosen_senders(nodes, "all") == [*range(len(nodes.senders))]
    assert senders("embed") == ["embed"]
    assert senders([("blocks.1.attn.hook_z", [0, 3])]) == ["a1.h0", "a1.h3"]
    assert senders("mlp_out") == [f"m{layer}" for layer in range(shipped.num_layers)]
    assert senders(["blocks.2.*"]) == [node.label for node in nodes.senders if node.label[1:2] == "2"]
    receivers = [
        nodes.receivers[at].label for at in chosen_receivers(shipped.hooked, nodes, [("blocks.1.attn.hook_q", 2)])
    ]
    assert receivers == ["a1.h2<q>"]
    for given, error in ((("nothing",), HookError), ([], InputError), ([("blocks.0.attn.hook_z", 99)], InputError)):
        with pytest.raises(error):
            chosen_senders(nodes, given)


def test_values_of_a_pair_are_those_of_two_forward_passes(shipped: MIModel) -> None:
    nodes = all_nodes(shipped)
    values = node_values(shipped, nodes, Pair(*IDS))
    spec = HookSpec()
    for name in captures(nodes):
        spec.capture(name)
    for row, ids in enumerate(IDS):
        alone = shipped.forward(ids, spec)
        for name in captures(nodes):
            assert np.abs(values.of(name, row) - alone[name][0]).max() < 5e-5, name
        assert np.abs(values.logits[row] - alone.output()[0, -1]).max() < 5e-5


def test_one_row_a_head_has_that_head_of_the_other_and_nothing_else() -> None:
    base, other = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    mixed = one_head_each(base, other)
    assert mixed.shape == (4, 3, 4, 5)
    for row in range(4):
        for head in range(4):
            assert mixed[row, :, head].tolist() == (other if row == head else base)[:, head].tolist()
