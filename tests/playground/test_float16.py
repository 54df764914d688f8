"""A page in float16: what overflows is rescaled, and edits are of true values, as in Python."""

import json

import numpy as np
import pytest
from rescaled import TEXTS, loud_model

from mionnx import HookSpec, InputError, Intervention, MIModel
from mionnx.playground import playground

PROMPT = "The capital of France is"
POINT, OUT = "blocks.2.hook_resid_post", "blocks.1.attn.hook_z"
RUN = """async ([prompt, interventions]) => {
  const tokens = await lab.encode(prompt);
  return Array.from((await lab.run({ tokens, interventions })).logits);
}"""


def entry(hook, kind, **more):
    return {"hook": hook, "kind": kind, "positions": None, "heads": None, "rows": None, **more}


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    """A model whose stream is past float16 from layer 2 on."""
    return loud_model(tmp_path_factory.mktemp("loud") / "m")


def test_what_no_browser_computes_is_refused(loud, tmp_path):
    with pytest.raises(InputError, match="dtype='bfloat16': a playground computes in float32 or float16"):
        playground(loud, tmp_path / "site", dtype="bfloat16", texts=TEXTS)
    with pytest.raises(InputError, match="texts= is of a dtype"):
        playground(loud, tmp_path / "site", texts=TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float16", "int4"])
def test_a_page_in_float16_shows_what_the_model_of_float32_does(loud, weights, laboratory, tmp_path):
    if weights == "int4":
        loud = MIModel.from_pretrained(loud.quantise(tmp_path / "blocks", bits=4, block_size=32), threads=1)
    folder = playground(loud, tmp_path / "site", dtype="float16", texts=TEXTS)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["model"]["weights"] == weights
    page = laboratory(folder)
    edits = {
        "plain": ([], HookSpec()),
        "stream": ([entry(POINT, "add", value=9e4)], HookSpec().intervene(POINT, Intervention.Add(9e4))),
        "half": ([entry(OUT, "scale", value=0.25)], HookSpec().intervene(OUT, Intervention.Scale(0.25))),
    }
    for entries, spec in edits.values():
        expected = loud.forward(PROMPT, spec).output()[0, -1]
        assert np.abs(np.array(page.evaluate(RUN, [PROMPT, entries])) - expected).max() < 0.05
    with pytest.raises(Exception, match="beyond the range of float16"):
        page.evaluate(RUN, [PROMPT, [entry(OUT, "add", value=9e4)]])
