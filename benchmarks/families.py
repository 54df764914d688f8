"""Every decoder-only text family of transformers, and its encoders, at tiny size, beside transformers in eager mode.

    python benchmarks/families.py [FAMILY ...] [--rows FILE] [--save]

All names of transformers' causal-LM mapping; for each that is missing, the reason. The same oracle and the same batches
as the tests: every hook point of every layer with and without padding and a past, logits also beside transformers
without taps, each kind of intervention at the hook points of the last layer, eight tokens decoded greedily. Of families
that no table of modules knows, the oracle is that of their own tests; where there is none, the export's own comparison
with eager mode stands alone. A row with a difference above 5e-5 or a cell without one does not count as whole. Encoders
have a row each, "bert (encoder)", with the head that predicts masked tokens (T5's without one): padded on no side, the
right and the left, streams and patterns beside transformers without taps, and an edit at every hook point.

Without names all are measured; with names these alone, and every other row is the one that was saved. `--rows` keeps
what was measured in a file of JSON lines, and measures what is not in it; `--save` writes
benchmarks/results/families.md.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from encoder_rows import AS_ENCODER, ENCODER_COLUMNS, measure_encoder
from family_models import RWKV4, MissingError, for_each, make_decoder
from tables import present
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "shared"))

from family_batches import KINDS, batch, difference, forward, interventions  # noqa: E402
from oracle import Inputs, Outcome, run  # noqa: E402
from recurrent_families import CONFIGS as RECURRENT_FAMILIES  # noqa: E402
from rwkv4_eager import UNSEEN  # noqa: E402
from rwkv4_eager import run as run_rwkv4  # noqa: E402
from unlisted_families import FAMILIES  # noqa: E402
from unlisted_families import run as run_unlisted  # noqa: E402

from exporters import rwkv  # noqa: E402
from exporters.transformers import export  # noqa: E402
from exporters.transformers.encoder_families import ENCODERS  # noqa: E402
from exporters.transformers.refused import ENCODER, REASONS  # noqa: E402
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
LARGEST = 5e-5  # difference in a row that counts as whole
SAVED = HERE / "results" / "families.md"
STRUCTURE = " (by structure)"

NOTES = (
    "-: not compared, as no oracle shows these hook points in torch; such a family does not count as whole.",
    "doge, axk2, deepseek_v32, glm_moe_dsa, minimax_m3_vl_text: texts of up to as many tokens as sparse attention "
    "keeps (`keep_window_size`, `index_topk`), so that it keeps all; a longer one is refused.",
    "laguna: where all layers have as many heads; others are refused.",
    "longcat_flash: each of its blocks is two layers.",
    "rwkv: RWKV-4, beside each row alone and whole; an edit of a decay or a state is compared with a loop in float64.",
    "Recurrent layers: sizes, decays and norms of tests/shared/recurrent_families.py; logits beside each row alone, "
    "without a cache.",
)


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
    if family.endswith(AS_ENCODER):
        return measure_encoder(family, folder), False
    if family in ENCODERS:
        raise MissingError(ENCODER)
    reference = make_decoder(family, folder / "checkpoint")
    began = time.process_time()
    (rwkv.export if family == RWKV4 else export)(folder / "checkpoint", folder / "hooked")
    seconds = time.process_time() - began
    model = MIModel.from_pretrained(folder / "hooked", threads=1)
    if by_structure(model) or family == RWKV4:
        return structural_row(family, model, reference, seconds), False
    with Reduced() as precision:
        run(reference, batch("plain"))
    oracles = [worst_capture, *([partial(worst_seen, family)] if family in FAMILIES else [])]
    captures = [max(worst(model, reference, batch(kind)) for worst in oracles) for kind in KINDS]
    untapped = logits_alone if family in RECURRENT_FAMILIES else untapped_logits
    for place in (0, 1):  # transformers counts the tokens of windows otherwise in texts padded on the right
        captures[place] = max(captures[place], untapped(model, reference, batch(KINDS[place])))
    worst, count = worst_intervention(model, reference, batch("left past"))
    same = greedy(model, reference)
    shown = [f"{value:.1e}" for value in (*captures, worst)]
    return [family, str(len(model.hook_points())), *shown, str(count), same, f"{seconds:.0f}"], precision.found


def by_structure(model: MIModel) -> bool:
    """Whether the hook points were found by structure: taps do not fit the family."""
    return FOUND_BY_STRUCTURE in model.hooked.metadata.exporter


def structural_row(family: str, model: MIModel, reference: Any, seconds: float) -> list[str]:
    """The row of a family whose hook points were found by structure, or of RWKV-4; what has no oracle is left open."""
    captures = dict.fromkeys(KINDS, "-")
    worst, count = "-", "-"
    if family in FAMILIES or family == RWKV4:
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
        f"{family}{STRUCTURE * by_structure(model)}",
        str(len(model.hook_points())),
        *captures.values(),
        worst,
        count,
        f"{same} of {TOKENS}",
        f"{seconds:.0f}",
    ]


def oracle(family: str) -> Callable[..., Outcome]:
    """A family's own oracle: what eager torch has at its hook points."""
    return run_rwkv4 if family == RWKV4 else partial(run_unlisted, family)


