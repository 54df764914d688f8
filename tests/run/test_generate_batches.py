"""Lists continued in batches: each row gets the text that it gets alone, and the same random numbers."""

import numpy as np
import pytest

from mionnx import HookSpec, InputError, Intervention, MIError

TEXTS = [
    "The capital of France is",
    "Paris",
    "The capital of Germany is Berlin . The capital of Japan is",
    "Paris is the capital of",
    "The capital of Kenya is",
]
POINT = "blocks.1.hook_resid_post"


@pytest.mark.parametrize("name", ["shipped", "recurrent"])
@pytest.mark.parametrize("size", [1, 2, "auto"])
def test_each_row_gets_its_own_text(request, name, size):
    model = request.getfixturevalue(name)
    spec = HookSpec().intervene(POINT, Intervention.Scale(1.2, positions="generated"))
    made = model.generate(TEXTS, spec, max_new_tokens=6, stop_strings=["."], batch_size=size)
    for row, text in enumerate(TEXTS):
        alone = model.generate(text, spec, max_new_tokens=6, stop_strings=["."])
        assert made.texts[row] == alone.texts[0]
        assert np.array_equal(made.ids[row], alone.ids[0])
        assert np.array_equal(made.new_ids[row], alone.new_ids[0])
    assert (made.cache is None) == (size != "auto")


def test_a_seed_gives_a_row_the_same_numbers_in_any_batch(shipped):
    asked = {"do_sample": True, "temperature": 2.0, "seed": 3, "max_new_tokens": 8}
    whole = shipped.generate(TEXTS, **asked)
    for size in (1, 2):
        assert shipped.generate(TEXTS, batch_size=size, **asked).texts == whole.texts


def test_values_of_rows_stay_with_their_rows(shipped):
    values = np.random.default_rng(1).normal(0, 1, (len(TEXTS), 1, 128)).astype(np.float32)
    spec = HookSpec().intervene(POINT, Intervention.Add(values, positions=[-1]))
    spec.intervene("blocks.2.hook_mlp_out", Intervention.Zero(rows=[3, 0], positions="generated"))
    made = shipped.generate(TEXTS, spec, max_new_tokens=4, batch_size=2)
    for row, text in enumerate(TEXTS):
        own = HookSpec().intervene(POINT, Intervention.Add(values[row, 0], positions=[-1]))
        if row in (0, 3):
            own.intervene("blocks.2.hook_mlp_out", Intervention.Zero(positions="generated"))
        assert np.array_equal(shipped.generate(text, own, max_new_tokens=4).ids[0], made.ids[row])
    with pytest.raises(MIError, match="row 7"):
        shipped.generate(TEXTS, HookSpec().intervene(POINT, Intervention.Zero(rows=[7])), batch_size=2)


def test_a_prefix_serves_all_rows_or_each_its_own(shipped):
    prefix = shipped.forward("The capital of", use_cache=True).kv_cache
    countries = ["France is", "Kenya", "Japan is"]
    made = shipped.generate(countries, cache=prefix, max_new_tokens=3, batch_size=2)
    assert made.new_texts == [shipped.generate(one, cache=prefix, max_new_tokens=3).new_texts[0] for one in countries]
    own = shipped.forward(["The capital of", "Paris is the capital of", "The capital of"], use_cache=True).kv_cache
    made = shipped.generate(countries, cache=own, max_new_tokens=3, batch_size=2)
    assert made.new_ids[0].tolist() == shipped.generate(countries, cache=own, max_new_tokens=3).new_ids[0].tolist()


def test_what_belongs_to_one_batch_is_refused(shipped):
    for asked in ({"output_logits": True}, {"streamer": print}, {"hooks": HookSpec().capture(POINT)}):
        with pytest.raises(InputError, match="batch_size"):
            shipped.generate(TEXTS, batch_size=2, **asked)
    with pytest.raises(InputError, match="batch_size=-1"):
        shipped.generate(TEXTS, batch_size=-1)
