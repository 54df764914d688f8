"""Options of a verb, from its signature and the `Args:` of its docstring; their values as arguments of the verb.

1. A parameter is an option of its name, with dashes; its help is its entry in `Args:`.
2. "see `patch_sweep`" in an entry stands for the entry there, "see `mionnx.Options`" for the attribute.
3. Its form follows from the annotation: a flag, a number, a text, a file, names with commas, numbers with ranges.
4. What an annotation cannot say (a HookSpec is read from a file) stands in `WORDS`: a word means the same in each verb.
5. An option that is left out is no argument: the verb's own default holds.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import Parameter, getdoc, signature
from pathlib import Path
from pydoc import locate
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from mionnx.analysis.features.sae import SAE
from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.jacobian_lens.jacobian_lens import JacobianLens
from mionnx.analysis.probes.probe_result import ProbeResult
from mionnx.cli.files import lines_of, load_tensor, read_text
from mionnx.compile.monitors import Monitor
from mionnx.errors import InputError
from mionnx.model import MIModel
from mionnx.spec.hook_spec import HookSpec

Verb = Callable[..., Any]
Number = TypeVar("Number", int, float)
MOST = 10_000  # numbers of one range
SAME = {"layers": ["--layer"], "layer": ["--layers"], "heads": ["--head"], "folder": ["-o"], "texts": ["--text"]}
REFERENCE = re.compile(r"\b(?:see|as for) `([\w.]+)`")
MANY = "Several with commas between, or the option again."
NUMBERS = "As 0,3 or 16-29, or the option again."
# Parameters for Python alone: functions, arrays, results of other verbs.
WITHOUT = {"before", "cotangent", "resume", "resume_key", "scores", "shortcuts", "direction"}


@dataclass(frozen=True)
class Form:
    """Form of a parameter on the command line."""

    kind: Any = str  # that typer parses
    argument: Callable[[str, Any], Any] = lambda option, value: value  # of the verb
    metavar: str | None = None
    remark: str = ""  # added to the help, or without an entry in `Args:` the help
    alone: bool = False  # the help is the remark, whatever the entry says

    def described(self, entry: str) -> str:
        """The help of an entry of `Args:`, in Markdown."""
        if self.alone or not entry:
            return self.remark
        text = re.sub(r"[,;]? or a (Python )?function\b[^.]*", "", entry)  # no option takes one
        text = re.sub(r"\bNone\b", "left out", text).replace("if False", "otherwise")
        text = text.replace("*", r"\*")  # a star would begin emphasis
        return " ".join(filter(None, [text[0].upper() + text[1:], self.remark]))


@dataclass(frozen=True)
class Group:
    """Options that become one argument of a command."""

    parameters: Sequence[Parameter]  # as typer reads them
    argument: Callable[[dict[str, Any]], Any]  # their values by name -> the command's argument


def numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    """Parse the comma-separated numbers of an option, ranges of integers such as 16-29 too."""
    try:
        return [number for part in text.split(",") for number in spread(part, kind)]
    except ValueError:
        ranges = " or 2-5" if kind is int else ""
        raise InputError(f"--{option} {text!r}: numbers with commas between, as 0,1{ranges}") from None


def spread(part: str, kind: type[Number]) -> list[Number]:
    """The numbers of a part between commas: one, or all of a range of integers; otherwise a `ValueError`."""
    ends = re.fullmatch(r"\s*(\d+)-(\d+)\s*", part) if kind is int else None
    if ends is None:
        return [kind(part)]
    first, last = int(ends[1]), int(ends[2])
    if not first <= last < first + MOST:  # it would end before it begins, or never
        raise ValueError(part)
    return [kind(number) for number in range(first, last + 1)]


def integers(option: str, texts: Sequence[str]) -> list[int]:
    """The numbers of an option that may be repeated."""
    return [number for text in texts for number in numbers(option, text, int)]


def _places(option: str, text: str) -> list[int] | str:
    """Positions by number, or the text itself: a phase, or a string of the prompt."""
    return numbers(option, text, int) if re.fullmatch(r"[\d\s,-]+", text) else text


def _names(option: str, texts: Sequence[str]) -> list[str]:
    return [name for text in texts for name in text.split(",")]


def _one_or_more(option: str, texts: Sequence[str]) -> str | list[str]:
    names = _names(option, texts)
    return names[0] if len(names) == 1 else names


def _knobs(option: str, texts: Sequence[str]) -> dict[str, list[str] | None]:
    """Name -> the hook points whose strengths it controls; None for all."""
    knobs: dict[str, list[str] | None] = {}
    for text in texts:
        name, _, hook = text.partition("=")
        knobs[name] = [*(knobs.get(name) or []), hook] if hook else None
    return knobs


def _monitors(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Name -> what is read: the top tokens at a hook point, a tensor's products with it, or saved probes."""
    monitors: dict[str, Any] = {}
    for text in texts:
        name, _, source = text.partition("=")
        hook, at, what = source.partition("@")
        top, tensor = re.fullmatch(r"top(\d+)", what), re.fullmatch(r"(.+\.safetensors):(.+)", what)
        if name in monitors:
            raise InputError(f"--{option} {name!r} twice: a monitor has a name of its own")
        if top:
            monitors[name] = Monitor(hook, k=int(top[1]))
        elif tensor:
            monitors[name] = (hook, load_tensor(Path(tensor[1]), tensor[2]))
        elif source and not at:
            monitors[name] = ProbeResult.load(source)
        else:
            raise InputError(f"--{option} {text!r}: NAME=HOOK@top5, NAME=HOOK@FILE.safetensors:KEY or NAME=PROBES")
    return monitors


