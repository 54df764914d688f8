"""`Reading`: the verbs that look at what a model computes, without changing it."""

from mionnx.reading.attention_verbs import AttentionVerbs
from mionnx.reading.attribution_verbs import AttributionVerbs
from mionnx.reading.lens_verbs import LensVerbs


class Reading(LensVerbs, AttributionVerbs, AttentionVerbs):
    """The logit lens, direct logit attribution and attention patterns of a hooked model."""
