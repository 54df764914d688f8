"""A warning of dynamic quantisation: what a token computes then depends on all tokens of the call."""

import warnings

from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.caller import caller_level


class DynamicRoundingWarning(UserWarning):
    """Activations are rounded with one scale for a call: batches change results."""


def warn_of_dynamic_rounding(model: HookedModel) -> None:
    """Warn of a dynamically quantised model, when it is opened."""
    if model.rounds_by_call:
        warnings.warn(
            f"{model.name} rounds its activations to 8 bits with one scale for all tokens of a call (dynamic "
            "quantisation): rows of a batch, padding, earlier positions and cached decoding change each other's "
            "results by about the size of a step. Sweeps run one cell a call, all positions of it",
            DynamicRoundingWarning,
            stacklevel=caller_level(),
        )
