"""The command `mionnx generate`: continue a prompt with interventions in force."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from mionnx.cli.files import PromptsFile, read_prompts
from mionnx.cli.injection import PRINTS, RUNS, Opening, Output, opening, with_groups
from mionnx.cli.intervention_options import Interventions, intervention_group
from mionnx.cli.parameters import options_of
from mionnx.errors import InputError, InterventionError
from mionnx.inputs.tokens import Decoder, Tokens, decode
from mionnx.model import MIModel
from mionnx.run.generation import Generation
from mionnx.run.streamer import TextStreamer
from mionnx.spec.hook_spec import HookSpec

SAMPLING = ("temperature", "top_k", "top_p", "seed")
OPTIONS = options_of(
    [MIModel.generate],
    only=(
        *("max_new_tokens", "min_new_tokens", *SAMPLING, "repetition_penalty", "eos_token_id", "stop_strings"),
        "batch_size",
    ),
)


@with_groups(opening=opening(*RUNS), interventions=intervention_group(), arguments=OPTIONS, output=PRINTS)
def generate(
    opening: Opening,
    interventions: Interventions,
    arguments: dict[str, Any],
    output: Output,
    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    prompts: PromptsFile = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message in the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system's message before it.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="First generate without the interventions.")] = False,
    do_sample: Annotated[
        bool | None,
        typer.Option(
            help="Sample; else greedy. Implied by --temperature, --top-k, --top-p and --seed.", show_default=False
        ),
    ] = None,
) -> None:
    """Print tokens as they are generated; texts of a file, with --prompts, when all are done.

    Interventions are written as for `mionnx run`; positions=prompt and positions=generated are the phases of the text.

    Example:
    mionnx generate models/world-llama "The capital of France is" --scale "blocks.2.hook_attn_out=0" --compare
    """
    if system is not None and not chat:
        raise InputError("--system is a message of a chat: give --chat too")
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give one PROMPT, or --prompts FILE")
    model = opening.model()
    texts = [prompt] if prompt is not None else read_prompts(prompts or Path())
    tokens = [model.tokenize_chat(_messages(text, system)) if chat else _tokens(model, text) for text in texts]
    spec = interventions.spec(model.num_heads, max(map(len, tokens)))
    if compare and spec.is_empty():
        raise InterventionError("--compare shows what interventions change, and none was given")
    _check_sampling(arguments, do_sample)
    arguments["do_sample"] = bool(do_sample) or any(name in arguments for name in SAMPLING)
    if prompts is not None:
        arguments.setdefault("batch_size", "auto")
    runs = {"baseline": HookSpec(), "steered": spec} if compare else {"text": spec}
    results: dict[str, Any] = {}
    for title, hooks in runs.items():
        if prompts is not None:
            results[title] = _rows(model.generate(tokens, hooks, **arguments))
            continue
        begin = (f"{title}: " if compare else "") + str(prompt) + ("\n" if chat else "")
        write = partial(typer.echo, nl=False) if chat else _after_space(model, tokens[0])
        streamer = None if output.as_json else PromptStreamer(model.tokenizer, begin, write)
        (results[title],) = _rows(model.generate(tokens[0], hooks, streamer=streamer, **arguments))
    output.deliver(results, results, _lines(results) if prompts is not None else ())


def _tokens(model: MIModel, text: Any) -> Any:
    """A text as tokens; ids of a JSON list as they are."""
    return model.tokenize(text) if isinstance(text, str) else text


def _rows(generation: Generation) -> list[dict[str, Any]]:
    """The rows of a generation, as JSON."""
    rows = zip(generation.texts, generation.new_texts, generation.ids, generation.new_ids, strict=True)
    return [
        {"text": text, "new_text": new_text, "ids": ids.tolist(), "new_ids": new_ids.tolist()}
        for text, new_text, ids, new_ids in rows
    ]


def _lines(results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """The texts of a list; those to compare one below the other."""
    for rows in zip(*results.values(), strict=True):
        for title, row in zip(results, rows, strict=True):
            yield (f"{title}: " if len(results) > 1 else "") + row["text"]


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def _check_sampling(arguments: dict[str, Any], do_sample: bool | None) -> None:
    """Refuse options of sampling beside --no-do-sample."""
    named = [f"--{name.replace('_', '-')}" for name in SAMPLING if name in arguments]
    if named and do_sample is False:
        raise InputError(f"{', '.join(named)}: sampling only, and --no-do-sample is given: leave one of the two out")


class PromptStreamer(TextStreamer):
    """A streamer that writes the prompt first, once it is accepted, and a new line last."""

    def __init__(self, tokenizer: Decoder, prompt: str, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, write)
        self.prompt = prompt

    def put(self, value: NDArray[np.int64]) -> None:
        """The prompt, then each new token."""
        if self._ids is None:
            typer.echo(self.prompt, nl=False)
        super().put(value)

    def end(self) -> None:
        """The rest, and a new line."""
        super().end()
        typer.echo()


def _after_space(model: MIModel, tokens: Tokens) -> Callable[[str], None]:
    """A printer of text pieces; a space precedes the first where the tokenizer puts one."""
    ids = tokens.ids.tolist()
    apart = decode(model.tokenizer, [*ids, ids[-1]])[len(decode(model.tokenizer, ids)) :].startswith(" ")
    begun: list[str] = []

    def write(text: str) -> None:
        typer.echo(" " + text if apart and not begun and not text.startswith(" ") else text, nl=False)
        begun.append(text)

    return write
