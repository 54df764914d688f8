"""The verb that shows attention."""

from collections.abc import Callable, Sequence

import numpy as np

from mionnx.analysis.attention.attention import AttentionPatterns
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.run.prompt import one_text
from mionnx.run.runner import Prompt, Runner
from mionnx.spec.hook_spec import HookSpec


class AttentionVerbs(Runner):
    """Attention patterns, and an RWKV's effective attention."""

    def attention(
        self,
        prompt: Prompt,
        layers: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
        *,
        hooks: HookSpec | None = None,
    ) -> AttentionPatterns:
        """Which token reads which, to be looked through head by head.

        Args:
            prompt: one text, or ids.
            layers, heads: which; all if left out.
            hooks: interventions to run the prompt with.

        Raises:
            InputError: several prompts, no such layer or head, or captures among the hooks.
        """
        text = one_text(self, prompt)
        chosen, shown = _chosen("layer", layers, self.num_layers), _chosen("head", heads, self.num_heads)
        spec = HookSpec().extend(hooks or HookSpec())
        if spec.captures:
            raise InputError("the hooks given to `attention` are interventions: what it captures are the patterns")
        effective = self.hooked.metadata.recurrent
        point: Callable[[int], HookPoint] = HookPoint.RwkvEffectiveAttn if effective else HookPoint.AttnPattern
        for layer in chosen:
            spec.capture(point(layer), heads=shown)
        cache = self.forward(text.ids, spec, logits=False)
        patterns = np.stack([cache[point(layer)][0].astype(np.float32) for layer in chosen])
        return AttentionPatterns(text.tokens, chosen, shown, patterns, effective)


def _chosen(what: str, given: int | Sequence[int] | None, count: int) -> list[int]:
    wanted = range(count) if given is None else [given] if isinstance(given, int | np.integer) else given
    found = [int(one) for one in wanted if isinstance(one, int | np.integer) and 0 <= one < count]
    if len(found) != len(wanted) or not found or len({*found}) != len(found):
        raise InputError(f"{what}s {given!r}: the model has the {what}s 0 to {count - 1}; name each once")
    return found
