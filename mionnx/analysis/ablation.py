"""Effect of an intervention on the next-token distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from mionnx.errors import InputError
from mionnx.machine.brief import Brief, spelled
from mionnx.machine.decimals import decimal
from mionnx.machine.softmax import log_softmax
from mionnx.machine.stored import Stored
from mionnx.machine.typed import typed
from mionnx.run.sampling import logit_vector
from mionnx.spec.attention_knockout import KnockoutSpec
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec


@dataclass(frozen=True)
class TokenChange:
    """One token's probability before and after."""

    token: int
    baseline: float
    ablated: float

    @property
    def change(self) -> float:
        """After minus before."""
        return self.ablated - self.baseline


@typed(InputError)
class AblationResult(Brief, Stored):
    """Two next-token distributions, without and with an intervention.

    Attributes:
        baseline_logits, ablated_logits: [vocab].
        spec: the intervention (a `KnockoutSpec`, a `HookSpec`), for the record.
    """

    INSIDE: ClassVar = (HookSpec, KnockoutSpec, StateKnockoutSpec, StateSteeringSpec)

    def __init__(self, baseline_logits: ArrayLike, ablated_logits: ArrayLike, spec: Any = None) -> None:
        self.baseline_logits, self.ablated_logits = logit_vector(baseline_logits), logit_vector(ablated_logits)
        self.spec = spec
        if self.baseline_logits.shape != self.ablated_logits.shape:
            raise InputError(f"logits of {self.baseline_logits.shape[0]} and {self.ablated_logits.shape[0]} tokens")

    def _contents(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        return cls(**contents)

    def kl_divergence(self) -> float:
        """KL divergence KL(baseline || ablated) in nats, in float64.

        The sum over the whole vocabulary of p (log p - log q).
        """
        log_p, log_q = log_softmax(self.baseline_logits), log_softmax(self.ablated_logits)
        if (np.isneginf(log_q) & ~np.isneginf(log_p)).any():
            return float("inf")  # impossible after, possible before, however unlikely
        likely = np.exp(log_p) > 0  # p log p is 0 where p is; the logarithms stay, since exp(log_q) may underflow to 0
        terms = np.exp(log_p[likely]) * (log_p[likely] - log_q[likely])
        return max(float(terms.sum()), 0.0)

    def logit_diff(self, token: int, versus: int | None = None) -> float:
        """Drop of a token's logit, or of its lead over another token: baseline minus ablated."""
        drop = self.baseline_logits - self.ablated_logits
        return float(drop[self._known(token)] - (0 if versus is None else drop[self._known(versus)]))

    def top_changed_tokens(self, k: int = 10) -> list[TokenChange]:
        """The k tokens whose probability changed most, most first; equal changes by token id.

        Raises:
            InputError: k is below 1.
        """
        if k < 1:
            raise InputError(f"the top {k} tokens: at least 1")
        before, after = (np.exp(log_softmax(logits)) for logits in (self.baseline_logits, self.ablated_logits))
        order = np.argsort(-np.abs(after - before), kind="stable")[:k]
        return [TokenChange(int(token), float(before[token]), float(after[token])) for token in order]

    def _facts(self) -> Iterator[str]:
        yield f"KL(baseline || ablated) {spelled(self.kl_divergence())} nats"
        yield f"{len(self.baseline_logits)} tokens"

    def _lines(self) -> Iterator[str]:
        if self.spec is not None:
            yield f"with {spelled(self.spec)}"
        for one in self.top_changed_tokens(5):
            yield f"token {one.token}: probability {decimal(one.baseline, 4)} -> {decimal(one.ablated, 4)}"

    def _known(self, token: int) -> int:
        if not 0 <= token < len(self.baseline_logits):
            raise InputError(f"token {token}; the vocabulary is 0 to {len(self.baseline_logits) - 1}")
        return token


class StateAblationResult(AblationResult):
    """Distributions of an RWKV model; its `spec` is a `StateKnockoutSpec` or a `StateSteeringSpec`."""
