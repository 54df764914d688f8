"""Quantising within a bound of KL: measured on the written model, cheap matrices first, the same bytes each time."""

import json

import numpy as np
import pytest
from command_line import mionnx, succeeded
from repository import REPOSITORY
from scipy.special import log_softmax, softmax

from mionnx import InputError, MIModel, ModelError

FLOATS = REPOSITORY / "models" / "world-llama"
TEXT = "The capital of France is Paris . The capital of Japan is Tokyo . The capital of Spain is Madrid . " * 30


def kl(floats: MIModel, blocks: MIModel, text: str, width: int = 256) -> float:
    """KL by scipy in float64, window by window."""
    ids, found = floats.tokenize(text).ids, []
    for at in range(0, len(ids), width):
        one, other = (model.forward(ids[at : at + width]).output()[0].astype(np.float64) for model in (floats, blocks))
        found.append((softmax(one, -1) * (log_softmax(one, -1) - log_softmax(other, -1))).sum(-1))
    return float(np.concatenate(found).mean())


def bits_of(model: MIModel) -> dict[str, int]:
    return {
        node.input[1].removesuffix("_blocks"): entry.i
        for node in model.hooked.proto.graph.node
        if node.op_type == "MatMulNBits"
        for entry in node.attribute
        if entry.name == "bits"
    }


@pytest.mark.parametrize("bound", [0.05, 0.004, 2e-5])
def test_the_written_model_is_within_the_bound_and_fewer_moves_are_not(bound, shipped, tmp_path):
    """0.05 is met by 4 bits for all, 0.004 by some in 8 bits, 2e-5 by some in floats."""
    made = MIModel.from_pretrained(shipped.quantise(tmp_path / "made", budget=bound, texts=TEXT), threads=1)
    said = made.hooked.metadata.quantised["budget"]
    assert said["kl"] <= bound
    assert said["kl"] == pytest.approx(kl(shipped, made, TEXT), rel=5e-3)
    assert said["tokens"] == len(shipped.tokenize(TEXT).ids)
    moved = said["moved_to_8_bits"], said["moved_to_floats"]
    assert [bool(names) for names in moved] == {0.05: [0, 0], 0.004: [1, 0], 2e-5: [1, 1]}[bound]
    found = bits_of(made)
    assert all(found.get(name, 8) == 8 for name in moved[0])
    assert not found.keys() & {*moved[1]}
    if any(moved):
        assert said["kl_without"] > bound
    if bound == 0.004:
        less = {"in_8_bits": moved[0][1:]} if len(moved[0]) > 1 else {}
        without = MIModel.from_pretrained(shipped.quantise(tmp_path / "less", **less), threads=1)
        assert kl(shipped, without, TEXT) > said["kl"]
        assert len(moved[0]) < len(found), "not all of them"


def test_matrices_that_cost_most_for_a_byte_move_first(shipped, tmp_path):
    made = MIModel.from_pretrained(shipped.quantise(tmp_path / "made", budget=0.004, texts=TEXT), threads=1)
    plain = MIModel.from_pretrained(shipped.quantise(tmp_path / "plain"), threads=1)
    losses = shipped.verify(other=plain, texts=TEXT, local=False).matrices
    order = sorted(losses, key=lambda one: (-one.kl / np.prod(one.shape), one.name))
    moved = made.hooked.metadata.quantised["budget"]["moved_to_8_bits"]
    assert {*moved} == {one.name for one in order[: len(moved)]}


def test_the_same_text_gives_the_same_bytes_and_the_models_own_text_serves(shipped, tmp_path):
    one, other = (shipped.quantise(tmp_path / name, budget=0.005) for name in ("one", "other"))
    for file in sorted(path.name for path in one.iterdir()):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    said = MIModel.from_pretrained(one).hooked.metadata.quantised["budget"]
    assert (said["text"], said["tokens"]) == ("own", 1024)
    assert said["kl"] <= 0.005


@pytest.mark.parametrize(("name", "bound"), [("world-gpt2", 1e-4), ("world-rwkv7", 0.001)])
def test_a_tied_table_and_rwkv_are_within_their_bounds(name, bound, tmp_path):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name, threads=1)
    made = MIModel.from_pretrained(model.quantise(tmp_path / "made", budget=bound), threads=1)
    said = made.hooked.metadata.quantised["budget"]
    assert said["kl"] <= bound < said["kl_without"]
    assert [bool(said[key]) for key in ("moved_to_8_bits", "moved_to_floats")] == [True, name == "world-gpt2"]


@pytest.mark.slow
def test_float16_is_measured_in_float16(checkpoint, tmp_path):
    model = MIModel.from_pretrained(checkpoint("llama"), dtype="float16", threads=1)
    made = MIModel.from_pretrained(model.quantise(tmp_path / "made", budget=1e-4, block_size=16), threads=1)
    assert made.hooked.metadata.dtype == "float16"
    assert made.hooked.metadata.quantised["budget"]["kl"] <= 1e-4


def test_a_bound_that_cannot_be_met_says_the_best(shipped, tmp_path):
    with pytest.raises(ModelError, match=r"with all matrices in 8 bits, and .* with all but .* in floats"):
        shipped.quantise(tmp_path / "made", budget=1e-12, texts=TEXT)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="above 0"):
            shipped.quantise(tmp_path / "made", budget=wrong)
    with pytest.raises(InputError, match="give budget="):
        shipped.quantise(tmp_path / "made", texts=TEXT)
    with pytest.raises(InputError, match="at least two"):
        shipped.quantise(tmp_path / "made", budget=0.1, texts="Paris")
    assert not [*tmp_path.iterdir()]


def test_the_command_says_what_it_reached(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    given = ("--budget", 0.004, "--text", tmp_path / "text.txt")
    found = json.loads(succeeded("quantise", FLOATS, "-o", tmp_path / "made", *given, "--json"))
    assert found["budget"]["kl"] <= found["budget"]["bound"] == 0.004
    said = " ".join(succeeded("quantise", FLOATS, "-o", tmp_path / "again", *given).split())
    assert f"{len(found['budget']['moved_to_8_bits'])} of them moved to 8 bits" in said
    refused = mionnx("quantise", FLOATS, "-o", tmp_path / "third", "--text", tmp_path / "text.txt")
    assert refused.returncode == 1
    assert "give --budget too" in " ".join(refused.stderr.split())
