"""TransformerLens' bridge on this engine beside its own, value by value; in a virtual environment that has it."""

import shutil
from pathlib import Path

import pytest
from float_twin import float_twin
from repository import REPOSITORY, SHARED

from exporters.adopt import adopt
from mionnx import MIModel

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


def test_circuits_of_heads_in_another_basis(beside):
    """`refactor_factored_attn_matrices`: what hooks change there, and gradients; logits, losses, all other values."""
    found = beside("world-gpt2", "refactored")
    moved = [found.pop(name) for name in [*found] if name.startswith("moved")]
    assert len(moved) == 4
    assert min(moved) > 0.01
    for name, apart in found.items():
        assert apart < TOLERANCE, name


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


@pytest.fixture
def stock(tmp_path) -> tuple[Path, Path]:
    """A checkpoint, and the file that optimum-onnx made of it, adopted; with a tokenizer."""
    checkpoint = Path(shutil.copytree(SHARED / "foreign" / "checkpoint", tmp_path / "checkpoint"))
    adopt(SHARED / "foreign" / "optimum", tmp_path / "stock")
    for folder in (checkpoint, tmp_path / "stock"):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(REPOSITORY / "models" / "world-llama" / name, folder / name)
    return checkpoint, tmp_path / "stock"


@pytest.fixture
def blocks(tmp_path) -> tuple[Path, Path]:
    """A model in blocks of 4 bits, and a checkpoint of the same numbers in float32."""
    source = REPOSITORY / "models" / "world-llama"
    made = MIModel.from_pretrained(MIModel.from_pretrained(source, threads=1).quantise(tmp_path / "blocks"), threads=1)
    return float_twin(source, made.hooked, tmp_path / "twin").hooked.folder, tmp_path / "blocks"


@pytest.mark.parametrize(("form", "part"), [("stock", "raw"), ("stock", "gradients"), ("blocks", "raw"),
                                            ("blocks", "folded"), ("blocks", "calls")])  # fmt: skip
def test_files_of_others_and_of_4_bits(beside_lens, request, form, part):
    """A stock file, and TransformerLens on its checkpoint; blocks of 4 bits, and TransformerLens on their numbers."""
    found = beside_lens("lens_bridge.py", *request.getfixturevalue(form), part)
    found.pop("gradients", None)
    assert len(found) > 30
    for name, apart in found.items():
        assert apart < TOLERANCE or name.startswith("moved"), name


def test_autoencoders_of_saelens(beside_lens, environment):
    """`SAE.encode` of a cache, runs with autoencoders and transcoders attached, hooks inside, gradients of features."""
    needed = "plotly plotly-express nltk python-dotenv simple-parsing tenacity"
    python = environment(f"transformer-lens==4.3.0 {needed}", "sae-lens==6.54.12")
    folder = REPOSITORY / "models" / "world-gpt2"
    found = beside_lens("lens_saes.py", folder, folder, python=python)
    moved = [found.pop(name) for name in [*found] if name.startswith("moved")]
    assert len(moved) == 3
    assert min(moved) > 0.1
    assert len(found) > 8
    for name, apart in found.items():
        assert apart < TOLERANCE, name


def test_the_page_shows_what_its_example_prints(beside_lens):
    found = beside_lens("lens_readme.py")
    assert found["printed"] == found["shown"]
