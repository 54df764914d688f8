"""Memory of a model in a process of its own: the peak of a pass and a generation, and three variants open together.

    python benchmarks/model_memory.py FOLDER [--level 0|4] [--variants] [--transformers]

prints JSON: "peak", bytes of the resident set at its largest less what it is after the imports, over opening, a forward
pass of 256 tokens and 16 tokens generated; "anonymous" and "mapped", the same of what is held after them: memory of no
file, and pages of files, which the system can take back; "variants", bytes of the proportional set (private memory, and
the share of mapped files) less the same, three seconds after three structures have run: the model itself, one steered,
and one with all residual streams captured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

TOKENS, NEW, SETTLED = 256, 16, 3.0


def peak() -> int:
    """Bytes of the largest resident set so far; `getrusage` would count what started this process too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def count_anew() -> None:
    """Let `peak` count from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def held() -> dict[str, int]:
    """Bytes of the resident set: of no file, and of files."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: 1024 * int(fields[key].split()[0]) for name, key in (("anonymous", "RssAnon"), ("mapped", "RssFile"))}


def proportional() -> int:
    """Bytes of this process: private ones, and its share of mapped files."""
    return int(psutil.Process().memory_full_info().pss)


def of_mionnx(folder: Path, level: int | None, variants: bool) -> dict[str, int]:
    """Measure a hooked model in this process."""
    from mionnx import HookPoint, HookSpec, Intervention, MIModel

    before, begin, start = peak(), proportional(), held()
    model = MIModel.from_pretrained(folder, accuracy_level=level)
    ids = np.arange(TOKENS)[None] + 100
    model.forward(ids).output()
    model.generate(ids[:, :NEW], max_new_tokens=NEW, eos_token_id=[])
    found = {"peak": peak() - before} | {kind: bytes_held - start[kind] for kind, bytes_held in held().items()}
    if variants:
        vector, layer = np.full(model.hidden_size, 0.1, np.float32), model.num_layers // 2
        model.forward(ids[:, :NEW], HookSpec().intervene(HookPoint.ResidPost(layer), Intervention.Add(vector)))
        model.forward(ids[:, :NEW], HookSpec().capture("blocks.*.hook_resid_post"))
        time.sleep(SETTLED)
        found["variants"] = proportional() - begin
    return found


def of_transformers(folder: Path) -> dict[str, int]:
    """Measure a checkpoint in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    before = peak()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(TOKENS)[None] + 100
    with torch.no_grad():
        model(ids)
        model.generate(ids[:, :NEW], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return {"peak": peak() - before}


def measure(folder: Path, *given: str) -> dict[str, int]:
    """The same in a process of its own, with an empty store."""
    with tempfile.TemporaryDirectory() as store:
        known = {**os.environ, "MIONNX_CACHE": store, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, __file__, str(folder), *given]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=known)
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--level", type=int)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args()
    found = (
        of_transformers(options.folder)
        if options.transformers
        else of_mionnx(options.folder, options.level, options.variants)
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
