"""The command `mionnx compile`: interventions baked into a plain ONNX model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mionnx.bind.hook_index import index_hooks
from mionnx.cli.intervention_options import Interventions, takes_interventions
from mionnx.cli.opening import PLAIN, Opening, opens_model
from mionnx.cli.options import Captures, Json, Model
from mionnx.compile.package import Packaging, compile_spec
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.progress import shown
from mionnx.spec.hook_spec import HookSpec

WEIGHTS = "embedded, alongside (as files), or referenced (links, no copy). By default alongside; for web embedded."
LEVEL = "Of weights in blocks: 0, products in floats, or 4, in 8 bits and fast. By default the file's."
Knobs = Annotated[
    list[str] | None, typer.Option("--knob", metavar="NAME[=HOOK]", help="Keep a strength as an input with a default.")
]


@opens_model("dtype")
@takes_interventions(prompt=False)
def compile_(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to create.")],
    interventions: Interventions,
    capture: Captures = None,
    knob: Knobs = None,
    last_logits: Annotated[bool, typer.Option(help="Compute logits of the last position only.")] = False,
    weights: Annotated[str | None, typer.Option(help=WEIGHTS)] = None,
    target: Annotated[str, typer.Option(help="generic, ort-cpu, ort-cuda or web.")] = "generic",
    optimum: Annotated[bool, typer.Option(help="Write the layout of optimum's ORTModelForCausalLM.")] = False,
    triton: Annotated[bool, typer.Option(help="Write the layout of a Triton Inference Server repository.")] = False,
    fused: Annotated[str, typer.Option(help="Keep an adopted file's fused operators: none, padded or all.")] = "none",
    accuracy_level: Annotated[int | None, typer.Option(help=LEVEL)] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without interventions: the model itself.")] = False,
    opening: Opening = PLAIN,
    as_json: Json = False,
) -> None:
    """Bake interventions into a plain ONNX model that runs without mionnx.

    Interventions are written as for `mionnx run`, or come from a saved HookSpec. A knob without HOOK controls every
    strength that can be one; HOOK may be a glob.

    Example:

    mionnx compile models/world-llama -o no-attention --scale "blocks.2.hook_attn_out=0" --knob strength
    """
    if optimum and triton:
        raise typer.BadParameter("give either --optimum or --triton")
    hooked = opening.hooked(model)
    spec = interventions.spec(hooked.metadata.sizes.num_heads, None)
    for hook in capture or ():
        spec.capture(hook)
    layout = "optimum" if optimum else "triton" if triton else "plain"
    packaging = Packaging(weights, target, layout, fused, accuracy_level)
    with shown() as progress:
        folder = compile_spec(
            hooked,
            spec,
            output,
            knobs=_knobs(knob or []),
            last_logits=last_logits,
            plain=plain,
            packaging=packaging,
            progress=progress,
        )
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    count = _count(spec, hooked)
    if as_json:
        facts = {"bytes": size, "target": packaging.target, "weights": packaging.placed}
        typer.echo(json.dumps({"folder": str(folder), "interventions": count, **facts}, indent=1))
        return
    typer.echo(
        f"{folder}: {count} intervention{'s' * (count != 1)} baked in, {size / 2**20:.1f} MiB, {packaging.target}, "
        f"weights {packaging.placed}"
    )
    if knob:
        typer.echo('ONNX Runtime warns of each knob ("appears in graph inputs"), which is harmless: see the card')


def _knobs(texts: list[str]) -> dict[str, list[str] | None]:
    """Name -> the hook points whose strengths it controls; None for all."""
    knobs: dict[str, list[str] | None] = {}
    for text in texts:
        name, _, hook = text.partition("=")
        knobs[name] = [*(knobs.get(name) or []), hook] if hook else None
    return knobs


def _count(spec: HookSpec, model: HookedModel) -> int:
    """Number of interventions, those of a glob one by one."""
    return len(index_hooks(spec, model).interventions) + len(spec.state_knockouts) + len(spec.state_steerings)
