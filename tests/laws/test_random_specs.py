"""Random specs on random batches, continuations and generations: mionnx beside references in float64.

The references run each row's text alone and whole (`tests/shared/spec_reference.py`), and share nothing with the
exporter or the rewriter. `benchmarks/random_specs.py` runs thousands.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from encoders import make_encoder
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_specs import VOCAB, Call, Capture, Edit, Point, draw, points_of
from rwkv_checkpoints import blinkdl
from spec_reference import Comparison, Reference, Text, batches_of, check, decoder, encoder, hybrid, recurrent

from exporters.transformers import export
from mionnx import Intervention, MIModel
from mionnx.spec.kinds import KINDS

FAMILIES = ("llama", "gpt2", "gemma2", "rwkv7", "bert", "lfm2")
HYBRIDS = (
    *("lfm2", "qwen3_5_text", "mamba2", "mamba", "bamba", "recurrent_gemma", "zamba2", "zamba", "falcon_h1"),
    "nemotron_h",
)
OTHERS = ("qwen3", "mistral", "qwen2", "phi3", "olmo2", "gpt_neox", "rwkv6", "modernbert", *HYBRIDS[1:])
ENCODERS = ("bert", "modernbert")
MOST_REFUSED = 0.3  # of the specs: more, and the rest would say little
Beside = tuple[MIModel, Reference]


@pytest.fixture(scope="session")
def beside(models, checkpoint, rwkv, request, shared) -> Callable[[str], Beside]:
    """Family -> its model, and its reference."""
    made: dict[str, Beside] = {}

    def find(family: str) -> Beside:
        if family not in made:
            if family.startswith("rwkv"):
                version = int(family.removeprefix("rwkv"))
                model = rwkv(f"{version}-pth")
                made[family] = model, recurrent(version, blinkdl(version), model)
            elif family in ENCODERS:
                folder = shared / "random_specs" / family
                folder.mkdir(parents=True, exist_ok=True)
                with FileLock(f"{folder}.lock"):
                    if not (folder / "hooked").exists():
                        make_encoder(family, folder / "checkpoint", vocab_size=VOCAB)
                        export(folder / "checkpoint", folder / "hooked")
                model = MIModel.from_pretrained(folder / "hooked", threads=1)
                made[family] = model, encoder(folder / "checkpoint", model)
            elif family in HYBRIDS:
                model = request.getfixturevalue("hybrid")(family)
                made[family] = model, hybrid(shared / "hybrids" / family / "checkpoint", model)
            else:
                made[family] = models(family), decoder(checkpoint(family), models(family))
        return made[family]

    return find


COUNTS = [pytest.param(20, id="few"), pytest.param(50, id="many", marks=pytest.mark.slow)]
# By seed: what hypothesis chooses choice by choice is plain, and refused twice as often.
RANDOMS = st.integers(0, 2**32 - 1).map(Random)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)])
def test_random_specs_agree_with_the_reference_or_are_refused(beside, family, count):
    model, reference = beside(family)
    refused: list[bool] = []

    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(RANDOMS)
    def every(random: Random) -> None:
        calls = draw(model, random)
        outcome = check(model, reference, calls)
        assert outcome.refused or outcome.agrees, (outcome, calls)
        refused.append(outcome.refused is not None)

    every()
    assert len(refused) >= count
    assert sum(refused) <= MOST_REFUSED * len(refused) + 1


def test_what_is_drawn_has_everything(beside):
    """Kinds, limits, phases, ragged batches, caches, generations: three hundred seeds draw all of it."""
    seen: dict[str, set[str]] = {}
    for family in ("llama", "rwkv7"):
        model, _ = beside(family)
        seen[family] = {what for seed in range(300) for what in features(draw(model, Random(seed)))}
    common = {"ragged", "cache", "generation", "prompts", "generated", "several", "before", "rows", "heads"}
    assert {"mask undone beside padding", "mask undone in a generation", "own key cut"} <= seen["llama"]
    common |= {"order", "by row", "uneven", "negative", "reads", "in part"}
    # beside the mask of a sliding window: tests/run/test_window.py; a guard: tests/spec/kinds/test_add_when.py
    kinds = {*KINDS} - {"window", "add_when"}
    assert common | kinds <= seen["llama"]
    assert common | kinds - {"knockout"} | {"state knockout", "state steering"} <= seen["rwkv7"]


def features(calls: list[Call]) -> set[str]:
    """What calls have in them."""
    found = {"cache"} if len(calls) > 1 else set()
    for call in calls:
        points = [edit.point.name for edit in call.edits]
        found |= {"ragged"} if len({*call.mask.sum(axis=1)}) > 1 else set()
        found |= {"generation"} if call.new else set()
        found |= {"prompts"} if call.prompts else set()
        found |= {"several"} if len({*points}) < len(points) else set()
        found |= {"before" for capture in call.captures if capture.before}
        found |= {"in part" for capture in call.captures if capture.positions and capture.heads}
        found |= {"state knockout" if state.scale is None else "state steering" for state in call.states}
        for edit in call.edits:
            found |= {edit.kind, *features_of(edit)}
        if any(undoes_a_mask(edit) for edit in call.edits):
            found |= {"mask undone in a generation"} if call.new else set()
            found |= {"mask undone beside padding"} if not call.mask.all() else set()
    return found


def undoes_a_mask(edit: Edit) -> bool:
    """Whether queries may read keys behind it that are hidden before it."""
    opening = {"scores": ("zero", "replace", "splice"), "pattern": ("add", "replace", "clamp", "splice")}
    return edit.kind in opening.get(edit.point.short, ())


def features_of(edit: Edit) -> set[str]:
    positions = edit.positions
    own = edit.kind == "knockout" and np.diagonal(edit.values[0], axis1=-2, axis2=-1)
    found = {"own key cut"} if np.isneginf(own).any() else set()
    found |= {name for name in ("rows", "heads", "reads") if getattr(edit, name) is not None}
    if positions == "generated":
        found.add("generated")
    if isinstance(positions, list):
        by_row = isinstance(positions[0], list)
        lists = positions if by_row else [positions]
        found |= {"by row"} if by_row else set()
        found |= {"uneven"} if len({*map(len, lists)}) > 1 else set()
        found |= {"negative"} if any(one < 0 for each in lists for one in each) else set()
        found |= {"order"} if any(each != sorted(each) for each in lists) else set()
    return found


VALUES = np.arange(128).reshape(2, 64) / 128


class Other(Edit):
    """An edit of which mionnx is told this, whatever the reference is told."""

    @property
    def intervention(self) -> Intervention:
        return Intervention.Add(VALUES, positions=[2, 0], rows=[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "seed"),
    [pytest.param("gemma2", 1474, id="NaN of a later call"), pytest.param("rwkv6", 294, id="a sum near 0")],
)
def test_what_the_reference_itself_has_got_wrong(beside, family, seed):
    """NaN times 0 in a call that had ended; one draw of rounding that left a cancelled sum as it was by chance."""
    model, reference = beside(family)
    assert check(model, reference, draw(model, Random(f"{family} {seed}"))).agrees


@pytest.mark.parametrize(
    ("meant", "agrees"),
    [
        ({}, True),
        ({"positions": [0, 2]}, False),
        ({"positions": [1, 0]}, False),
        ({"rows": (0,)}, False),
        ({"kind": "replace"}, False),
        ({"values": (VALUES * 1.001,)}, False),
    ],
)
def test_a_spec_that_mionnx_took_otherwise_is_found(beside, meant, agrees):
    model, reference = beside("llama")
    point = next(point for point in points_of(model) if point.name == "blocks.1.hook_resid_mid")
    edit = replace(Other(point, "add", (VALUES,), [2, 0], rows=(1,)), **meant)
    calls = [Call(np.array([[3, 4, 5, 0], [6, 7, 8, 9]]), np.array([[1, 1, 1, 0], [1, 1, 1, 1]]), edits=[edit])]
    outcome = check(model, reference, calls)
    assert outcome.refused is None
    assert outcome.agrees == agrees


def test_a_difference_and_its_rounding_are_of_the_same_part():
    """A capture of one position beside a larger number at another: rounding is measured at that position too."""
    point = Point("x", ("batch", "seq", "hidden"), ("batch", "seq", 1))
    texts, again = (Text({"x": point}, [], 0, values={"x": np.array([[one], [1000.0]])}) for one in (1.0, 1.001))
    call = Call(np.array([[3, 4]]), np.ones((1, 2), int), logits=False, captures=[Capture(point, positions=(0,))])
    (batch,), compared = batches_of([call]), []
    for text in (texts, again):
        compared.append(Comparison([text]))
        compared[-1].cache({"x": np.array([[[1.002]]])}, batch, [[0, 1]], [[0, 1]])
    assert np.isclose(compared[0].apart()[0], 2e-3)
    assert np.isclose(compared[0].rounded(compared[1], 0), 1e-3)
