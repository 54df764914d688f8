"""One step of the measurement, in a process of its own: `run.py` starts it. Rows are written as soon as there are any.

python benchmarks/gpu/steps.py STEP --to FILE [--provider cpu] [--tiny] [--graphs FOLDER] [--work FOLDER]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import memory_use  # noqa: E402
import numpy as np  # noqa: E402
import on_families  # noqa: E402
import profiles  # noqa: E402
import torch  # noqa: E402
from shapes import dtypes_of  # noqa: E402
from torch_side import CASES, Patching, forward, generate  # noqa: E402

from mionnx import HookPoint, HookSpec, Intervention, MIModel  # noqa: E402
from models import Place, finished, ids_of, ours, theirs, timed  # noqa: E402

Row = Sequence[Any]
Emit = Callable[[Row], None]
ATTENTION = ("eager", "sdpa")
ANSWER, VERSUS = 11, 22
SWEEPS = {
    "layer x head": ("z", ("layer", "head")),
    "layer x position": ("resid_pre", ("layer", "position")),
    "layer x head x position": ("z", ("layer", "head", "position")),
}


def spec_of(case: str, model: MIModel, direction: np.ndarray) -> HookSpec:
    """A case in mionnx."""
    if case == "streams":
        return HookSpec().capture("blocks.*.hook_resid_post")
    if case == "every":
        return HookSpec().capture(lambda name: not name.endswith("hook_result"))
    if case == "steered":
        return HookSpec().intervene(HookPoint.ResidPost(model.num_layers // 2), Intervention.Add(direction))
    return HookSpec()


def direction_of(hidden: int) -> np.ndarray:
    """A vector to steer with."""
    return np.random.default_rng(1).normal(0, 0.1, hidden).astype(np.float32)


def measured(place: Place) -> list[tuple[str, str]]:
    """(model, dtype): the first dtype of each model, then the second ones."""
    known = dtypes_of(place.tiny).items()
    pairs = [(name, dtype) for number in (0, 1) for name, kinds in known for dtype in kinds[number : number + 1]]
    return [pair for pair in pairs if place.dtypes((pair[1],))]


def forward_table(place: Place, emit: Emit) -> None:
    """Forward passes."""
    for name, dtype in measured(place):
        folder = place.folder(name, dtype)
        for batch, length in ((1, 512), (8, 512)) if not place.tiny else ((1, 16), (8, 16)):
            _forward_rows(place, emit, name, dtype, folder, (batch, length))


def _forward_rows(place: Place, emit: Emit, name: str, dtype: str, folder: Path, size: tuple[int, int]) -> None:
    found: dict[str, dict[str, float]] = {case: {} for case in CASES}
    last: dict[str, np.ndarray] = {}
    for program, cases in (("mionnx", CASES), ("graphs", ("plain", "streams", "steered"))):
        if program == "mionnx" or (place.provider == "cuda" and size[0] == 1):  # results are copied to the CPU
            _forward_ours(place, folder, size, program, cases, found, last)
    apart = dict.fromkeys(CASES, "")
    for kind in ATTENTION:
        with theirs(folder, place, kind, dtype) as peer:
            ids, direction = _on_device(peer, size)
            for case in CASES:
                work = partial(forward, peer, ids, case, direction)
                found[case][kind], logits = attempt(partial(timed, work, place.device, 10))
                if logits is not None and case in last:
                    values = logits[:, -1].float().cpu().numpy()
                    apart[case] = f"{np.abs(values - last[case]).max() / np.abs(values).max():.1e}"
    plain = found["plain"]["mionnx"]
    for case, by in found.items():
        own = by["mionnx"]
        emit([name, dtype, f"{size[0]} x {size[1]}", case, ms(own), ms(by.get("graphs")), over(own, plain),
              over(by["eager"], own), over(by["sdpa"], own), apart[case]])  # fmt: skip


def _forward_ours(
    place: Place,
    folder: Path,
    size: tuple[int, int],
    program: str,
    cases: tuple[str, ...],
    found: dict[str, dict[str, float]],
    last: dict[str, np.ndarray],
) -> None:
    model = ours(folder, place, **({"cuda_graphs": True} if program == "graphs" else {}))
    ids, direction = ids_of(model.vocab_size, *size), direction_of(model.hidden_size)
    for case in cases:
        work = partial(model.forward, ids, spec_of(case, model, direction))
        found[case][program], cache = attempt(partial(timed, work, place.device, 10))
        if cache is not None and program == "mionnx":
            last[case] = np.asarray(cache.output()[:, -1], np.float32)


def _on_device(peer: Any, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same tokens and direction for torch."""
    ids = torch.from_numpy(ids_of(peer.config.vocab_size, *size)).to(peer.device)
    return ids, torch.from_numpy(direction_of(peer.config.hidden_size)).to(peer.device, peer.dtype)


