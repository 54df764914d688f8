"""The worked examples, run on a model that knows the capitals of countries and who gives what to whom.

Each example is a function of a model that prints what it did and what came out; nothing in it is written down
beforehand.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.special import softmax

from mionnx.ablation import AblationResult, StateAblationResult
from mionnx.hookpoint import HookPoint
from mionnx.intervention import Intervention
from mionnx.knockout import KnockoutSpec, create_knockout_mask
from mionnx.model import MIModel
from mionnx.spec import HookSpec
from mionnx.state_spec import StateKnockoutSpec

CAPITAL = "The capital of France is"
OTHER = "The capital of Germany is"
GIFT = "When Mary and John went to the store , John gave a drink to"


def run_all(models: Sequence[MIModel], console: Console) -> None:
    """Run every example on the first of the models that has its hook points; those that none has are left out."""
    examples: list[tuple[str, Callable[[MIModel, Console], None], Callable[[int], HookPoint]]] = [
        ("Attention patterns", attention_patterns, HookPoint.AttnPattern),
        ("Logit lens over the residual stream", logit_lens, HookPoint.ResidPost),
        ("Attention knockout", attention_knockout, HookPoint.AttnScores),
        ("Activation patching, France into Germany", activation_patching, HookPoint.ResidPost),
        ("Head ablation", head_ablation, HookPoint.AttnZ),
        ("RWKV state knockout", state_knockout, HookPoint.RwkvState),
    ]
    number, announced = 0, None
    for title, example, needed in examples:
        model = next((model for model in models if needed(0) in model.hook_points()), None)
        if model is None:
            continue
        if model is not announced:
            console.print(repr(model), style="dim", highlight=False)
        number, announced = number + 1, model
        console.rule(f"{number}. {title}", align="left")
        example(model, console)


def attention_patterns(model: MIModel, console: Console) -> None:
    """Where the last token looks in the layer and head that look most at the country."""
    tokens = model.tokenize(CAPITAL)
    (country,) = tokens.positions_of("France")
    cache = model.forward(tokens, HookSpec().capture("blocks.*.attn.hook_pattern"))
    looks = cache.stack("pattern")[:, 0, :, -1, country]  # [layer, head]
    layer, head = map(int, np.unravel_index(looks.argmax(), looks.shape))
    shape = list(cache["pattern", layer].shape)
    console.print(f"{CAPITAL!r}: blocks.{layer}.attn.hook_pattern is {shape} (batch, n_heads, seq_q, seq_k).")
    table = Table("what the last token reads", *tokens.pieces, title=f"layer {layer}, head {head}")
    table.add_row("attention", *(f"{weight:.2f}" for weight in cache["pattern", layer][0, head, -1]))
    console.print(table)


def logit_lens(model: MIModel, console: Console) -> None:
    """What the residual stream after each layer would predict, were it the last."""
    cache = model.forward(CAPITAL, HookSpec().capture("blocks.*.hook_resid_post"))
    answer = int(cache.output()[0, -1].argmax())
    table = Table("layer", "likeliest next token", "its probability", f"probability of {name(model, answer)}")
    for layer, stream in enumerate(cache.stack("resid_post")[:, 0, -1]):
        chances = softmax(model.project_to_vocab(stream))
        best = int(chances.argmax())
        table.add_row(str(layer), name(model, best), f"{chances[best]:.3f}", f"{chances[answer]:.3f}")
    console.print(f"{CAPITAL!r} ... , read off after each layer:")
    console.print(table)


def attention_knockout(model: MIModel, console: Console) -> None:
    """Cut the edge from the last token to the country, layer by layer and in all layers."""
    tokens = model.tokenize(CAPITAL)
    (country,) = tokens.positions_of("France")
    edge = KnockoutSpec().edge(len(tokens) - 1, country)
    mask = create_knockout_mask(edge, model.num_heads, len(tokens))
    baseline = model.forward(tokens).output()[0, -1]
    table = Table("knocked out in", "likeliest next token", "KL from the baseline (nats)")
    for layers in [*([layer] for layer in range(model.num_layers)), list(range(model.num_layers))]:
        spec = HookSpec()
        for layer in layers:
            spec.intervene(HookPoint.AttnScores(layer), Intervention.Knockout(mask))
        result = AblationResult(baseline, model.forward(tokens, spec).output()[0, -1], edge)
        where = f"layer {layers[0]}" if len(layers) == 1 else "every layer"
        best = name(model, int(result.ablated_logits.argmax()))
        table.add_row(where, best, f"{result.kl_divergence():.4f}")
    console.print(f"The last token of {CAPITAL!r} can no longer read {'France'!r}:")
    console.print(table)


def activation_patching(model: MIModel, console: Console) -> None:
    """Put the residual stream of one prompt into another, one layer and position at a time."""
    clean, corrupted = model.tokenize(CAPITAL), model.tokenize(OTHER)
    cache = model.forward(clean, HookSpec().capture("blocks.*.hook_resid_post"))
    answer, other = (int(model.forward(tokens).output()[0, -1].argmax()) for tokens in (clean, corrupted))
    table = Table(f"P({name(model, answer)}) after patching layer", *corrupted.pieces)
    for layer in range(model.num_layers):
        donor = cache["resid_post", layer]
        cells = []
        for position in range(len(corrupted)):
            patch = Intervention.Replace(donor, positions=position)
            logits = model.forward(corrupted, HookSpec().intervene(HookPoint.ResidPost(layer), patch)).output()
            cells.append(f"{softmax(logits[0, -1])[answer]:.2f}")
        table.add_row(str(layer), *cells)
    console.print(f"Activations of {CAPITAL!r} put into {OTHER!r}, which alone answers {name(model, other)}:")
    console.print(table)


def head_ablation(model: MIModel, console: Console) -> None:
    """Zero one head after the other, and see what it does to the answer."""
    tokens = model.tokenize(GIFT)
    baseline = model.forward(tokens).output()[0, -1]
    answer = int(baseline.argmax())
    scores = np.array([[_ablate(model, tokens.ids, baseline, layer, head) for head in range(model.num_heads)]
                       for layer in range(model.num_layers)])  # fmt: skip
    table = Table("layer", *(f"{head}" for head in range(model.num_heads)), title="KL in nats, one head zeroed")
    for layer, row in enumerate(scores):
        table.add_row(str(layer), *(f"{score:.3f}" for score in row))
    console.print(f"{GIFT!r} ... {name(model, answer)}:")
    console.print(table)
    layer, head = map(int, np.unravel_index(scores.argmax(), scores.shape))
    ablated = _without(model, tokens.ids, layer, head)
    console.print(
        f"Layer {layer}, head {head} matters most: P({name(model, answer)}) falls from "
        f"{softmax(baseline)[answer]:.3f} to {softmax(ablated)[answer]:.3f} without it."
    )


def state_knockout(model: MIModel, console: Console) -> None:
    """Leave out what the country writes into the recurrent state, layer by layer and in all layers."""
    tokens = model.tokenize(CAPITAL)
    (country,) = tokens.positions_of("France")
    baseline = model.forward(tokens).output()[0, -1]
    answer = int(baseline.argmax())
    table = Table("knocked out in", "likeliest next token", "KL (nats)", f"P({name(model, answer)})")
    for layer in [*range(model.num_layers), None]:
        spec = StateKnockoutSpec().position(country)
        if layer is not None:
            spec.layer(layer)
        ablated = model.forward(tokens, HookSpec().set_state_knockout(spec)).output()[0, -1]
        result = StateAblationResult(baseline, ablated, spec)
        where = "every layer" if layer is None else f"layer {layer}"
        best, chance = name(model, int(ablated.argmax())), softmax(ablated)[answer]
        table.add_row(where, best, f"{result.kl_divergence():.4f}", f"{chance:.3f}")
    console.print(f"{'France'!r} in {CAPITAL!r} writes nothing into the state:")
    console.print(table)


def _without(model: MIModel, ids: NDArray[np.int64], layer: int, head: int) -> NDArray[np.float32]:
    spec = HookSpec().intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
    return model.forward(ids, spec).output()[0, -1]


def _ablate(model: MIModel, ids: NDArray[np.int64], baseline: NDArray[np.float32], layer: int, head: int) -> float:
    return AblationResult(baseline, _without(model, ids, layer, head)).kl_divergence()


def name(model: MIModel, token: int) -> str:
    """A token as text, quoted."""
    return repr(model.tokenizer.decode([token], skip_special_tokens=False))
