"""The same numbers as TransformerLens, on the same weights; it runs in a virtual environment of its own."""

import pytest
from conftest import REPOSITORY

pytestmark = pytest.mark.slow
TOLERANCE = 5e-5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_patching_sweep(beside_lens, checkpoint, hooked, family):
    found = beside_lens("lens_sweeps.py", checkpoint(family), hooked(family), REPOSITORY / "models" / "world-llama")
    assert len(found) == 15
    for name, figures in found.items():
        assert figures["apart"] < TOLERANCE < figures["effect"] / 100, name
