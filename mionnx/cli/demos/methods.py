"""Worked examples of methods: logit lens, attribution, patching, ablation, induction heads, circuits, steering."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from rich.console import Console

from mionnx.analysis.gradients.attribute_patch import AttributedSweep
from mionnx.bind.logit_selection import Logits
from mionnx.cli.tables import dose_table, lens_table
from mionnx.errors import HookError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.decimals import decimal
from mionnx.machine.softmax import softmax
from mionnx.run.prompt import token_text
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.view import Table

if TYPE_CHECKING:
    from mionnx.model import MIModel
    from mionnx.view import Shown

FRANCE, GERMANY = "The capital of France is", "The capital of Germany is"
GIFT, OTHER = (f"When Mary and John went to the store , {giver} gave a drink to" for giver in ("John", "Mary"))
CONFIRMED = 5  # heads
STEPS = 8  # along the path between the two prompts' values
EDGES = (20, 50, 100, 200)
FRAMES = (
    "The capital of {} is",
    "The capital city of {} is called",
    "{} has its capital in",
    "{} is governed from",
    "In {} the seat of power is",
    "People from {} call",
    "Ask for the capital of {} and hear",
)


def write(result: "Shown", folder: Path | None, name: str, console: Console) -> None:
    """Write a result's page and picture, if there is a folder for them."""
    if folder is not None:
        console.print(f"the page: {result.save(folder / f'{name}.html')}", highlight=False)
        result.save(folder / f"{name}.png")


def quoted(model: "MIModel", token: int) -> str:
    """A token as text, quoted."""
    return repr(token_text(model, token))


def largest(values: Any, count: int) -> list[tuple[int, int]]:
    """The indices of the largest entries by size: layers and heads."""
    flat = np.argsort(-np.abs(values), axis=None)[:count]
    return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(flat, values.shape), strict=True)]


def zeroed(heads: list[tuple[int, int]]) -> HookSpec:
    """A spec that zeroes heads."""
    spec = HookSpec()
    for layer, head in heads:
        spec.intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
    return spec


def named(heads: list[tuple[int, int]]) -> str:
    """Heads as text."""
    return ", ".join(f"{layer}.{head}" for layer, head in heads)


def fall(model: "MIModel", prompt: str, spec: HookSpec) -> str:
    """What a spec does to the probability of a prompt's answer."""
    before, after = (softmax(model.forward(prompt, hooks).output()[0, -1]) for hooks in (None, spec))
    answer, top = int(before.argmax()), int(after.argmax())
    return (
        f"P({quoted(model, answer)}) falls from {decimal(before[answer], 3)} to {decimal(after[answer], 3)}; the top "
        f"token is {quoted(model, top)}, with {decimal(after[top], 3)}"
    )


def lens(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Apply the logit lens to the last position: top tokens, rank and KL divergence by layer."""
    other = int(model.forward(GERMANY, logits=Logits(positions=-1)).output()[0, 0].argmax())
    result = model.logit_lens(FRANCE, k=3, token_ids=[other])
    answer = result.spell(int(result.answers[-1]))
    console.print(f"{FRANCE!r}: {answer!r} is the top token from {result.converged[-1]} on.")
    console.print(lens_table(result, result.at(-1)))
    write(result, folder, "lens", console)


def attribution(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Compare the direct contributions of heads to a logit with the effect of zeroing them."""
    tokens = model.tokenize(GIFT)
    result = model.attribute(tokens)
    heads, effects = result.heads, ablated(model, GIFT, result.answer)
    if heads is None:
        raise HookError(f"{model.hooked.metadata.family}: the stream has no heads to attribute a logit to")
    table = Table("head", "direct contribution", "logit lost when the head is zeroed", "rank of that effect")
    # Twice: the rank of each head by its effect.
    ranks = np.argsort(np.argsort(-np.abs(effects), axis=None)).reshape(effects.shape)
    for layer, head in largest(heads, 5):
        cells = (
            decimal(heads[layer, head], 3, sign=True),
            decimal(effects[layer, head], 3, sign=True),
            str(ranks[layer, head] + 1),
        )
        table.add_row(f"layer {layer}, head {head}", *cells)
    console.print(
        f"{GIFT!r}: the logit of {result.answer!r}, {decimal(result.logit, 3)}, is the sum of {len(result.labels)} "
        f"components (error {abs(result.total - result.logit):.1e}). The heads with the largest contributions:"
    )
    console.print(table)
    write(result, folder, "attribution", console)


def ablated(model: "MIModel", prompt: str, answer: str) -> np.ndarray:
    """[layer, head]: decrease of the answer's logit when a head is zeroed at the last position."""
    token, chosen = model.token_id(answer), Logits(positions=-1, token_ids=model.token_id(answer))
    baseline = model.forward(prompt).output()[0, -1, token]
    effects = np.zeros((model.num_layers, model.num_heads))
    for layer, head in np.ndindex(*effects.shape):
        # At the last position alone, whose heads the direct contributions are of.
        spec = HookSpec().intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head, positions=-1))
        effects[layer, head] = baseline - model.forward(prompt, spec, logits=chosen).output()[0, 0, 0]
    return effects


