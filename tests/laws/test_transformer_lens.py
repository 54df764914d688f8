"""The same numbers as TransformerLens, on the same weights; it runs in a virtual environment of its own."""

import os
import subprocess

import pytest
from repository import REPOSITORY, SHARED

pytestmark = pytest.mark.slow
TOLERANCE = 5e-5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_patching_sweep(beside_lens, checkpoint, hooked, family):
    found = beside_lens("lens_sweeps.py", checkpoint(family), hooked(family), REPOSITORY / "models" / "world-llama")
    assert len(found) == 15
    for name, figures in found.items():
        assert figures["apart"] < TOLERANCE < figures["effect"] / 100, name


@pytest.mark.parametrize("model", ["world-gpt2", "world-llama"])
def test_every_weight_raw_and_folded(beside_lens, model):
    """Accessors, parameters, circuits of heads, scores, singular vectors, `FactoredMatrix`, and folded weights."""
    folder = REPOSITORY / "models" / model
    found = beside_lens("lens_weights.py", folder, folder)
    assert {"W_Q", "QK.S", "OV.eigenvalues", "composition K", "singular w_in", "folded W_Q", "folded b_U"} <= {*found}
    assert len(found) > 80
    for name, apart in found.items():
        assert apart < TOLERANCE, name


@pytest.mark.parametrize("model", ["world-gpt2", "world-llama"])
def test_jacobian_lenses_and_their_files(beside_lens, tmp_path, model):
    """Fits, files in both directions, readouts, token vectors, decompositions."""
    folder = REPOSITORY / "models" / model
    found = beside_lens("lens_jacobians.py", folder, folder, tmp_path)
    found.pop("cpu")
    assert {"J 0", "J 2", "readout 3", "file of theirs", "file of ours", "occupancy"} <= {*found}
    for name, apart in found.items():
        assert apart < TOLERANCE, name


SKIPPED = [
    "analysis/attribution/test_attribution.py::test_what_transformer_lens_gives",
    "analysis/python_hooks/test_run_with_hooks.py::test_the_same_functions_in_transformer_lens",
]


def test_what_skips_without_it(environment):
    """Tests that need TransformerLens in their own process are skipped elsewhere; here they run."""
    python = environment("transformer-lens==4.3.0")
    # Variables of this run's workers would send it to their folders.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    known = {**variables, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(SHARED)])}
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *(f"{REPOSITORY}/tests/{test}" for test in SKIPPED)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=known)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "skipped" not in ran.stdout
