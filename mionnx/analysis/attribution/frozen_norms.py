"""`FrozenNorms`: contributions through norms between additions, and through the transform of a masked LM's head.

A norm with its scale held at the actual stream's is a linear map (`linear_parts`), so what a layer adds passes those
behind it linearly: to the head it counts as its product with one direction, the head's own taken back through them.
What the head makes of the last stream is a line by RelP's rules: an activation x f(x) takes f for constant, and a norm
its scale. What is left of the logit is biases: of the norms, and of the head.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.attribution import decompose
from mionnx.analysis.attribution.decompose import Named, layers_with_shares
from mionnx.analysis.attribution.linear_parts import LinearNorm, LinearParts, Part
from mionnx.bind.logit_selection import Logits
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import NORMED_STREAM
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

Vector = NDArray[np.float64]


def sums_have_names(hooked: HookedModel) -> bool:
    """Whether a stream is normed after each addition, and the sums before these norms are hook points."""
    layers = range(hooked.metadata.sizes.num_layers)
    sums = {str(point(i)) for i in layers for point in (HookPoint.ResidMidSum, HookPoint.ResidPostSum)}
    return NORMED_STREAM in hooked.metadata.exporter and sums <= hooked.metadata.hooks.keys()


def reads_through(model: Runner) -> bool:
    """Whether the logits are no product with the final norm's output: norms stand between, or a head's transform."""
    return sums_have_names(model.hooked) or model.opened(LinearParts).front is None


class FrozenNorms:
    """The norms of one model's stream, none where it is a plain sum (ModernBERT), and the head as a direction."""

    def __init__(self, model: Runner, hooks: HookSpec | None, texts: int) -> None:
        # The head of each text is read by itself, where rows are no longer those of the list.
        if texts > 1 and hooks is not None and any(one.rows is not None for _, one in hooks.interventions):
            raise InputError(
                "rows= of a list: where parts go through norms between additions, or a transform in the head, give "
                "prompts one at a time"
            )
        self.model, self.hooks, self.normed = model, hooks, sums_have_names(model.hooked)
        self.end = str(HookPoint.ResidPost(model.num_layers - 1))

    @cached_property
    def additions(self) -> Named:
        """What is added to the stream, the embedding behind its norm first."""
        named = [("embed", str(HookPoint.ResidPre(0)))]
        if not self.normed:
            return named + decompose.additions(self.model.hooked, self.model.num_layers, "all", False, False)
        for i in range(self.model.num_layers):
            named += [(f"{i}_attn_out", str(HookPoint.AttnOut(i))), (f"{i}_mlp_out", str(HookPoint.MlpOut(i)))]
        return named

    @cached_property
    def norms(self) -> list[tuple[Part, tuple[str, ...]]]:
        """Each norm of the stream, with the beginnings of the labels of what is added right before it."""
        norms = list[tuple[Part, tuple[str, ...]]]()
        for i in range(self.model.num_layers) if self.normed else ():
            norms.append(((str(HookPoint.ResidMidSum(i)), str(HookPoint.ResidMid(i))), (f"L{i}H", f"{i}_attn")))
            norms.append(((str(HookPoint.ResidPostSum(i)), str(HookPoint.ResidPost(i))), (f"{i}_mlp",)))
        return norms

    @property
    def points(self) -> list[str]:
        """The hook points to capture."""
        names = [name for _, name in self.additions]
        names += [str(HookPoint.AttnResult(i)) for i in layers_with_shares(self.model.hooked)]
        return [*names, *(before for (before, _), _ in self.norms), self.end]

    def contributions(
        self,
        parts: Mapping[str, Vector],
        cache: HookCache,
        column: int,
        ids: NDArray[np.int64],
        index: int,
        tokens: tuple[int, int | None],
        logit: float,
    ) -> tuple[list[str], Vector]:
        """Labels and contributions [component] to a logit, or difference, at an index of a text."""
        direction = self._head(ids, index, tokens)
        head_bias = logit - float(cache[self.end][0, column].astype(np.float64) @ direction)
        norm_bias, shares = 0.0, dict[str, float]()
        for part, begins in reversed(self.norms):
            norm = self._norm(part, cache[part[0]][0, [column]])
            norm_bias += float(norm.bias @ direction)
            direction = norm.turned(direction)[0]
            shares |= {label: float(parts[label] @ direction) for label in parts if label.startswith(begins)}
        # in front of all norms: the embedding; where there are none, every part
        shares |= {label: float(part @ direction) for label, part in parts.items() if label not in shares}
        values = [shares[label] for label in parts]
        biases = {"norm_bias": norm_bias} if self.normed else {}
        return [*parts, *biases, "head_bias"], np.array([*values, *biases.values(), head_bias])

    def _norm(self, part: Part, stream: NDArray[np.floating]) -> LinearNorm:
        # All norms are one graph, opened once.
        return self.model.opened(LinearParts).linear(part, stream, tuple(one for one, _ in self.norms))

    def _head(self, ids: NDArray[np.int64], index: int, tokens: tuple[int, int | None]) -> Vector:
        """The direction [hidden] of the last stream whose product with it is the logit but for biases."""
        answer, versus = tokens
        spec = HookSpec().extend(self.hooks or HookSpec()).gradient(self.end)
        name = "logit" if versus is None else "logit_diff"
        spec.set_metric(name, answer=answer, versus=versus, position=index, rules="relp")
        cache = self.model.forward(ids, spec, logits=Logits(positions=index))
        return np.asarray(cast(HookCache, cache.grad)[self.end][0, index], np.float64)
