"""`ridge_lens`: the linear map of each layer's stream that predicts the last one's best, in closed form.

With centred streams x of a layer and y of the last one, J = C_yx (C_xx + p tr(C_xx) / d I)^-1 and b = mean y - J mean x
(ridge regression). No gradients: one pass over the texts, whose second moments are summed (`Moments`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mionnx.analysis.harvest.texts import Source
from mionnx.analysis.jacobian_lens.jacobian_lens import FITTED_ON, JacobianLens
from mionnx.analysis.jacobian_lens.lens_texts import LensTexts, source_layers
from mionnx.analysis.jacobian_lens.pullback import stream
from mionnx.errors import InputError
from mionnx.inputs.lacking import refuse_several_streams, refuse_without_vocabulary
from mionnx.machine.moments import Moments
from mionnx.machine.progress import shown
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec


@typed(leave=["texts"])
def ridge_lens(
    model: Runner,
    texts: Source,
    *,
    layers: Sequence[int] | None = None,
    penalty: float = 1e-3,
    skip: int = 0,
    max_tokens: int = 128,
    column: str | None = None,
    progress: bool | None = None,
) -> JacobianLens:
    """Fit a ridge lens: the linear map of each layer's stream, with a bias, that predicts the last one's best.

    What a tuned lens is trained for by descent, in the last stream instead of the prediction: one forward pass a text.

    Args:
        texts, layers, max_tokens, column, progress: see `fit_lens`.
        penalty: of the squared map, as a share of the mean variance of a layer's stream.
        skip: first positions that do not count; the last one does not either.

    Raises:
        InputError: no text that is long enough, no such layer, fewer tokens than two.

    Example:
        model.logit_lens("The capital of France is", lens=model.ridge_lens(texts))
    """
    refuse_without_vocabulary(model.hooked, "a lens")
    refuse_several_streams(model.hooked, "a lens")
    if not 0 < penalty < float("inf"):
        raise InputError(f"penalty={penalty}: a finite number above 0")
    chosen, source = source_layers(model, layers), LensTexts(model, texts, column, skip, max_tokens)
    last, sums, count = stream(model.num_layers - 1), dict[int, Moments](), 0
    spec = HookSpec().capture([*map(stream, chosen), last])
    with shown(progress) as show:
        for ids in source:
            cache = model.forward(ids[None], HookSpec().extend(spec), logits=False)
            at = source.positions(ids)
            for layer in chosen:
                both = np.concatenate([cache[stream(layer)][0, at], cache[last][0, at]], axis=1)
                part = Moments.of(both, products=True)
                sums[layer] = sums[layer].merged(part) if layer in sums else part
            count += 1
            show("ridge lens", count, source.source.count)
    model.give_back(later=True)
    if not count or sums[chosen[0]].count[0] < 2:
        raise InputError("a ridge lens needs two tokens at least, of texts that are long enough")
    matrices, biases, width = {}, {}, model.hidden_size
    for layer, moments in sums.items():
        assert moments.products is not None
        within, across = moments.products[:width, :width], moments.products[:width, width:]
        inverse = within + penalty * np.trace(within) / width * np.eye(width)
        matrices[layer] = np.linalg.solve(inverse, across).T
        biases[layer] = moments.mean[0, width:] - matrices[layer] @ moments.mean[0, :width]
    metadata = {
        "model": model.hooked.name,
        FITTED_ON: model.hooked.weights_sha256,
        "estimator": "ridge_lens",
        "penalty": penalty,
        "target_layer": model.num_layers - 1,
        "max_seq_len": max_tokens,
        "skip_first_positions": skip,
        "n_prompts": count,
    }
    return JacobianLens(matrices, biases=biases, n_prompts=count, metadata=metadata)
