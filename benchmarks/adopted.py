"""Adopted stock files beside transformers: hook points, interventions, generation, the null law, size and time.

    python benchmarks/adopted.py STOCK [--kinds optimum-past,genai-fp32] [--families llama,gpt2] [--save]

STOCK is the folder that `stock_files.py` wrote, with its manifest. Each file is adopted; every hook point and an
intervention at each is compared with the checkpoint in transformers, eager; greedy continuations with
those of transformers; and an empty spec with the file as it came, in plain onnxruntime. `--save` writes
benchmarks/results/stock.md.
"""

import argparse
import json
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.progress import track
from tables import present
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "shared"))

from oracle import Inputs, run  # noqa: E402

from exporters.adopt import adopt  # noqa: E402
from mionnx import HookPoint, HookSpec, Intervention, MIError, MIModel  # noqa: E402

MASKED = np.finfo(np.float16).min / 2  # scores below are those of masked keys
SEQ, NEW = 12, 5
Edit = tuple[HookPoint, Intervention]


@dataclass(frozen=True)
class Outcome:
    """What was measured of one file; "-" where it cannot be, and why under the tables."""

    kind: str
    family: str
    points: str = "-"
    captures: str = "-"
    interventions: str = "-"
    generation: str = "-"
    null: str = "-"
    seconds: float = float("nan")
    added: int = 0
    why: str = ""


class Checkpoints:
    """The checkpoints in transformers, each opened once."""

    def __init__(self, stock: Path) -> None:
        self.stock, self._opened = stock, dict[str, PreTrainedModel]()

    def __call__(self, name: str) -> PreTrainedModel:
        """The model of a checkpoint's folder."""
        if name not in self._opened:
            self._opened[name] = AutoModelForCausalLM.from_pretrained(
                self.stock / name, attn_implementation="eager", dtype=torch.float32
            ).eval()
        return self._opened[name]


def batch() -> Inputs:
    """Two texts, the first padded on the left by two tokens."""
    ids = np.random.default_rng(0).integers(3, 400, (2, SEQ))
    mask = np.ones_like(ids)
    mask[0, :2] = 0
    return Inputs(ids, mask)


def distance(point: HookPoint, one: np.ndarray, other: np.ndarray, inputs: Inputs) -> float:
    """The largest difference at real tokens and keys that are read, relative to the largest number."""
    axis = (point.axes or ()).index("seq_q" if "seq_q" in (point.axes or ()) else "seq")
    one, other = (np.moveaxis(array.astype(np.float64), axis, 1)[inputs.real] for array in (one, other))
    seen = (one > MASKED) & (other > MASKED)
    return float(np.abs(one - other)[seen].max() / max(1.0, np.abs(other[seen]).max()))


def captures(model: MIModel, torch_model: PreTrainedModel, inputs: Inputs) -> tuple[str, str]:
    """Hook points found of those that transformers has, and the largest difference at one."""
    expected = run(torch_model, inputs)
    names = [str(point) for point in model.hook_points() if str(point) in expected.values]
    found = model.forward(inputs.ids, HookSpec().capture(names), attention_mask=inputs.mask)
    off = [distance(HookPoint.parse(name), found[name], expected.values[name], inputs) for name in names]
    return f"{len(names)} of {len(expected.values)}", f"{max(off):.0e}"


