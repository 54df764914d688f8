"""Random specs on random batches, continuations and generations, beside references in float64.

    python benchmarks/random_specs.py [--specs 1820] [--seed 0] [--families llama,rwkv7] [--pieces FOLDER] [--save]

Each spec is run by mionnx in float32 and by a reference that was written on its own, shares no code with the exporter
or the rewriter, and runs each row's text alone and whole: decoders, hybrids and masked language models in torch
(`tests/shared/decoder_reference.py`, `hybrid_reference.py`, `encoder_reference.py`), RWKV in numpy (`rwkv_loop.py`).
Logits, captures and states are compared. What mionnx refuses must be an MIError, and is counted; a difference
prints the seed. With `--pieces`, hundred after hundred of them is kept in a folder, and what is there already is not
run again. `--save` writes benchmarks/results/random_specs.md, of encoders or hybrids alone random_specs_encoders.md and
random_specs_hybrids.md; families that are not named keep the rows that they have there.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import perf_counter

from rich.console import Console
from rich.progress import track
from tables import earlier, present

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "shared"))

from encoders import make_encoder  # noqa: E402
from families import make_checkpoint  # noqa: E402
from random_specs import VOCAB, draw  # noqa: E402
from recurrent_families import make_recurrent  # noqa: E402
from rwkv_checkpoints import write  # noqa: E402
from spec_reference import TOLERANCE, Reference, check, decoder, encoder, hybrid, recurrent  # noqa: E402

from exporters import rwkv, transformers  # noqa: E402
from mionnx import MIModel  # noqa: E402

FAMILIES = (
    "llama",
    "gpt2",
    "gemma2",
    "qwen3",
    "mistral",
    "qwen2",
    "phi3",
    "olmo2",
    "gpt_neox",
    "rwkv4",
    "rwkv6",
    "rwkv7",
)
ENCODERS = ("bert", "roberta", "distilbert", "modernbert")
HYBRIDS = (
    *("mamba2", "qwen3_5_text", "lfm2", "mamba", "bamba", "recurrent_gemma", "zamba2", "zamba", "minimax"),
    *("falcon_h1", "nemotron_h"),
)
REFERENCES = dict.fromkeys(ENCODERS, encoder) | dict.fromkeys(HYBRIDS, hybrid)
# A spec that makes the logits of a router equal leaves the choice of experts to anyone: there is one.
ALONE = {"minimax": {"num_local_experts": 1, "num_experts_per_tok": 1}}
PIECE = 100  # specs of a piece
COLUMNS = ("family", "tried", "agree", "refused", "differ", "worst relative difference", "in rounding", "minutes")
CONSOLE = Console(stderr=True)


@dataclass
class Counts:
    """What became of the specs of one family."""

    family: str
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    minutes: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        outcomes, refusals = self.outcomes + other.outcomes, self.refusals + other.refusals
        worst, minutes = max(self.worst, other.worst), self.minutes + other.minutes
        return Counts(self.family, outcomes, refusals, worst, minutes)

    @classmethod
    def read(cls, path: Path) -> "Counts":
        """What `measure` has written."""
        stored = json.loads(path.read_text())
        counters = {name: Counter(stored[name]) for name in ("outcomes", "refusals")}
        return cls(**{**stored, **counters})

    def row(self) -> tuple[str, ...]:
        """One row of the table."""
        kinds = (str(self.outcomes[kind]) for kind in ("agree", "refused", "differ"))
        rounding = str(self.outcomes["within rounding"])
        tried = sum(self.outcomes.values()) - self.outcomes["within rounding"]
        return (self.family, str(tried), *kinds, f"{self.worst:.1e}", rounding, f"{self.minutes:.1f}")


def opened(family: str, folder: Path) -> tuple[MIModel, Reference]:
    """A random checkpoint of a family in mionnx, and in float64."""
    checkpoint, hooked = folder / "checkpoint", folder / "hooked"
    if family.startswith("rwkv"):
        version = int(family.removeprefix("rwkv"))
        tensors = write(f"{version}-pth", checkpoint)
        rwkv.export(checkpoint, hooked)
        model = MIModel.from_pretrained(hooked, threads=1)
        return model, recurrent(version, tensors, model)
    if family in HYBRIDS:
        make_recurrent(family, checkpoint, **ALONE.get(family, {}))
    elif family in ENCODERS:
        make_encoder(family, checkpoint, vocab_size=VOCAB)
    else:
        make_checkpoint(family, checkpoint)
    transformers.export(checkpoint, hooked)
    model = MIModel.from_pretrained(hooked, threads=1)
    return model, REFERENCES.get(family, decoder)(checkpoint, model)


def measure(family: str, seeds: range, pieces: Path) -> Counts:
    """Run the specs of one family, or read what became of them."""
    starts = [*seeds[::PIECE]]
    files = {start: pieces / f"{family} {start} {min(start + PIECE, seeds.stop)}.json" for start in starts}
    if not all(path.exists() for path in files.values()):
        with tempfile.TemporaryDirectory() as folder:
            model, reference = opened(family, Path(folder))
            for start, path in track(files.items(), family, console=CONSOLE):
                if not path.exists():
                    counts = piece(family, model, reference, range(start, min(start + PIECE, seeds.stop)))
                    path.write_text(json.dumps(vars(counts)))
    return sum(map(Counts.read, files.values()), Counts(family))


def piece(family: str, model: MIModel, reference: Reference, seeds: range) -> Counts:
    """Run some specs."""
    counts, start = Counts(family), perf_counter()
    for number in seeds:
        calls = draw(model, Random(f"{family} {number}"))
        try:
            outcome = check(model, reference, calls)
        except Exception as error:  # an error that is none of mionnx' own is a difference too
            counts.outcomes["differ"] += 1
            CONSOLE.print(f"{family} {number}: {type(error).__name__}: {error}\n{calls}", markup=False)
            continue
        if outcome.refused:
            counts.outcomes["refused"] += 1
            counts.refusals[outcome.refused.partition(":")[0]] += 1
            continue
        counts.outcomes["agree" if outcome.agrees else "differ"] += 1
        counts.outcomes["within rounding"] += outcome.agrees and outcome.worst > TOLERANCE
        counts.worst = max(counts.worst, outcome.worst)
        if not outcome.agrees:
            CONSOLE.print(f"{family} {number}: {outcome}\n{calls}", markup=False)
    counts.minutes = (perf_counter() - start) / 60
    return counts


def main() -> None:
    """Run, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--specs", type=int, default=1820, help="of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", default=",".join((*FAMILIES, *ENCODERS, *HYBRIDS)))
    parser.add_argument("--pieces", type=Path, help="the folder of those that ran, made if it is not there")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    seeds, families = range(options.seed, options.seed + options.specs), options.families.split(",")
    with tempfile.TemporaryDirectory() as folder:
        pieces = options.pieces or Path(folder)
        pieces.mkdir(parents=True, exist_ok=True)
        found = [measure(family, seeds, pieces) for family in families]
    refusals = sum((counts.refusals for counts in found), Counter())
    named = ", ".join(f"{count} {name}" for name, count in refusals.most_common())
    kinds = {"random_specs_encoders": ENCODERS, "random_specs_hybrids": HYBRIDS}
    table = next((name for name, kind in kinds.items() if {*families} <= {*kind}), "random_specs")
    kept = earlier(table, COLUMNS, families)
    rows = kept | {counts.family: counts.row() for counts in found}
    others = f" Run last: {', '.join(families)}; the other rows are of earlier runs." if kept else ""
    present(
        table,
        "Random specs beside references in float64",
        f"{sum(int(row[1]) for row in rows.values())} specs on random small models, fp32, seed {options.seed}; "
        f"{platform.machine()}",
        [(COLUMNS, [rows[family] for family in (*FAMILIES, *ENCODERS, *HYBRIDS) if family in rows])],
        options.save,
        said=f"Differences of logits and captures, relative to the largest number of each array.{others}",
        notes=[
            f"agree: within {TOLERANCE:.0e}; or, counted besides under *in rounding*, within 30 times of what "
            "moving every value at a hook point by half a step of float32 changes in the same part of the reference.",
            f"refused, each with an MIError{', in the last run' if kept else ''}: {named or 'none'}.",
        ],
    )
    sys.exit(any(counts.outcomes["differ"] for counts in found))


if __name__ == "__main__":
    main()
