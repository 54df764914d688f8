"""Quantising within a bound of KL: measured on the written model, cheap matrices first, the same bytes each time."""

import json
from itertools import product

import numpy as np
import pytest
from command_line import mionnx, succeeded
from quantised_files import bits_of
from repository import REPOSITORY
from scipy.special import log_softmax, softmax

from mionnx import InputError, MIModel, ModelError
from mionnx.analysis.quantisation.budget import Moves
from mionnx.analysis.quantisation.matrix_loss import MatrixLoss

FLOATS = REPOSITORY / "models" / "world-llama"
TEXT = "The capital of France is Paris . The capital of Japan is Tokyo . The capital of Spain is Madrid . " * 30


def kl(floats: MIModel, blocks: MIModel, text: str, width: int = 256) -> float:
    """KL by scipy in float64, window by window."""
    ids, found = floats.tokenize(text).ids, []
    for at in range(0, len(ids), width):
        one, other = (model.forward(ids[at : at + width]).output()[0].astype(np.float64) for model in (floats, blocks))
        found.append((softmax(one, -1) * (log_softmax(one, -1) - log_softmax(other, -1))).sum(-1))
    return float(np.concatenate(found).mean())


@pytest.mark.slow
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
        half = MIModel.from_pretrained(shipped.quantise(tmp_path / "less", in_8_bits=moved[0][::2]), threads=1)
        assert kl(shipped, half, TEXT) > bound
        assert len(moved[0]) < len(found), "not all of them"


@pytest.mark.slow
def test_fewer_bytes_than_by_moving_what_pays_most_first(shipped, tmp_path):
    """The shortest row of moves within the bound, by files that are written, is beside it the larger one."""
    made = MIModel.from_pretrained(shipped.quantise(tmp_path / "made", budget=0.004, texts=TEXT), threads=1)
    plain = MIModel.from_pretrained(shipped.quantise(tmp_path / "plain"), threads=1)
    losses = shipped.verify(other=plain, texts=TEXT, local=False).matrices
    four_more = {one.name: int(np.prod(one.shape)) // 2 for one in losses}  # bytes, of as many numbers
    order = [one.name for one in sorted(losses, key=lambda one: (-one.kl / np.prod(one.shape), one.name))]

    def within(count: int) -> bool:
        folder = shipped.quantise(tmp_path / str(count), in_8_bits=order[:count])
        return kl(shipped, MIModel.from_pretrained(folder, threads=1), TEXT) <= 0.004

    low, high = 0, len(order)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if within(middle) else (middle, high)
    said = made.hooked.metadata.quantised["budget"]
    grown = [sum(four_more[name] for name in names) for names in (said["moved_to_8_bits"], order[:high])]
    assert 0 < grown[0] < grown[1]
    assert said["bytes"] - said["bytes_without"] == grown[0]


def test_a_set_of_moves_is_the_smallest_there_is():
    """Against all sets of eight matrices."""
    random = np.random.default_rng(0)
    for _ in range(20):
        kls, sizes = random.exponential(size=8), random.integers(1, 40, 8).tolist()
        names = [f"m{at}" for at in range(8)]
        losses = [MatrixLoss(name, 0, (1, 1), 4, 1, 0.0, 0.0, kl, 1.0) for name, kl in zip(names, kls, strict=True)]
        moves = Moves.of(dict.fromkeys(names, 4), dict.fromkeys(names, 8), losses, dict(zip(names, sizes, strict=True)))
        left = random.uniform(0, kls.sum())
        every = [np.array(one, bool) for one in product((0, 1), repeat=8)]
        least = min(int(np.dot(sizes, one)) for one in every if kls[~one].sum() <= left)
        found = moves.fewest(left)
        assert moves.bytes(found) == least
        assert kls[[found[name] == 4 for name in names]].sum() <= left * (1 + 1e-6)


@pytest.mark.slow
def test_the_same_text_gives_the_same_bytes_and_the_models_own_text_serves(shipped, tmp_path):
    one, other = (shipped.quantise(tmp_path / name, budget=0.005) for name in ("one", "other"))
    for file in sorted(path.name for path in one.iterdir()):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    said = MIModel.from_pretrained(one).hooked.metadata.quantised["budget"]
    assert (said["text"], said["tokens"]) == ("own", 1024)
    assert said["kl"] <= 0.005


@pytest.mark.parametrize(
    ("name", "bound"), [("world-gpt2", 1e-4), pytest.param("world-rwkv7", 0.001, marks=pytest.mark.slow)]
)
@pytest.mark.slow
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


@pytest.mark.slow
def test_the_command_says_what_it_reached(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    given = ("--budget", 0.004, "--texts", tmp_path / "text.txt")
    found = json.loads(succeeded("quantise", FLOATS, "-o", tmp_path / "made", *given, "--json"))
    assert found["budget"]["kl"] <= found["budget"]["bound"] == 0.004
    said = " ".join(succeeded("quantise", FLOATS, "-o", tmp_path / "again", *given).split())
    moved = found["budget"]["moved_to_8_bits"]
    assert f"{len(moved)} of them moved to 8 bits, 0 to floats to 8 bits: {', '.join(moved)}" in said
    assert f"{found['budget']['bytes']:,} bytes of matrices" in said
    refused = mionnx("quantise", FLOATS, "-o", tmp_path / "third", "--texts", tmp_path / "text.txt")
    assert refused.returncode == 1
    assert "give --budget too" in " ".join(refused.stderr.split())
