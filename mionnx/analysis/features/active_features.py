"""`features`: the features of a sparse autoencoder that are most active at each token of a text."""

from collections.abc import Sequence

import numpy as np

from mionnx.analysis.features.activations import FeatureActivations
from mionnx.analysis.features.network import ranking
from mionnx.analysis.features.sae import SAE
from mionnx.errors import HookError, InputError, InterventionError
from mionnx.inputs.tokens import Tokens
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

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
        sae: the SAE or transcoder.
        k: how many features a token.
        follow: features whose activations are wanted at every token; if left out, the largest among the k of any
            token.
        hooks: interventions that are in force.

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
    chosen = None if follow is None else [sae.known(feature) for feature in follow]
    ids, values, followed = _ranked(model, tokens, sae, k, chosen or [0], hooks)
    if chosen is None:
        chosen = _largest(ids, values)
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
    for name in names:
        spec.capture(name)
    cache = model.forward(tokens, spec, logits=False)
    ids, values, along = (cache[name][0] for name in names)
    return ids, values, along


def _largest(ids: np.ndarray, values: np.ndarray) -> list[int]:
    """The features with the largest activations among those ranked; none that is nowhere active."""
    order = np.argsort(-values.ravel(), kind="stable")
    active = [int(ids.ravel()[at]) for at in order if values.ravel()[at] > 0]
    return [*dict.fromkeys(active)][:FOLLOWED]
