"""What code written for hooks reads off a model, and the verbs on the residual stream."""

import numpy as np
import pytest
import torch
from oracle import Inputs, run
from repository import REPOSITORY
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mionnx import HookError, HookPoint, InputError, Intervention, InterventionError, MIError, MIModel

FRANCE, GERMANY = "The capital of France is", "The capital of Germany is"


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    folder = REPOSITORY / "models" / "world-llama"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def streams(model, reference, prompt, edits=()):
    """Layer -> [seq, hidden], by the eager torch model."""
    ids = model.to_tokens(prompt)
    values = run(reference, Inputs(ids, np.ones_like(ids)), edits).values
    return {layer: values[str(HookPoint.ResidPost(layer))][0] for layer in range(model.num_layers)}


def close(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() / max(1, np.abs(expected).max()) < 5e-5


def test_sizes(model, reference):
    cfg, config = model.cfg, reference.config
    assert (cfg.n_layers, cfg.n_heads, cfg.n_key_value_heads) == (4, 8, 4)
    assert (cfg.d_model, cfg.d_vocab, cfg.d_mlp) == (config.hidden_size, config.vocab_size, config.intermediate_size)
    assert cfg.d_head * cfg.n_heads == reference.model.layers[0].self_attn.o_proj.in_features
    assert (cfg.model_name, cfg.dtype) == ("world-llama", "float32")
    assert list(model.hook_dict) == [str(point) for point in model.hook_points()]
    assert model.hook_dict["blocks.2.attn.hook_z"] == HookPoint.AttnZ(2)
    gpt2 = MIModel.from_pretrained(REPOSITORY / "models" / "world-gpt2")
    assert gpt2.cfg.n_ctx == gpt2.hooked.metadata.sizes.max_positions


def test_matrices(model, reference):
    assert np.array_equal(model.W_E, reference.model.embed_tokens.weight.detach().numpy())
    assert np.array_equal(model.W_U, reference.lm_head.weight.detach().numpy().T)
    assert not model.b_U.any()
    projection = reference.model.layers[1].self_attn.o_proj.weight.detach().numpy()  # [hidden, n_heads * head_dim]
    assert np.array_equal(model.W_O[1, 3], projection[:, 3 * 16 : 4 * 16].T)
    assert not model.W_E.flags.writeable


def test_tokens(model):
    ids = model.to_tokens([FRANCE, GERMANY])
    assert ids.shape == (2, 5)
    assert model.to_str_tokens(FRANCE) == ["The", "capital", "of", "France", "is"]
    assert model.to_str_tokens(ids[:1]) == model.to_str_tokens(FRANCE)
    assert model.to_string(ids) == [FRANCE, GERMANY]
    assert model.to_string(ids[1]) == GERMANY
    assert model.to_string(model.to_single_token("Paris")) == "Paris"
    for wrong, message in (([1.5], "integers"), ([9999], "vocabulary"), (ids, "integers")):
        with pytest.raises(InputError, match=message):
            model.to_str_tokens(wrong)
    with pytest.raises(InputError, match=r"texts of \[3, 5\] tokens"):
        model.to_tokens([FRANCE, "three four five"])


def test_a_beginning_of_text_is_put_in_front_or_left_out(model, copy):
    """FINDINGS, part 2, friction 17; transformers' tokenizer of the same files is the oracle."""
    assert model.to_tokens(FRANCE, prepend_bos=True).tolist() == [[1, *model.to_tokens(FRANCE)[0]]]
    np.testing.assert_array_equal(model.to_tokens(FRANCE, prepend_bos=False), model.to_tokens(FRANCE))
    file = copy / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.save(str(file))
    adding, oracle = MIModel.from_pretrained(copy), AutoTokenizer.from_pretrained(copy)
    for text in (FRANCE, "<eos> France is"):
        ids = [oracle(text)["input_ids"]]
        assert adding.to_tokens(text).tolist() == adding.to_tokens(text, prepend_bos=True).tolist() == ids
        bare = [oracle(text, add_special_tokens=False)["input_ids"]]
        assert adding.to_tokens(text, prepend_bos=False).tolist() == bare
        assert ids == [[1, *bare[0]]]
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("bos_token_id", "no_such"))
    (copy / "generation_config.json").unlink()
    with pytest.raises(InputError, match="names no beginning-of-text token"):
        MIModel.from_pretrained(copy).to_tokens(FRANCE, prepend_bos=True)


def test_the_device_of_a_model(model):
    assert model.device() == "cpu"


