"""`attention`: attention patterns of one text by layer and head, as `AttentionPatterns`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.attention.massive import Massive, about_sinks, massive_in, streams_after
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint, Layered
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.hook_cache import HookCache
from mionnx.run.nan_logits import numbers
from mionnx.run.prompt import is_list, texts_of
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.view import Columns, Patterns, Shown, View, long_form

PRINTED_WEIGHTS = 6  # weights of a printed result


@dataclass(frozen=True, repr=False)
@typed(InputError)
class AttentionPatterns(Shown):
    """Attention patterns of one text, or effective attention of layers with a state.

    Attributes:
        layers, heads: numbers of the layers and heads in `patterns`.
        patterns: [layer, head, query, key], float32.
        effective: whether they are effective attention, of a recurrence, positive and normalised.
        massive: massive activations of the streams behind these layers: (layer, position, feature, number), see
            `mionnx.analysis.attention.massive`.
    """

    tokens: list[str]
    layers: list[int]
    heads: list[int]
    patterns: NDArray[np.float32]
    effective: bool
    massive: list[Massive] = field(default_factory=list)

    frame_height = 720  # pixels of the page in a notebook

    def of(self, layer: int, head: int) -> NDArray[np.float32]:
        """One head's pattern, [query, key].

        Raises:
            InputError: a layer or head that was not captured.
        """
        if layer not in self.layers or head not in self.heads:
            raise InputError(f"layer {layer}, head {head}: there are the layers {self.layers} and heads {self.heads}")
        return self.patterns[self.layers.index(layer), self.heads.index(head)]

    @property
    def first_token(self) -> NDArray[np.float64]:
        """Mean attention of later tokens to the first one, [layer, head]; above 0.3 a head is a sink.

        Raises:
            InputError: a text of one token.
        """
        if len(self.tokens) < 2:
            raise InputError("a text of one token has no later ones that attend to the first")
        shares: NDArray[np.float64] = self.patterns[:, :, 1:, 0].mean(axis=2, dtype=np.float64)
        return shares

    def at(self, position: int) -> int:
        """Convert a position to one counted from the start.

        Raises:
            InputError: a position that the text does not have.
        """
        if not -len(self.tokens) <= position < len(self.tokens):
            raise InputError(f"position {position} of {len(self.tokens)} tokens (0 to {len(self.tokens) - 1})")
        return position % len(self.tokens)

    def _facts(self) -> Iterator[str]:
        yield from (count(len(self.layers), "layer"), count(len(self.heads), "head"), count(len(self.tokens), "token"))

    def _lines(self) -> Iterator[str]:
        last = self.patterns[:, :, -1]
        yield f"the last token, {self.tokens[-1]!r}, reads most:"
        order = np.argsort(-last, None, "stable")[:PRINTED_WEIGHTS]
        for layer, head, key in np.transpose(np.unravel_index(order, last.shape)):
            token = f"{key} {self.tokens[key]!r}"
            yield f"{decimal(last[layer, head, key])}  layer {self.layers[layer]}, head {self.heads[head]}: {token}"

    def view(self) -> View:
        """The patterns, token by token and head by head; a page has weights of 8 bits."""
        title = "Effective attention" if self.effective else "Attention patterns"
        one = f"layer {self.layers[0]}, head {self.heads[0]}" * (self.patterns.shape[:2] == (1, 1))
        facts = ""
        if len(self.tokens) > 1 and not self.effective:
            facts = about_sinks(self.first_token, self.massive, self.tokens)
        panels = [Patterns(self.tokens, self.layers, self.heads, self.patterns, heading=one)]
        return View(title, panels, facts=facts)

    def _columns(self) -> Columns:
        tokens = [*enumerate(self.tokens)]
        axes: dict[str, Sequence[Any]] = {"layer": self.layers, "head": self.heads}
        axes |= {"query, query_token": tokens, "key, key_token": tokens}
        return long_form(axes, {"weight": self.patterns})


@overload
def attention(
    model: Runner,
    prompt: str,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    *,
    effective: bool | None = None,
    hooks: HookSpec | None = None,
    batch_size: BatchSize = AUTO,
) -> AttentionPatterns: ...
@overload
def attention(
    model: Runner,
    prompt: Prompt,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    *,
    effective: bool | None = None,
    hooks: HookSpec | None = None,
    batch_size: BatchSize = AUTO,
) -> Any: ...
@typed()
def attention(
    model: Runner,
    prompt: Prompt,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    *,
    effective: bool | None = None,
    hooks: HookSpec | None = None,
    batch_size: BatchSize = AUTO,
) -> AttentionPatterns | list[AttentionPatterns]:
    """Capture the attention patterns of one text: the weight of each key for each query.

    Args:
        prompt: one text, or ids; or a list of them, which gives a list of results.
        layers, heads: numbers of layers and heads; by default all. Of Mamba, whose weights differ from channel to
            channel, the channels are the heads.
        effective: whether it is the effective attention of layers with a state, the weight of each token's value in
            the output of the recurrence; by default only where no layer attends. Layers of a hybrid that attend have
            patterns, those with a state effective attention: name the one or the other.
        hooks: interventions to run the prompt with.
        batch_size: as for `forward`.

    Raises:
        InputError: no such layer or head, or captures among the hooks.

    Example:
        patterns = model.attention("The capital of France is", layers=2)
        patterns.of(2, 0)[-1]  # weights of the last token's query, [key]
    """
    texts = texts_of(model, prompt)
    point = pattern_point(model, effective)
    effective = point is not HookPoint.AttnPattern
    having = [i for i in range(model.num_layers) if point(i).name in model.hooked.order]
    if not having:
        what = "state" if effective else "attention"
        raise InputError(f"attention(effective={effective}): no layer of the model has {what}")
    chosen = _checked("layer", layers, having)
    counts = {int(model.hooked.axes(point(layer))[1]) for layer in chosen}
    if len(counts) > 1:
        raise InputError(f"layers {chosen} have {', '.join(map(str, sorted(counts)))} heads: name layers of one kind")
    shown = _checked("head", heads, range(counts.pop()))
    spec = HookSpec().extend(hooks or HookSpec())
    if spec.captures:
        raise InputError("the hooks given to `attention` are interventions: what it captures are the patterns")
    for layer in chosen:
        spec.capture(point(layer), heads=shown)
    streams = streams_after(model, chosen)
    if streams:
        spec.capture([*streams.values()])

    def read(row: int, cache: HookCache) -> AttentionPatterns:
        patterns = np.stack([numbers(cache)[point(layer)][0].astype(np.float32) for layer in chosen])
        massive = massive_in({layer: cache[name] for layer, name in streams.items()})
        return AttentionPatterns(texts[row].tokens, chosen, shown, patterns, effective, massive)

    request = ListRequest([text.ids for text in texts], spec, batch_size, logits=False)
    results = map_rows(model, request, read, "attention")
    return results if is_list(model, prompt) else results[0]


def pattern_point(model: Runner, effective: bool | None = None) -> Layered:
    """The hook point of patterns, or of effective attention; the latter by default where no layer attends."""
    metadata = model.hooked.metadata
    if not (not metadata.attends if effective is None else effective):
        return HookPoint.AttnPattern
    return HookPoint.RwkvEffectiveAttn if metadata.shifts_tokens else HookPoint.SsmEffectiveAttn


def _checked(what: str, numbers: int | Sequence[int] | None, having: Sequence[int]) -> list[int]:
    """The numbers that are meant, all that there are (`having`) if none are named."""
    series = having if numbers is None else [numbers] if isinstance(numbers, int | np.integer) else numbers
    indices = [int(one) for one in series if one in having]
    # A number out of range or given twice makes the two lengths differ.
    if not indices or len({*indices}) != len(series):
        gapless = len(having) == having[-1] + 1
        there = f"{what}s 0 to {having[-1]}" if gapless else f"{what}s with patterns {', '.join(map(str, having))}"
        raise InputError(f"{what}s {numbers!r}: the model has the {there}; name each once")
    return indices
