"""TransformerLens' bridge on this engine beside its own, value by value; in a virtual environment that has it."""

import pytest
from repository import REPOSITORY

pytestmark = pytest.mark.slow
TOLERANCE = 5e-5
MODELS = ("world-gpt2", "world-llama")


@pytest.fixture
def beside(beside_lens):
    """Compare one part of a model; the largest differences by name."""

    def run(model: str, part: str) -> dict[str, float]:
        folder = REPOSITORY / "models" / model
        return beside_lens("lens_bridge.py", folder, folder, part)

    return run


@pytest.mark.parametrize("part", ["raw", "folded"])
@pytest.mark.parametrize("model", MODELS)
def test_every_value_hook_and_weight(beside, model, part):
    """All names of a cache; a function at each kind of value; all parameters; with folded weights too."""
    found = beside(model, part)
    moved = {name: value for name, value in found.items() if name.startswith("moved")}
    assert len(moved) > 30
    assert sum(value > 0.01 for value in moved.values()) > 30
    for name in found.keys() - moved.keys():
        assert found[name] < TOLERANCE, name


@pytest.mark.parametrize("model", MODELS)
def test_gradients_through_hooks(beside, model):
    found = beside(model, "gradients")
    assert found.pop("gradients") < -40
    for name, apart in found.items():
        assert apart < TOLERANCE, name


@pytest.mark.parametrize("model", MODELS)
def test_calls(beside, model):
    """Losses, parts of passes, generation, texts, patching, heads, stacks of a cache."""
    found = beside(model, "calls")
    assert len(found) > 20
    for name, apart in found.items():
        assert apart < TOLERANCE, name


def test_the_page_shows_what_its_example_prints(beside_lens):
    found = beside_lens("lens_readme.py")
    assert found["printed"] == found["shown"]
