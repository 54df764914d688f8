"""Key-value caches: cut, cleared, mixed, saved, and refused where they do not fit."""

import numpy as np
import pytest
import torch
from families import VOCAB
from oracle import Inputs, run
from rwkv_checkpoints import LAYERS, blinkdl

from mionnx import InputError, KVCache

TOLERANCE = 5e-5
VERSIONS = [6, 7, 4]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("change", ["layers", "batch", "heads", "dtype", "length"])
def test_caches_that_do_not_fit(models, family, change):
    model = models(family)
    cache = model.forward(np.full((2, 4), 5), use_cache=True).kv_cache
    layers, mask = list(cache.layers), cache.attention_mask
    if change == "layers":
        layers = layers[:1]
    elif change == "batch":
        layers, mask = [(key[:1], value[:1]) for key, value in layers], mask[:1]
    elif change == "heads":
        layers = [(key[:, :1], value[:, :1]) for key, value in layers]
    elif change == "dtype":
        layers = [(key.astype(np.float64), value) for key, value in layers]
    else:
        mask = mask[:, 1:]
    with pytest.raises(InputError, match="cache"):
        model.forward(np.full((2, 3), 5), cache=KVCache(layers, mask))


def prompts(rows: int, seq: int = 7, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask; of several rows the first ones are padded on the left."""
    ids = np.random.default_rng(seed).integers(3, VOCAB, (rows, seq))
    mask = np.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : 3 - row] = 0
    return ids, mask


def lists(rows: list[np.ndarray]) -> list[list[int]]:
    return [row.tolist() for row in rows]


def test_a_trimmed_cache_of_a_padded_batch_keeps_each_row_s_own_padding(models):
    """What follows it is what follows the shorter prompts: FINDINGS part 1, tests that cannot fail."""
    model, (ids, mask) = models("llama"), prompts(3)
    cut, after = 5, np.array([[11, 12], [13, 14], [15, 16]])
    cache = model.forward(ids, attention_mask=mask, use_cache=True).kv_cache
    cache.trim_to(cut)
    assert np.array_equal(cache.attention_mask, mask[:, :cut])
    found = model.forward(after, cache=cache).output()
    for row in range(3):
        real = ids[row, :cut][mask[row, :cut] == 1]
        expected = model.forward([[*real, *after[row]]]).output()[0, -2:]
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family_", ["llama", "gpt2", "gemma2", "mixtral"])
def test_a_layer_from_a_donor_equals_torch_on_the_same_tensors(family_, models, references):
    """Recipient and donor are two prompts; the next tokens are run on the mixture in both programs."""
    model, reference = models(family_), references(family_)
    (ids, mask), (others, _) = prompts(2, 9, 1), prompts(2, 9, 2)
    own, donor = (model.forward(tokens, attention_mask=mask, use_cache=True).kv_cache for tokens in (ids, others))
    mixed = KVCache(list(own.layers), own.attention_mask)
    mixed.clone_layer_from(donor, 1)
    mixed.clone_layer_position_range(donor, 0, 5, 8)
    after = np.array([[11, 12], [13, 14]])
    found = model.forward(after, cache=mixed).output()
    full = np.concatenate([mask, np.ones((2, 2), np.int64)], axis=1)
    past = [tuple(torch.from_numpy(part.copy()) for part in layer) for layer in _mixture(reference, ids, others, mask)]
    expected = _continued(reference, after, full, past)
    assert np.abs(found - expected).max() / max(1, np.abs(expected).max()) < TOLERANCE
    assert np.abs(found - model.forward(after, cache=own).output()).max() > 1e-3


def _mixture(reference, ids, others, mask) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same transplant on the tensors that torch computed."""
    own, donor = (run(reference, Inputs(tokens, mask)).cache for tokens in (ids, others))
    first = [part.copy() for part in own[0]]
    for part, other in zip(first, donor[0], strict=True):
        part[:, :, 5:8] = other[:, :, 5:8]
    return [tuple(first), donor[1]]


def _continued(reference, ids: np.ndarray, mask: np.ndarray, past) -> np.ndarray:
    from exporters.transformers.trace import run_eagerly

    positions = torch.from_numpy(np.maximum(mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :].copy())
    logits, _ = run_eagerly(
        reference, lambda name, value, stream: value, torch.from_numpy(ids), torch.from_numpy(mask), positions, past
    )
    return logits.numpy()


def test_a_trimmed_cache_is_that_of_the_shorter_text(models):
    model, ids = models("llama"), np.arange(10, 20)[None]
    cache = model.forward(ids, use_cache=True).kv_cache
    cache.trim_to(6)
    short = model.forward(ids[:, :6], use_cache=True).kv_cache
    assert cache.seq_len == 6
    assert np.abs(model.forward([[5]], cache=cache).output() - model.forward([[5]], cache=short).output()).max() < 1e-5
    one = model.generate([[5]], cache=cache, max_new_tokens=4, eos_token_id=[])
    assert lists(one.new_ids) == lists(model.generate([[*ids[0, :6], 5]], max_new_tokens=4, eos_token_id=[]).new_ids)


def test_a_cleared_layer_holds_zeros(models):
    model, ids = models("llama"), np.arange(10, 16)[None]
    cache = model.forward(ids, use_cache=True).kv_cache
    before = cache.get_layer(1)
    cache.clear_layer(0)
    assert not cache.get_layer(0)[0].any()
    assert not cache.get_layer(0)[1].any()
    assert cache.get_layer(1) is before
    cache.set_layer(0, *before)
    assert np.array_equal(cache.get_layer(0)[1], before[1])


@pytest.mark.parametrize("name", ["llama", "6-pth"])
def test_a_cache_is_saved_whole(name, models, rwkv, tmp_path):
    model = models(name) if name == "llama" else rwkv(name)
    found = model.forward(np.arange(10, 16)[None], use_cache=True)
    cache = found.state or found.kv_cache
    cache.save(tmp_path / "cache.safetensors")
    loaded = type(cache).load(tmp_path / "cache.safetensors")
    assert np.array_equal(model.forward([[5]], cache=loaded).output(), model.forward([[5]], cache=cache).output())
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cache.safetensors").read_bytes()[:-9])
    with pytest.raises(InputError, match="cut"):
        type(cache).load(tmp_path / "cut.safetensors")
    with pytest.raises(InputError, match="missing"):
        type(cache).load(tmp_path / "missing.safetensors")
    with pytest.raises(InputError):
        cache.save(tmp_path / "nowhere" / "cache.safetensors")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_state_from_a_donor_equals_the_loop(rwkv, version):
    """The float64 loop takes layer 1's state from another text too."""
    from rwkv_loop import Gates, Loop

    model = rwkv(f"{version}-pth")
    ids, others, after = ([*range(s, s + 9)] for s in (10, 30, 50))
    tensors = {name: tensor.numpy().astype(np.float64) for name, tensor in blinkdl(version).items()}
    loops = [Loop(tensors, version), Loop(tensors, version)]
    for oracle, text in zip(loops, (ids, others), strict=True):
        oracle.run(text)
    states = [loops[0].states[0], loops[1].states[1]]
    own, donor = (model.forward(text).state for text in (ids, others))
    own.clone_layer_from(donor, 1)
    expected = loops[0].run(after, Gates.ones(LAYERS, len(after), 2), states=states)
    found = model.forward(after, initial_state=own).output()[0]
    assert np.abs(found - expected).max() / max(1, np.abs(expected).max()) < TOLERANCE
    with pytest.raises(InputError, match="clone_layer_from"):
        own.clone_layer_position_range(donor, 0, 0, 2)
    with pytest.raises(InputError, match="hook_states"):
        own.trim_to(3)


def test_surgery_that_does_not_fit_is_refused(models):
    model = models("llama")
    cache = model.forward([[3, 4, 5]], use_cache=True).kv_cache
    longer = model.forward([[3, 4, 5, 6]], use_cache=True).kv_cache
    keys, values = cache.get_layer(0)
    for change, named in (
        (lambda: cache.get_layer(2), "0 to 1"),
        (lambda: cache.get_layer(-1), "0 to 1"),
        (lambda: cache.clone_layer_from(longer, 0), "layer 0"),
        (lambda: cache.set_layer(0, keys[..., :3], values), "key of layer 0"),
        (lambda: cache.set_layer(0, keys, values * np.nan), "value of layer 0"),
        (lambda: cache.clone_layer_position_range(longer, 0, 2, 4), "this cache, which holds 3"),
        (lambda: cache.clone_layer_position_range(longer, 0, 2, 2), "positions 2 up to 2"),
        (lambda: cache.trim_to(4), "holds 3"),
        (lambda: cache.repeat(2).repeat(2), "one row"),
        (lambda: model.forward([[3]], cache=models("gpt2").forward([[3]], use_cache=True).kv_cache), "cache"),
        (lambda: model.generate([[3], [4]], cache=cache.repeat(3)), "3 rows"),
    ):
        with pytest.raises(InputError) as caught:
            change()
        assert named in str(caught.value)
    assert np.array_equal(cache.get_layer(0)[0], keys)
