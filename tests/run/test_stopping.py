"""What a generation may ask for: refused before any work where it cannot end well."""

import re

import numpy as np
import pytest

from mionnx import InputError
from mionnx.inputs.token_batch import make_token_batch
from mionnx.machine import memory
from mionnx.run.sampling import refuse_too_long


@pytest.mark.parametrize("name", ["shipped", "recurrent"])
def test_more_tokens_than_memory_holds_are_refused_before_any_work(request, name):
    model = request.getfixturevalue(name)
    with pytest.raises(InputError, match=r"max_new_tokens=1000000000000 after 3 tokens.* tokens fit"):
        model.generate(np.array([[5, 6, 7]]), max_new_tokens=10**12)
    with pytest.raises(InputError, match=r"greedy=1000000000000 after 3 tokens.* tokens fit"):
        model.verify(np.array([[5, 6, 7]]), ("ort-cpu", "ort-cpu:none"), greedy=10**12)


@pytest.mark.parametrize("rows", [1, 3])
def test_as_many_tokens_as_the_refusal_names_fit(shipped, monkeypatch, rows):
    monkeypatch.setattr(memory, "total", lambda: 10**6)
    metadata = shipped.hooked.metadata
    batch = make_token_batch(np.ones((rows, 4), np.int64), None, None, shipped.hooked)
    with pytest.raises(InputError) as refusal:
        refuse_too_long("new", 10**6, batch, metadata)
    most = int(re.search(r"at most (\d+) tokens fit", str(refusal.value))[1])
    assert most > 1
    refuse_too_long("new", most, batch, metadata)
    with pytest.raises(InputError, match=f"new={most + 1}"):
        refuse_too_long("new", most + 1, batch, metadata)