def test_stopping_before_a_layer(model, reference):
    """FINDINGS, part 2, friction 17: TransformerLens returns the stream that the layer would read."""
    expected = streams(model, reference, FRANCE)
    for layer in (1, 2, 4, -1):
        stream, cache = model.run_with_cache(FRANCE, stop_at_layer=layer)
        end = layer % 4 or 4
        close(stream[0], expected[end - 1])
        assert {point.layer for point in map(HookPoint.parse, cache)} == {None, *range(end)}
        assert "hook_logits" not in cache
    stream, cache = model.run_with_cache(FRANCE, ["*.hook_z", "hook_embed"], stop_at_layer=1)
    assert list(cache) == ["hook_embed", "blocks.0.attn.hook_z", "blocks.0.hook_resid_post"]
    start, _ = model.run_with_cache(FRANCE, stop_at_layer=0)
    np.testing.assert_array_equal(start, cache["hook_embed"])
    seen = []
    hooks = [("blocks.0.attn.hook_z", lambda activation, hook: seen.append(hook.name) or activation * 0)]
    changed, _ = model.run_with_cache(FRANCE, fwd_hooks=hooks, stop_at_layer=1)
    assert seen == ["blocks.0.attn.hook_z"]
    assert np.abs(changed - stream).max() > 0.01


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stop_at_layer": 5}, "layers 0 to 3"),
        ({"stop_at_layer": 1, "names_filter": "blocks.3.hook_resid_post"}, "stops at blocks.0.hook_resid_post"),
        ({"stop_at_layer": 1, "return_type": "loss"}, "no logits"),
    ],
)
def test_stopping_where_nothing_would_be_kept(model, asked, message):
    with pytest.raises(MIError, match=message):
        model.run_with_cache(FRANCE, **asked)


def encodings(model):
    """One text as tokenizers give it."""
    tokenizer = AutoTokenizer.from_pretrained(model.hooked.folder)
    ids = model.tokenize(FRANCE).ids
    yield from (tokenizer(FRANCE), tokenizer(FRANCE, return_tensors="pt"), tokenizer(FRANCE, return_tensors="np"))
    yield from (model.tokenizer.encode(FRANCE), model.tokenize(FRANCE), {"input_ids": ids}, torch.tensor(ids))


def test_texts_of_encodings(model):
    for given in encodings(model):
        assert model.to_str_tokens(given) == FRANCE.split()
        assert model.to_string(given) in (FRANCE, [FRANCE])
    for given in [*encodings(model)][:-1]:
        with pytest.raises(InputError, match=f"text must be a text or a list of texts, got .*{type(given).__name__}"):
            model.to_tokens(given)
    with pytest.raises(InputError, match="a dictionary has 'input_ids'"):
        model.to_string({"ids": [3]})


@pytest.mark.parametrize("kind", [torch.tensor, np.array, np.int64, lambda id: torch.tensor(id, dtype=torch.uint8)])
def test_a_token_may_be_an_array_of_one_number(model, kind):
    paris = model.to_single_token("Paris")
    given = kind(paris)
    assert model.attribute(FRANCE, given).answer == model.attribute(FRANCE, paris).answer == "Paris"
    np.testing.assert_array_equal(model.embedding_for(given), model.embedding_for(paris))
    tracked = model.logit_lens(FRANCE, token_ids=torch.tensor([paris, 3])).tracked
    assert tracked == [paris, 3]


@pytest.mark.parametrize("wrong", [torch.tensor(1.0), torch.tensor(True), np.array(["Paris"]), torch.tensor([1])])
def test_what_is_no_token_is_refused(model, wrong):
    with pytest.raises(InputError, match="token must be an integer or a text, got"):
        model.embedding_for(wrong)


def test_capturing(model, reference):
    expected = streams(model, reference, FRANCE)
    whole = model.forward_with_capture(FRANCE, [0, 3])
    assert list(whole) == [0, 3]
    for layer, stream in whole.items():
        close(stream, expected[layer])
    last = model.capture_residuals(model.tokenize(FRANCE), range(4))
    for layer, stream in last.items():
        close(stream, expected[layer][-1])


def test_ablating(model, reference):
    expected = streams(model, reference, FRANCE, [(HookPoint.ResidPost(1), Intervention.Zero())])
    found = model.forward_ablate(FRANCE, [1], [1, 2, 3])
    for layer, stream in found.items():
        close(stream, expected[layer][-1])
    assert not found[1].any()