def worst_seen(family: str, model: MIModel, reference: Any, inputs: Inputs) -> float:
    """The largest difference over the hook points that the family's own oracle shows."""
    reference.config._attn_implementation = "eager"
    expected = oracle(family)(reference, inputs).values
    found = forward(model, inputs, HookSpec().capture(lambda name: not HookPoint.parse(name).derived)).values
    return max(difference(HookPoint.parse(name), found[name], expected[name], inputs) for name in expected)


def unlisted_interventions(family: str, model: MIModel, reference: Any, inputs: Inputs) -> tuple[float, int]:
    """Largest difference of logits over interventions in the last layer and outside; their number."""
    plain, worst, count = oracle(family)(reference, inputs), 0.0, 0
    hidden = UNSEEN if family == RWKV4 else FAMILIES[family].unseen
    for point in map(HookPoint.parse, plain.values):
        if point.name.endswith((*hidden,)) or point.layer not in (None, model.num_layers - 1):
            continue
        for edit in list(interventions(point, plain.values[point.name].shape, whole=False))[::3]:
            expected = oracle(family)(reference, inputs, [(point, edit)]).logits
            found = forward(model, inputs, HookSpec().intervene(point, edit)).logits
            scale = max(1.0, float(np.abs(expected[inputs.real]).max()))
            worst, count = max(worst, float(np.abs(found - expected)[inputs.real].max()) / scale), count + 1
    return worst, count


def worst_capture(model: MIModel, reference: torch.nn.Module, inputs: Inputs) -> float:
    """The largest difference over all hook points.

    Raises:
        MissingError: a hook point is on one side only.
    """
    expected = run(reference, inputs).values
    found = forward(model, inputs, HookSpec().capture(lambda name: not HookPoint.parse(name).derived)).values
    if {*found} != {*expected}:
        raise MissingError(f"hook points differ: {', '.join(sorted({*found} ^ {*expected})[:4])}")
    points = map(HookPoint.parse, found)
    return max(difference(point, found[str(point)], expected[str(point)], inputs) for point in points)


def untapped_logits(model: MIModel, reference: Any, inputs: Inputs) -> float:
    """The largest difference of logits from transformers' own attention and experts, without taps."""
    config = reference.config
    config._attn_implementation = config._experts_implementation = "eager"
    tokens = {"input_ids": inputs.ids, "attention_mask": inputs.mask, "position_ids": inputs.positions}
    with torch.no_grad():
        logits = reference(**{name: torch.from_numpy(array) for name, array in tokens.items()}).logits.numpy()
    return float(np.abs(forward(model, inputs, HookSpec()).logits - logits)[inputs.real].max())


