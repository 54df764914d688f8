"""Texts as windows of tokens to measure KL over; a model's own text in the place of none."""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.inputs.tokens import encode
from mionnx.run.generation import generate
from mionnx.run.runner import Runner

WINDOW = 256  # tokens, the first special ones among them
OWN_ROWS, OWN_LENGTH = 8, 128  # texts that a model writes itself, and their tokens

Ids = NDArray[np.int64]


def windows(model: Runner, texts: str | Sequence[str]) -> list[Ids]:
    """Cut texts into windows of at most 256 tokens, [1, tokens] each."""
    # Each begins with the special tokens that the tokenizer puts before a text; of an encoder it ends as a text does.
    documents = [texts] if isinstance(texts, str) else list(texts)
    if not documents:
        raise InputError("texts=[]: there is no text to measure on")
    limit = min(WINDOW, model.hooked.metadata.sizes.max_positions or WINDOW)
    return [window for text in documents for window in _cut(model, text, limit)]


def _cut(model: Runner, text: str, limit: int) -> list[Ids]:
    before, ids, after = _parts(model, text)
    width = limit - len(before) - len(after)
    if width < 1 or len(before) + len(ids) + len(after) < 2:
        raise InputError(f"a text of {len(ids)} tokens: at least two are needed to measure on")
    cut = [np.concatenate([before, ids[at : at + width], after]) for at in range(0, len(ids), width)]
    return [one[None] for one in cut if len(one) >= 2]  # a single token at the end has nothing to predict


def _parts(model: Runner, text: str) -> tuple[Ids, Ids, Ids]:
    """The special tokens before a text, its own, and of an encoder those behind it."""
    ids = np.asarray(model.tokenize(text).ids, np.int64)
    bare = np.asarray(encode(model.tokenizer, text, add_special_tokens=False).ids, np.int64)
    at = next((at for at in range(len(ids) - len(bare) + 1) if (ids[at : at + len(bare)] == bare).all()), 0)
    return ids[:at], bare, ids[at + len(bare) :] if model.bidirectional else bare[:0]


def own_text(model: Runner, argument: str) -> list[Ids]:
    """Texts [2, 128] that a model samples at temperature 1 from its first special token, always with the same seed."""
    # `argument`: that which names texts in their place
    if model.bidirectional:
        raise InputError(f"{model.hooked.name} is an encoder, which writes no text to measure on: give {argument}")
    first = 0
    if model.has_tokenizer:
        special = np.asarray(encode(model.tokenizer, "").ids, np.int64)
        first = int(special[0]) if len(special) else 0
    # Without a special token of the tokenizer: the token that ends a text, as many models begin with it.
    first = first or next(iter(model.hooked.end_tokens()), 0)
    length = min(OWN_LENGTH, model.hooked.metadata.sizes.max_positions or OWN_LENGTH)
    begin = np.full((OWN_ROWS, 1), first, np.int64)
    generation = generate(
        model, begin, max_new_tokens=length - 1, do_sample=True, top_k=0, seed=0, eos_token_id=[], pad_token_id=0
    )
    return [np.stack(generation.ids[at : at + 2]) for at in range(0, OWN_ROWS, 2)]


def calls_of(model: Runner, ids: Sequence[Ids]) -> list[TokenBatch]:
    """Windows as the inputs of forward passes, without a past."""
    return [make_token_batch(one, None, None, model.hooked) for one in ids]


def digest(ids: Sequence[Ids]) -> str:
    """SHA-256 of windows' tokens, in hexadecimal."""
    sha = sha256()
    for one in ids:
        # The shape too, so that windows cut elsewhere differ; little-endian on every machine.
        sha.update(np.array(one.shape, "<i8").tobytes() + np.ascontiguousarray(one, "<i8").tobytes())
    return sha.hexdigest()
