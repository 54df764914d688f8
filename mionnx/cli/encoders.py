"""Commands on encoders: masks, labels, tags, spans, and how alike texts are, and why."""

from collections.abc import Callable
from typing import Annotated, Any

import typer
from numpy.typing import NDArray
from rich.table import Table

from mionnx.cli.command import Arguments, Command, Open
from mionnx.machine.decimals import decimal
from mionnx.model import MIModel

Texts = Annotated[list[str], typer.Argument(metavar="TEXT", help="One text, or several.")]
Others = Annotated[list[str] | None, typer.Option("--beside", metavar="TEXT", help="Texts of the columns, if others.")]
BERT = "models/world-bert"


def _of_texts(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Call a verb with the texts of the command line, which are no files."""

    def call(open: Open, arguments: Arguments, texts: Texts) -> Any:
        return verb(open(), texts, **arguments)

    return call


def _alike(open: Open, arguments: Arguments, texts: Texts, beside: Others = None) -> tuple[list[str], NDArray[Any]]:
    columns = beside or texts
    return columns, open().similarity(texts, columns, **arguments)


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
    ['mionnx tag MODEL "Ann lives in Rome"'],
    call=_of_texts(MIModel.tag),
    without=("texts",),
)
ANSWER_SPAN = Command(
    [MIModel.answer_span],
    ['mionnx answer-span MODEL "Where does Ann live?" "Ann lives in Rome now"'],
    positional=("question", "context"),
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
