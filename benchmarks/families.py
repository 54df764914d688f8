"""Every decoder-only text family of transformers at tiny size, beside transformers in eager mode.

    python benchmarks/families.py [FAMILY ...] [--rows FILE] [--save]

All names of transformers' causal-LM mapping; for each that is missing, the reason. The same oracle and the same batches
as the tests: every hook point of every layer with and without padding and a past, each kind of intervention at the hook
points of the last layer, eight tokens decoded greedily. Of families that no table of modules knows, the oracle is that
of their own tests; where there is none, the export's own comparison with eager mode stands alone. `--rows` keeps what
was measured in a file of JSON lines, and measures what is not in it; `--save` writes benchmarks/results/families.md.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import track
from tables import present
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "shared"))

from families import make_checkpoint, make_model  # noqa: E402
from family_batches import KINDS, batch, difference, forward, interventions  # noqa: E402
from oracle import Inputs, run  # noqa: E402
from tiny_configs import tiny_config  # noqa: E402
from unlisted_families import FAMILIES, make  # noqa: E402
from unlisted_families import run as run_unlisted  # noqa: E402

from exporters.transformers import export  # noqa: E402
from mionnx import HookPoint, HookSpec, MIModel  # noqa: E402
from mionnx.graph.metadata import FOUND_BY_STRUCTURE  # noqa: E402

COLUMNS = (
    "family",
    "hook points",
    *(f"captures, {kind}" for kind in KINDS),
    "interventions",
    "how many",
    "greedy tokens",
    "export, s",
)
TOKENS = 8
REDUCED = (torch.float16, torch.bfloat16)
OTHER_INPUTS = {"vision_config", "audio_config", "vq_config", "audio_encoder_config", "text_config"}
RECURRENT = ("mamba", "rwkv", "xlstm", "linearattention", "deltanet", "recurrent", "shortconv", "kda")


class MissingError(Exception):
    """Why a family is not in the table."""


class Reduced(TorchDispatchMode):
    """Whether anything is computed in half precision."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        self.found |= isinstance(value, torch.Tensor) and value.dtype in REDUCED
        return value


def measure(family: str, folder: Path) -> tuple[list[str], bool]:
    """One row, and whether eager mode computes a part of it in half precision.

    Raises:
        MissingError: the family is no text decoder with keys and values, or does not work.
    """
    if family in FAMILIES:
        reference: Any = make(family)
        reference.save_pretrained(folder / "checkpoint")
    else:
        check_kind(family)
        reference = make_checkpoint(family, folder / "checkpoint", **tiny_config(family))
    began = time.process_time()
    export(folder / "checkpoint", folder / "hooked")
    seconds = time.process_time() - began
    model = MIModel.from_pretrained(folder / "hooked", threads=1)
    if FOUND_BY_STRUCTURE in model.hooked.metadata.exporter:
        return structural_row(family, model, reference, seconds), False
    with Reduced() as precision:
        run(reference, batch("plain"))
    oracles = [worst_capture, *([partial(worst_seen, family)] if family in FAMILIES else [])]
    captures = [f"{max(worst(model, reference, batch(kind)) for worst in oracles):.1e}" for kind in KINDS]
    worst, count = worst_intervention(model, reference, batch("left past"))
    same = greedy(model, reference)
    row = [family, str(len(model.hook_points())), *captures, f"{worst:.1e}", str(count), same, f"{seconds:.0f}"]
    return row, precision.found


def structural_row(family: str, model: MIModel, reference: Any, seconds: float) -> list[str]:
    """The row of a family whose hook points were found by structure; what has no oracle is left open."""
    captures = dict.fromkeys(KINDS, "-")
    worst, count = "-", "-"
    if family in FAMILIES:
        for kind in KINDS:
            captures[kind] = f"{worst_seen(family, model, reference, batch(kind)):.1e}"
        last, made = unlisted_interventions(family, model, reference, batch("left past"))
        worst, count = f"{last:.1e}", str(made)
    start = batch("plain").ids[:1]
    text = model.generate(start[0], max_new_tokens=TOKENS, eos_token_id=[]).ids[0][None]
    with torch.no_grad():
        logits = reference(input_ids=torch.from_numpy(text)).logits[0].numpy()
    same = int((logits[start.shape[1] - 1 : -1].argmax(-1) == text[0, start.shape[1] :]).sum())
    return [
        f"{family} (by structure)",
        str(len(model.hook_points())),
        *captures.values(),
        worst,
        count,
        f"{same} of {TOKENS}",
        f"{seconds:.0f}",
    ]


def worst_seen(family: str, model: MIModel, reference: Any, inputs: Inputs) -> float:
    """The largest difference over the hook points that the family's own oracle shows."""
    expected = run_unlisted(family, reference, inputs).values
    found = forward(model, inputs, HookSpec().capture(lambda name: not name.endswith("hook_result"))).values
    return max(difference(HookPoint.parse(name), found[name], expected[name], inputs) for name in expected)


def unlisted_interventions(family: str, model: MIModel, reference: Any, inputs: Inputs) -> tuple[float, int]:
    """Largest difference of logits over interventions in the last layer and outside; their number."""
    plain, worst, count = run_unlisted(family, reference, inputs), 0.0, 0
    for point in map(HookPoint.parse, plain.values):
        unseen = any(point.name.endswith(short) for short in FAMILIES[family].unseen)
        if unseen or point.layer not in (None, model.num_layers - 1):
            continue
        for edit in list(interventions(point, plain.values[point.name].shape, whole=False))[::3]:
            expected = run_unlisted(family, reference, inputs, [(point, edit)]).logits
            found = forward(model, inputs, HookSpec().intervene(point, edit)).logits
            scale = max(1.0, float(np.abs(expected[inputs.real]).max()))
            worst, count = max(worst, float(np.abs(found - expected)[inputs.real].max()) / scale), count + 1
    return worst, count


