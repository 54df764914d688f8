"""`Attribution`: the direct contribution of each component of a model to a logit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.view import Bars, Columns, HeatMap, Shown, Text, View, readable

PRINTED_COMPONENTS = 6  # components of a printed result
_PLACE = re.compile(r"L(\d+)H(\d+)|(\d+)_")  # of a label with a layer
MEANING = (
    "What each component adds to the logit directly, the final norm held at the scale of this position's stream; red "
    "raises it, blue lowers it. What a component does through later layers is theirs, not its own."
)


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class Attribution(Shown):
    """Direct logit attribution at one position: a logit, or a difference of two, as a sum.

    The final norm is taken as the linear map that it is at this position's stream (see
    `mionnx.analysis.attribution.linear_parts`), so that contributions add up exactly. What a component does through
    later layers is not in its contribution: this is its direct effect. With a soft cap (Gemma 2) the logits are those
    before it.

    Attributes:
        labels: of the components in the order in which they are added: "embed", "pos_embed", "L0H0", "0_attn_bias",
            "0_mlp_out", ..., "final_norm_bias", "head_bias"; "0_attn_out" of layers whose heads have no shares (mixers,
            JetMoE); "norm_bias" for the biases of all norms where the stream is normed after each addition (BERT).
        values: [component] contributions, in logits.
        num_heads: heads a layer; 0 where none have shares.
        logit: the model's own logit, or difference, which the contributions add up to.
        capped: whether the model's logits are soft-capped after this.
        answer, versus: the tokens' texts; versus is None where the logit itself is taken apart.
        position: at which the next token is predicted.
    """

    labels: list[str]
    values: NDArray[np.float64]
    num_heads: int
    num_layers: int
    logit: float
    capped: bool
    answer: str
    versus: str | None
    tokens: list[str]
    position: int

    def __getitem__(self, label: str) -> float:
        """The contribution of one component."""
        return dict(zip(self.labels, self.values.tolist(), strict=True))[label]

    def _facts(self) -> Iterator[str]:
        yield f"{self.what}: {decimal(self.logit, 4)}"
        yield count(len(self.labels), "component")

    def _lines(self) -> Iterator[str]:
        yield f"at position {self.position}, after {self.tokens[self.position]!r}; the largest contributions:"
        for label, value in self.top(PRINTED_COMPONENTS):
            yield f"{decimal(value, 3, sign=True):>9}  {label}"

    @property
    def heads(self) -> NDArray[np.float64] | None:
        """[layer, head]: the contributions of heads, NaN in layers where they have no shares; None without any."""
        return heads_of(self.labels, self.values, self.num_layers)

    @property
    def total(self) -> float:
        """The sum of all contributions."""
        return float(self.values.sum())

    def top(self, k: int | None = None) -> list[tuple[str, float]]:
        """The components with the largest contributions of either sign; all if `k` is left out."""
        return leading(self.labels, self.values, k)

    @property
    def what(self) -> str:
        """The logit or difference of logits, in words."""
        tokens = f"{self.answer!r}" + ("" if self.versus is None else f" minus that of {self.versus!r}")
        return f"logit of {tokens}" + (" before the soft cap" if self.capped else "")

    IN_JSON = ("tokens", "position", "answer", "versus", "logit", "total", "capped", "labels", "values", "heads")

    def view(self) -> View:
        """Bars, sorted or in order, and the heads as a map."""
        what = f"{self.what} at position {self.position}"
        return view_of(self, what, self.logit, Text(self.tokens, here=self.position))

    def _columns(self) -> Columns:
        return {**places_of(self.labels), "contribution": self.values}


def view_of(
    contributions: Attribution | Attributions, what: str, logit: float, *above: Text, errors: Numbers | None = None
) -> View:
    """Contributions as bars, and those of heads as a map, below the logit in words."""
    gap = abs(float(contributions.values.sum()) - logit)
    facts = (
        f"{what}: {readable(logit)}, the sum of {len(contributions.labels)} components (which differ from it by "
        f"{readable(gap)})."
    )
    panels: list[Bars | HeatMap] = [
        Bars(contributions.labels, contributions.values, "logits", errors, heading="Components")
    ]
    if contributions.heads is not None:
        with_heads = np.flatnonzero(~np.isnan(contributions.heads).all(axis=1))
        labels = {"layer": [*map(str, with_heads)], "head": [*map(str, range(contributions.heads.shape[1]))]}
        panels.append(HeatMap(labels, {"logits": contributions.heads[with_heads]}, heading="Heads"))
    about = f"{contributions.what}: {decimal(logit, 3)}"
    return View("Direct logit attribution", [*above, panels], about=about, facts=facts, meaning=MEANING)


def leading(labels: list[str], values: Numbers, k: int | None) -> list[tuple[str, float]]:
    """The k labels with the largest values of either sign, and the values; all if `k` is None."""
    at_least("k", 0 if k is None else k, 0)
    order = np.argsort(-np.abs(values), kind="stable")[:k]
    return [(labels[i], float(values[i])) for i in order]


def heads_of(labels: list[str], values: NDArray[np.float64], layers: int) -> NDArray[np.float64] | None:
    """[layer, head]: the contributions of heads among those of components; None without any."""
    places = places_of(labels)
    chosen = [row for row, head in enumerate(places["head"]) if head is not None]
    if not chosen:
        return None
    heads = np.full((layers, 1 + max(places["head"][row] for row in chosen)), np.nan)
    for row in chosen:
        heads[places["layer"][row], places["head"][row]] = values[row]
    return heads


def places_of(labels: list[str]) -> dict[str, list[Any]]:
    """Component, layer and head of each label; None where it has none."""
    matches = [_PLACE.match(label) for label in labels]
    layers = [None if one is None else int(one[1] or one[3]) for one in matches]
    heads = [None if one is None or one[2] is None else int(one[2]) for one in matches]
    return {"component": labels, "layer": layers, "head": heads}


Numbers = NDArray[np.float64]
TWO = 2  # prompts from which on there is a spread


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class Attributions(Shown, Sequence[Attribution]):
    """The `Attribution` of each of several prompts, as a sequence, and their mean."""

    each: tuple[Attribution, ...]
    INSIDE: ClassVar = (Attribution,)

    @overload
    def __getitem__(self, row: int) -> Attribution: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Attribution, ...]: ...
    def __getitem__(self, row: int | slice) -> Attribution | tuple[Attribution, ...]:
        return self.each[row]

    def __len__(self) -> int:
        return len(self.each)

    @property
    def n(self) -> int:
        return len(self.each)

    @property
    def labels(self) -> list[str]:
        """The components, as in each `Attribution`."""
        return self.each[0].labels

    @property
    def by_pair(self) -> Numbers:
        """[prompts, component]: the contributions in each prompt."""
        return np.stack([one.values for one in self.each])

    @property
    def values(self) -> Numbers:
        """[component]: the mean contributions."""
        return np.asarray(self.by_pair.mean(axis=0))

    @property
    def std(self) -> Numbers:
        """[component]: the standard deviation over prompts (by n - 1); NaN for one."""
        return np.full(len(self.labels), np.nan) if self.n < TWO else np.asarray(self.by_pair.std(axis=0, ddof=1))

    @property
    def sem(self) -> Numbers:
        """[component]: the standard error of the mean."""
        return np.asarray(self.std / np.sqrt(self.n))

    @property
    def logits(self) -> Numbers:
        """[prompts]: the logit, or difference, that the contributions add up to."""
        return np.array([one.logit for one in self.each])

    @property
    def heads(self) -> Numbers | None:
        """[layer, head]: the mean contributions of the heads; None where they have no shares."""
        return heads_of(self.labels, self.values, self.each[0].num_layers)

    @property
    def what(self) -> str:
        """The logit or difference of logits, in words."""
        quantity = "logit of the answer" if self.each[0].versus is None else "lead of the answer"
        return f"mean {quantity} over {count(self.n, 'prompt')}{' before the soft cap' * self.each[0].capped}"

    def top(self, k: int | None = None) -> list[tuple[str, float]]:
        """The components with the largest mean contributions of either sign; all if `k` is left out."""
        return leading(self.labels, self.values, k)

    def _facts(self) -> Iterator[str]:
        yield f"{self.what}: {decimal(float(self.logits.mean()), 4)}"
        yield count(len(self.labels), "component")

    def _lines(self) -> Iterator[str]:
        yield "the largest mean contributions, ± is the standard error:"
        errors = dict(zip(self.labels, self.sem, strict=True))
        for label, value in self.top(PRINTED_COMPONENTS):
            yield f"{decimal(value, 3, sign=True):>9}±{decimal(errors[label], 3)}  {label}"

    def to_dict(self) -> dict[str, Any]:
        facts = ("tokens", "position", "answer", "versus", "logit")
        names = ("n", "labels", "values", "std", "sem", "heads", "by_pair")
        values = {name: getattr(self, name) for name in names}
        return {**values, "prompts": [{name: getattr(one, name) for name in facts} for one in self.each]}

    def _columns(self) -> Columns:
        places = {name: column * self.n for name, column in places_of(self.labels).items()}
        pairs = np.repeat(np.arange(self.n), len(self.labels))
        return {"pair": pairs, **places, "contribution": self.by_pair.ravel()}

    def view(self) -> View:
        """Bars of the means with their standard errors, and the heads as a map."""
        return view_of(self, self.what, float(self.logits.mean()), errors=None if self.n < TWO else self.sem)
