"""Prompts of a sweep: token ids without padding, names of the axes' entries, and a short description."""

from collections.abc import Iterable, Sequence

import numpy as np

from mionnx.analysis.sweep.grid import Grid
from mionnx.errors import InputError
from mionnx.run.prompt import Ids, prompt_text, token_text
from mionnx.run.runner import Runner


def common_length(prompts: Sequence[Ids]) -> int | None:
    """The number of tokens of all prompts; None if they differ in length."""
    lengths = {len(prompt) for prompt in prompts}
    return lengths.pop() if len(lengths) == 1 else None


def refuse_unlike(clean: Sequence[Ids], corrupted: Sequence[Ids]) -> None:
    """Refuse pairs of prompts whose positions do not correspond.

    Raises:
        InputError: another number of prompts, or of tokens in a pair.
    """
    if len(clean) != len(corrupted):
        raise InputError(f"{len(clean)} clean prompts and {len(corrupted)} corrupted ones: they come in pairs")
    for pair, (one, other) in enumerate(zip(clean, corrupted, strict=True)):
        if len(one) != len(other):
            raise InputError(
                f"pair {pair}: the clean prompt has {len(one)} tokens, the corrupted one {len(other)}; positions can "
                "be patched only where they correspond"
            )


def until(at: int, prompt: Ids) -> Ids:
    """Cut a prompt behind the position whose logits are read.

    Raises:
        InputError: the prompt has no such position.
    """
    if not isinstance(at, int | np.integer) or not -len(prompt) <= at < len(prompt):
        raise InputError(f"position={at!r}: the prompt has {len(prompt)} tokens (0 to {len(prompt) - 1})")
    return prompt[: int(at) % len(prompt) + 1]


def axis_labels(
    model: Runner, grid: Grid, prompts: Sequence[Ids], names: Iterable[str] | None = None
) -> dict[str, list[str]]:
    """Name the entries of a grid's axes.

    A position is named by its tokens, "France/Germany" where prompts have two there and "France/Germany/…" where they
    have more; or as `names` says.
    """
    tokens = [_tokens_there(model, ids) for ids in zip(*prompts, strict=False)]
    labels = {name: list(map(str, range(size))) for name, size in zip(grid.over, grid.sizes, strict=True)}
    positions = tokens if names is None else [*names]
    named = {"layer": [str(layer) for layer in grid.layers], "position": positions, "source": tokens}
    return labels | {name: named[name] for name in grid.over if name in named}


def _tokens_there(model: Runner, ids: Iterable[np.integer]) -> str:
    first, *others = [token_text(model, int(token)) for token in dict.fromkeys(ids)]
    return "/".join([first, *others[:1], *(["…"] if len(others) > 1 else [])])


def quote(model: Runner, ids: Ids) -> str:
    """A prompt in quotes, cut after 60 characters; its ids if the model has no tokenizer."""
    text = prompt_text(model, ids)
    return repr(text if len(text) <= 60 else text[:57] + "...")


def and_more(prompts: Sequence[Ids]) -> str:
    """Tell how many prompts there are besides the first: " and 3 more"."""
    return f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""
