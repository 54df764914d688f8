"""The command `mionnx bisect`: the smallest part of a model at which two runtimes disagree."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from mionnx.cli.opening import PLAIN, Opening, opens_model
from mionnx.cli.options import Json, Model, SpecFile
from mionnx.cli.verify import DISAGREES, Other, Runtimes, Tolerance
from mionnx.model import MIModel
from mionnx.spec.hook_spec import HookSpec
from mionnx.view.page import plain


@opens_model("dtype")
def bisect(
    model: Model,
    runtimes: Runtimes,
    prompt: Annotated[str, typer.Option(help="The text to run on.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for a bug report; made new.")] = None,
    spec: SpecFile = None,
    other: Other = None,
    tolerance: Tolerance = None,
    opening: Opening = PLAIN,
    as_json: Json = False,
) -> None:
    """Find the smallest part of a model at which two runtimes, or two models, disagree.

    The inputs of that part agree, and its output does not. Exit code 0 if there is none, 2 if there is one.

    Examples:

    mionnx bisect models/world-llama --runtimes ort-cpu,openvino --prompt "The capital of France is" -o report

    mionnx bisect MODEL --runtimes ort-cpu --other EDITED_MODEL --prompt "The capital of France is"
    """
    opened = opening.model(model)
    found = opened.bisect(
        prompt,
        runtimes.split(","),
        folder=output,
        hooks=HookSpec.load(str(spec)) if spec else None,
        other=MIModel.from_pretrained(other) if other else None,
        tolerance=tolerance,
    )
    typer.echo(json.dumps(plain(found.to_dict(), None), indent=1, allow_nan=False) if as_json else str(found))
    sys.exit(DISAGREES if found.hook else 0)
