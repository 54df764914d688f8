"""The command `mionnx probe`: linear probes on harvested activations."""

from pathlib import Path
from typing import Annotated

import typer

from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.probes.labels import PROBE_KINDS
from mionnx.analysis.probes.probe import probe as fit
from mionnx.cli.options import Html, Json, Png, Save, deliver
from mionnx.errors import InputError

CLASSES, VALUES = PROBE_KINDS


def probe(
    folder: Annotated[Path, typer.Argument(help="Folder that `mionnx harvest` wrote.")],
    labels: Annotated[Path, typer.Argument(help="A label a line, one a text or one a token; an empty line is none.")],
    hook: Annotated[list[str] | None, typer.Option("--hook", help="Only this hook point; may be repeated.")] = None,
    groups: Annotated[Path | None, typer.Option(help="A group a line, one a text: they stay in one fold.")] = None,
    regression: Annotated[bool, typer.Option("--regression", help="Labels are numbers to predict.")] = False,
    per: Annotated[str | None, typer.Option(help="text or token, where the number of labels does not tell.")] = None,
    folds: Annotated[int, typer.Option(min=2, help="Parts of the texts, each held out once.")] = 5,
    penalty: Annotated[float, typer.Option(help="Of the squared weights.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the division into folds.")] = 0,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Fit a linear probe at each hook point of a harvest; scores are of texts held out.

    Example: mionnx probe activations labels.txt --html probe.html
    """
    given = [line or None for line in _lines(labels)]
    kind = VALUES if regression else CLASSES
    together = None if groups is None else _lines(groups)
    options = {"groups": together, "per": per, "kind": kind, "folds": folds, "penalty": penalty, "seed": seed}
    result = fit(Activations(folder), given, hook, **options)  # type: ignore[arg-type]
    deliver(result, result.table, html, png, as_json, save)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
