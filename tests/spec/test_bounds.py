"""What has no end, no bottom or no data is refused at once: FINDINGS part 1, defects 5, 8 and 9."""

from itertools import count

import numpy as np
import pytest

from mionnx import HookError, HookSpec, Intervention, InterventionError, MIError

POINT = "blocks.1.hook_resid_post"
ITSELF: list = [1]
ITSELF.append(ITSELF)


def deep() -> list:
    made: list = [1]
    for _ in range(3000):
        made = [made]
    return made


@pytest.mark.parametrize("limit", ["positions", "heads", "rows", "experts", "neurons"])
@pytest.mark.parametrize("given", [range(10**12), count(), deep(), ITSELF], ids=["huge", "endless", "deep", "itself"])
def test_limits_without_end_or_bottom_are_refused(limit, given):
    with pytest.raises(MIError, match=r"entries|integers|a text|lists in lists"):
        Intervention.Zero(**{limit: given})


def test_captures_at_positions_without_end_are_refused():
    with pytest.raises(MIError, match=r"positions has more than 1,048,576 entries"):
        HookSpec().capture(POINT, positions=range(10**12))
    with pytest.raises(MIError, match=r"positions has more than 1,048,576 entries|positions must be"):
        HookSpec().capture(POINT, positions=(i for i in count()))


def test_a_tensor_without_data_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(InterventionError, match="meta"):
        Intervention.Zero(positions=torch.empty(3, device="meta", dtype=torch.int64))


def test_600_interventions_at_one_hook_point_act_as_their_sum(shipped):
    spec = HookSpec()
    for number in range(600):
        spec.intervene(POINT, Intervention.Add(number / 1000))
    once = HookSpec().intervene(POINT, Intervention.Add(sum(number / 1000 for number in range(600))))
    text = "The capital of France is"
    np.testing.assert_allclose(shipped.forward(text, spec).output(), shipped.forward(text, once).output(), atol=5e-5)


def test_more_interventions_at_one_hook_point_than_can_be_inserted_are_refused():
    spec = HookSpec().intervene([POINT] * 2000, Intervention.Add(1.0))
    with pytest.raises(HookError, match="2,000 interventions, the most"):
        spec.intervene(POINT, Intervention.Add(2.0))


def test_half_of_a_pair_of_surrogates_in_a_chat_is_named(shipped):
    chat = [{"role": "user", "content": "a\ud800"}]
    with pytest.raises(MIError, match="half of a pair of surrogates"):
        shipped.tokenize_chat(chat, chat_template="{{ messages[0].content }}")
    with pytest.raises(MIError):
        shipped.tokenize_chat(
            [{"role": "user", "content": "a"}], chat_template="{{ messages[0].content }}{{ '\ud800' }}"
        )


@pytest.mark.parametrize("verb", ["quantise", "compile"])
def test_a_path_that_is_too_long_is_refused(shipped, tmp_path, verb):
    path = str(tmp_path / "/".join(["a" * 200] * 25))
    arguments = {"quantise": (path,), "compile": (HookSpec().intervene(POINT, Intervention.Zero()), path)}[verb]
    with pytest.raises(MIError, match="folder must be a text or a path"):
        getattr(shipped, verb)(*arguments)


def test_senders_that_are_one_number_are_refused(shipped):
    with pytest.raises(MIError, match="senders"):
        shipped.edge_attribution(
            "The capital of France is", "The capital of Japan is", answer="Paris", versus="Tokyo", senders=np.array(3)
        )


TWO_PROMPTS = ("The capital of France is", "The capital of Japan is")


@pytest.mark.parametrize("kind", ["numpy.array", "torch.tensor"])
def test_an_array_without_axes_is_its_number(shipped, kind):
    module, _, function = kind.partition(".")
    three = getattr(pytest.importorskip(module), function)(3)
    assert shipped.circuit(*TWO_PROMPTS, three, steps=1).sizes == [3]
    one, other = (shipped.patch_sweep(*TWO_PROMPTS, layers=layers, answer="Paris") for layers in (three, [3]))
    assert np.array_equal(one.values, other.values)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.circuit(*TWO_PROMPTS, count(), steps=1),
        lambda model: model.patch_sweep(*TWO_PROMPTS, layers=count()),
        lambda model: model.path_patch(*TWO_PROMPTS, receivers=count(), layers=[1]),
        lambda model: model.attribute_patch(*TWO_PROMPTS, hook=count(), answer="Paris"),
        lambda model: model.head_scores(token_ids=count()),
        lambda model: model.capture_residuals(TWO_PROMPTS[0], count()),
    ],
    ids=["edges", "layers", "receivers", "hook", "tokens", "residuals"],
)
def test_what_analyses_go_through_has_an_end(shipped, call):
    with pytest.raises(MIError, match="has more than 1,048,576 entries: give fewer"):
        call(shipped)


def test_one_attribution_is_found_among_several(shipped):
    found = shipped.attribute(list(TWO_PROMPTS), "Paris")
    assert found.index(found[1]) == 1
