"""Every error that mionnx raises on purpose: one class per kind, all of them an `MIError`."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST = 8_000  # characters of a message


class MIError(Exception):
    """Base of all errors; the message names the hook or argument, and the nearest valid choice."""

    def __str__(self) -> str:
        words = super().__str__()
        # Libraries quote what they read: of a damaged file that can be all of it.
        return words if len(words) <= LONGEST else f"{words[:LONGEST]}… ({len(words):,} characters in all)"


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


class UnknownNameError(MIError, AttributeError):
    """Unknown attribute; the message translates another library's name."""


class UnknownImportError(MIError, ImportError):
    """Unknown name of `from mionnx import`; the message is an `UnknownNameError`'s."""


class UnknownKeywordError(MIError, TypeError):
    """Unknown keyword of a verb; the message translates another library's."""


class RuntimeMissingError(MIError, ImportError):
    """ONNX Runtime, or the requested execution provider, is not installed."""


def install(extra: str) -> str:
    """The command that installs an extra; mionnx is on no package index, so of a checkout."""
    return f"pip install -e '.[{extra}]' in a checkout of mionnx"


def nearest(name: object, choices: Iterable[str]) -> str:
    """End of an error message with the valid choice nearest to a name; empty if none is near."""
    matches = difflib.get_close_matches(str(name), list(choices), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


@contextmanager
def boundary(kind: type[MIError], sentence: str) -> Iterator[None]:
    """Turn what a library throws at a file into one refusal that begins with `sentence`; an `MIError` passes."""
    try:
        yield
    except (MIError, ImportError):  # whoever calls says which package is missing
        raise
    except BaseException as error:
        # Rust's panics are no Exception, and neither is Ctrl-C, which goes on.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = str(error) if type(error) is Exception else f"{type(error).__name__}: {error}"
        raise kind(f"{sentence}: {words}") from error
