"""Texts and pairs of texts of an encoder as tokens, cut at its longest text, and run in batches of like length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer

from mionnx.errors import InputError, TokenizerError, boundary
from mionnx.graph.metadata import NEXT_TOKEN
from mionnx.graph.sizes import cut_side
from mionnx.inputs.tokens import Tokens
from mionnx.inputs.world_tokenizer import WorldTokenizer
from mionnx.machine.brief import spelled
from mionnx.run.batching import BatchSize
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import is_pair
from mionnx.spec.hook_spec import HookSpec

T = TypeVar("T")
STRIDE = 128  # tokens that windows of a context share at most, unless it is said: as in transformers' pipeline
Texts = str | tuple[str, str] | Iterable[Any]


def need_head(model: Runner, verb: str, *heads: str) -> None:
    """Refuse a verb on a model without the head that it reads."""
    metadata = model.hooked.metadata
    if metadata.head not in heads:
        kinds = {NEXT_TOKEN: "predicts the next token", "none": "has no head: it gives its last stream"}
        raise InputError(
            f"{verb} reads the head {' or '.join(map(repr, heads))}, and {model.hooked.name} "
            f"{kinds.get(metadata.head, f'has the head {metadata.head!r}')}"
        )


def listed_texts(texts: Texts, pairs: bool) -> list[Any]:
    """Texts as a list of texts or pairs of texts."""
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping):  # the keys of a dictionary are no texts
        raise InputError(f"texts are a text or a list of them, got a {type(texts).__name__}")
    entries = list[Any]()
    for entry in [texts] if isinstance(texts, str) or (pairs and is_pair(texts)) else texts:  # may be range(10**12)
        if not (isinstance(entry, str) or (pairs and is_pair(entry))):
            more = " or a pair (text, text)" if pairs else ""
            raise InputError(f"each of the texts is a text{more}, got a {type(entry).__name__}")
        entries.append(entry)
    if not entries:
        raise InputError("texts=[]: there is nothing to run on")
    return entries


def tokens_of(model: Runner, texts: Sequence[Any], max_length: int | None = None) -> list[Tokens]:
    """Texts, or pairs, as tokens; longer ones are cut, the longer text of a pair first, special tokens kept."""
    tokenizer, most = _tokenizer(model), model.hooked.longest_text if max_length is None else max_length
    side = cut_side(model.hooked.folder)
    parts = [part for text in texts for part in (text if isinstance(text, tuple) else (text,))]
    with boundary(TokenizerError, "the tokenizer fails on the texts"):
        encodings = iter(tokenizer.encode_batch(parts, add_special_tokens=False))
        joined = [_joined(tokenizer, text, encodings, most, side) for text in texts]
    return _typed(model, joined)


def windows_of(model: Runner, question: str, context: str, stride: int | None) -> tuple[Tokens, list[Tokens], int]:
    """A pair as tokens uncut; the same in windows of the context that fit; tokens from one window to the next."""
    tokenizer, most, pair = _tokenizer(model), model.hooked.longest_text, (question, context)
    with boundary(TokenizerError, "the tokenizer fails on the texts"):
        first, second = tokenizer.encode_batch([*pair], add_special_tokens=False)
    room = len(second.ids) if most is None else most - tokenizer.num_special_tokens_to_add(True) - len(first.ids)
    if room < min(1, len(second.ids)):
        raise InputError(f"the question has {len(first.ids)} tokens: of {most} it leaves no room for a context")
    shared = min(room // 2, STRIDE) if stride is None else stride
    if stride is not None and stride >= room:
        raise InputError(f"stride={stride}: windows have {room} tokens of the context, and share fewer")
    all_tokens = _together(tokenizer, pair, first, second)
    second.truncate(room, stride=shared)
    parts = [_together(tokenizer, pair, first, part) for part in (second, *second.overflowing)]
    return all_tokens, _typed(model, parts), room - shared


def _tokenizer(model: Runner) -> Tokenizer:
    if isinstance(model.tokenizer, WorldTokenizer):
        raise TokenizerError(f"{model.hooked.name} has a tokenizer without special tokens: give ids to `forward`")
    return model.tokenizer


def _typed(model: Runner, texts: list[Tokens]) -> list[Tokens]:
    """Texts with token types where the graph takes them."""
    return texts if model.hooked.has_token_types else [replace(tokens, type_ids=None) for tokens in texts]


def _joined(tokenizer: Any, text: Any, encodings: Any, most: int | None, side: str = "right") -> Tokens:
    paired = isinstance(text, tuple)
    first, second = next(encodings), next(encodings) if paired else None
    if most is not None:
        room = most - tokenizer.num_special_tokens_to_add(paired)
        if room < 1 + paired:
            raise InputError(f"max_length={most}: there is no room for a token beside the special ones")
        _cut(first, second, room, side)
    return _together(tokenizer, text, first, second)


def _together(tokenizer: Any, text: Any, first: Encoding, second: Encoding | None) -> Tokens:
    """A text or a pair with the special tokens, of encodings without these."""
    encoding: Encoding = tokenizer.post_process(first, second)
    if not encoding.ids:
        raise TokenizerError(f"the text {spelled(text)} has no tokens")
    ids, begin = np.array(encoding.ids, np.int64), len(text[0]) + 1 if second else 0
    # A tokenizer that leaves spaces out of its offsets (RoBERTa's) has cut one off each of `encoding` twice.
    own = [iter(first.offsets), iter([(start + begin, end + begin) for start, end in second.offsets] if second else [])]
    places = zip(encoding.special_tokens_mask, encoding.sequence_ids, strict=True)
    offsets = [(0, 0) if special else next(own[which == 1]) for special, which in places]
    if second is None:
        return Tokens(text, ids, offsets, encoding.tokens)
    return Tokens("\n".join(text), ids, offsets, encoding.tokens, type_ids=np.array(encoding.type_ids, np.int64))


def _cut(first: Encoding, second: Encoding | None, room: int, side: str) -> None:
    """Cut one text, or the longer of two token by token, to a number of tokens."""
    if second is None:
        first.truncate(room, direction=side)
        return
    one, other = len(first.ids), len(second.ids)
    if one + other > room:
        half = room // 2
        shorter = min(one, other, half)
        one, other = (shorter, room - shorter) if one <= other else (room - shorter, shorter)
        first.truncate(min(one, len(first.ids)), direction=side)
        second.truncate(min(other, len(second.ids)), direction=side)


def map_texts(
    model: Runner,
    texts: Sequence[Tokens],
    read: Callable[[int, HookCache], T],
    stage: str,
    hooks: HookSpec | None = None,
    batch_size: BatchSize = "auto",
    progress: bool | None = None,
) -> list[T]:
    """Run texts in batches of like length, and make something of the results of each."""
    for tokens in texts[:1000]:
        model.unknown_words.look(tokens)
    request = ListRequest(list(texts), hooks or HookSpec(), batch_size)
    return map_rows(model, request, read, stage, progress=progress)
