"""Memory of one and of eight open variants of a model: on the device, and in this process."""

import multiprocessing
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from shapes import dtypes_of

from mionnx import HookPoint, HookSpec, Intervention
from models import Place, ids_of, ours

QUERY = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
VARIANTS = 8


def on_device(place: Place) -> float:
    """GiB in use on the device; on the CPU, in this process."""
    if place.provider == "cuda":
        return float(subprocess.run(QUERY, check=True, capture_output=True, text=True).stdout.split()[0]) / 1024
    return psutil.Process().memory_info().rss / 2**30


def table(place: Place, emit: Callable[[Sequence[Any]], None]) -> None:
    """Rows: weights, one variant, eight, their ratio."""
    spawned = multiprocessing.get_context("spawn")
    for name, dtype in (("gpt2", "float32"), ("1B", "bfloat16"), ("4B", "bfloat16")):
        if dtype not in dtypes_of(place.tiny)[name]:
            continue
        place.folder(name, dtype)
        with spawned.Pool(1) as alone:  # a process keeps what it freed, and the next model would not count it
            emit(alone.apply(_row, (place, name, dtype)))


def _row(place: Place, name: str, dtype: str) -> list[Any]:
    folder, before = place.folder(name, dtype), on_device(place)
    weights = sum(one.stat().st_size for one in folder.glob("*.safetensors")) / 2**30
    model = ours(folder, place)
    ids, used = ids_of(model.vocab_size, 1, 16), []
    for number in range(VARIANTS):
        layer = number % model.num_layers
        spec = HookSpec().capture(HookPoint.ResidPost(layer)) if number % 2 else HookSpec()
        model.forward(ids, spec.intervene(HookPoint.ResidPre(layer), Intervention.Scale(1.0 + number))).output()
        used.append(on_device(place) - before)
    sizes = [f"{size:.2f}" for size in (weights, used[0], used[-1], used[-1] / max(used[0], 1e-9))]
    return [name, dtype, *sizes, len(model.compiled)]
