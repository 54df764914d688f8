"""Recurrences as one node: which become one, what it gives, and that captures, gates and gradients do not decide it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from recurrences import BY, RULES, error, expanded, fed, loop, opened, random_gates, random_reads
from toy_recurrent import HIDDEN, VOCAB, WEIGHTS, logits_of, write_recurrent

from mionnx import HookSpec, Intervention, MIModel, StateKnockoutSpec, StateSteeringSpec
from mionnx.engine.fused_recurrence import FUSED, fuse_recurrences
from mionnx.graph.edited_graph import edit, to_proto


def fused(model: bytes) -> tuple[onnx.ModelProto, int]:
    proto = onnx.load_from_string(model)
    return proto, fuse_recurrences(proto)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("by", BY)
def test_a_recurrence_by_head_or_key_is_one_node(rule, by):
    """Rewritten or not, in both rules; what remains of it in the graph are the gates."""
    model = onnx.load_from_string(expanded({0: random_reads(rule, by, 2), 1: random_reads("delta", "head", 2)}))
    for proto in (model, to_proto(edit(model), model, {})):
        count = fuse_recurrences(proto)
        assert count == (1 if by == "number" else 2)
        assert [node.op_type for node in proto.graph.node].count(FUSED) == count
        onnx.checker.check_model(proto)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("by", ["head", "key"])
def test_it_gives_what_the_open_form_gives(rule, by):
    model = expanded({0: random_reads(rule, by, 2)})
    proto, _ = fused(model)
    plain, one = opened(model), opened(proto.SerializeToString())
    for length in (1, 30):
        for strength in (0.01, 1, 1000):
            for gates in ({}, {0: random_gates(length, 3)}):
                reads = random_reads(rule, by, length, strength)
                y, states = loop(reads, gates.get(0, {}))
                feeds = fed({0: reads}, gates)
                pairs = zip(one.run(None, feeds), plain.run(None, feeds), (y, states[:, -1]), strict=True)
                for found, expected, exact in pairs:
                    assert error(found, expected) < 2e-6
                    assert error(found, exact) < 2e-6


def test_what_is_no_such_recurrence_is_left_alone(shipped_rwkv):
    """RWKV takes decays as they are, and out at keys of its own; a branch that computes anything else."""
    assert fused(shipped_rwkv)[1] == 0
    model = onnx.load_from_string(expanded({0: random_reads("gated", "head", 2)}))
    (branch,) = (one.g for node in model.graph.node for one in node.attribute if one.name == "then_branch")
    for node in branch.node:
        if node.op_type == "Add":
            node.op_type = "Sub"
    assert fuse_recurrences(model) == 0


@pytest.fixture(scope="module")
def shipped_rwkv() -> bytes:
    folder = Path(__file__).parents[2] / "models" / "world-rwkv7"
    return onnx.load(folder / "model.onnx", load_external_data=False).SerializeToString()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_recurrent(tmp_path_factory.mktemp("recurrent") / "hooked")


@pytest.fixture(scope="module")
def recurrent(folder) -> MIModel:
    return MIModel.from_pretrained(folder, threads=1)


def ids(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, VOCAB, length)


SPECS = {
    "plain": (HookSpec(), {}),
    "knockout": (HookSpec().set_state_knockout(StateKnockoutSpec().position(3)), {"write": 0, "at": 3}),
    "decay": (
        HookSpec().set_state_knockout(StateKnockoutSpec().position(3).decay()),
        {"write": 0, "decays": False, "at": 3},
    ),
    "erase": (
        HookSpec().set_state_knockout(StateKnockoutSpec().position(3).erase()),
        {"write": 0, "erase": 0, "at": 3},
    ),
    "steering": (HookSpec().set_state_steering(StateSteeringSpec(2.5).position(1)), {"write": 2.5, "at": 1}),
    "edit": (HookSpec().intervene("blocks.1.hook_resid_pre", Intervention.Scale(0.5, positions=2)), None),
}


@pytest.mark.parametrize("name", SPECS)
def test_captures_do_not_decide_which_form_is_taken(recurrent, name):
    """Every rewritten graph has two nodes for two layers; the logits are those of a loop."""
    spec, factors = SPECS[name]
    for length in (6, 40):
        plain = recurrent.forward(ids(length), spec)
        captured = recurrent.forward(ids(length), HookSpec().capture("*").extend(spec))
        assert np.array_equal(plain.output(), captured.output())
        if factors is not None:
            assert error(plain.output()[0], logits_of(ids(length), **factors)) < 5e-6
    rewritten = [compiled.model for compiled in recurrent.compiled.values() if compiled.model is not None]
    assert rewritten
    assert all(fused(model)[1] == 2 for model in rewritten)


def test_states_go_on_token_by_token(recurrent):
    text = ids(20)
    expected, state = logits_of(text), None
    for t, token in enumerate(text):
        cache = recurrent.forward([token], cache=state)
        state = cache.state
        assert np.abs(cache.output()[0, 0] - expected[t]).max() < 5e-5


def test_other_engines_keep_the_open_form(recurrent, folder):
    text = ids(20)
    plain = recurrent.forward(text).output()
    open_form = MIModel.from_pretrained(folder, engine="openvino").forward(text).output()
    assert error(open_form, plain) < 2e-6
    assert not np.array_equal(open_form, plain)


@pytest.mark.parametrize("length", [5, 20])
def test_gradients_go_through_the_open_form_to_central_differences(recurrent, monkeypatch, length):
    """The recurrence is one node on the way there, branches of its own on the way back."""
    text = np.random.default_rng(3).permutation(VOCAB)[:length]
    found = recurrent.gradients(text, "hook_embed", "logit", answer=3).grad["hook_embed"][0]
    embedding = WEIGHTS["W_E"].astype(np.float64)

    def logit(t: int, place: int, step: float) -> float:
        moved = embedding.copy()
        moved[text[t], place] += step
        monkeypatch.setitem(WEIGHTS, "W_E", moved)
        return logits_of(text)[-1, 3]

    step = 1e-5
    expected = [
        [(logit(t, at, step) - logit(t, at, -step)) / (2 * step) for at in range(HIDDEN)] for t in range(length)
    ]
    assert error(found, np.array(expected)) < 2e-6
