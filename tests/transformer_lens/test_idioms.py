"""What TransformerLens' notebooks do with a bridge, on this engine and on TransformerLens' own."""

import shutil
from typing import Any

import pytest
from families import make_checkpoint
from repository import REPOSITORY

pytestmark = pytest.mark.slow
TOLERANCE = 5e-5
# Families whose modules add the stream themselves; whose logits have a cap; whose attention and MLP read the same
# stream; whose queries have a norm of their own.
OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "gemma2": {"pad_token_id": None},
    "gpt_neox": {"pad_token_id": None},
    "qwen3": {"pad_token_id": None},
    "gemma3_text": {"pad_token_id": None},
}


@pytest.fixture
def checkpoint(request, tmp_path):
    """A model of the repository, or a small one of a family, with a tokenizer."""
    if request.param not in OTHERS:
        return REPOSITORY / "models" / request.param
    make_checkpoint(request.param, tmp_path, **{**OTHERS[request.param], "vocab_size": 2000})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(REPOSITORY / "models" / "world-llama" / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("checkpoint", ["world-gpt2", "world-llama", *OTHERS], indirect=True)
def test_idioms_of_notebooks(beside_lens, checkpoint):
    """Functions at all names, caches under each flag, changed logits, the module's pass, gradients by weights."""
    found = beside_lens("lens_idioms.py", checkpoint, checkpoint)
    counts = [found.pop(f"{form}: weights") for form in ("raw", "folded")]
    assert max(counts) <= -20
    assert len(found) > 100
    for name, apart in found.items():
        assert apart < TOLERANCE, name