def generation_table(place: Place, emit: Emit) -> None:
    """Generation of 64 tokens after 32."""
    new, prompt = (64, 32) if not place.tiny else (6, 4)
    for name, dtype in measured(place):
        folder = place.folder(name, dtype)
        for batch in (1, 8):
            _generation_rows(place, emit, name, dtype, folder, batch, prompt, new)


def _generation_rows(
    place: Place, emit: Emit, name: str, dtype: str, folder: Path, batch: int, prompt: int, new: int
) -> None:
    found: dict[str, dict[str, float]] = {"plain": {}, "streams": {}, "steered": {}}
    texts: dict[str, np.ndarray] = {}
    for program in ("mionnx", "graphs"):
        if program == "mionnx" or place.provider == "cuda":
            _generation_ours(place, folder, (batch, prompt), new, program, found, texts)
    same = dict.fromkeys(found, "")
    for kind in ATTENTION:
        with theirs(folder, place, kind, dtype) as peer:
            ids, direction = _on_device(peer, (batch, prompt))
            for case in found:
                work = partial(generate, peer, ids, case, direction, new)
                found[case][kind], made = attempt(partial(timed, work, place.device, 1))
                if made is not None and case in texts:
                    same[case] = f"{(made.cpu().numpy() == texts[case]).cumprod(1).sum(1).mean():.0f} of {new}"
    plain = found["plain"]["mionnx"]
    for case, by in found.items():
        own = by["mionnx"]
        emit([name, dtype, batch, case, rate(own, batch * new), rate(by.get("graphs"), batch * new), over(own, plain),
              over(by["eager"], own), over(by["sdpa"], own), same[case]])  # fmt: skip


def _generation_ours(
    place: Place,
    folder: Path,
    size: tuple[int, int],
    new: int,
    program: str,
    found: dict[str, dict[str, float]],
    texts: dict[str, np.ndarray],
) -> None:
    model = ours(folder, place, **({"cuda_graphs": True} if program == "graphs" else {}))
    ids, direction = ids_of(model.vocab_size, *size), direction_of(model.hidden_size)
    for case in found:
        work = partial(model.generate, ids, spec_of(case, model, direction), max_new_tokens=new, eos_token_id=[])
        found[case][program], made = attempt(partial(timed, work, place.device, 3))
        if made is not None:
            texts[case] = np.stack(made.new_ids)


