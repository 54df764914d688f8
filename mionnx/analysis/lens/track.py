"""`track_token`, `track_token_at`, `track_race`: tokens followed from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.lens.logit_lens import Scored, logit_lens, read_vectors
from mionnx.analysis.lens.readout import Lens
from mionnx.errors import InputError
from mionnx.inputs.token_rows import IDS
from mionnx.machine.typed import typed
from mionnx.run.prompt import one_text, streams_of, token_of
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec


@typed()
def track_token_at(model: Runner, residual: ArrayLike, token: int | str) -> float:
    """The probability of a token, a residual [hidden] read as the last layer's.

    Raises:
        InputError: another width, NaN, or no such token.

    Example:
        cache = model.forward("The capital of France is", HookSpec().capture("blocks.3.hook_resid_post"))
        model.track_token_at(cache["resid_post", 3][0, -1], "Paris")
    """
    streams = streams_of(residual, model.hidden_size).reshape(-1, model.hidden_size)
    if len(streams) != 1:
        raise InputError(f"residual is {list(np.shape(residual))}; it must be [hidden]")
    readout = model.opened(Lens).read(streams, streams[None], np.array([[token_of(model, token)]]), 1)
    return float(np.exp(readout.log_probs[0, 0, 0]))


@typed()
def track_token(
    model: Runner, prompt: Prompt, token: int | str, *, position: int = -1, hooks: HookSpec | None = None
) -> NDArray[np.float32]:
    """The probability of a token after each layer, [layers], at one position of a prompt.

    `logit_lens(prompts, token_ids=[token], positions=-1)` follows it in a list.

    Raises:
        InputError: several prompts, or no such token or position.

    Example:
        model.track_token("The capital of France is", "Paris")  # float32 [n_layers]
    """
    lens = logit_lens(model, one_text(model, prompt).ids, hooks, k=1, positions=position, token_ids=[token])
    return np.exp(lens.readout.log_probs[:, 0, 1])


@typed()
def track_race(
    model: Runner,
    source: Prompt | Mapping[int, ArrayLike],
    k: int = 5,
    *,
    position: int = -1,
    hooks: HookSpec | None = None,
) -> dict[int, Scored]:
    """The top tokens of each layer at one position.

    Args:
        source: a prompt, or {layer: residual [hidden]}, which `position` and `hooks` do not apply to.
        k: how many tokens a layer.
        position: of the prompt, negative from its end.
        hooks: interventions to run the prompt with.

    Returns:
        {layer: [(token id, probability)]}.

    Raises:
        InputError: several prompts, NaN, another width, or a k or position that does not exist.

    Example:
        model.track_race("The capital of France is", k=3)[2]  # the top three after layer 2
    """
    if isinstance(source, Mapping) and IDS not in source:
        if not source or position != -1 or hooks is not None:
            raise InputError("track_race takes a prompt, or {layer: residual} with nothing but k")
        rows = [streams_of(residual, model.hidden_size, f"layer {layer}") for layer, residual in source.items()]
        return dict(zip(map(int, source), read_vectors(model, np.stack(rows), k), strict=True))
    lens = logit_lens(model, one_text(model, source).ids, hooks, k=k, positions=position)
    return {layer: lens.best(layer, 0) for layer in range(model.num_layers)}
