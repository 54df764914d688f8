"""The commands `run` and `generate`: one forward pass, or a continuation, with and without interventions."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Column

from mionnx.analysis.ablation import AblationResult
from mionnx.cli.files import PromptsFile, read_prompts
from mionnx.cli.injection import PRINTS, RUNS, Opening, Output, opening, with_groups
from mionnx.cli.interventions import Captures, Interventions, intervention_group
from mionnx.cli.parameters import options_of
from mionnx.errors import InputError, InterventionError
from mionnx.graph.metadata import NEXT_TOKEN
from mionnx.inputs.tokens import Decoder, Tokens, decode
from mionnx.machine.decimals import decimal
from mionnx.machine.softmax import softmax
from mionnx.model import MIModel
from mionnx.run.encoder_texts import need_head
from mionnx.run.generation import Generation
from mionnx.run.hook_cache import HookCache
from mionnx.run.metric_place import index_read
from mionnx.run.prompt import token_text
from mionnx.run.streamer import TextStreamer
from mionnx.spec.hook_spec import HookSpec
from mionnx.view import Table

SAMPLING = ("temperature", "top_k", "top_p", "seed")
OPTIONS = options_of(
    [MIModel.generate],
    only=(
        *("max_new_tokens", "min_new_tokens", *SAMPLING, "repetition_penalty", "eos_token_id", "stop_strings"),
        "batch_size",
    ),
)


@with_groups(opening=opening(*RUNS), interventions=intervention_group(), output=PRINTS)
def run(
    opening: Opening,
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    interventions: Interventions,
    output: Output,
    capture: Captures = None,
    k: Annotated[int, typer.Option(min=1, help="Number of next tokens to show.")] = 5,
    save: Annotated[Path | None, typer.Option(help="Write captures and logits to a .safetensors file.")] = None,
) -> None:
    """Print the top tokens side by side, and the KL divergence of the two distributions.

    An intervention is written HOOK[=VALUE][@LIMITS]. A hook is a name, a glob, which means one intervention at each
    hook point that it matches, or several of them with commas. A value is a number, FILE.safetensors:KEY[*FACTOR], or
    for --knockout edges QUERY>KEY; limits are positions=..;heads=..;neurons=.. State interventions of RWKV models have
    limits only: positions=..;layers=..;terms=.. (or heads=.. for --state-steering).

    Examples:
    mionnx run models/world-llama "The capital of France is" --zero "blocks.1.attn.hook_z@heads=3"

    mionnx run models/world-llama "The capital of France is" --scale "blocks.*.hook_mlp_out=0.5"

    mionnx run models/world-llama "The capital of France is" --knockout "blocks.2.attn.hook_scores=-1>3"

    mionnx run models/world-rwkv7 "The capital of France is" --state-knockout "positions=3;layers=1"
    """
    model = opening.once()
    tokens = model.tokenize(prompt)
    spec = interventions.spec(model.num_heads, len(tokens), model.bidirectional)
    changes = spec.num_interventions() + len(spec.state_knockouts) + len(spec.state_steerings)
    for hook in capture or ():
        spec.capture(hook)
    at = _place(model, tokens.ids)
    cache = model.forward(tokens, spec)
    treated = cache.output()[0, at]
    facts: dict[str, Any] = {
        "top": _top_tokens(model, treated, k),
        "captures": {name: list(value.shape) for name, value in cache.items()},
    }
    if changes:
        baseline = model.forward(tokens).output()[0, at]
        facts["baseline"] = _top_tokens(model, baseline, k)
        facts["kl_divergence"] = AblationResult(baseline, treated).kl_divergence()
    if save:
        cache.save(save)
    output.deliver(cache, facts, _tables(facts, cache))


def _place(model: MIModel, ids: NDArray[np.int64]) -> int:
    """Where the token stands that is predicted: the last one's successor, or of an encoder the mask."""
    need_head(model, "mionnx run", NEXT_TOKEN, "masked_lm")
    place = index_read(model.hooked, None, ids)
    return -1 if place is None else place


def _top_tokens(model: MIModel, logits: NDArray[Any], k: int) -> list[tuple[str, float]]:
    """The most likely next tokens with their probabilities; logits [vocab]."""
    probabilities = softmax(logits.astype(np.float64))
    order = np.argsort(-probabilities, kind="stable")[:k]
    return [(token_text(model, int(i)), float(probabilities[i])) for i in order]


def _tables(facts: dict[str, Any], cache: HookCache) -> Iterator[RenderableType]:
    compared = "baseline" in facts
    columns = {"baseline": facts["baseline"], "treated": facts["top"]} if compared else {"token": facts["top"]}
    table = Table(*(heading for title in columns for heading in (title, "probability")))
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*(text for token, probability in cells for text in (repr(token), decimal(probability, 4))))
    yield table
    if compared:
        yield f"KL(baseline || treated) = {decimal(facts['kl_divergence'], 6)} nats"
    if cache:
        table = Table(Column("captured", no_wrap=True), "shape", "mean", "deviation")
        for name, value in cache.items():
            unmasked = value[value > np.finfo(value.dtype).min / 2].astype(np.float64)  # masked scores say nothing
            table.add_row(name, escape(str(list(value.shape))), f"{unmasked.mean():.4g}", f"{unmasked.std():.4g}")
        yield table


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
    sampling = [name for name in SAMPLING if name in arguments]
    if sampling and do_sample is False:  # said, and not left out
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sampling)
        raise InputError(f"{options}: sampling only, and --no-do-sample is given: leave one of the two out")
    arguments["do_sample"] = bool(do_sample or sampling)
    model = opening.model()
    texts = [prompt] if prompts is None else read_prompts(prompts)
    tokens = [_tokens(model, text, chat, system) for text in texts]
    # A mask for the longest text: shorter ones take their part of it.
    spec = interventions.spec(model.num_heads, max(map(len, tokens)), model.bidirectional)
    if compare and spec.is_empty():
        raise InterventionError("--compare shows what interventions change, and none was given")
    if prompts is not None:
        arguments.setdefault("batch_size", "auto")
    runs = {"baseline": HookSpec(), "steered": spec} if compare else {"text": spec}
    results: dict[str, Any] = {}
    for title, hooks in runs.items():
        if prompts is not None:
            results[title] = _rows(model.generate(tokens, hooks, **arguments))
            continue
        # A chat's answer begins below the question; a text goes on in its line.
        begin = (f"{title}: " if compare else "") + str(prompt) + ("\n" if chat else "")
        write = partial(typer.echo, nl=False) if chat else _after_space(model, tokens[0])
        streamer = None if output.as_json else PromptStreamer(model.tokenizer, begin, write)
        (results[title],) = _rows(model.generate(tokens[0], hooks, streamer=streamer, **arguments))
    output.deliver(results, results, _lines(results) if prompts is not None else ())


def _tokens(model: MIModel, text: Any, chat: bool, system: str | None) -> Any:
    """A text as tokens, a chat's with its template; ids of a JSON list as they are."""
    if chat:
        first = [] if system is None else [{"role": "system", "content": system}]
        return model.tokenize_chat([*first, {"role": "user", "content": text}])
    return model.tokenize(text) if isinstance(text, str) else text


def _rows(generation: Generation) -> list[dict[str, Any]]:
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
    # A token after the prompt, decoded by itself, loses the space that stands before it in the text.
    apart = decode(model.tokenizer, [*ids, ids[-1]])[len(decode(model.tokenizer, ids)) :].startswith(" ")
    first = True

    def write(text: str) -> None:
        nonlocal first
        typer.echo(" " + text if apart and first and not text.startswith(" ") else text, nl=False)
        first = False

    return write
