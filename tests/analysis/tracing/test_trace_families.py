"""Attribution graphs of families beside gradients by what their MLPs write, and those that have none."""

import numpy as np
import pytest
from families import make_checkpoint
from tiny_configs import tiny_config
from transcoder_files import effects_by_gradients, write_set
from unlisted_families import FAMILIES, make

from exporters.transformers import export
from mionnx import GradientError, InputError, MIModel, TranscoderSet

# values repeated, gathered, along unknown lengths; latents; experts; a factor behind the head, and in front of it
FAMILIES_OF_RULES = ("diffllama", "falcon", "apertus1p5_text", "deepseek_v2", "dbrx", "cohere", "minicpm3")
IDS = np.random.default_rng(5).integers(5, 80, (2, 9)).tolist()


@pytest.fixture
def traced(tmp_path):
    """Family -> its model, its attribution graph of random transcoders, and these."""

    def trace(family):
        if family in FAMILIES:
            make(family).save_pretrained(tmp_path / "checkpoint")
        else:
            make_checkpoint(family, tmp_path / "checkpoint", **tiny_config(family))
        export(tmp_path / "checkpoint", tmp_path / "hooked")
        model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
        layers = write_set(model, tmp_path / "set", features=24, texts=[[ids] for ids in IDS])
        return model, model.trace(IDS[0], TranscoderSet.load(tmp_path / "set"), answer=5, versus=9), layers

    return trace


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES_OF_RULES)
def test_effects_are_gradients_by_what_mlps_write(traced, family):
    model, graph, layers = traced(family)
    expected, few = effects_by_gradients(model, graph, layers, 5, 9), len(graph.features)
    assert np.abs(graph.effects[few, :few] - expected).max() < 1e-5 * np.abs(expected).max()
    assert (expected != 0).mean() > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "error", "message"),
    [
        (
            "gemma4_text",
            InputError,
            r"an attribution graph follows the residual stream, and layer 0 .* reads hook_embed",
        ),
        ("longcat_flash", InputError, r"layer 1 of this longcat_flash reads blocks\.0\.mlp\.hook_pre besides"),
        ("modernbert-decoder", InputError, "transforms the final norm's output before its product"),
        ("bloom", GradientError, "rows and heads of .* are one axis"),
    ],
)
def test_what_reads_more_than_the_stream_or_heads_beside_the_batch_is_refused(traced, family, error, message):
    with pytest.raises(error, match=message):
        traced(family)