def test_ablating_positions(model, reference):
    """FINDINGS, part 2, friction 17."""
    expected = streams(model, reference, FRANCE, [(HookPoint.ResidPost(1), Intervention.Zero(positions=3))])
    for layer, stream in model.forward_ablate(FRANCE, 1, [2, 3], positions=3).items():
        close(stream, expected[layer][-1])
    assert np.abs(expected[3][-1] - streams(model, reference, FRANCE)[3][-1]).max() > 0.1


def test_steering(model, reference):
    vector = np.random.default_rng(0).normal(0, 1, model.hidden_size).astype(np.float32)
    edits = [(HookPoint.ResidPost(layer), Intervention.Add(vector * 0.5, positions=-1)) for layer in (0, 2)]
    expected = streams(model, reference, FRANCE, edits)
    for layer, stream in model.forward_steer(FRANCE, [(0, vector, 0.5), (2, vector, 0.5)], range(4)).items():
        close(stream, expected[layer][-1])


def test_patching(model, reference):
    donor = streams(model, reference, GERMANY)
    edits = [(HookPoint.ResidPost(0), Intervention.Replace(donor[0][3], positions=3))]
    expected = streams(model, reference, FRANCE, edits)
    for at in ([(0, 3)], [(0, -2)]):
        found = model.patch_activations(GERMANY, FRANCE, at, [3])
        close(found[3], expected[3][-1])
    logits = model.project_to_vocab(found[3])
    assert model.to_string(logits.argmax()) == "Berlin"


def test_generating(model):
    assert model.generate_with_hooks(FRANCE, 2) == (
        "Paris .",
        model.generate(FRANCE, max_new_tokens=2).new_ids[0].tolist(),
    )
    vector = np.random.default_rng(1).normal(0, 3, model.hidden_size)
    steers, layers = [(1, vector, 2.0)], [2]
    text, ids = model.generate_with_hooks(FRANCE, 4, ablate_layers=None, steers=steers)
    assert text == model.to_string(ids)
    grown = model.tokenize(FRANCE).ids.tolist()
    for token in ids:  # the whole text anew at each step, steered where it was the last token then

        def steer(activation, hook, first=4):
            activation[:, first:] += np.float32(vector * 2.0)

        logits = model.run_with_hooks(grown, [("blocks.1.hook_resid_post", steer)])
        assert token == logits[0, -1].argmax()
        grown.append(token)
    for token in model.generate_with_hooks(FRANCE, 1, ablate_layers=layers)[1]:

        def zero(activation, hook):
            activation[:] = 0

        assert token == model.run_with_hooks(FRANCE, [("blocks.2.hook_resid_post", zero)])[0, -1].argmax()


def test_a_recurrent_model_has_the_same_verbs():
    rwkv = MIModel.from_pretrained(REPOSITORY / "models" / "world-rwkv7")
    found = rwkv.patch_activations(GERMANY, FRANCE, [(3, -1)], [3])  # before that, RWKV-7 hands layer 0's values on
    assert rwkv.to_string(rwkv.project_to_vocab(found[3]).argmax()) == "Berlin"
    assert rwkv.generate_with_hooks(FRANCE, 2)[0] == "Paris ."
    with pytest.raises(HookError, match="W_O"):
        rwkv.W_O  # noqa: B018


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (lambda model: model.capture_residuals(FRANCE, [4]), HookError, "layer 4: the model has the layers 0 to 3"),
        (lambda model: model.capture_residuals(FRANCE, [-1]), HookError, "layer -1"),
        (lambda model: model.capture_residuals(FRANCE, []), HookError, "no layers"),
        (lambda model: model.forward_with_capture([FRANCE, GERMANY], [0]), InputError, "one prompt"),
        (lambda model: model.forward_ablate(FRANCE, [3], [1]), InterventionError, "changes nothing"),
        (
            lambda model: model.forward_steer(FRANCE, [(0, [1.0], 1)], [1]),
            InterventionError,
            r"\[hidden=128\], got \[1\]",
        ),
        (lambda model: model.forward_steer(FRANCE, [(0, [np.nan] * 128, 1)], [1]), InterventionError, "NaN"),
        (lambda model: model.patch_activations("three four", FRANCE, [(0, 3)], [1]), InterventionError, "donor has"),
        (lambda model: model.patch_activations(FRANCE, "three four", [(0, 3)], [1]), InterventionError, "position 3"),
        (lambda model: model.generate_with_hooks(FRANCE, 0), InputError, "max_new_tokens"),
        (lambda model: model.generate_with_hooks(FRANCE, 3, [9]), HookError, "layer 9"),
    ],
)
def test_what_does_not_exist_is_refused(model, act, kind, message):
    with pytest.raises(kind, match=message):
        act(model)
