"""The accuracy level of models of blocks: what measures in floats and generates in 8 bits, and what levels keep to."""

import warnings

import numpy as np
import pytest

from mionnx import GeneratingLevelWarning, HookSpec, InputError, Intervention, MIModel, SlowBlocksWarning

PROMPTS = ["The capital of France is", "The capital of Spain is", "one two three"]


@pytest.fixture(scope="module")
def blocks(shipped, tmp_path_factory):
    """Accuracy level -> the shipped Llama in 4 bits, opened at that level."""
    folder = shipped.quantise(tmp_path_factory.mktemp("accuracy") / "int4")
    opened = {level: MIModel.from_pretrained(folder, threads=1, accuracy_level=level) for level in (None, 0, 4)}
    return opened.__getitem__


def test_generating_rounds_and_measuring_does_not_and_that_is_said_once(blocks):
    unsaid = blocks(None)
    with pytest.warns(GeneratingLevelWarning, match=r"accuracy_level=0"):
        found = unsaid.generate(PROMPTS, max_new_tokens=4, output_logits=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unsaid.generate(PROMPTS, max_new_tokens=1)
        rounded, floats = (blocks(level).generate(PROMPTS, max_new_tokens=4, output_logits=True) for level in (4, 0))
    for one, other in zip(found.steps, rounded.steps, strict=True):
        np.testing.assert_array_equal(one.output(), other.output())
    assert not np.array_equal(found.steps[0].output(), floats.steps[0].output())
    np.testing.assert_array_equal(unsaid.forward(PROMPTS).output(), blocks(0).forward(PROMPTS).output())
    assert not np.array_equal(unsaid.forward(PROMPTS).output(), blocks(4).forward(PROMPTS).output())


@pytest.mark.filterwarnings("ignore::mionnx.GeneratingLevelWarning")
def test_an_intervention_holds_at_the_level_that_generates(blocks):
    spec = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero()).capture("blocks.2.hook_resid_post")
    found, expected = (blocks(level).generate(PROMPTS, spec, max_new_tokens=3) for level in (None, 4))
    assert [list(row) for row in found.new_ids] == [list(row) for row in expected.new_ids]
    np.testing.assert_array_equal(found.steps[0]["resid_post", 2], expected.steps[0]["resid_post", 2])


@pytest.mark.parametrize("level", [0, 4])
def test_batches_captures_and_pasts_change_last_bits_alone(blocks, level):
    """What a token reads is rounded by itself, so that no law needs another bound than float32's."""
    model, tolerance = blocks(level), 5e-5
    together = model.forward(PROMPTS[:2], HookSpec().capture("*resid_post"))
    plain = model.forward(PROMPTS[:2])
    np.testing.assert_array_equal(together.output(), plain.output())
    for row, prompt in enumerate(PROMPTS[:2]):
        np.testing.assert_allclose(model.forward(prompt).output()[0], plain.output()[row], rtol=0, atol=tolerance)
    ids = model.tokenize(PROMPTS[0]).ids[None]
    past = model.forward(ids[:, :3], use_cache=True).kv_cache
    rest = model.forward(ids[:, 3:], cache=past).output()
    np.testing.assert_allclose(rest, plain.output()[:1, 3:], rtol=0, atol=tolerance)


def test_eight_bits_in_floats_are_slow_and_that_is_said_when_a_model_is_opened(shipped, tmp_path):
    folder = shipped.quantise(tmp_path / "int8", bits=8)
    with pytest.warns(SlowBlocksWarning, match=r"times float32's time; .*accuracy_level=4"):
        MIModel.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MIModel.from_pretrained(folder, accuracy_level=4)
        MIModel.from_pretrained(shipped.hooked.folder)


def test_a_level_without_blocks_or_that_there_is_not_is_refused(shipped):
    with pytest.raises(InputError, match=r"no products with weights in blocks"):
        MIModel.from_pretrained(shipped.hooked.folder, accuracy_level=4)
    with pytest.raises(InputError, match="accuracy_level=3"):
        MIModel.from_pretrained(shipped.hooked.folder, accuracy_level=3)
