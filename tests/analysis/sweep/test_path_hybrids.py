"""Path patching through layers with states, MiniMax' normed stream among them: beside frozen runs and patching."""

import numpy as np
import pytest
from oracle import Edits, Inputs, Outcome, run
from recurrent_families import VOCAB, make_recurrent
from sweep_pairs import difference

from exporters.transformers import export
from mionnx import HookPoint, Intervention, MIModel

RANDOM = np.random.default_rng(3)
CLEAN, CORRUPTED = (RANDOM.integers(3, VOCAB, 9) for _ in range(2))
GIVEN = {"answer": 5, "versus": 9}
LAYERS, TOLERANCE = 3, 5e-5  # recurrence, attention, recurrence
pytestmark = pytest.mark.slow  # exports; `test_recurrent_families.py` has a fast one


@pytest.fixture(scope="module", params=["minimax", "granitemoehybrid", "qwen3_5_text"])
def both(request, tmp_path_factory):
    """A hybrid of three layers, and the same in torch."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_recurrent(request.param, folder / "checkpoint")
    export(folder / "checkpoint", folder / "hooked")
    return MIModel.from_pretrained(folder / "hooked", threads=1), reference


def eager(reference, ids: np.ndarray, edits: Edits = ()) -> Outcome:
    return run(reference, Inputs(ids[None], np.ones((1, len(ids)), int)), edits)


CASES = [  # what sends: the hook point of a layer, and a head of it; what receives
    (HookPoint.SsmZ(0), 1, HookPoint.MlpPre(0)),
    (HookPoint.SsmZ(0), 2, HookPoint.AttnQ(1)),
    (HookPoint.SsmZ(0), 0, HookPoint.SsmPre(2)),
    (HookPoint.AttnZ(1), 3, HookPoint.SsmPre(2)),
    (HookPoint.AttnZ(1), 1, HookPoint.FinalNorm),
    (HookPoint.MlpOut(0), None, HookPoint.AttnV(1)),
    (HookPoint.MlpOut(1), None, HookPoint.MlpPre(2)),
]


@pytest.mark.parametrize(("sender", "head", "receiver"), CASES, ids=lambda one: str(one))
def test_a_path_to_one_receiver_is_that_of_frozen_runs(both, sender, head, receiver):
    """All else keeps its output, and norms between are computed anew; then what the receiver reads is put in."""
    model, reference = both
    over = ("layer",) if head is None else ("layer", "head")
    found = model.path_patch(CLEAN, CORRUPTED, [receiver], sender.name, over, layers=[sender.layer], **GIVEN)
    old, new = (eager(reference, ids).values for ids in (CORRUPTED, CLEAN))
    sent, at = old[sender.name].copy(), () if head is None else (slice(None), slice(None), head)
    sent[at] = new[sender.name][at]
    outputs = [point(layer) for layer in range(LAYERS) for point in (HookPoint.AttnOut, HookPoint.MlpOut)]
    # what the sender itself is part of is computed of it
    own = HookPoint.MlpOut(sender.layer) if head is None else HookPoint.AttnOut(sender.layer)
    frozen = [(point, Intervention.Replace(old[point.name])) for point in outputs if point != own]
    reads = eager(reference, CORRUPTED, [*frozen, (sender, Intervention.Replace(sent))]).values[receiver.name]
    logits = eager(reference, CORRUPTED, [(receiver, Intervention.Replace(reads))]).logits[0, -1]
    value = float(found.values.ravel()[head or 0])
    assert value == pytest.approx(difference(logits, 5, 9), abs=TOLERANCE)
    assert abs(value - found.corrupted) > 1e-4


@pytest.mark.parametrize("hook", ["hook_resid_pre", "hook_mlp_out"])
def test_a_path_to_all_receivers_is_plain_patching(both, hook):
    model, _ = both
    plain = model.patch_sweep(CLEAN, CORRUPTED, hook, ("layer", "position"), **GIVEN)
    path = model.path_patch(CLEAN, CORRUPTED, "all", hook, ("layer", "position"), **GIVEN)
    np.testing.assert_allclose(path.values, plain.values, atol=TOLERANCE)
    assert np.abs(path.effect).max() > 1e-3