def sweep_table(place: Place, emit: Emit) -> None:
    """Patching sweeps at 64 tokens."""
    length, sample = (64, 60) if not place.tiny else (8, 6)
    for name, dtype in (("gpt2", "float32"), ("1B", "float32"), ("4B", "bfloat16")):
        if dtype not in dtypes_of(place.tiny)[name]:
            continue
        folder = place.folder(name, dtype)
        clean = ids_of(100, 1, length)[0]
        corrupted = clean.copy()
        corrupted[length // 4] += 1
        rows = {case: _sweeps(place, folder, case, clean, corrupted) for case in SWEEPS}
        with theirs(folder, place, "eager", dtype) as peer:
            patching = Patching(peer, clean, corrupted, (ANSWER, VERSUS))
            for case, (first, second, values) in rows.items():
                seconds, apart = _patched(place, patching, case, values, sample)
                emit([name, dtype, case, values.size, f"{first:.2f}", f"{second:.2f}", f"{seconds:.2f}",
                      over(seconds, first), over(seconds, second), f"{apart:.1e}"])  # fmt: skip


def _sweeps(
    place: Place, folder: Path, case: str, clean: np.ndarray, corrupted: np.ndarray
) -> tuple[float, float, np.ndarray]:
    """Seconds of a model's first sweep, of the same again, and the values."""
    model, (what, axes) = ours(folder, place), SWEEPS[case]
    seconds: list[float] = []
    for _ in range(2):
        begin = time.perf_counter()
        result = model.patch_sweep(clean, corrupted, what, axes, answer=ANSWER, versus=VERSUS)
        seconds.append(time.perf_counter() - begin)
    return seconds[0], seconds[1], result.values


def _patched(place: Place, patching: Patching, case: str, values: np.ndarray, sample: int) -> tuple[float, float]:
    """Torch's seconds for all cells, from a sample, and the largest difference of these."""
    what, axes = SWEEPS[case]
    cells = np.array(list(np.ndindex(values.shape)))
    chosen = cells[np.sort(np.random.default_rng(0).permutation(len(cells))[:sample])]
    patching.values(what, axes, chosen[:2])
    finished(place.device)
    begin = time.perf_counter()
    exact = patching.values(what, axes, chosen)
    seconds = (time.perf_counter() - begin) * len(cells) / len(chosen)
    return seconds, float(np.abs(exact - values[tuple(chosen.T)]).max())


def opening_table(place: Place, emit: Emit) -> None:
    """A new structure, to its first logits on the CPU."""
    for name, dtype in measured(place):
        folder = place.folder(name, dtype)
        begin = time.perf_counter()
        model = ours(folder, place)
        ids = ids_of(model.vocab_size, 1, 16)
        np.asarray(model.forward(ids).output())
        first = time.perf_counter() - begin
        seconds = []
        for layer in range(2):
            spec = HookSpec().intervene(HookPoint.ResidPost(layer), Intervention.Scale(1.1))
            for _ in range(2):
                begin = time.perf_counter()
                np.asarray(model.forward(ids, spec).output())
                seconds.append(time.perf_counter() - begin)
        emit([name, dtype, f"{first:.2f}", f"{seconds[0]:.2f}", f"{seconds[2]:.2f}", ms(seconds[3])])
        del model


def verify_table(place: Place, emit: Emit) -> None:
    """CPU, CUDA and torch on the same tokens, every hook point: `mionnx verify`."""
    for name, dtype, tolerance in (("gpt2", "float32", 5e-4), ("1B", "float32", 5e-4)):
        model = MIModel.from_pretrained(place.folder(name, dtype), check="none")
        runtimes = ["ort-cpu", *(["ort-cuda"] if place.provider == "cuda" else []), "torch"]
        found = model.verify([ids_of(model.vocab_size, 1, 24)[0]], runtimes, tolerance=tolerance, greedy=4)
        for line in str(found).splitlines():
            emit([name, dtype, f"{tolerance:g}", line.strip().replace("|", "/")])


def attempt(work: Callable[[], tuple[float, Any]]) -> tuple[float, Any]:
    """Seconds and result; NaN and None where it failed, with the reason on the terminal and the run going on."""
    try:
        return work()
    except Exception as error:  # out of memory, most likely: one cell of a table
        print(f"{type(error).__name__}: {str(error)[:500]}", file=sys.stderr)
        return float("nan"), None


def ms(seconds: float | None) -> str:
    """Milliseconds; "-" where nothing was measured."""
    return "-" if seconds is None else "failed" if np.isnan(seconds) else f"{seconds * 1000:.1f}"


def rate(seconds: float | None, tokens: int) -> str:
    """Tokens a second."""
    return "-" if seconds is None else "failed" if np.isnan(seconds) else f"{tokens / seconds:.0f}"


def over(one: float, other: float) -> str:
    """A ratio of seconds."""
    return "-" if np.isnan([one, other]).any() else f"{one / other:.2f}"


STEPS: dict[str, Callable[[Place, Emit], None]] = {
    "families": on_families.table,
    "verify": verify_table,
    "generation": generation_table,
    "forward": forward_table,
    "sweeps": sweep_table,
    "opening": opening_table,
    "memory": memory_use.table,
    "profile": profiles.table,
}


def main() -> None:
    """Run one step; each row is a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--provider", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--graphs", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    place = Place(options.provider, options.tiny, options.graphs, options.work)
    with options.to.open("a") as file:

        def emit(row: Row) -> None:
            file.write(json.dumps([str(cell) for cell in row]) + "\n")
            file.flush()
            print(*row, sep=" | ", flush=True)

        STEPS[options.step](place, emit)


if __name__ == "__main__":
    main()
