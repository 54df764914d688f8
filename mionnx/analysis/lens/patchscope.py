"""`patchscope`: an activation read by what a model generates when it stands in another prompt.

Ghandeharioun et al. 2024, "Patchscopes" (arXiv 2401.06102): the residual stream of a source prompt, at a position and a
layer, is mapped by f and takes the place of a placeholder's in a target prompt, which the target model continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.lens.logit_lens import stream_names
from mionnx.errors import InputError, InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.lacking import refuse_without_cache
from mionnx.inputs.tokens import decode
from mionnx.machine.arrays import to_array
from mionnx.machine.brief import count, spelled
from mionnx.machine.decimals import decimal
from mionnx.machine.softmax import softmax
from mionnx.machine.typed import typed
from mionnx.run.generation import generate
from mionnx.run.prompt import PromptText, one_text, prompt_text, token_of, token_text
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.view import Columns, Lines, Series, Shown, Table, View, long_form

IDENTITY = "cat->cat; 135->135; hello->hello; ?"  # the paper's prompt that asks for the token itself
Mapping = Callable[[NDArray[Any]], Any] | None


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class Patchscope(Shown):
    """What a target prompt is continued with, for each source layer.

    Attributes:
        source, target: the two prompts.
        token, replaced: the source's token whose stream is read, and the target's whose stream it replaces.
        position, placeholder: their places, counted from the texts' starts.
        points: the hook points that were read, one a row.
        targets: the hook points that were replaced, one a row.
        texts: per row what was generated; `plain` is the target's own continuation, without a patch.
        top_ids, top: [rows, k]: the most likely first tokens, and their probabilities, float64.
        token_ids: tokens that are followed; `followed` [rows + 1, tokens] are their probabilities as the first token,
            in the last row without a patch.
        names: id -> text of these tokens.
    """

    source: str
    target: str
    token: str
    replaced: str
    position: int
    placeholder: int
    points: list[str]
    targets: list[str]
    texts: list[str]
    plain: str
    top_ids: NDArray[np.int64]
    top: NDArray[np.float64]
    token_ids: list[int]
    followed: NDArray[np.float64]
    names: dict[int, str]

    @property
    def layers(self) -> list[int]:
        """The source layers."""
        return [HookPoint.parse(name).layer or 0 for name in self.points]

    def _facts(self) -> Iterator[str]:
        yield f"{spelled(self.token)} read in {spelled(self.target)}"
        yield count(len(self.points), "layer")

    def _lines(self) -> Iterator[str]:
        for layer, text, share in zip(self.layers, self.texts, self.top[:, 0], strict=True):
            yield f"{layer:>3}  {decimal(float(share))}  {text!r}"
        yield f"without a patch  {self.plain!r}"

    def table(self, k: int | None = None) -> Table:
        """Table of what is generated: a row a source layer, or the first k."""
        title = next(iter(self._facts()))
        table = Table("from", "into", "continuation", "first token", "probability", title=title)
        rows = zip(self.points, self.targets, self.texts, self.top_ids[:, 0].tolist(), self.top[:, 0], strict=True)
        for point, into, text, token, share in [*rows][:k]:
            table.add_row(point, into, text, self.names[token], decimal(float(share), 3))
        table.add_row("no patch", "", self.plain, "", "", style="dim")
        return table

    def view(self) -> View:
        """Curves of the first tokens' probabilities over the layers, and the continuations."""
        tokens = self.token_ids or [int(self.top_ids[0, 0])]
        if self.token_ids:
            columns = self.followed[:-1].T
        else:
            columns = np.where(self.top_ids == tokens[0], self.top, 0).sum(axis=1)[None]
        series = [Series(self.names[token], values) for token, values in zip(tokens, columns, strict=True)]
        of = f" of {self.names[tokens[0]]!r}" if len(tokens) == 1 else ""  # one curve has no legend
        label = f"probability{of} as the first token"
        curves = Lines([*map(str, self.layers)], series, "source layer", label, low=0, high=1)
        facts = f"Without a patch: {self.plain!r}"
        about = f"{self.token!r} of {self.source!r} in place of {self.replaced!r} of {self.target!r}"
        return View("Patchscope", [curves, self.table()], about, facts)

    def _columns(self) -> Columns:
        rows = [*zip(self.layers, self.points, self.targets, self.texts, strict=True)]
        axes = {"layer, from, into, continuation": rows, "rank": range(self.top.shape[1])}
        tokens = np.array([self.names[token] for token in self.top_ids.ravel().tolist()], object)
        return long_form(axes, {"token": tokens, "probability": self.top})


