"""The command `mionnx generate`: continue a prompt with interventions in force."""

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from mionnx.cli.intervention_options import Interventions, takes_interventions
from mionnx.cli.options import Json, Model, Prompt, Provider
from mionnx.errors import InputError, InterventionError
from mionnx.inputs.tokens import Tokens
from mionnx.model import MIModel
from mionnx.run.streamer import Decoder, TextStreamer
from mionnx.spec.hook_spec import HookSpec


@takes_interventions()
def generate(
    model: Model,
    prompt: Prompt,
    interventions: Interventions,
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
    provider: Provider = "cpu",
) -> None:
    """Continue a prompt with interventions in force at every step.

    Tokens are printed as they are generated. Interventions are written as for `mionnx run`; positions=prompt and
    positions=generated are the phases of the text.

    Example:

    mionnx generate models/world-llama "The capital of France is" --scale "blocks.2.hook_attn_out=0" --compare
    """
    if system is not None and not chat:
        raise InputError("--system is a message of a chat: give --chat too")
    opened = MIModel.from_pretrained(model, provider=provider)
    tokens = opened.tokenize_chat(_messages(prompt, system)) if chat else opened.tokenize(prompt)
    spec = interventions.spec(opened.num_heads, len(tokens))
    if compare and spec.is_empty():
        raise InterventionError("--compare shows what interventions change, and none was given")
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stop_strings": stop,
        "repetition_penalty": repetition_penalty,
        **_sampling(do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
    }
    runs = {"baseline": HookSpec(), "steered": spec} if compare else {"text": spec}
    results = {}
    for title, chosen in runs.items():
        begin = (f"{title}: " if compare else "") + prompt + ("\n" if chat else "")
        write = partial(typer.echo, nl=False) if chat else _after_space(opened, tokens)
        streamer = None if as_json else PromptStreamer(opened.tokenizer, begin, write)
        result = opened.generate(tokens, chosen, streamer=streamer, **options)
        results[title] = {
            "text": result.texts[0],
            "new_text": result.new_texts[0],
            "ids": result.ids[0].tolist(),
            "new_ids": result.new_ids[0].tolist(),
        }
    if as_json:
        typer.echo(json.dumps(results, indent=1))


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
    apart = model.tokenizer.decode([*ids, ids[-1]])[len(model.tokenizer.decode(ids)) :].startswith(" ")
    begun: list[str] = []

    def write(text: str) -> None:
        typer.echo(" " + text if apart and not begun and not text.startswith(" ") else text, nl=False)
        begun.append(text)

    return write