TEXT, TEXTS = Form(metavar="TEXT"), Form(list[str], metavar="TEXT", remark="May be repeated.")
LINES = Form(Path, lambda _, path: lines_of(path), "FILE", "One a line.")
WORDS = {
    **{name: replace(TEXT, remark=f"The {name} prompt.", alone=True) for name in ("clean", "corrupted")},
    **dict.fromkeys(("prompt", "source"), replace(TEXT, remark="The prompt.", alone=True)),
    "progress": Form(bool, remark="A bar at once, or none; by default where it takes over two seconds.", alone=True),
    **dict.fromkeys(("positive", "negative", "stop_strings", "damage_texts"), TEXTS),
    "batch_size": Form(str, lambda _, text: int(text) if text.isdecimal() else text, "N"),
    "strengths": Form(str, lambda option, text: numbers(option, text, float), "NUMBERS", "As 0,0.5,1."),
    "position": Form(str, lambda _, text: int(text) if re.fullmatch(r"-?\d+", text) else text, "N"),
    "hooks": Form(Path, lambda _, path: HookSpec.load(path), "FILE", "A HookSpec that was saved."),
    "other": Form(str, lambda _, model: MIModel.from_pretrained(model), "MODEL"),
    "lens": Form(Path, lambda _, path: JacobianLens.load(path), "FILE", "A Jacobian, J++, tuned or ridge lens."),
    "edges": Form(str, _places, "NUMBERS", "As 20,50,100, or mib."),
    "sae": Form(Path, lambda _, path: SAE.load(path), metavar="FOLDER"),
    "transcoders": Form(Path, metavar="FOLDER"),
    "toward": Form(metavar="FEATURE"),
    "texts": Form(list[Path], lambda _, paths: [read_text(path) for path in paths], "FILE", "May be repeated."),
    "reference": LINES,
    "knobs": Form(list[str], _knobs, "NAME[=HOOK]", "May be repeated."),
    "monitors": Form(
        *(list[str], _monitors, "NAME=HOOK@WHAT"),
        "WHAT: top5, the five top tokens of the lens, or FILE.safetensors:KEY, products with weights; or NAME=PROBES, "
        "a file of saved probes. May be repeated.",
    ),
    "activations": Form(Path, lambda _, folder: Activations(folder), "FOLDER"),
    "labels": Form(Path, lambda _, path: [line or None for line in lines_of(path, blank=True)], "FILE"),
    "groups": replace(LINES, argument=lambda _, path: lines_of(path, blank=True)),
}