def interventions(model: MIModel, torch_model: PreTrainedModel, inputs: Inputs) -> str:
    """The largest difference of logits with a scale at one position, over all hook points."""
    off = [0.0]
    chosen = "MlpExpertIndices"  # numbers of experts, which are not scaled
    for point in [point for point in model.hook_points() if not point.derived and point.variant != chosen]:
        edit = Intervention.Scale(0.5, positions=[SEQ // 2])
        expected = run(torch_model, inputs, [(point, edit)]).logits
        found = model.forward(inputs.ids, HookSpec().intervene(point, edit), attention_mask=inputs.mask).output()
        off.append(float(np.abs(found - expected)[inputs.real].max() / max(1.0, np.abs(expected).max())))
    return f"{max(off):.0e}"


def generation(model: MIModel, torch_model: PreTrainedModel, inputs: Inputs) -> str:
    """How many of two greedy continuations are those of transformers."""
    torch_model.config._attn_implementation = "eager"  # the oracle leaves its own
    torch_model.config._experts_implementation = "eager"
    ids, mask = torch.from_numpy(inputs.ids), torch.from_numpy(inputs.mask)
    with torch.no_grad():
        expected = torch_model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )[:, SEQ:]
    found = model.generate(inputs.ids, attention_mask=inputs.mask, max_new_tokens=NEW, eos_token_id=[])
    same = sum(list(one) == other.tolist() for one, other in zip(found.new_ids, expected, strict=True))
    return f"{same} of 2"


def null_law(model: MIModel, file: Path) -> str:
    """The largest difference of an empty spec's logits from the file as it came; 0 are the same bits.

    Of two rows; of one row where the file runs on one only.
    """
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    ids = batch().ids
    try:
        (expected,) = session.run(["logits"], stock_feeds(session, model, ids))
    except Exception:  # of onnxruntime, which share no base class
        ids = ids[:1]
        (expected,) = session.run(["logits"], stock_feeds(session, model, ids))
    return f"{np.abs(model.forward(ids).output().astype(np.float64) - expected).max():.0e}"


def stock_feeds(session: onnxruntime.InferenceSession, model: MIModel, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs of a stock file for texts without padding and a past."""
    rows, sizes = len(ids), model.hooked.metadata.sizes
    known = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(SEQ)[None].repeat(rows, 0),
        "use_cache_branch": np.array([False]),
    }
    nothing = np.zeros((rows, sizes.num_kv_heads, 0, sizes.head_dim))
    kinds = {"tensor(int32)": np.int32, "tensor(bool)": np.bool_, "tensor(int64)": np.int64}
    kinds |= {"tensor(float16)": np.float16, "tensor(float)": np.float32}
    return {entry.name: known.get(entry.name, nothing).astype(kinds[entry.type]) for entry in session.get_inputs()}


def attempt(measure: Callable[[], Any], whys: list[str]) -> Any:
    """A measurement; "-" where it is refused, with the reason."""
    try:
        return measure()
    except MIError as error:
        whys.append(str(error))
    except Exception as error:  # of transformers and onnxruntime, which share no base class
        whys.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return "-"


def measure(entry: dict[str, Any], stock: Path, checkpoints: Checkpoints, folder: Path) -> Outcome:
    """Adopt one file and measure it."""
    file, target, whys = stock / entry["file"], folder / "hooked", list[str]()
    start = process_time()
    try:
        adopt(file, target)
    except MIError as error:
        return Outcome(entry["kind"], entry["family"], why=str(error))
    seconds = process_time() - start
    added = sum(path.stat().st_size for path in target.iterdir() if path.stat().st_nlink == 1)
    model, inputs = MIModel.from_pretrained(target, threads=1), batch()
    torch_model = checkpoints(entry["checkpoint"])
    found = attempt(lambda: captures(model, torch_model, inputs), whys)
    count = str(sum(not point.derived for point in model.hook_points()))
    return Outcome(
        entry["kind"],
        entry["family"],
        found[0] if found != "-" else count,
        found[1] if found != "-" else "-",
        attempt(lambda: interventions(model, torch_model, inputs), whys) if found != "-" else "-",
        attempt(lambda: generation(model, torch_model, inputs), whys),
        attempt(lambda: null_law(MIModel.from_pretrained(target, threads=1, fast=True), file), whys),
        seconds,
        added,
        "; ".join(dict.fromkeys(whys)),
    )


def matrix(
    outcomes: Sequence[Outcome], families: Sequence[str], field: str, title: str
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of kind by family."""
    at = {(one.kind, one.family): str(getattr(one, field)) for one in outcomes}
    kinds = dict.fromkeys(one.kind for one in outcomes)
    return [title, *families], [[kind, *(at.get((kind, family), "") for family in families)] for kind in kinds]


def costs(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of seconds and bytes: the median of a kind."""
    rows = []
    for kind in dict.fromkeys(one.kind for one in outcomes):
        of_kind = [one for one in outcomes if one.kind == kind and one.added]
        if of_kind:
            kib = median(one.added for one in of_kind) / 1024
            rows.append([kind, f"{median(one.seconds for one in of_kind):.2f}", f"{kib:.0f}"])
    return ["kind", "processor seconds to adopt", "KiB added"], rows


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stock", type=Path)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--families", default="")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    entries = [entry for entry in json.loads((asked.stock / "manifest.json").read_text()) if entry.get("file")]
    for name, chosen in (("kind", asked.kinds), ("family", asked.families)):
        entries = [entry for entry in entries if not chosen or entry[name] in chosen.split(",")]
    families, checkpoints = [*dict.fromkeys(entry["family"] for entry in entries)], Checkpoints(asked.stock)
    outcomes = []
    for entry in track(entries, "adopting", console=Console(stderr=True)):
        with tempfile.TemporaryDirectory(dir=asked.stock) as folder:
            outcomes.append(measure(entry, asked.stock, checkpoints, Path(folder)))
    fields = {
        "points": "hook points found",
        "captures": "captures",
        "interventions": "interventions",
        "generation": "greedy texts",
        "null": "null law",
    }
    whys = dict.fromkeys(f"{one.kind}, {one.family}: {one.why[:300]}" for one in outcomes if one.why)
    present(
        "stock",
        "Adopted stock files beside transformers",
        "Captures, interventions: largest relative difference from transformers; "
        f"onnxruntime {onnxruntime.__version__}, {platform.machine()}",
        [*(matrix(outcomes, families, *field) for field in fields.items()), costs(outcomes)],
        asked.save,
        "Greedy texts: of two, those of transformers. Null law: logits of an empty spec, opened with fast=True, "
        "against the file in plain onnxruntime (of one row where the file runs on one only). Quantised files differ "
        "from the checkpoint by their weights (of a mixture of experts, 1 is another expert chosen), and those of "
        "float16 by their rounding.",
        [*whys],
    )


if __name__ == "__main__":
    main()
