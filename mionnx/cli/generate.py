"""The command `mionnx generate`: continue a prompt with interventions in force."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from mionnx.cli.intervention_options import Interventions, takes_interventions
from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import Json, Model, rows_of_pass
from mionnx.errors import InputError, InterventionError
from mionnx.inputs.tokens import Decoder, Tokens, decode
from mionnx.model import MIModel
from mionnx.run.generation import Generation
from mionnx.run.streamer import TextStreamer
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify.verbs import read_prompts


@opens_model(*RUNS)
@takes_interventions()
def generate(
    model: Model,
    interventions: Interventions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Many prompts, a text a line or a JSON list, in its place.")
    ] = None,
    batch_size: Annotated[str, typer.Option(metavar="N", help="Of --prompts: rows of one pass, or auto.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 32,
    chat: Annotated[bool, typer.Option(help="The prompt is a user's message, in the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system's message before it.")] = None,
    compare: Annotated[bool, typer.Option(help="First generate without the interventions.")] = False,
    do_sample: Annotated[
        bool | None, typer.Option(help="Sample; else greedy. The four options below imply it.", show_default=False)
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; 1.0 if left out.")] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Sample among the k most likely tokens; 50 if left out, 0 for all.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the tokens that reach this probability together.")
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: fewer of the tokens in the text.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Random seed of the sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End at this text; may be repeated.")] = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Continue a prompt with interventions in force at every step.

    Tokens are printed as they are generated; texts of a file, with --prompts, when all are done. Interventions are
    written as for `mionnx run`; positions=prompt and positions=generated are the phases of the text.

    Example:

    mionnx generate models/world-llama "The capital of France is" --scale "blocks.2.hook_attn_out=0" --compare
    """
    if system is not None and not chat:
        raise InputError("--system is a message of a chat: give --chat too")
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give one PROMPT, or --prompts FILE")
    opened = opening.model(model)
    texts = [prompt] if prompt is not None else read_prompts(prompts or Path())
    tokens = [opened.tokenize_chat(_messages(text, system)) if chat else _tokens(opened, text) for text in texts]
    spec = interventions.spec(opened.num_heads, max(map(len, tokens)))
    if compare and spec.is_empty():
        raise InterventionError("--compare shows what interventions change, and none was given")
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stop_strings": stop,
        "repetition_penalty": repetition_penalty,
        **_sampling(do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
    }
    runs = {"baseline": HookSpec(), "steered": spec} if compare else {"text": spec}
    if prompts is not None:
        options["batch_size"] = rows_of_pass(batch_size)
        results: dict[str, Any] = {title: _rows(opened.generate(tokens, one, **options)) for title, one in runs.items()}
    else:
        results = {}
        for title, chosen in runs.items():
            begin = (f"{title}: " if compare else "") + str(prompt) + ("\n" if chat else "")
            write = partial(typer.echo, nl=False) if chat else _after_space(opened, tokens[0])
            streamer = None if as_json else PromptStreamer(opened.tokenizer, begin, write)
            results[title] = _rows(opened.generate(tokens[0], chosen, streamer=streamer, **options))[0]
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    elif prompts is not None:
        _print(results)


def _tokens(model: MIModel, text: Any) -> Any:
    """A text as tokens; ids of a JSON list as they are."""
    return model.tokenize(text) if isinstance(text, str) else text


def _rows(made: Generation) -> list[dict[str, Any]]:
    """The rows of a generation, as JSON."""
    rows = zip(made.texts, made.new_texts, made.ids, made.new_ids, strict=True)
    return [
        {"text": text, "new_text": new_text, "ids": ids.tolist(), "new_ids": new_ids.tolist()}
        for text, new_text, ids, new_ids in rows
    ]


def _print(results: dict[str, list[dict[str, Any]]]) -> None:
    """The texts of a list, in the order given; those to compare one below the other."""
    for rows in zip(*results.values(), strict=True):
        for title, row in zip(results, rows, strict=True):
            typer.echo((f"{title}: " if len(results) > 1 else "") + row["text"])


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def _sampling(do_sample: bool | None, **given: float | None) -> dict[str, Any]:
    """The sampling options that are given; any of them implies sampling.

    Raises:
        InputError: one of them, and --no-do-sample.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if named and do_sample is False:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in named)
        raise InputError(f"{options}: sampling only, and --no-do-sample is given: leave one of the two out")
    return named | {"do_sample": bool(named) or bool(do_sample)}


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
