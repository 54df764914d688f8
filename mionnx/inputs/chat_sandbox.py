"""Render chat templates: the program of the process that `chat_renderer.py` starts.

It imports jinja2 and the standard library. A template comes with a checkpoint and is not trusted: it runs in jinja2's
immutable sandbox, on plain JSON values, in an address space of bounded size. The names that it may use are those that
transformers gives it.

Lines of JSON come in, {"template", "variables"}, and one goes out for each: {"text"} or {"error"}. The first line that
goes out says that the program is ready.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, TextIO

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 2**30  # bytes of the process
LONGEST_CHAT = 2**22  # characters of a rendered chat
CACHED = 8  # compiled templates


class GenerationTag(Extension):
    """Tag `{% generation %}`, which marks the assistant's text for training: its body stays."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        """The statements between the tag and its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def raise_exception(message: str) -> None:
    """Refuse a chat: a function for templates."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """Spell today's date: a function for templates."""
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Spell a value as JSON, HTML characters as they are: a filter for templates."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    """Make the sandbox, with the functions, filters and tags that chat templates know."""
    sandbox = ImmutableSandboxedEnvironment(
        # as transformers sets them: they decide which white space around tags becomes tokens
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return sandbox


def rendered(compiled: Callable[[str], jinja2.Template], template: str, variables: dict[str, Any]) -> dict[str, str]:
    """Render a template: its text, or the error that it ends with."""
    try:
        pieces, length = [], 0
        # piece by piece: a loop without end is seen by the length of what it has written
        for piece in compiled(template).generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > LONGEST_CHAT:
                return {"error": f"its text is longer than {LONGEST_CHAT} characters"}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:  # a template may fail in any way that Python has
        return {"error": str(error) or type(error).__name__}


def limit_memory() -> None:
    """Bound this process' address space, where the system can."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    with suppress(ValueError, OSError):  # macOS has the limit's name and refuses to set it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def serve(questions: TextIO, answers: TextIO) -> None:
    """Answer lines until there are no more."""
    compiled = lru_cache(CACHED)(environment().from_string)
    print("{}", file=answers, flush=True)
    for line in questions:
        request = json.loads(line)
        print(json.dumps(rendered(compiled, request["template"], request["variables"])), file=answers, flush=True)


if __name__ == "__main__":
    limit_memory()
    serve(sys.stdin, sys.stdout)
