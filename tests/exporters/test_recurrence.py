"""The one recurrence in its open form, beside a float64 loop: rules, decays, sizes, lengths, gates, gradients."""

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import BY, RULES, error, expanded, fed, loop, marked, opened, random_gates, random_reads

from exporters.recurrence.expand import expand
from mionnx.rewrite.gradient.differentiate import differentiate

LENGTHS = (1, 2, 15, 16, 17, 64, 150)
kinds = pytest.mark.parametrize(("rule", "by"), [(rule, by) for rule in RULES for by in BY])
law = settings(max_examples=20, deadline=None, derandomize=True)


@cache
def session(rule: str, by: str, sizes: tuple[int, int, int] = (3, 16, 24)):
    return opened(expanded({0: random_reads(rule, by, 2, sizes=sizes)}))


def run(rule: str, by: str, reads, gates=None, sizes=(3, 16, 24)):
    return session(rule, by, sizes).run(None, fed({0: reads}, {} if gates is None else {0: gates}))


@pytest.mark.parametrize("length", LENGTHS)
@kinds
def test_every_length_and_decay_is_the_loop(rule, by, length):
    """Log decays about 0.01 to 1000, e^-4 to e^4 times that between tokens."""
    for strength in (0.01, 1, 1000):
        reads = random_reads(rule, by, length, strength)
        y, states = loop(reads)
        found_y, found_state = run(rule, by, reads)
        assert error(found_y, y) < 2e-6
        assert error(found_state, states[:, -1]) < 2e-6


@pytest.mark.parametrize("sizes", [(1, 1, 40), (5, 1, 1), (2, 40, 3), (4, 8, 8)])
@kinds
def test_any_sizes(rule, by, sizes):
    for length in (1, 9, 33):
        reads = random_reads(rule, by, length, sizes=sizes)
        y, states = loop(reads)
        found_y, found_state = run(rule, by, reads, sizes=sizes)
        assert error(found_y, y) < 2e-6
        assert error(found_state, states[:, -1]) < 2e-6


@kinds
def test_gates_are_those_of_the_loop(rule, by):
    for length in (1, 14, 50):
        reads, gates = random_reads(rule, by, length), random_gates(length, 3)
        y, states = loop(reads, gates)
        found_y, found_state = run(rule, by, reads, gates)
        assert error(found_y, y) < 2e-6
        assert error(found_state, states[:, -1]) < 2e-6


@kinds
def test_gates_of_ones_are_none_bit_for_bit(rule, by):
    for length in (1, 14, 50):
        reads = random_reads(rule, by, length)
        ones = {name: np.ones_like(gate) for name, gate in random_gates(length, 3).items()}
        for one, other in zip(run(rule, by, reads), run(rule, by, reads, ones), strict=True):
            assert np.array_equal(one, other)


@law
@given(st.sampled_from(RULES), st.sampled_from(BY), st.integers(2, 40), st.data())
def test_a_token_without_write_erase_and_decay_might_not_be_there(rule, by, length, data):
    reads, token = random_reads(rule, by, length, seed=length), data.draw(st.integers(0, length - 1))
    gates = {name: np.ones((2, length, 3, 1), np.float32) for name in "wed"}
    for gate in gates.values():
        gate[:, token] = 0
    others = {name: array if name == "s" else np.delete(array, token, 1) for name, array in reads.items()}
    y, state = run(rule, by, reads, gates)
    expected_y, states = loop(others)
    assert error(np.delete(y, token, 1), expected_y) < 2e-6
    assert error(state, states[:, -1]) < 2e-6


@law
@given(st.sampled_from(RULES), st.sampled_from(BY), st.lists(st.integers(1, 20), min_size=2, max_size=4))
def test_calls_of_any_widths_are_one_pass(rule, by, widths):
    reads = random_reads(rule, by, sum(widths))
    y, states = loop(reads)
    state, parts, begin = reads["s"], [], 0
    for width in widths:
        part = {name: array[:, begin : begin + width] for name, array in reads.items()} | {"s": state}
        of_part, state = run(rule, by, part)
        parts.append(of_part)
        begin += width
    assert error(np.concatenate(parts, 1), y) < 2e-6
    assert error(state, states[:, -1]) < 2e-6


