"""`features`: the features of a sparse autoencoder that are most active at each token of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.network import ranking
from mionnx.analysis.features.sae import SAE
from mionnx.errors import HookError, InputError, InterventionError
from mionnx.inputs.tokens import Tokens
from mionnx.machine.brief import count, spelled
from mionnx.machine.ranges import index_within
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.view import Columns, HeatMap, Shown, Text, View, readable

FOLLOWED = 40  # features whose activations are given at every token, if none are named


@typed(leave=["prompt"])
def features(
    model: Runner,
    prompt: str | Tokens,
    sae: SAE,
    k: int = 10,
    *,
    follow: Sequence[int] | None = None,
    hooks: HookSpec | None = None,
) -> FeatureActivations:
    """The most active features at each token.

    They are ranked inside the graph: no [seq, d_sae] array leaves it, and what comes after is not computed.

    Args:
        prompt: a text; `harvest(texts, None, folder, sae=sae)` ranks the features of a list, in batches, on disk.
        k: number of features at each token.
        follow: features whose activations are wanted at every token; if left out, the largest among the k of any
            token.

    Raises:
        InputError: k is not between 1 and the number of features, or the prompt is not one text.
        HookError, InterventionError: an SAE that does not fit the model, or features that it does not have.

    Example:
        active = model.features("The capital of Japan is", SAE.load("saes/layer_2"), k=4)
        active.top(-1)  # [(feature, activation)] at the last token
    """
    if not 1 <= k <= sae.d_sae:
        raise InputError(f"k={k} of {sae.d_sae} features")
    tokens = model.tokenize(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(tokens, Tokens):
        raise InputError(f"features are those of one text, or of Tokens, got {prompt!r}")
    chosen = None if follow is None else [sae.number_of(feature) for feature in follow]
    # The graph follows one feature at least; its column is cut off below.
    ids, values, followed = _ranked(model, tokens, sae, k, chosen or [0], hooks)
    if chosen is None:
        chosen = _largest(ids, values)
        # Which features are largest is known only now: a second run follows them through all tokens.
        followed = _ranked(model, tokens, sae, k, chosen or [0], hooks)[2]
    if not chosen:
        followed = followed[:, :0]
    return FeatureActivations(sae.config.hook, tuple(tokens.pieces), ids, values, np.array(chosen, int), followed)


def _ranked(
    model: Runner, tokens: Tokens, sae: SAE, k: int, followed: Sequence[int], hooks: HookSpec | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Top features [seq, k] and their activations, and activations of followed ones [seq, n]."""
    where = sae.config.hook
    if not where:
        raise HookError("the SAE's file does not say what it reads: SAE.load(path, hook='blocks.3....')")
    inputs = {"k": np.array([k]), "followed": np.array(followed, np.int64)}
    spec = HookSpec().extend(hooks or HookSpec())
    if spec.captures:
        raise InterventionError("features() has captures of its own: give it interventions only")
    spec.intervene(where, Intervention.Splice(ranking(sae.config, sae.weights, inputs)))
    names = [f"{where}.hook_{name}" for name in ("top_ids", "top_values", "followed")]
    cache = model.forward(tokens, spec.capture(names), logits=False)
    ids, values, along = (cache[name][0] for name in names)
    return ids, values, along


def _largest(ids: np.ndarray, values: np.ndarray) -> list[int]:
    """The features with the largest activations among those ranked; none that is nowhere active."""
    order = np.argsort(-values, axis=None, kind="stable")
    # Where fewer than k features are active at a token, the rest of its k have the activation 0.
    return [*dict.fromkeys(ids.ravel()[order][values.ravel()[order] > 0].tolist())][:FOLLOWED]


