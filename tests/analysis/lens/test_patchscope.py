"""Patchscopes: each row equals a patch made by hand, and world-llama's capital is read out of layer 1."""

import json

import numpy as np
import pytest
from command_line import succeeded
from repository import REPOSITORY
from scipy.special import softmax

from mionnx import HookSpec, InputError, Intervention, InterventionError, MIError, MIModel, Patchscope

LLAMA, GPT2 = (REPOSITORY / "models" / name for name in ("world-llama", "world-gpt2"))
COUNTRIES = ["France", "Germany", "Norway", "Portugal", "Greece", "Kenya", "Egypt", "Spain"]  # all but the last
SOURCE, TARGET = "France has its capital in", "The capital of Japan is"


@pytest.fixture(scope="module")
def gpt2() -> MIModel:
    return MIModel.from_pretrained(GPT2, threads=1)


@pytest.mark.parametrize("target_layer", [None, 0, 2])
@pytest.mark.parametrize("hook", ["resid_pre", "resid_post"])
def test_rows_equal_patches_by_hand(shipped, hook, target_layer):
    scope = shipped.patchscope(
        SOURCE, 0, target=TARGET, placeholder=3, target_layer=target_layer, hook=hook, token_ids=["Paris", "Tokyo"], k=3
    )
    streams = shipped.forward(SOURCE, HookSpec().capture(f"blocks.*.hook_{hook}"))
    plain = softmax(shipped.forward(TARGET).output()[0, -1].astype(np.float64))
    tokens = [shipped.token_id(name) for name in ("Paris", "Tokyo")]
    for row, layer in enumerate(scope.layers):
        into = layer if target_layer is None else target_layer
        assert scope.targets[row] == f"blocks.{into}.hook_{hook}"
        spec = HookSpec().intervene(scope.targets[row], Intervention.Replace(streams[hook, layer][0, 0], positions=3))
        shares = softmax(shipped.forward(TARGET, spec).output()[0, -1].astype(np.float64))
        np.testing.assert_allclose(scope.top[row], np.sort(shares)[::-1][:3], atol=5e-5)
        np.testing.assert_allclose(scope.followed[row], shares[tokens], atol=5e-5)
        assert scope.texts[row] == shipped.generate(TARGET, spec, max_new_tokens=5).new_texts[0]
    np.testing.assert_allclose(scope.followed[-1], plain[tokens], atol=5e-5)
    assert scope.plain == shipped.generate(TARGET, max_new_tokens=5).new_texts[0]


def test_a_capital_is_read_out_of_layer_1_where_the_lens_reads_none(shipped):
    read = said = 0
    for country in COUNTRIES:
        capital = shipped.generate(f"The capital of {country} is", max_new_tokens=1).new_texts[0]
        prompt = f"{country} has its capital in"
        scope = shipped.patchscope(prompt, 0, target="The capital of Sweden is", placeholder="Sweden", layers=[1])
        lens = shipped.logit_lens(prompt, k=1, layers=[1], positions=0)
        said += scope.texts[0].split()[0] == capital
        read += lens.spell(lens.best(0, 0)[0][0]) == capital
    assert (said, read) == (7, 0)


def test_layers_are_those_that_the_continuation_sees(shipped):
    """After the last layer a token before the last one reaches nothing: left out, and refused where it is asked for."""
    assert shipped.patchscope(SOURCE, 0, target=TARGET, placeholder=3, max_new_tokens=1).layers == [0, 1, 2]
    assert shipped.patchscope(SOURCE, target=TARGET, max_new_tokens=1).layers == [0, 1, 2, 3]
    with pytest.raises(InterventionError, match=r"no later token reads blocks\.3\.hook_resid_post"):
        shipped.patchscope(SOURCE, 0, target=TARGET, placeholder=3, layers=[3])


def test_another_model_is_the_target_with_a_mapping(shipped, gpt2):
    seen = []

    def mapping(streams):
        seen.append(streams.shape)
        return np.zeros((len(streams), gpt2.hidden_size), np.float32)

    options = {"target": TARGET, "target_model": gpt2, "layers": [0, 1]}
    scope = shipped.patchscope(SOURCE, 0, placeholder=3, mapping=mapping, **options)
    assert seen == [(2, shipped.hidden_size)]
    for layer, share in zip(scope.layers, scope.top[:, 0], strict=True):
        spec = HookSpec().intervene(f"blocks.{layer}.hook_resid_post", Intervention.Zero(positions=3))
        assert abs(softmax(gpt2.forward(TARGET, spec).output()[0, -1].astype(np.float64)).max() - share) < 5e-5
    with pytest.raises(InputError, match=r"mapping= gave \[2, 3\]"):
        shipped.patchscope(SOURCE, mapping=lambda streams: streams[:, :3], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": 9}, "position 9 of a text of 5"),
        ({"placeholder": "of Japan"}, r"is 2 tokens \('.*of', '.*Japan'\)"),
        ({"placeholder": "Peru"}, "Peru"),
        ({"placeholder": 7}, "position 7"),
        ({"target": [3, 4], "placeholder": "Japan"}, "the target is no text"),
        ({"layers": [4]}, "no layer 4"),
        ({"target_layer": 9}, "target layer 9"),
        ({"hook": "resid_pots"}, "no residual stream"),
        ({"source": [SOURCE, TARGET]}, "one prompt is read at a time"),
        ({"target_model": "gpt2"}, "is no model"),
        ({"k": 0}, "the top 0"),
        ({"token_ids": ["Atlantis"]}, "Atlantis"),
    ],
)
def test_what_cannot_be_read_is_refused(shipped, options, message):
    with pytest.raises(MIError, match=message):
        shipped.patchscope(**{"source": SOURCE, "position": 0, "target": TARGET, "placeholder": 3} | options)


def test_a_command_a_page_and_a_file(shipped, tmp_path):
    page = tmp_path / "scope.html"
    made = succeeded(
        *("patchscope", str(LLAMA), SOURCE, "--position", "0", "--target", TARGET, "--placeholder", "Japan"),
        *("--token-ids", "Paris", "--html", str(page), "--json"),
    )
    assert "Paris" in json.dumps(json.loads(made))
    assert "Patchscope" in page.read_text()
    scope = shipped.patchscope(SOURCE, 0, target=TARGET, placeholder="Japan", token_ids=["Paris"])
    loaded = Patchscope.load(scope.save(tmp_path / "scope.safetensors"))
    assert loaded.texts == scope.texts
    assert str(loaded) == str(scope)
    assert len(scope.to_frame()) == 15
