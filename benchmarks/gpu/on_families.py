"""Every family on the device beside the CPU: hook points, the null law, decoding, operators that stay on the CPU."""

import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mionnx import FallbackWarning, HookPoint, HookSpec, Intervention, MIModel
from models import Place

IDS = np.arange(3, 15)[None]
MASKED = np.finfo(np.float16).min * 0.9  # scores below are masked, by numbers of the provider's own
PROCESSES = 8


def table(place: Place, emit: Callable[[Sequence[Any]], None]) -> None:
    """Rows: family, hook points, largest difference, the same bits with all captured, the same texts, operators."""
    folders = sorted(one for one in (place.graphs.parent / "families").glob("*") if one.is_dir())
    with ProcessPoolExecutor(1 if place.tiny else PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(partial(_row, place.provider), folders):
            emit(row)


def _row(provider: str, folder: Path) -> list[Any]:
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ours = MIModel.from_pretrained(folder, provider=provider, check="none")
            theirs = MIModel.from_pretrained(folder, threads=1, check="none")
            spec = HookSpec().capture("*").intervene(HookPoint.ResidPost(0), Intervention.Scale(1.1, positions=[3, -1]))
            found, expected = (one.forward(IDS, spec) for one in (ours, theirs))
            pairs = [(found[name], expected[name]) for name in expected]
            worst = max(map(_apart, *zip(*pairs, (found.output(), expected.output()), strict=True)))
            plain = ours.forward(IDS).output()
            same = np.array_equal(plain, ours.forward(IDS, HookSpec().capture("*")).output())
            texts = _texts(ours, theirs)
        left = {str(one.message).partition("leaves ")[2].partition(" to the CPU")[0] for one in said
                if one.category is FallbackWarning}  # fmt: skip
        return [folder.name, len(pairs), f"{worst:.1e}", "yes" if same else "no", texts, "; ".join(sorted(left))]
    except Exception as error:  # of any library: the row says it
        return [folder.name, "", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "", "", ""]


def _texts(ours: MIModel, theirs: MIModel) -> str:
    if ours.hooked.metadata.reads_whole:
        return "-"
    settings: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": []}
    made = [one.generate(IDS, **settings).new_ids[0].tolist() for one in (ours, theirs)]
    return "yes" if made[0] == made[1] else f"{made[0]} for {made[1]}"


def _apart(found: Any, expected: Any) -> float:
    ours, theirs = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    seen = theirs > MASKED
    if not np.isfinite(ours[seen]).all():
        return float("nan")
    return float(np.abs(ours - theirs)[seen].max(initial=0) / max(1, np.abs(theirs[seen]).max(initial=0)))
