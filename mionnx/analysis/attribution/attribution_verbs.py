"""The verb that takes a logit apart."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.attribution import decompose
from mionnx.analysis.attribution.attribution import Attribution
from mionnx.analysis.attribution.linear_norm import Frozen, freeze
from mionnx.analysis.attribution.norm_graphs import Part, output_norms
from mionnx.analysis.attribution.stack_verbs import StackVerbs
from mionnx.bind.logit_selection import Logits
from mionnx.errors import InputError, ModelError
from mionnx.graph.hook_points import HookPoint
from mionnx.run.hook_cache import HookCache
from mionnx.run.prompt import (
    Text,
    one_text,
    spell,
    token_of,
)
from mionnx.run.runner import Prompt
from mionnx.spec.hook_spec import HookSpec

Vector = NDArray[np.float64]
BEHIND = (HookPoint.FinalNorm, HookPoint.Logits)
SLACK = {4: 1e-5, 2: 2e-2, 8: 1e-5}  # bytes of a float -> what sums may miss, relative to the sum of all sizes


class AttributionVerbs(StackVerbs):
    """Direct logit attribution."""

    def attribute(
        self,
        prompt: Prompt,
        answer: int | str | None = None,
        versus: int | str | None = None,
        *,
        position: int = -1,
        hooks: HookSpec | None = None,
    ) -> Attribution:
        """Take a logit, or the lead of one token over another, apart into what every component contributes directly.

        The parts are the embeddings, every head, what attention outputs have beside their heads (biases), the MLPs, and
        the biases of the final norm and the head. Heads go through a norm behind the attention (Gemma 2) as through the
        final one.

        Args:
            prompt: one text, or ids.
            answer: by id or text; the likeliest token if left out.
            versus: the token that the answer's lead is over; None for the answer's logit itself.
            position: at which the next token is predicted; negative from the end.
            hooks: interventions to run the prompt with; one on the stream itself is no component, and an error, and so
                is one at `hook_final_norm` or `hook_logits`, where all components have been added up.

        Raises:
            InputError: several prompts, no such position or token, or captures among the hooks, or interventions
                behind the stream.
            ModelError: the contributions do not add up to the model's own logit.
        """
        text = one_text(self, prompt)
        place = text.place(position)
        cache = self._at(text, place, hooks)
        logits = cache.output()[0, 0]
        chosen = int(logits.argmax()) if answer is None else token_of(self, answer)
        against = None if versus is None else token_of(self, versus)
        if chosen == against:
            raise InputError(f"answer and versus are both token {chosen}: their difference is 0")
        parts = self._parts(cache)
        bare = self._unembed.bare(logits, cache[self._end][0, 0])
        values = self._contributions(np.stack(list(parts.values())), cache, chosen, against)
        logit = float(bare[chosen] - (0 if against is None else bare[against]))
        self._refuse_gap(values, logit)
        return Attribution(
            [*parts, "final_norm_bias", "head_bias"],
            values,
            0 if self.hooked.metadata.recurrent else self.num_heads,
            self.num_layers,
            logit,
            self._unembed.head.capped,
            spell(self, chosen),
            None if against is None else spell(self, against),
            text.tokens,
            place,
        )

    @property
    def _end(self) -> HookPoint:
        return HookPoint.ResidPost(self.num_layers - 1)

    def _at(self, text: Text, place: int, hooks: HookSpec | None) -> HookCache:
        """Everything that the stream is the sum of, at one position."""
        spec = HookSpec().extend(hooks or HookSpec())
        if spec.captures:
            raise InputError("the hooks of an attribution are interventions: what it captures are its own components")
        for point in BEHIND:
            if spec.has_intervention_at(point):
                raise InputError(f"an intervention at {point} comes behind the stream, and changes no component of it")
        for request in self.decomposition_hooks().captures:
            spec.capture(request.what, positions=place)
        return self.forward(text.ids, spec, logits=Logits(positions=place))

    def _parts(self, cache: HookCache) -> dict[str, Vector]:
        """Label -> what it adds to the stream, [hidden], in order."""
        parts: dict[str, Vector] = {}
        for label, name in decompose.additions(self.hooked, self.num_layers, "all", False, True):
            value = cache[name][0, 0].astype(np.float64)
            layer = HookPoint.parse(name).layer or 0
            if label.endswith("_attn_out") and not self.hooked.metadata.recurrent:
                shares = self._shares(cache, layer)
                parts |= {f"L{layer}H{head}": share for head, share in enumerate(shares)}
                parts[f"{layer}_attn_bias"] = value - shares.sum(axis=0)
            else:
                parts[label] = value
        return parts

    def _shares(self, cache: HookCache, layer: int) -> Vector:
        """[head, hidden]: what each head adds to the stream, through a norm behind the attention if there is one."""
        shares = cache[HookPoint.AttnResult(layer)][0, 0]
        if layer not in self._output_norms:
            return shares.astype(np.float64)
        part = self._output_norms[layer]
        norms = self._norms(list(self._output_norms.values()))
        whole = shares.sum(axis=0, keepdims=True)
        frozen = freeze(lambda rows: norms.run(part, rows), whole, self._place(part))
        return frozen.apply(shares[:, None])[:, 0]

    def _contributions(self, stack: Vector, cache: HookCache, answer: int, versus: int | None) -> Vector:
        frozen: Frozen = self._frozen(cache, self.num_layers, False, None)
        ids = np.array([answer, *([] if versus is None else [versus])])
        directions = self._unembed.directions(ids)
        direction = directions[0] - (directions[1] if len(ids) > 1 else 0)
        offset = self._unembed.offset(answer) - (0 if versus is None else self._unembed.offset(versus))
        given = frozen.project(stack[:, None, None], direction)[:, 0, 0]
        return np.concatenate([given, [frozen.bias @ direction, offset]])

    def _refuse_gap(self, values: Vector, logit: float) -> None:
        slack = SLACK[np.dtype(self.hooked.dtype(self._end)).itemsize]
        gap = abs(float(values.sum()) - logit)
        if not gap <= slack * max(1.0, float(np.abs(values).sum())):
            raise ModelError(
                f"{self.hooked.metadata.family}: the components contribute {values.sum():.5f}, and the logit is "
                f"{logit:.5f}: something else is added to the stream, or an intervention changes the stream itself"
            )

    @cached_property
    def _output_norms(self) -> dict[int, Part]:
        return output_norms(self.hooked)