@kinds
def test_the_recurrence_of_one_hot_values_is_the_effective_attention(rule, by):
    """From an empty state y is A v, gates included; the column of a silenced token is exactly zero."""
    length, silenced = 24, 7
    reads, gates = random_reads(rule, by, length, 0.05), random_gates(length, 3)
    if by == "number":  # each number of v has a matrix of its own
        reads["g"][:] = reads["g"][..., :1]
    gates["w"][:, silenced] = 0
    one_hot = np.broadcast_to(np.eye(length, dtype=np.float32)[None, :, None], (2, length, 3, length))
    hot = reads | {"v": one_hot, "s": np.zeros((2, 3, 16, length), np.float32)}
    hot |= {"g": np.repeat(reads["g"][..., :1], length, -1)} if by == "number" else {}
    weights, _ = run(rule, by, hot, gates, (3, 16, length))
    y, _ = loop(reads | {"s": 0 * reads["s"]}, gates)
    assert error(np.einsum("bihj,bjhv->bihv", weights, reads["v"]), y) < 5e-6
    assert (weights[..., silenced] == 0).all()
    assert (np.triu(weights.transpose(0, 2, 1, 3), 1) == 0).all()


def test_layers_of_other_sizes_read_their_own_gates():
    """Layer 0 has fewer heads than layer 2; the layers without a recurrence are counted."""
    layers = {
        0: random_reads("gated", "head", 20, sizes=(2, 8, 8)),
        2: random_reads("delta", "key", 20, sizes=(5, 4, 6)),
    }
    gates = {0: random_gates(20, 2, seed=1), 2: random_gates(20, 5, seed=2)}
    found = opened(expanded(layers)).run(None, fed(layers, gates))
    for place, layer in enumerate(layers):
        y, states = loop(layers[layer], gates[layer])
        assert error(found[2 * place], y) < 2e-6
        assert error(found[2 * place + 1], states[:, -1]) < 2e-6


def test_names_stay_and_gates_are_inputs_with_defaults():
    layers = {1: random_reads("delta", "head", 2)}
    model = marked(layers)
    # a hook point of a later layer says how many there are
    later = ir.node("Identity", [model.graph.inputs[0]])
    later.outputs[0].name = "blocks.3.hook_resid_post"
    model.graph.append(later)
    expand(model)
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto, full_check=True)
    assert [value.name for value in proto.graph.output][:2] == ["blocks.1.ssm.hook_y", "blocks.1.ssm.hook_state"]
    assert {entry.domain for entry in proto.opset_import} == {""}
    made = {name for node in proto.graph.node for name in node.output}
    assert {f"blocks.1.ssm.{name}" for name in ("written_v", "kept_log_decay", "erase_gate")} <= made
    gates = {entry.name: entry for entry in opened(proto.SerializeToString()).get_overridable_initializers()}
    axes = ("batch", "seq", "n_heads")
    for name, kind in (("state_write", "float"), ("state_erase", "float"), ("state_decay", "bool")):
        assert gates[name].type == f"tensor({kind})"
        assert gates[name].shape == [4, *(f"{name}.{axis}" for axis in axes)]
    gated = opened(expanded({0: random_reads("gated", "head", 2)}))
    assert {entry.name for entry in gated.get_overridable_initializers()} == {"state_write", "state_decay"}


@cache
def backwards(rule: str, by: str):
    """A session of the gradients by all reads, and the names of these."""
    reads = random_reads(rule, by, 2, sizes=(2, 4, 6))
    proto = onnx.load_from_string(expanded({0: reads}))
    seed = onnx.helper.make_tensor_value_info("seed", onnx.TensorProto.FLOAT, ["batch", "seq", 2, 6])
    proto.graph.input.append(seed)
    back = differentiate(proto, "blocks.0.ssm.hook_y", [f"{name}.0" for name in reads], seed="seed")
    names = [value.name for value in back.graph.output]
    own = {name: next(one for one in names if one.startswith(f"{name}.0.") and "gradient" in one) for name in reads}
    return opened(back.SerializeToString()), own


@pytest.mark.parametrize("length", [1, 11, 40])
@kinds
def test_gradients_are_those_of_autograd(rule, by, length):
    reads = random_reads(rule, by, length, 0.1, (2, 4, 6))
    seed = np.random.default_rng(3).normal(size=reads["v"].shape).astype(np.float32)
    leaves = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in reads.items()}
    (torch_loop(leaves) * torch.from_numpy(seed)).sum().backward()
    back, names = backwards(rule, by)
    found = back.run([names[name] for name in leaves], fed({0: reads}) | {"seed": seed})
    for own, (name, leaf) in zip(found, leaves.items(), strict=True):
        assert error(own, leaf.grad.numpy()) < 2e-6, name


def torch_loop(reads):
    state, ys = reads["s"], []
    for t in range(reads["v"].shape[1]):
        log = reads["g"][:, t]
        state = state * (log if log.ndim == 4 else log[..., None]).exp()
        u = reads["v"][:, t]
        if "b" in reads:
            u = reads["b"][:, t] * (u - (reads["k"][:, t][..., None] * state).sum(-2))
        state = state + reads["k"][:, t][..., None] * u[:, :, None]
        ys.append((reads["q"][:, t][..., None] * state).sum(-2))
    return torch.stack(ys, 1)