def check_kind(family: str) -> None:
    """Refuse what is no text decoder with keys and values.

    Raises:
        MissingError: the reason.
    """
    try:
        config = AutoConfig.for_model(family)
    except Exception as error:
        raise MissingError(f"transformers' own default config is refused: {first_line(error)}") from error
    if config.is_encoder_decoder:
        raise MissingError("an encoder and a decoder")
    if OTHER_INPUTS & {*config.sub_configs}:
        raise MissingError("reads images or sound; its text part, where it has one, is a family of its own")
    try:
        model = make_model(family, **tiny_config(family))
    except Exception as error:
        raise MissingError(f"does not build at tiny size: {first_line(error)}") from error
    kinds = {type(module).__name__.lower() for module in model.modules()}
    if any(word in kind for kind in kinds for word in RECURRENT):
        raise MissingError("state-space, recurrent or linear attention layers, or convolutions over tokens")
    if getattr(config, "is_decoder", True) is False and "type_vocab_size" in config.to_dict():
        raise MissingError("an encoder, which the mapping lists because it can be made to attend to the left")


def first_line(error: BaseException) -> str:
    """An error's class and the beginning of what it says, in one line."""
    said = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__


def worst_capture(model: MIModel, reference: torch.nn.Module, inputs: Inputs) -> float:
    """The largest difference over all hook points.

    Raises:
        MissingError: a hook point is on one side only.
    """
    expected = run(reference, inputs).values
    found = forward(model, inputs, HookSpec().capture(lambda name: not name.endswith("hook_result"))).values
    if {*found} != {*expected}:
        raise MissingError(f"hook points differ: {', '.join(sorted({*found} ^ {*expected})[:4])}")
    points = map(HookPoint.parse, found)
    return max(difference(point, found[str(point)], expected[str(point)], inputs) for point in points)


def worst_intervention(model: MIModel, reference: torch.nn.Module, inputs: Inputs) -> tuple[float, int]:
    """Largest difference of logits over interventions in the last layer and outside; their number."""
    plain = run(reference, inputs)
    worst, count = 0.0, 0
    for point in [p for p in model.hook_points() if not p.derived and p.layer in (None, model.num_layers - 1)]:
        if point.axes[-1] == "n_chosen" or not np.issubdtype(plain.values[str(point)].dtype, np.floating):
            continue  # a choice is no number to add to
        for edit in list(interventions(point, plain.values[str(point)].shape, whole=False))[::3]:
            expected = run(reference, inputs, [(point, edit)]).logits
            found = forward(model, inputs, HookSpec().intervene(point, edit)).logits
            scale = max(1.0, float(np.abs(expected[inputs.real]).max()))
            worst, count = max(worst, float(np.abs(found - expected)[inputs.real].max()) / scale), count + 1
    return worst, count


def greedy(model: MIModel, reference: torch.nn.Module) -> str:
    """How many of the tokens that mionnx decodes are eager's choice after the same text."""
    start = batch("plain").ids[:1]
    text = model.generate(start[0], max_new_tokens=TOKENS, eos_token_id=[]).ids[0][None]
    logits = run(reference, Inputs(text, np.ones_like(text))).logits[0]
    chosen = logits[start.shape[1] - 1 : -1].argmax(-1)
    return f"{int((chosen == text[0, start.shape[1] :]).sum())} of {TOKENS}"


def for_each(
    names: list[str], function: Callable[[str, Path], tuple[list[str], bool]], rows: Path | None
) -> dict[str, dict[str, Any]]:
    """What was measured of each family, or why it is missing."""
    kept = [json.loads(line) for line in rows.read_text().splitlines()] if rows and rows.exists() else []
    found = {entry["family"]: entry for entry in kept}
    for name in track([name for name in names if name not in found], "families", console=Console(stderr=True)):
        entry: dict[str, Any] = {"family": name}
        with tempfile.TemporaryDirectory() as folder:
            try:
                entry["row"], entry["reduced"] = function(name, Path(folder))
            except MissingError as error:
                entry["missing"] = str(error)
            except Exception as error:  # of any library: the table says it
                entry["missing"] = f"refused: {first_line(error)}"
        found[name] = entry
        if rows:
            with rows.open("a") as file:
                file.write(json.dumps(entry) + "\n")
    return found


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    unlisted = {name for name in FAMILIES if "," in name}  # two more kinds of falcon
    names = given.families or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *unlisted})
    found = for_each(names, measure, given.rows)
    rows = [found[name]["row"] for name in names if "row" in found[name]]
    reduced = [name for name in names if found[name].get("reduced")]
    missing = [(name, found[name]["missing"]) for name in names if "missing" in found[name]]
    title = f"transformers {transformers.__version__}, random small models, eager, fp32; {platform.machine()}"
    said = (
        f"{len(rows)} of the {len(names)} names measured, of transformers' causal-LM mapping, work whole. "
        f"Eager mode computes a part in half precision in: {', '.join(reduced) or 'none'}. "
        "Seconds are processor time of an export."
    )
    tables = [(COLUMNS, rows), (("missing", "why"), missing)]
    present("families", "Largest difference from transformers", title, tables, given.save, said)


if __name__ == "__main__":
    main()
