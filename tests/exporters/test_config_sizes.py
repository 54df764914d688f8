"""Sizes of a config.json that no model has: one sentence with the file, the key and the value (FINDINGS, part 4)."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from repository import REPOSITORY
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from exporters import adopt
from exporters.config_sizes import FRACTIONS, SIZE_LIMITS, check_sizes
from exporters.transformers.config import native_config
from mionnx.errors import ExportError

FOREIGN = REPOSITORY / "tests" / "shared" / "foreign"
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "head_dim")


@pytest.fixture
def changed(tmp_path):
    """A config.json of a Llama with another entry."""

    def change(key: str, value: object) -> Path:
        table = json.loads((FOREIGN / "checkpoint" / "config.json").read_text()) | {key: value}
        (tmp_path / "config.json").write_text(json.dumps(table))
        return tmp_path

    return change


@pytest.mark.parametrize("key", [*SIZES, "intermediate_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [-1, 0, 10**18, 2.5, True, "large"])
def test_a_size_that_no_model_has(key, value, changed):
    with pytest.raises(
        ExportError, match=rf"config\.json: {key} has to be an integer of 1 to [\d,]+; it says {value!r}"
    ):
        native_config(changed(key, value))


@pytest.mark.parametrize("value", [-1e-5, 0, 1e308, float("inf"), float("nan"), True, "small"])
def test_an_epsilon_that_no_model_has(value, changed):
    with pytest.raises(ExportError, match="rms_norm_eps has to be a number above 0, up to 1; it says"):
        native_config(changed("rms_norm_eps", value))


def test_heads_that_do_not_share(changed):
    with pytest.raises(ExportError, match="num_key_value_heads has to be a divisor of the 4 heads; it says 3"):
        native_config(changed("num_key_value_heads", 3))


def test_a_config_beside_an_adopted_file_is_checked_too(tmp_path):
    for text, said in (('{"sliding_window": 1000000000000000000}', "sliding_window has to be"), ("[1]", "no table")):
        source = Path(shutil.copytree(FOREIGN / "optimum", tmp_path / said[:4]))
        (source / "config.json").write_text(text)
        with pytest.raises(ExportError, match=said):
            adopt.adopt(source, tmp_path / "hooked")


def test_every_family_of_transformers_keeps_to_the_table():
    tables = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with suppress(Exception):  # configs that need another
            tables.append(CONFIG_MAPPING[kind]().to_dict())
    assert len(tables) > 105
    for table in tables:
        check_sizes(table, Path("config.json"))
    assert sum(bool({*SIZE_LIMITS, *FRACTIONS} & table.keys()) for table in tables) > 100
