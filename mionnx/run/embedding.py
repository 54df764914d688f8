"""`embed` and `similarity`: sentence embeddings, and how alike they are, as sentence-transformers gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError, nearest
from mionnx.machine.arrays import to_array
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.encoder_texts import Texts, listed_texts, map_texts, need_head, tokens_of
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

PROMPT_NAME = re.compile(r"[\w.-]+")
Vectors = NDArray[np.float32]


@typed(leave=["texts"])
def embed(
    model: Runner,
    texts: str | Iterable[str],
    hooks: HookSpec | None = None,
    *,
    prompt_name: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    batch_size: BatchSize = AUTO,
    progress: bool | None = None,
) -> Vectors:
    """Embed texts, as sentence-transformers' `encode` does.

    Args:
        texts: a text, or any iterable of texts.
        hooks: interventions in force, the same for all texts; rows count in the whole list.
        prompt_name: the name of one of the model's prompts ("query"), or a text put before each text; by default the
            model's own default, mostly none.
        normalize: True gives embeddings of length 1; by default as the model's folder says. False is refused where the
            graph normalises: capture `hook_pooled` there.
        max_length: tokens at which longer texts are cut; by default as the model's folder says.
        batch_size: texts of a pass, those of like length together; "auto": as many as run well.
        progress: None for a bar when it takes longer than two seconds.

    Returns:
        float32 [texts, d].

    Raises:
        InputError: a model without sentence embeddings, no texts, or a prompt that it does not have.

    Example:
        model.embed(["A man plays the guitar.", "Someone performs music."]).shape  # (2, 384)
    """
    need_head(model, "embed", "embedding")
    pooling = model.hooked.metadata.pooling
    if normalize is False and pooling.get("normalize"):
        raise InputError("normalize=False: this model's graph gives vectors of length 1; capture hook_pooled instead")
    entries = listed_texts(texts, pairs=False)
    if max_length is not None:
        at_least("max_length", max_length, 1)
    tokens = tokens_of(model, with_prompt(model, entries, prompt_name), max_length)

    def read(row: int, cache: HookCache) -> Vectors:
        return np.asarray(cache.output()[0], np.float32)

    vectors = np.stack(map_texts(model, tokens, read, "texts", hooks, batch_size, progress))
    return unit(vectors) if normalize else vectors


def with_prompt(model: Runner, texts: Sequence[str], prompt: str | None) -> list[str]:
    """Texts as their tokenizer is given them: behind a prompt, in lower case where the model's folder says so."""
    before, lower = prompt_before(model, prompt), model.hooked.metadata.pooling.get("lower_case")
    return [(before + text).lower() if lower else before + text for text in texts]


def prompt_before(model: Runner, prompt: str | None) -> str:
    """The text before each text."""
    pooling = model.hooked.metadata.pooling
    prompts = pooling.get("prompts") or {}
    name = pooling.get("default_prompt") if prompt is None else prompt
    text = "" if name is None else prompts.get(name, name)
    # A text before each text ends in a space or a colon; a word without either is a name, perhaps mistyped.
    if prompt and prompt not in prompts and PROMPT_NAME.fullmatch(prompt):
        has = ", ".join(prompts) or "none"
        advice = nearest(prompt, prompts)
        raise InputError(f"prompt_name={prompt!r} names no prompt of this model, which has {has}{advice}")
    if text and pooling.get("include_prompt") is False:
        raise InputError(
            "this model leaves the tokens of a prompt out of its pooling, which its graph does not: embed without one"
        )
    return str(text)


@typed(leave=["a", "b"])
def similarity(
    model: Runner,
    a: str | Iterable[str] | ArrayLike,
    b: str | Iterable[str] | ArrayLike | None = None,
    hooks: HookSpec | None = None,
    *,
    prompt_name: str | None = None,
    batch_size: BatchSize = AUTO,
    progress: bool | None = None,
) -> NDArray[np.float64]:
    """How alike texts are: the model's own measure of their embeddings.

    Args:
        a, b: texts, or embeddings [n, d]; a with itself where b is left out.
        hooks: interventions in force; `rows=` of them count in a and in b each from 0.
        prompt_name, batch_size, progress: see `embed`.

    Returns:
        float64 [texts of a, texts of b]: the cosine, or what the model's folder names: the dot product, or the negative
        euclidean or manhattan distance.

    Example:
        model.similarity("A man plays the guitar.", ["Someone performs music.", "It rains."])
    """
    need_head(model, "similarity", "embedding")

    def vectors(side: object) -> NDArray[np.float64]:
        array = to_array(side) if hasattr(side, "__array__") else None
        if array is not None and array.dtype.kind not in "OSU":  # texts in an array are texts
            array = np.atleast_2d(array).astype(np.float64)
            if array.ndim != 2 or array.shape[1] != model.hooked.metadata.columns:
                raise InputError(f"embeddings are [n, {model.hooked.metadata.columns}], got {list(array.shape)}")
            return array
        embeddings = embed(model, side, hooks, prompt_name=prompt_name, batch_size=batch_size, progress=progress)  # type: ignore[arg-type]
        return embeddings.astype(np.float64)

    first = vectors(a)
    second = first if b is None else vectors(b)
    return compared(first, second, model.hooked.metadata.pooling.get("similarity") or "cosine")


def compared(a: NDArray[np.float64], b: NDArray[np.float64], measure: str) -> NDArray[np.float64]:
    """[n, m]: how alike the vectors of two lists are."""
    if measure == "dot":
        return np.asarray(a @ b.T)
    if measure == "cosine":
        return np.asarray(unit(a) @ unit(b).T)
    differences = a[:, None] - b[None]
    if measure == "manhattan":
        return np.asarray(-np.abs(differences).sum(axis=-1))
    return np.asarray(-np.sqrt((differences**2).sum(axis=-1)))


def unit(vectors: NDArray[np.floating]) -> NDArray[np.floating]:
    """Vectors of length 1; zeros stay zeros."""
    lengths = np.sqrt((vectors.astype(np.float64) ** 2).sum(axis=-1, keepdims=True))
    return (vectors / np.maximum(lengths, 1e-12)).astype(vectors.dtype)


def vector_of(model: Runner, text: Texts) -> Vectors:
    """The embedding [d] of a text."""
    return embed(model, [text])[0]  # type: ignore[list-item]