@typed(leave=["target_model"])
def patchscope(
    model: Runner,
    source: Prompt,
    position: int = -1,
    *,
    target: Prompt = IDENTITY,
    placeholder: str | int = -1,
    layers: Sequence[int] | None = None,
    target_layer: int | None = None,
    hook: str = "resid_post",
    target_model: Any = None,
    mapping: Mapping = None,
    max_new_tokens: int = 5,
    k: int = 5,
    token_ids: Sequence[int | str] = (),
) -> Patchscope:
    """Read activations by what a model says when they stand in another prompt (a patchscope).

    The stream of each source layer is put in place of one token's of the target prompt, all layers as rows of one
    batch beside a row without a patch, and each row is continued greedily.

    Args:
        source: the prompt whose stream is read.
        position: of the source's token, negative from the end.
        target: the prompt that is continued; by default the paper's, which asks for the token itself.
        placeholder: the token of the target whose stream is replaced: a position, or a part of the text that is one
            token (its last occurrence).
        layers: source layers; all if left out, but those whose patch the continuation could not see.
        target_layer: the layer at which every row is patched; if left out, each row's own source layer.
        hook: the stream of a layer: "resid_post", "resid_mid" or "resid_pre".
        target_model: another model that continues the target; `mapping` brings the streams to its width.
        mapping: f, a function of [rows, width] that gives what is put into the target.
        max_new_tokens: how many tokens a row is continued by.
        k: how many of the most likely first tokens are kept.
        token_ids: tokens by id or text, whose probability as the first token is followed over the layers.

    Raises:
        InputError: several prompts, no such position, layer or token, a placeholder that is not one token, or a
            mapping that gives another shape than the target's.
        HookError: a model without such a stream.
        InterventionError: a patch that the continuation could not see, such as at the last layer before the last token.

    Example:
        scope = model.patchscope("France has its capital in", 0, target="The capital of Japan is", placeholder="Japan")
        scope.texts[1]  # what is said with the stream after layer 1 of "France" in place of "Japan"
    """
    other = model if target_model is None else target_model
    if not isinstance(other, Runner):
        raise InputError(f"target_model={spelled(target_model)} is no model: MIModel.from_pretrained opens one")
    if other.bidirectional:
        refuse_without_cache(other.hooked, "patchscope")
    if not 1 <= k <= other.vocab_size:
        raise InputError(f"the top {k} of {other.vocab_size} tokens")
    text, into = one_text(model, source), one_text(other, target)
    place, at = text.place(position), placeholder_of(other, into, target, placeholder)
    points = stream_names(model, layers, hook)
    targets = [_target(other, name, target_layer, hook) for name in points]
    seen = [at == len(into) - 1 or not _last(other, name) for name in targets]
    if layers is None and target_layer is None:
        points, targets = ([name for name, one in zip(names, seen, strict=True) if one] for names in (points, targets))
    elif not all(seen):
        name = targets[seen.index(False)]
        raise InterventionError(
            f"no later token reads {name} of the placeholder, token {at} of {len(into)}: patch an earlier layer, or "
            "the last token"
        )
    cache = model.forward(text.ids, HookSpec().capture(points, positions=place), logits=False)
    streams = np.stack([cache[name][0, 0] for name in points])
    values = _mapped(streams, mapping, other.hidden_size)
    spec = HookSpec()
    for row, (name, value) in enumerate(zip(targets, values, strict=True)):
        spec.intervene(name, Intervention.Replace(value, positions=at, rows=row))
    batch = np.tile(into.ids, (len(points) + 1, 1))
    run = generate(other, batch, spec, max_new_tokens=max_new_tokens, output_logits=True, batch_size=None)
    shares = softmax(run.steps[0].output()[:, -1].astype(np.float64), axis=-1)
    other.give_back(later=True)
    return _result(model, other, (text, into, place, at), (points, targets), run.new_ids, shares, token_ids, k)


