"""The command `mionnx run`: one forward pass, with and without interventions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Column

from mionnx.analysis.ablation import AblationResult
from mionnx.cli.injection import PRINTS, RUNS, Opening, Output, opening, with_groups
from mionnx.cli.intervention_options import Captures, Interventions, intervention_group
from mionnx.machine.decimals import decimal
from mionnx.machine.softmax import softmax
from mionnx.model import MIModel
from mionnx.run.hook_cache import HookCache
from mionnx.run.prompt import token_text
from mionnx.view import Table

Logits = NDArray[Any]  # [vocab]


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
    spec = interventions.spec(model.num_heads, len(tokens))
    changes = spec.num_interventions() + len(spec.state_knockouts) + len(spec.state_steerings)
    for hook in capture or ():
        spec.capture(hook)
    cache = model.forward(tokens, spec)
    treated = cache.output()[0, -1]
    baseline = model.forward(tokens).output()[0, -1] if changes else None
    if save:
        cache.save(save)
    output.deliver(cache, _facts(model, cache, baseline, treated, k), _tables(model, cache, baseline, treated, k))


def _top_tokens(model: MIModel, logits: Logits, k: int) -> list[tuple[str, float]]:
    """The most likely next tokens with their probabilities."""
    probabilities = softmax(logits.astype(np.float64))
    order = np.argsort(-probabilities, kind="stable")[:k]
    return [(token_text(model, int(i)), float(probabilities[i])) for i in order]


def _tables(
    model: MIModel, cache: HookCache, baseline: Logits | None, treated: Logits, k: int
) -> Iterator[RenderableType]:
    columns = [_top_tokens(model, logits, k) for logits in (baseline, treated) if logits is not None]
    titles = ["next token"] if baseline is None else ["baseline", "treated"]
    table = Table(*(heading for title in titles for heading in (title, "probability")))
    for cells in zip(*columns, strict=True):
        table.add_row(*(text for token, probability in cells for text in (repr(token), decimal(probability, 4))))
    yield table
    if baseline is not None:
        yield f"KL(baseline || treated) = {decimal(AblationResult(baseline, treated).kl_divergence(), 6)} nats"
    if cache:
        yield _captures(cache)


def _captures(cache: HookCache) -> Table:
    table = Table(Column("captured", no_wrap=True), "shape", "mean", "deviation")
    for name, value in cache.items():
        unmasked = value[value > np.finfo(value.dtype).min / 2].astype(np.float64)  # masked scores say nothing
        table.add_row(name, escape(str(list(value.shape))), f"{unmasked.mean():.4g}", f"{unmasked.std():.4g}")
    return table


def _facts(model: MIModel, cache: HookCache, baseline: Logits | None, treated: Logits, k: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "top": _top_tokens(model, treated, k),
        "captures": {name: list(value.shape) for name, value in cache.items()},
    }
    if baseline is not None:
        result["baseline"] = _top_tokens(model, baseline, k)
        result["kl_divergence"] = AblationResult(baseline, treated).kl_divergence()
    return result
