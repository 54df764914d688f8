"""Every error that mionnx raises on purpose: one class per kind, all of them an `MIError`."""

import difflib
from collections.abc import Iterable


class MIError(Exception):
    """Base of all errors; the message names the hook or argument, and the nearest valid choice."""


class HookError(MIError):
    """Unknown hook point, or one without a captured value."""


class InterventionError(MIError):
    """Intervention without the effect asked for: wrong shape, position, head, row or value."""


class GradientError(MIError):
    """A gradient that cannot be computed: no rule, no metric, or no dependence on a hook point."""


class InputError(MIError):
    """Tokens, masks, positions or a cache that the model cannot run on."""


class ModelError(MIError):
    """Hooked model folder that is corrupt, incomplete, unsafe or of another format version."""


class SpecFileError(MIError):
    """A saved `HookSpec`, or another file, that cannot be read or written."""


class TokenizerError(MIError):
    """No tokenizer, or a text that it cannot place."""


class ExportError(MIError):
    """A checkpoint that cannot become a hooked model."""


class RuntimeMissingError(MIError, ImportError):
    """ONNX Runtime, or the requested execution provider, is not installed."""


def install(extra: str) -> str:
    """The command that installs an extra; mionnx is on no package index, so of a checkout."""
    return f"pip install -e '.[{extra}]' in a checkout of mionnx"


def nearest(name: str, choices: Iterable[str]) -> str:
    """End of an error message with the valid choice nearest to a name; empty if none is near."""
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