def options_of(
    verbs: Sequence[Verb],
    positional: Sequence[str] = (),  # parameters whose values stand without an option
    optional: Iterable[str] = (),  # parameters that the command takes from elsewhere, where they are left out
    words: Mapping[str, str] = MappingProxyType({}),  # parameter -> option, where the two differ
    without: Iterable[str] = (),
    only: Sequence[str] = (),  # if there are any, the others are no options
    panel: str | None = None,  # heading of the options in the help
) -> Group:
    """Options of one or several verbs; those of a command line become keyword arguments."""
    forms: dict[str, Form] = {}
    options: dict[str, Parameter] = {}
    for verb in verbs:
        hints, helps = get_type_hints(verb), help_of(verb)
        for name, parameter in signature(verb).parameters.items():
            if name in {"self", "model", *WITHOUT, *without, *forms} or (only and name not in only):
                continue
            if parameter.kind is Parameter.VAR_KEYWORD:
                continue  # as of Ray's twin, whose other options the verb has
            form, word = _form(name, hints[name]), words.get(name, name)
            required = parameter.default is Parameter.empty and name not in optional
            about: dict[str, Any] = {"help": form.described(helps.get(name, "")), "rich_help_panel": panel}
            about["show_default"] = name not in optional and _default(parameter.default)
            if name in positional:
                shape = typer.Argument(metavar=word.upper(), **about)
            else:
                shape = typer.Option(*_spellings(word, form, parameter.default), metavar=form.metavar, **about)
            forms[name], options[name] = form, keyword(word, form.kind, shape, ... if required else None)

    def arguments(values: dict[str, Any]) -> dict[str, Any]:
        parsed = {name: values[option.name] for name, option in options.items()}
        return {
            name: forms[name].argument(options[name].name.replace("_", "-"), value)
            for name, value in parsed.items()
            # What is left out is no argument: the verb's own default holds.
            if value not in (None, [])
        }

    order = [*positional, *(name for name in options if name not in positional)]
    return Group([options[name] for name in order], arguments)


def keyword(name: str, kind: Any, shape: Any, default: Any) -> Parameter:
    """A parameter with its `typer.Option` or `typer.Argument`; `...`: without a default."""
    annotation: Any = Annotated[kind | None if default is None else kind, shape]
    empty = Parameter.empty if default is ... else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=empty, annotation=annotation)


def _spellings(word: str, form: Form, default: Any) -> list[str]:
    flag = "--" + word.replace("_", "-")
    # A flag that is on by default, or undecided, needs a way to say no.
    if form.kind is bool and default is not False:
        return [f"{flag}/--no-{flag[2:]}"]
    return [flag, *SAME.get(word, ())]


def _default(default: Any) -> str | bool:
    """A default in the help; nothing where it is a value for "left out"."""
    if default in (Parameter.empty, None, "", ()) or default is False:  # 0 is a default
        return False
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _members(hint: Any) -> list[Any]:
    """The types of a union, those of unions in it too."""
    union = get_origin(hint) in (Union, UnionType)
    return [member for part in get_args(hint) for member in _members(part)] if union else [hint]


def _form(name: str, hint: Any) -> Form:
    members = _members(hint)
    # A verb that takes a path itself, as `harvest` its texts, reads the file itself.
    if name in WORDS and Path not in members:
        return WORDS[name]
    lists = [part for part in members if get_origin(part) in (Iterable, Sequence)]
    listed = [member for part in lists for inner in get_args(part) for member in _members(inner)]
    for kind in (bool, Path):
        # A flag or a path decides the form, whatever else the parameter takes in Python.
        if kind in members:
            return Form(kind, metavar=None if kind is bool else "FOLDER" if name == "folder" else "PATH")
    if choices := [member for member in members if get_origin(member) is Literal]:
        return Form(choices[0])
    # Tokens, by text or id.
    if int in listed and str in listed:
        return TEXT if str in members else TEXTS
    if int in listed:
        return Form(str, _places, "POSITIONS") if str in members else Form(list[str], integers, "NUMBERS", NUMBERS)
    if str in listed:
        return Form(list[str], _one_or_more if str in members else _names, "NAMES", MANY)
    if plain := next((kind for kind in (str, int, float) if kind in members), None):
        return Form(plain)
    raise TypeError(f"{name}: {hint} has no form on the command line: see mionnx.cli.parameters.WORDS")


@cache
def help_of(verb: Any) -> dict[str, str]:
    """Parameter -> its entry in `Args:` or `Attributes:`, with entries of others put in."""
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", getdoc(verb) or "", re.S | re.M)
    entries: list[str] = []
    for line in (section[1] if section else "").splitlines():
        # Entries are indented by four columns, their further lines by more.
        if re.match(r"    \S", line):
            entries.append(line.strip())
        elif line.strip():
            entries[-1] += " " + line.strip()
    helps = {}
    for entry in entries:
        names, _, text = entry.partition(": ")
        for name in names.split(", "):
            helps[name] = _resolved(name, text, alone=names == name)
    return helps


def _resolved(name: str, text: str, alone: bool) -> str:
    """An entry with those that it refers to; a remark on several parameters is left out."""
    reference = REFERENCE.search(text)
    there = reference and (getattr(MIModel, reference[1], None) or locate(reference[1]))
    entry = help_of(there).get(name) if there else None
    if reference is None or entry is None:
        return text
    return text.replace(reference[0], entry.rstrip(".")) if alone else entry
