"""The command `mionnx attention`: attention patterns, token by token and head by head."""

from rich.markup import escape

from mionnx.analysis.attention.attention_patterns import AttentionPatterns
from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import (
    Heads,
    Html,
    Json,
    Layers,
    Model,
    Png,
    Position,
    Prompt,
    Save,
    chosen,
    deliver,
)
from mionnx.machine.decimals import decimal
from mionnx.view import Table


@opens_model(*RUNS)
def attention(
    model: Model,
    prompt: Prompt,
    position: Position = -1,
    layers: Layers = None,
    heads: Heads = None,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Show the tokens that each head attends to; for an RWKV, its effective attention.

    The table is of one position and the key that each head attends to most; the page has everything.

    Example: mionnx attention models/world-llama "The capital of France is" --html attention.html
    """
    opened = opening.once(model)
    result = opened.attention(opened.tokenize(prompt), chosen("layers", layers), chosen("heads", heads))
    index = result.at(position)
    deliver(result, lambda: attention_table(result, index), html, png, as_json, save)


def attention_table(result: AttentionPatterns, index: int) -> Table:
    """The key that each head attends to most at one position, with its weight."""
    title = escape(f"most attended token at position {index}, {result.tokens[index]!r}, by head")
    wide = len(result.heads) > 8
    table = Table("layer", *(["heads"] if wide else map(str, result.heads)), title=title)
    for i, layer in enumerate(result.layers):
        best = result.patterns[i, :, index].argmax(axis=-1)
        cells = [
            f"{result.tokens[key]!r} {decimal(result.patterns[i, j, index, key], 2)}" for j, key in enumerate(best)
        ]
        if wide:
            cells = ["  ".join(f"{head}: {cell}" for head, cell in zip(result.heads, cells, strict=True))]
        table.add_row(str(layer), *map(escape, cells))
    return table
