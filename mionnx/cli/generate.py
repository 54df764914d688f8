"""The command `mionnx generate`: continue a prompt with interventions in force."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from mionnx.cli.intervention_options import Interventions, takes_interventions
from mionnx.cli.options import Json, Model, Prompt, Provider
from mionnx.errors import InterventionError
from mionnx.inputs.tokens import Tokens
from mionnx.model import MIModel
from mionnx.run.streamer import TextStreamer
from mionnx.spec.hook_spec import HookSpec


@takes_interventions()
def generate(
    model: Model,
    prompt: Prompt,
    interventions: Interventions,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 32,
    compare: Annotated[bool, typer.Option(help="First generate without the interventions.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; greedy if left out.")] = None,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k most likely tokens; 0 for all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Sample among the tokens that reach this probability together.")] = 1.0,
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
    opened = MIModel.from_pretrained(model, provider=provider)
    tokens = opened.tokenize(prompt)
    spec = interventions.spec(opened.num_heads, len(tokens))
    if compare and spec.is_empty():
        raise InterventionError("--compare shows what interventions change, and none was given")
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stop_strings": stop,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    if temperature is not None:
        options |= {"temperature": temperature, "do_sample": True}
    runs = {"baseline": HookSpec(), "steered": spec} if compare else {"text": spec}
    results = {}
    for title, chosen in runs.items():
        if not as_json:
            typer.echo((f"{title}: " if compare else "") + prompt, nl=False)
        streamer = None if as_json else TextStreamer(opened.tokenizer, _after_space(opened, tokens))
        result = opened.generate(tokens, chosen, streamer=streamer, **options)
        results[title] = {
            "text": result.texts[0],
            "new_text": result.new_texts[0],
            "new_ids": result.new_ids[0].tolist(),
        }
        if not as_json:
            typer.echo()
    if as_json:
        typer.echo(json.dumps(results, indent=1))


def _after_space(model: MIModel, tokens: Tokens) -> Callable[[str], None]:
    """A printer of text pieces; a space precedes the first where the tokenizer puts one."""
    ids = tokens.ids.tolist()
    apart = model.tokenizer.decode([*ids, ids[-1]])[len(model.tokenizer.decode(ids)) :].startswith(" ")
    begun: list[str] = []

    def write(text: str) -> None:
        typer.echo(" " + text if apart and not begun and not text.startswith(" ") else text, nl=False)
        begun.append(text)

    return write
