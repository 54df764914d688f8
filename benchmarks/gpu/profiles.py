"""Profiles of a forward pass and of decoding: kernels and copies on the device, Python, and nodes on the CPU."""

import cProfile
import pstats
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shapes import dtypes_of

from mionnx import FallbackWarning, MIModel
from mionnx.engine.placement import providers_of
from models import Place, ids_of, ours

Emit = Callable[[Sequence[Any]], None]
SHOWN = 14


def table(place: Place, emit: Emit) -> None:
    """Rows: model, call, kind, what, count, milliseconds, share of the call."""
    pairs = (("gpt2", "float32"), ("1B", "bfloat16"), ("4B", "bfloat16"))
    for name, dtype in pairs:
        if dtype not in dtypes_of(place.tiny)[name]:
            continue
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = ours(place.folder(name, dtype), place)
            ids = ids_of(model.vocab_size, 1, 16 if place.tiny else 512)
            new = 4 if place.tiny else 32
            _profiled(place, emit, name, "forward", lambda model=model, ids=ids: model.forward(ids))
            _profiled(
                place, emit, name, f"decoding {new}",
                lambda model=model, ids=ids, new=new: model.generate(ids[:, :8], max_new_tokens=new, eos_token_id=[]),
            )  # fmt: skip
        for one in said:
            if one.category is FallbackWarning:
                emit([name, "", "warning", one.message, "", "", ""])
        _placement(emit, name, model)
        del model


def _profiled(place: Place, emit: Emit, name: str, call: str, work: Callable[[], Any]) -> None:
    work()
    work()
    begin = time.perf_counter()
    work()
    wall = (time.perf_counter() - begin) * 1000
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if place.provider == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profile:
        work()
    device = [one for one in profile.key_averages() if getattr(one, "device_time_total", 0) > 0]
    device.sort(key=lambda one: -one.device_time_total)
    busy = sum(one.device_time_total for one in device) / 1000
    emit([name, call, "all", "wall clock; the device's share", "", f"{wall:.2f}", f"{busy / wall:.2f}"])
    for one in device[:SHOWN]:
        copies = "copy" if one.key.lower().startswith(("memcpy", "memset")) else "kernel"
        spent = one.device_time_total / 1000
        emit([name, call, copies, one.key[:70].replace("|", "/"), one.count, f"{spent:.2f}", f"{spent / wall:.2f}"])
    _python(emit, name, call, work)


def _python(emit: Emit, name: str, call: str, work: Callable[[], Any]) -> None:
    """The functions in which Python itself spends most."""
    profiler = cProfile.Profile()
    profiler.runcall(work)
    entries = sorted(pstats.Stats(profiler).stats.items(), key=lambda entry: -entry[1][2])[:6]
    total = sum(entry[1][2] for entry in pstats.Stats(profiler).stats.items()) or 1.0
    for (file, line, function), (_, count, own, _, _) in entries:
        where = f"{file.rpartition('/')[2]}:{line} {function}"
        emit([name, call, "python", where[:70].replace("|", "/"), count, f"{own * 1000:.2f}", f"{own / total:.2f}"])


def _placement(emit: Emit, name: str, model: MIModel) -> None:
    """How many nodes each provider has, and the operators on the CPU."""
    for graph in list(model.compiled.values())[:1]:
        for provider, nodes in providers_of(graph.session).items():
            counts = Counter(node.op_type for node in nodes).most_common(8)
            shown = ", ".join(f"{kind} {count}" for kind, count in counts)
            emit([name, "", "nodes", f"{provider}: {shown}", len(nodes), "", ""])