def logits_alone(model: MIModel, reference: Any, inputs: Inputs) -> float:
    """The same of each row alone and without a cache: padding and a cache are not for all of transformers' states."""
    config = reference.config
    config._attn_implementation = config._experts_implementation = "eager"
    found, worst = forward(model, inputs, HookSpec()).logits, 0.0
    for row, real in enumerate(inputs.real):
        with torch.no_grad():
            logits = reference(input_ids=torch.from_numpy(inputs.ids[row][real])[None], use_cache=False).logits[0]
        worst = max(worst, float(np.abs(found[row, real] - logits.numpy()).max()))
    return worst


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


def whole(row: list[str]) -> bool:
    """Whether everything of a row was compared, with no difference above `LARGEST`."""
    if len(row) == len(ENCODER_COLUMNS):
        return max(map(float, row[2:-1])) <= LARGEST
    differences = row[2 : 3 + len(KINDS)]
    return "-" not in row and max(map(float, differences)) <= LARGEST and row[-2] == f"{TOKENS} of {TOKENS}"


def marked(row: list[str]) -> list[str]:
    """A row that says so where it does not count as whole."""
    return row if whole(row) else [f"{row[0]}, not whole", *row[1:]]


def saved() -> dict[str, dict[str, Any]]:
    """What the saved table says of each family."""
    text = SAVED.read_text()
    reduced = text.partition("in half precision in: ")[2].partition(". ")[0].split("; ")  # a name may have a comma
    found: dict[str, dict[str, Any]] = {}
    for cells in (line.split(" | ") for line in text.splitlines()):
        name = cells[0].removesuffix(", not whole").removesuffix(STRUCTURE)
        if name in ("family", "encoder", "missing", "---") or len(cells) not in (2, len(COLUMNS), len(ENCODER_COLUMNS)):
            continue
        row = [cells[0].removesuffix(", not whole"), *cells[1:]]
        told: dict[str, Any] = {"missing": cells[1]} if len(cells) == 2 else {"row": row, "reduced": name in reduced}
        found[name] = {"family": name, **told}
    return found


def main() -> None:
    """Measure, print, and save if asked.

    Raises:
        SystemExit: a name that the mapping does not have.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    unlisted = {name for name in FAMILIES if "," in name}  # two more kinds of falcon
    encoders = [f"{name}{AS_ENCODER}" for name in sorted(ENCODERS)]
    decoders = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *unlisted})
    refused = sorted({*REASONS} - {*decoders})
    every = [*decoders, *encoders, *refused]
    if strange := sorted({*given.families} - {*every}):
        parser.error(f"neither in transformers' causal-LM mapping nor an encoder: {', '.join(strange)}")
    names = given.families or every
    others = {name: entry for name, entry in saved().items() if name not in names}
    unknown_yet = {name: {"family": name, "missing": "not measured"} for name in every if name not in names}
    found = for_each(names, measure, given.rows, unknown_yet | others)
    rows = [found[name]["row"] for name in decoders if "row" in found[name]]
    encoded = [found[name]["row"] for name in encoders if "row" in found[name]]
    reduced = [name for name in every if found[name].get("reduced")]
    missing = [(name, found[name]["missing"]) for name in every if "missing" in found[name]]
    title = f"transformers {transformers.__version__}, random small models, eager, fp32; {platform.machine()}"
    said = (
        f"{sum(map(whole, rows))} of {len(decoders)} families work whole, every cell compared and no difference above "
        f"{LARGEST:.0e}: the {len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} names of transformers' causal-LM mapping and "
        f"{len(unlisted)} further kinds of falcon. Of encoders {sum(map(whole, encoded))} of {len(encoders)} do. "
        f"Eager mode computes a part in half precision in: {'; '.join(reduced) or 'none'}. "
        "Seconds are processor time of an export."
    )
    tables = [(COLUMNS, [marked(row) for row in rows]), (ENCODER_COLUMNS, [marked(row) for row in encoded])]
    tables.append((("missing", "why"), missing))
    present("families", "Largest difference from transformers", title, tables, given.save, said, NOTES)


if __name__ == "__main__":
    main()
