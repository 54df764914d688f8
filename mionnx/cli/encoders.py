"""Commands on encoders: masks, labels, tags, spans, and how alike texts are, and why."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from mionnx.cli.command import Arguments, Command, Open
from mionnx.machine.brief import cut
from mionnx.machine.decimals import decimal
from mionnx.machine.files import atomic_path
from mionnx.model import MIModel
from mionnx.run.embedding import Vectors

Texts = Annotated[list[str], typer.Argument(metavar="TEXT", help="One text, or several.")]
Others = Annotated[list[str] | None, typer.Option("--beside", metavar="TEXT", help="Texts of the columns, if others.")]
Target = Annotated[
    Path | None, typer.Option("--save", metavar="FILE.npy", help="Write the embeddings, float32 [texts, d].")
]
BERT = "models/world-bert"
SHOWN = 6  # numbers of an embedding that a terminal shows


def _of_texts(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Call a verb with the texts of the command line, which are no files."""

    def call(open: Open, arguments: Arguments, texts: Texts) -> Any:
        return verb(open(), texts, **arguments)

    return call


def _alike(open: Open, arguments: Arguments, texts: Texts, beside: Others = None) -> tuple[list[str], NDArray[Any]]:
    columns = beside or texts
    return columns, open().similarity(texts, columns, **arguments)


def _embedded(open: Open, arguments: Arguments, texts: Texts, target: Target = None) -> tuple[list[str], Vectors]:
    vectors = open().embed(texts, **arguments)
    if target is not None:
        with atomic_path(target) as partial, partial.open("wb") as file:
            np.save(file, vectors)
    return texts, vectors


def _lines(result: tuple[list[str], Vectors]) -> list[Table]:
    texts, vectors = result
    table = Table("text", "numbers", "length", "the first ones")
    for text, vector in zip(texts, vectors.astype(np.float64), strict=True):
        first = " ".join(decimal(number, 3) for number in vector[:SHOWN].tolist())
        length = decimal(float(np.sqrt(vector @ vector)), 4)
        table.add_row(cut(text, 60), str(len(vector)), length, first)
    return [table]


def _matrix(result: tuple[list[str], NDArray[Any]]) -> list[Table]:
    columns, numbers = result
    table = Table(*columns)
    for row in numbers.tolist():
        table.add_row(*(decimal(number, 4) for number in row))
    return [table]


FILL_MASK = Command(
    [MIModel.fill_mask],
    [f'mionnx fill-mask {BERT} "The capital of France is <mask> ."'],
    call=_of_texts(MIModel.fill_mask),
    without=("texts",),
)
CLASSIFY = Command(
    [MIModel.classify],
    ['mionnx classify MODEL "What a day" "It rains"'],
    call=_of_texts(MIModel.classify),
    without=("texts",),
)
TAG = Command(
    [MIModel.tag],
    ['mionnx tag MODEL "Ann lives in Rome"', 'mionnx tag MODEL "Ann lives in Rome" --html tags.html'],
    call=_of_texts(MIModel.tag),
    without=("texts",),
)
ANSWER_SPAN = Command(
    [MIModel.answer_span],
    ['mionnx answer-span MODEL "Where does Ann live?" "Ann lives in Rome now"'],
    positional=("question", "context"),
)
EMBED = Command(
    [MIModel.embed],
    [
        'mionnx embed minilm "A man plays the guitar" "Someone performs music"',
        'mionnx embed minilm "It rains" --save rain.npy',
    ],
    call=_embedded,
    show=_lines,
    facts=lambda result: result[1].tolist(),
    without=("texts",),
    files=False,
)
SIMILARITY = Command(
    [MIModel.similarity],
    ['mionnx similarity minilm "A man plays the guitar" "Someone performs music"'],
    call=_alike,
    show=_matrix,
    facts=lambda result: result[1].tolist(),
    without=("a", "b"),
    files=False,
)
ATTRIBUTE_SIMILARITY = Command(
    [MIModel.attribute_similarity],
    ['mionnx attribute-similarity minilm "A man plays the guitar" "Someone performs music" --html pairs.html'],
    positional=("a", "b"),
)
