"""Every error that mionnx raises on purpose: one class per kind, all of them an `MIError`."""

import difflib
from collections.abc import Iterable


class MIError(Exception):
    """Something asked of mionnx cannot be done; the message says what, where, and the nearest valid choice."""


class HookError(MIError):
    """A hook point that the model does not have, or that was not captured."""


class InterventionError(MIError):
    """An intervention that would not take effect as asked: wrong shape, position, head, row, kind or value."""


class InputError(MIError):
    """Tokens, masks, positions or a cache that the model cannot run on."""


class ModelError(MIError):
    """A hooked model folder that is corrupt, incomplete, unsafe, or made by another format version."""


class SpecFileError(MIError):
    """A saved `HookSpec`, or another file, that cannot be read or written."""


class TokenizerError(MIError):
    """No tokenizer, or a text that it cannot place."""


class ExportError(MIError):
    """A checkpoint that cannot become a hooked model."""


class RuntimeMissingError(MIError, ImportError):
    """No ONNX Runtime, or not the execution provider asked for."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A clause naming the valid choice nearest to `name`, to end an error message with; empty if there is none."""
    found = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""
