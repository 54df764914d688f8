"""`Command`: a verb of `MIModel` on the command line."""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import getdoc
from typing import Any

from mionnx.cli.injection import (
    NO_MODEL,
    PRINTS,
    RUNS,
    WRITES,
    Function,
    Opening,
    Output,
    opening,
    own_options,
    with_groups,
)
from mionnx.cli.parameters import Verb, options_of
from mionnx.model import MIModel

Arguments = dict[str, Any]
Open = Callable[[], MIModel]


@dataclass(frozen=True)
class Command:
    """A command that calls a verb, or one of several, and shows its result."""

    verbs: Sequence[Verb]  # their parameters are the options
    examples: Sequence[str]
    more: str = ""  # words in the help below the verb's own
    # (open, arguments, ...) -> result, where `open`, an `Opening`, opens the model when it is called; by default it
    # calls the first verb. Further parameters are options of the command.
    call: Callable[..., Any] | None = None
    # (result, ...) -> texts and tables to print; further parameters are options of the command.
    show: Callable[..., Iterable[Any]] = lambda result: [result.table()]
    facts: Callable[[Any], Any] = lambda result: result  # the values of a result that `--json` prints
    exit_code: Callable[[Any], int] = lambda result: 0
    # positional, optional, words, without: see `options_of`.
    positional: Sequence[str] = ()
    optional: Sequence[str] = ()
    words: dict[str, str] = field(default_factory=dict)
    without: Sequence[str] = ()
    # Parameters of `MIModel.from_pretrained` that are options; None for a command without a model.
    settings: Sequence[str] | None = RUNS
    before: Callable[..., None] | None = None  # passed to the verb as `before`, except where JSON is printed
    once: bool = False  # whether each graph runs once: then weights are not packed
    files: bool = True  # whether the result is saved by --html, --png and --save

    def function(self) -> Function:
        """The command as a function with a signature that typer reads."""
        call = self.call or (lambda open, arguments: self.verbs[0](open(), **arguments))
        groups = {
            "arguments": options_of(self.verbs, self.positional, self.optional, self.words, self.without),
            "of_call": own_options(call, 2),
            "of_show": own_options(self.show, 1),
            "output": WRITES if self.files else PRINTS,
            "opening": NO_MODEL if self.settings is None else opening(*self.settings),
        }

        @with_groups(**groups)
        def run(
            arguments: Arguments, of_call: Arguments, of_show: Arguments, output: Output, opening: Opening | None
        ) -> None:
            output.check()
            # An estimate is for people, and takes a trial of one layer.
            if self.before and not output.as_json:
                arguments["before"] = self.before
            # A command without a model has no `opening`.
            result = call(opening and (opening.once if self.once else opening), arguments, **of_call)
            output.deliver(result, self.facts(result), self.show(result, **of_show))
            if code := self.exit_code(result):
                sys.exit(code)

        return run

    @property
    def help(self) -> str:
        """The verb's docstring below its first line, `more`, and the examples, in Markdown."""
        # The first line is the list's, and options have the arguments: what stands between is the help.
        words = re.split(r"^(?:Args|Raises|Returns|Example):", getdoc(self.verbs[0]) or "", maxsplit=1, flags=re.M)[0]
        examples = ["Example:" if len(self.examples) == 1 else "Examples:", *self.examples]
        return "\n\n".join([*words.strip().split("\n\n")[1:], *filter(None, [self.more]), *examples])