def patching(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Patch the residual stream of one prompt into another, one layer and position at a time."""
    sweep = model.patch_sweep(FRANCE, GERMANY, "resid_mid")
    console.print(f"The stream of {FRANCE!r}, patched into {GERMANY!r} at one layer and position; 1 is full recovery:")
    console.print(sweep.table())
    console.print(
        f"{sweep.facts()}; {sweep.cost['without effect']:.0f} of {sweep.values.size} cells cannot have an effect."
    )
    write(sweep, folder, "patching", console)


def heads_of_the_answer(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Zero each head by itself; then, together, the four with the largest patching effect."""
    sweep = model.ablation_sweep(GIFT)
    console.print(f"{GIFT!r}, each head zeroed by itself:")
    console.print(sweep.table())
    write(sweep, folder, "ablation", console)
    path = model.patch_sweep(GIFT, OTHER, "z", ("layer", "head"), patching="noising")
    heads = largest(np.minimum(path.effect, 0), 4)  # those that lower the answer
    console.print(
        f"Without heads {named(heads)}, which have the largest patching effects, {fall(model, GIFT, zeroed(heads))}."
    )


def induction(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Find induction heads, and measure the prediction of repeated sequences without them."""
    scores = model.head_scores()
    console.print(scores.table(3))
    write(scores, folder, "heads", console)
    # Heads with more than half of their attention on the target.
    best = [(layer, head) for layer, head, score in scores.top("induction", 4) if score > 0.5]
    words = np.random.default_rng(0).permutation(np.arange(20, min(400, model.vocab_size)))[:16]
    rates = []
    for hooks in (None, zeroed(best)):
        # Row t predicts token t + 1: predictions of tokens 17 to 31, the repetition but for its first.
        predicted = model.forward(np.tile(words, 2), hooks).output()[0, 16:-1].argmax(-1)
        rates.append(float((predicted == words[1:]).mean()))
    console.print(
        f"A sequence of 16 random tokens, repeated: {rates[0]:.0%} of the repetition is predicted; without heads "
        f"{named(best)}, {rates[1]:.0%}."
    )


def heads_and_edges(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Estimate every head's patching effect, confirm the largest, and keep the leading edges."""
    result = cast(  # of one kind of hook point
        AttributedSweep, model.attribute_patch(GIFT, OTHER, "z", ("layer", "head"), steps=STEPS, confirm=CONFIRMED)
    )
    console.print(
        f"{GIFT!r}, patched into {OTHER!r}: every head's effect from {STEPS} gradients, and the leading exactly:"
    )
    console.print(result.confirmed())
    write(result, folder, "attribution_patching", console)
    edges = model.edge_attribution(GIFT, OTHER, steps=5)
    circuit = model.circuit(GIFT, OTHER, EDGES, scores=edges)
    shares = ", ".join(
        f"{count}: {decimal(share, 2)}" for count, share in zip(EDGES, circuit.faithfulness, strict=True)
    )
    console.print(
        f"The leading of {edges.count} edges kept, every other one patched, and the share of the effect that is left: "
        f"{shares}."
    )
    write(circuit, folder, "circuit", console)


def steering(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Compute a direction from prompts about two countries, steer with it, and project it out."""
    positive, negative = ([frame.format(country) for frame in FRAMES] for country in ("Germany", "France"))
    directions = model.contrast(positive, negative)
    console.print(f"Mean difference of {len(FRAMES)} prompts about Germany and about France, at the last token:")
    table = Table("layer", "norm", "share of differences", "held-out accuracy", "cosine with next layer")
    separation, cosines = directions.separation, [*directions.convergence(), np.nan]
    for i, layer in enumerate(directions.layers):
        shares = (separation.explained[i], separation.held_out[i]) if separation else (np.nan, np.nan)
        cells = [decimal(cell, 2) for cell in (directions.norms[i], *shares, cosines[i])]
        table.add_row(str(layer), *cells[:3], "" if i + 1 == len(cosines) else cells[3])
    console.print(table)
    layer = directions.best_layer
    response = model.dose_response(FRANCE, directions[layer], np.linspace(0, 2, 9), positions=-1, bisect=1e-3)
    console.print(f"Layer {layer}'s direction, added to the last token of {FRANCE!r}:")
    console.print(dose_table(response, 0))
    flip = response.flips[0]
    where = f"strength {decimal(flip, 3)}" if np.isfinite(flip) else "none of these strengths"
    console.print(f"The answer flips at {where}.")
    projected = fall(model, FRANCE, directions.ablation_spec())
    console.print(f"With each layer's direction projected out of the stream, {projected}.")
    write(directions, folder, "directions", console)
    write(response, folder, "dose", console)