def _result(
    model: Runner,
    other: Runner,
    prompts: tuple[PromptText, PromptText, int, int],
    hooks: tuple[list[str], list[str]],
    new_ids: Sequence[NDArray[np.int64]],
    shares: NDArray[np.float64],
    tokens: Sequence[int | str],
    k: int,
) -> Patchscope:
    """The result of continuations, and of the probabilities [rows + 1, vocab] of their first tokens."""
    text, into, place, at = prompts
    followed = [token_of(other, token) for token in tokens]
    top_ids = np.argsort(-shares[:-1], axis=1, kind="stable")[:, :k].astype(np.int64)
    names = {token: token_text(other, token) for token in {*top_ids.ravel().tolist(), *followed}}
    said = [_said(other, row.tolist()) for row in new_ids]
    top = np.take_along_axis(shares[:-1], top_ids, axis=1)
    return Patchscope(
        source=prompt_text(model, text.ids),
        target=prompt_text(other, into.ids),
        token=text.tokens[place],
        replaced=into.tokens[at],
        position=place,
        placeholder=at,
        points=hooks[0],
        targets=hooks[1],
        texts=said[:-1],
        plain=said[-1],
        top_ids=top_ids,
        top=top,
        token_ids=followed,
        followed=shares[:, followed],
        names=names,
    )


def _said(model: Runner, ids: list[int]) -> str:
    return decode(model.tokenizer, ids) if model.has_tokenizer else " ".join(map(str, ids))


def placeholder_of(model: Runner, text: PromptText, prompt: Prompt, placeholder: str | int) -> int:
    """The position of the token that a placeholder names; a part of the text that is several tokens is refused."""
    if not isinstance(placeholder, str):
        return text.place(placeholder)
    if not isinstance(prompt, str):
        raise InputError(f"placeholder={placeholder!r} is a part of a text, and the target is no text: give a position")
    places = model.tokenize(prompt).positions_of(placeholder, -1)
    if len(places) != 1:
        pieces = ", ".join(repr(text.tokens[place]) for place in places)
        raise InputError(
            f"placeholder={placeholder!r} is {len(places)} tokens ({pieces}), and a patch replaces one: choose a part "
            "that is one token, or a position"
        )
    return places[0]


def _last(model: Runner, name: str) -> bool:
    """Whether a stream is read by its own token's logits alone: behind what mixes tokens in the last layer."""
    point = HookPoint.parse(name)
    behind = ("resid_post",) if model.hooked.metadata.shifts_tokens else ("resid_post", "resid_mid")
    return point.layer == model.num_layers - 1 and point.short in behind


def _target(model: Runner, name: str, layer: int | None, hook: str) -> str:
    """The hook point of the target for a row's source."""
    number = HookPoint.parse(name).layer if layer is None else layer
    if number not in range(model.num_layers):
        raise InputError(f"target layer {number}: the target's model has layers 0 to {model.num_layers - 1}")
    return stream_names(model, [int(number or 0)], hook)[0]


def _mapped(streams: NDArray[Any], mapping: Mapping, width: int) -> NDArray[Any]:
    """Streams [rows, width] as the target takes them."""
    if mapping is None:
        if streams.shape[1] != width:
            raise InputError(
                f"the source's stream has width {streams.shape[1]} and the target's model {width}: mapping= brings one "
                "to the other"
            )
        return streams
    try:
        values = to_array(mapping(streams))
    except (TypeError, ValueError) as error:
        raise InputError(f"mapping= failed on streams {list(streams.shape)}: {error}") from error
    if values.shape != (len(streams), width):
        raise InputError(f"mapping= gave {list(values.shape)}, and the target takes {[len(streams), width]}")
    return values