PRINTED_TOKENS = 6  # tokens of a printed result, the last ones
MAP_FEATURES = 20  # features in the picture
MAP_TOKENS = 60  # tokens in the picture


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class FeatureActivations(Shown):
    """The features of a text's tokens.

    Attributes:
        hook: the hook point that was encoded.
        tokens: [seq], as texts.
        ids, values: [seq, k], the features with the largest activations, the largest first, and these activations.
        followed, activations: [n], features whose activations are known at every token, and [seq, n], these.
    """

    hook: str
    tokens: tuple[str, ...]
    ids: NDArray[np.int64]
    values: NDArray[np.float32]
    followed: NDArray[np.int64]
    activations: NDArray[np.float32]

    def of(self, feature: int) -> NDArray[np.float32]:
        """[seq]: one followed feature's activation at every token."""
        at = np.flatnonzero(self.followed == feature)
        if not len(at):
            raise InterventionError(f"feature {feature} was not followed: features(..., follow=[{feature}])")
        return self.activations[:, at[0]]

    def top(self, position: int) -> list[tuple[int, float]]:
        """The features active at one token, the most active first."""
        position = index_within("position", position, len(self.tokens))
        pairs = zip(self.ids[position], self.values[position], strict=True)
        return [(int(feature), float(value)) for feature, value in pairs if value > 0]

    def _facts(self) -> Iterator[str]:
        yield from (self.hook, count(len(self.tokens), "token"), f"top {count(self.ids.shape[1], 'feature')}")
        yield f"{len(self.followed)} followed"

    def _lines(self) -> Iterator[str]:
        for position, token in list(enumerate(self.tokens))[-PRINTED_TOKENS:]:
            best = [f"{feature} ({spelled(value)})" for feature, value in self.top(position)[:5]]
            yield f"{position} {token!r}: {', '.join(best) or 'none'}"

    def to_dict(self) -> dict[str, Any]:
        """All attributes; the followed features' activations as [n, seq]."""
        return {**super().to_dict(), "activations": self.activations.T}

    def view(self) -> View:
        """Text coloured by a feature of choice, features of each token, and the strongest as a map."""
        scores: dict[int, Any] = dict(zip(self.followed.tolist(), self.activations.T, strict=True))
        followed = {*scores}
        for position in range(len(self.tokens)):
            for feature, value in self.top(position):
                # Only what was among the largest is known of the others.
                if feature not in followed:
                    scores.setdefault(feature, {})[position] = value
        numbers = {feature: number for number, feature in enumerate(scores)}
        chips = [[(numbers[feature], value) for feature, value in self.top(at)] for at in range(len(self.tokens))]
        facts = [self._fact(feature, of) for feature, of in scores.items()]
        text = Text(self.tokens, [*scores.values()], diverging=False, facts=facts, chips=chips, chooses=True)
        about = (
            f"{len(self.tokens)} tokens at {self.hook}. The text is coloured by one feature's activation; choose it "
            "here, or click it below. Of a feature that was not followed, only where it is among the largest is known."
        )
        options = [str(feature) for feature in scores]
        panels = [text, *self._maps()]
        return View(f"Features at {self.hook}", panels, meaning=about, choice="feature", options=options)

    def _fact(self, feature: int, scores: Any) -> str:
        values = [*scores.values()] if isinstance(scores, dict) else scores.tolist()
        active = [value for value in values if value > 0]
        most = readable(max(active, default=0))
        return f"feature {feature} is active at {len(active)} of {len(self.tokens)} tokens, at most {most}"

    def _maps(self) -> list[HeatMap]:
        """The strongest followed features over the first tokens."""
        order = np.argsort(-self.activations.max(axis=0, initial=0), kind="stable")[:MAP_FEATURES]
        if not len(order):
            return []
        axes = {"feature": [str(self.followed[at]) for at in order], "token": self.tokens[:MAP_TOKENS]}
        more = len(self.tokens) - MAP_TOKENS
        note = f"and {more} more tokens" if more > 0 else ""
        numbers = {"activation": np.maximum(self.activations[:MAP_TOKENS, order].T, 0)}
        return [HeatMap(axes, numbers, diverging=False, heading="The strongest followed features", note=note)]

    def _columns(self) -> Columns:
        rows = [
            (position, self.tokens[position], feature, value)
            for position in range(len(self.tokens))
            for feature, value in self.top(position)
        ]
        return dict(zip(("position", "token", "feature", "activation"), zip(*rows, strict=True), strict=True))
