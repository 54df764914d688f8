"""Reading a model: the logit lens, direct logit attribution, attention patterns."""

from mionnx.reading.attention import AttentionPatterns
from mionnx.reading.attribution import Attribution
from mionnx.reading.lens import LensResult
from mionnx.reading.reading import Reading

__all__ = ["AttentionPatterns", "Attribution", "LensResult", "Reading"]
