"""Numbers that a browser has to find too, before it shows any: logits of `forward`, plain and with interventions."""

from typing import Any

import numpy as np

from mionnx.graph.hook_points import HookPoint
from mionnx.model import MIModel
from mionnx.playground.graph import PlaygroundGraph
from mionnx.spec.attention_knockout import KnockoutSpec, create_knockout_mask
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

LENGTH, CHECKED_LOGITS = 6, 32  # tokens of the prompt; logits that are compared
TOLERANCE = 1e-3  # of the largest logit


def reference(model: MIModel, graph: PlaygroundGraph) -> dict[str, Any]:
    """The check of a runtime: a prompt, interventions, and some logits of its last position.

    A runtime whose logits are further from these than the tolerance is not used.
    """
    vocabulary, layer = model.vocab_size, model.num_layers // 2
    tokens = np.arange(3, 3 + 7 * LENGTH, 7) % vocabulary
    shown = np.linspace(0, vocabulary - 1, min(CHECKED_LOGITS, vocabulary)).astype(int)
    spec, entries = _changes(model, layer, graph)
    logits = [model.forward(tokens[None], one).output()[0, -1, shown] for one in (None, spec)]
    largest = max(float(np.abs(one).max()) for one in logits)
    return {
        "tokens": tokens.tolist(),
        "ids": shown.tolist(),
        "tolerance": TOLERANCE * max(largest, 1.0),
        "runs": [
            {"interventions": changes, "logits": [round(float(x), 6) for x in one]}
            for changes, one in zip(([], entries), logits, strict=True)
        ],
    }


def _changes(model: MIModel, layer: int, graph: PlaygroundGraph) -> tuple[HookSpec, list[dict[str, Any]]]:
    """A spec of several kinds, and the same as the page's entries."""
    spec, entries = HookSpec(), []
    limits: dict[str, Any] = {"positions": None, "heads": None, "rows": None}
    scores, out, stream = (
        str(point(layer)) for point in (HookPoint.AttnScores, HookPoint.AttnOut, HookPoint.ResidPost)
    )
    if scores in graph.sites:
        mask = create_knockout_mask(KnockoutSpec().edge(LENGTH - 1, 1), model.num_heads, LENGTH)
        spec.intervene(scores, Intervention.Knockout(mask))
        entries.append({"hook": scores, "kind": "knockout", **limits, "value": {"edges": [[LENGTH - 1, 1]]}})
    if out in graph.sites:
        spec.intervene(out, Intervention.Scale(0.5))
        entries.append({"hook": out, "kind": "scale", **limits, "value": 0.5})
    spec.intervene(stream, Intervention.Add(0.25, positions=[-1, 2]))
    entries.append({"hook": stream, "kind": "add", **limits, "positions": [-1, 2], "value": 0.25})
    return spec, entries
