"""AddWhen: a guard in Python, in generation, in files, compiled; `tests/laws/test_kinds.py` holds its law."""

import numpy as np
import pytest
from command_line import PROMPT

from mionnx import HookPoint, HookSpec, Intervention, InterventionError

HOOK = HookPoint.ResidPost(1)
VECTOR = np.cos(np.arange(128)).astype(np.float32)


@pytest.fixture(scope="module")
def activations(shipped) -> np.ndarray:
    return shipped.forward(PROMPT, HookSpec().capture(HOOK))[HOOK][0]


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def guarded(probe: object, threshold: float) -> HookSpec:
    return HookSpec().intervene(HOOK, Intervention.AddWhen(VECTOR, when=(probe, threshold))).capture(HOOK)


def test_it_adds_where_scikit_learns_own_probability_is_above_the_threshold(shipped, activations):
    """The probe is scikit-learn's, its scaler too, and so is the probability that decides."""
    linear = pytest.importorskip("sklearn.linear_model")
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    labels = np.arange(len(activations)) % 2
    for probe in (linear.LogisticRegression(), make_pipeline(StandardScaler(), linear.LogisticRegression())):
        probe.fit(activations, labels)
        likely = probe.predict_proba(activations)[:, 1]
        threshold = float(np.median(likely))  # of five tokens, two are above
        found = shipped.forward(PROMPT, guarded(probe, threshold - 1e-3))[HOOK][0]
        expected = activations + VECTOR * (likely > threshold - 1e-3)[:, None]
        assert 0 < (likely > threshold - 1e-3).sum() < len(likely)
        assert np.abs(found - expected).max() < 1e-6


def test_a_direction_is_read_by_its_projection(shipped, activations):
    projected = activations @ (VECTOR / np.linalg.norm(VECTOR))
    threshold = float(np.sort(projected)[1:3].mean())
    found = shipped.forward(PROMPT, guarded(VECTOR / np.linalg.norm(VECTOR), threshold))[HOOK][0]
    assert np.array_equal((found != activations).any(-1), projected > threshold)


def test_every_token_of_a_generation_decides_for_itself_compiled_too(shipped, tmp_path):
    """Cached decoding is one pass over the whole text, and a spec file, and a compiled graph with a knob."""
    import onnxruntime

    spec = guarded(VECTOR, 0.0).intervene("blocks.2.hook_resid_post", Intervention.AddWhen(-VECTOR, (VECTOR, 0.3)))
    spec.save(tmp_path / "guard.safetensors")
    spec = HookSpec.load(tmp_path / "guard.safetensors")
    made = shipped.generate(PROMPT, spec, max_new_tokens=6, eos_token_id=[])
    ids = made.ids[0][None, :-1]
    once = shipped.forward(ids, spec)
    assert np.abs(made.captured(HOOK)[0] - once[HOOK][0]).max() < 5e-5
    folder = shipped.compile(spec, tmp_path / "out", knobs={"strength": None})
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    feeds |= {
        one.name: np.zeros((1, 4, 0, 16), np.float32) for one in session.get_inputs() if one.name.startswith("past")
    }
    (logits,) = session.run(["logits"], feeds)
    assert np.abs(logits - once.output()).max() < 5e-5
    (plain,) = session.run(["logits"], feeds | {"strength": np.array(0, np.float32)})
    assert np.abs(plain - shipped.forward(ids).output()).max() < 5e-5
    assert np.abs(plain - logits).max() > 0.01


@pytest.mark.parametrize(
    ("probe", "threshold", "message"),
    [
        ((np.ones((3, 128)), np.zeros(3)), 0.5, "one number"),
        ((np.ones(128), np.nan), 0.5, "finite weights"),
        ("refusal", 0.5, "no linear probe"),
        (np.zeros(128), 0.5, "not all zero"),
    ],
)
def test_what_is_no_guard_is_refused(probe, threshold, message):
    with pytest.raises(InterventionError, match=message):
        Intervention.AddWhen(VECTOR, when=(probe, threshold))
