"""`attention`: attention patterns of one text by layer and head, as `AttentionPatterns`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.memory import format_bytes
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.hook_cache import HookCache
from mionnx.run.nan_logits import numbers
from mionnx.run.prompt import is_list, texts_of
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.view import Shown, new_figure, render
from mionnx.view.figure import token_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLD = 6  # weights of a printed result
LEVELS = 255  # a weight on a page is (level / 255)^2, which keeps small weights apart
MOST = 2**26  # bytes of weights that a page may hold
WORDS = 40  # tokens up to which a figure of one head names them


@dataclass(frozen=True, repr=False)
@typed(InputError)
class AttentionPatterns(Shown):
    """Attention patterns of one text; effective attention for an RWKV model.

    Attributes:
        tokens: of the prompt.
        layers, heads: numbers of the layers and heads in `patterns`.
        patterns: [layer, head, query, key], float32.
        effective: whether they are the effective attention of an RWKV model, positive and normalised.
    """

    tokens: list[str]
    layers: list[int]
    heads: list[int]
    patterns: NDArray[np.float32]
    effective: bool

    frame_height = 720

    def of(self, layer: int, head: int) -> NDArray[np.float32]:
        """One head's pattern, [query, key].

        Raises:
            InputError: a layer or head that was not captured.
        """
        if layer not in self.layers or head not in self.heads:
            raise InputError(f"layer {layer}, head {head}: there are the layers {self.layers} and heads {self.heads}")
        return self.patterns[self.layers.index(layer), self.heads.index(head)]

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
        for layer, head, key in np.transpose(np.unravel_index(np.argsort(-last, None, "stable")[:TOLD], last.shape)):
            token = f"{key} {self.tokens[key]!r}"
            yield f"{decimal(last[layer, head, key])}  layer {self.layers[layer]}, head {self.heads[head]}: {token}"

    @property
    def title(self) -> str:
        """Title of figures and pages."""
        return "Effective attention" if self.effective else "Attention patterns"

    def to_dict(self) -> dict[str, Any]:
        """All attributes, in full precision."""
        return {
            "tokens": self.tokens,
            "layers": self.layers,
            "heads": self.heads,
            "effective": self.effective,
            "patterns": self.patterns,
        }

    def page(self) -> str:
        """Render an HTML page of the patterns, token by token and head by head; weights in 8 bits.

        Raises:
            InputError: more weights than a page can hold: choose layers or heads.
        """
        self._refuse_too_large(self.patterns.size // 2)
        causal = not any(np.triu(layer, 1).any() for layer in self.patterns)
        kept = self.patterns[..., *np.tril_indices(len(self.tokens))] if causal else self.patterns
        self._refuse_too_large(kept.size)
        levels = np.rint(np.sqrt(np.clip(kept, 0, 1)) * LEVELS).astype(np.uint8)
        data = {
            "tokens": self.tokens,
            "layers": self.layers,
            "heads": self.heads,
            "causal": causal,
            "weights": base64.b64encode(levels.tobytes()).decode(),
        }
        return render("attention.html", self.title, data=data)

    def _refuse_too_large(self, size: int) -> None:
        if size > MOST:
            raise InputError(
                f"a page of {len(self.layers)} layers, {len(self.heads)} heads and {len(self.tokens)} tokens would "
                f"hold {format_bytes(size)} of weights, and {format_bytes(MOST)} are the most: choose layers= or heads="
            )

    def figure(self) -> Figure:
        """Draw all heads side by side, a row a layer; one head alone with its tokens."""
        if self.patterns.shape[:2] == (1, 1):
            return self._single()
        layers, heads, size, _ = self.patterns.shape
        tiles = np.full((layers, size + 1, heads, size + 1), np.nan, np.float32)
        tiles[:, :size, :, :size] = self.patterns.transpose(0, 2, 1, 3)
        figure, axes = new_figure(1.2 + 0.8 * heads, 0.9 + 0.8 * layers)
        from matplotlib.colors import Normalize, PowerNorm

        scale = PowerNorm(0.5, 0, 1) if size > WORDS else Normalize(0, 1)
        image = axes.imshow(tiles.reshape(layers * (size + 1), -1), cmap="Blues", norm=scale, aspect="auto")
        middles = (size + 1) * np.arange(max(layers, heads)) + size / 2
        axes.set_xticks(middles[:heads], [str(head) for head in self.heads])
        axes.set_yticks(middles[:layers], [str(layer) for layer in self.layers])
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        axes.set_title(f"{self.title}: queries downwards, keys to the right", fontsize=9)
        figure.colorbar(image, fraction=0.03, label="weight" + (" (square-root scale)" if size > WORDS else ""))
        return figure

    def _single(self) -> Figure:
        count = len(self.tokens)
        side = 1.6 + min(12.0, 0.35 * max(count, 6))
        figure, axes = new_figure(side + 0.8, side)
        image = axes.imshow(self.patterns[0, 0], cmap="Blues", vmin=0, vmax=1)
        if count <= WORDS:
            words = [token_label(token)[:14] for token in self.tokens]
            axes.set_xticks(range(count), words, rotation=90, fontsize=8)
            axes.set_yticks(range(count), words, fontsize=8)
        axes.set_xlabel("key: what is read")
        axes.set_ylabel("query: what reads")
        axes.set_title(f"layer {self.layers[0]}, head {self.heads[0]}", fontsize=10)
        figure.colorbar(image, fraction=0.04, label="weight")
        return figure


@overload
def attention(
    model: Runner,
    prompt: str,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    *,
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
    hooks: HookSpec | None = None,
    batch_size: BatchSize = AUTO,
) -> AttentionPatterns | list[AttentionPatterns]:
    """Capture the attention patterns of one text: the weight of each key for each query.

    Args:
        prompt: one text, or ids; or a list of them, which gives a list of results.
        layers, heads: numbers of layers and heads; by default all.
        hooks: interventions to run the prompt with.
        batch_size: most texts of a pass, those of like length together; "auto": as many as run well and fit into
            memory; None: all at once.

    Raises:
        InputError: no such layer or head, or captures among the hooks.

    Example:
        patterns = model.attention("The capital of France is", layers=2)
        patterns.of(2, 0)[-1]  # weights of the last token's query, [key]
    """
    texts = texts_of(model, prompt)
    chosen, shown = _checked("layer", layers, model.num_layers), _checked("head", heads, model.num_heads)
    spec = HookSpec().extend(hooks or HookSpec())
    if spec.captures:
        raise InputError("the hooks given to `attention` are interventions: what it captures are the patterns")
    effective = model.hooked.metadata.recurrent
    point: Callable[[int], HookPoint] = HookPoint.RwkvEffectiveAttn if effective else HookPoint.AttnPattern
    for layer in chosen:
        spec.capture(point(layer), heads=shown)

    def read(row: int, cache: HookCache) -> AttentionPatterns:
        patterns = np.stack([numbers(cache)[point(layer)][0].astype(np.float32) for layer in chosen])
        return AttentionPatterns(texts[row].tokens, chosen, shown, patterns, effective)

    request = ListRequest([text.ids for text in texts], spec, batch_size, logits=False)
    made = map_rows(model, request, read, "attention")
    return made if is_list(model, prompt) else made[0]


def _checked(what: str, given: int | Sequence[int] | None, count: int) -> list[int]:
    wanted = range(count) if given is None else [given] if isinstance(given, int | np.integer) else given
    found = [int(one) for one in wanted if isinstance(one, int | np.integer) and 0 <= one < count]
    if len(found) != len(wanted) or not found or len({*found}) != len(found):
        raise InputError(f"{what}s {given!r}: the model has the {what}s 0 to {count - 1}; name each once")
    return found
