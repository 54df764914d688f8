"""Run the code cells of notebooks on one engine, and keep what each leaves behind; `tl_notebooks.py` starts it.

    python benchmarks/tl_cells.py FOLDER NOTEBOOK ...

Each notebook runs in a process of its own. A cell that raises is recorded, and the next goes on. FOLDER/NAME/N.npz has
the numbers that cell N made or changed, FOLDER/NAME.json what was printed, raised and how long it took. The variables
that say what names mean are those of `tl_plugin`; MIONNX_TL_FILES has files by the end of their names on the hub,
MIONNX_TL_CUT the cells that are left out, by notebook, MIONNX_TL_LIMIT the seconds of processor that a cell may take:
one that takes longer is cut, and what it made is taken back.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import tl_plugin
import torch
from IPython.core.interactiveshell import InteractiveShell
from tl_values import leaves, sampled
from transformer_lens.model_bridge import TransformerBridge

ROOT = Path(__file__).parents[1]
LIMIT = float(os.environ["MIONNX_TL_LIMIT"])
# What only draws, and is not on PyPI or opens a server; in its place stands what takes every call.
DRAWS = ("pysvelte", "gradio")
NO_MAGIC = ("pip", "load_ext", "autoreload")
# Options of `boot_transformers` that would make another model of the same name: every model is in float32.
LEFT = ("dtype", "revision", "trust_remote_code")


class OverTime(BaseException):
    """A cell takes longer than the limit."""


class Drawing(ModuleType):
    """Stands in for a package that draws: every name, call and block is one of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Drawing(name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None:
        return None


def without_network() -> None:
    """Give data sets, files of the hub and packages that draw their meaning here."""
    texts = {"text": [line for path in sorted(ROOT.rglob("*.md")) for line in path.read_text().splitlines(True)]}
    datasets.load_dataset = lambda *args, **options: texts
    files = json.loads(os.environ["MIONNX_TL_FILES"])
    fetch = huggingface_hub.hf_hub_download

    def local(*args: Any, **options: Any) -> str:
        name = str(options.get("filename", ""))
        return next((path for end, path in files.items() if name.endswith(end)), None) or fetch(*args, **options)

    huggingface_hub.hf_hub_download = local
    sys.modules.update({name: Drawing(name) for name in DRAWS})
    original = TransformerBridge.boot_transformers

    def boot(name: str, *args: Any, **options: Any) -> Any:
        return original(name, *args, **{key: one for key, one in options.items() if key not in LEFT})

    TransformerBridge.boot_transformers = staticmethod(boot)
    if os.environ["MIONNX_TL_ENGINE"] == "torch":  # with its cache of keys it gives other tokens under transformers 5
        generate = TransformerBridge.generate

        def without_cache(*args: Any, **options: Any) -> Any:
            return generate(*args, **{"use_past_kv_cache": False, **options})

        TransformerBridge.generate = without_cache


def interactive() -> InteractiveShell:
    """IPython's own shell, which shows no tracebacks, installs nothing and calls no programs."""
    shell = InteractiveShell.instance(colors="NoColor")
    shell.history_manager.enabled = False
    shell.showtraceback = shell.showsyntaxerror = lambda *args, **options: None
    for name in NO_MAGIC:
        shell.register_magic_function(lambda line: None, magic_name=name)
    shell.system = lambda command: None
    return shell


def run(notebook: Path, folder: Path, cut: list[int]) -> dict[str, Any]:
    """Run the cells of a notebook; what is recorded of each, and the passes that were counted."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    shell, seen = interactive(), dict[str, str]()
    records = []
    for number, cell in enumerate(cells):
        if number in cut:
            records.append({"state": "cut", "said": "", "text": "", "seconds": LIMIT})
            continue
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(number)
        record = one(shell, "".join(cell["source"]))
        records.append(record)
        if record["state"] != "cut":
            keep(shell.user_ns, seen, folder / notebook.stem / f"{number}.npz")
    return {"cells": records, "counts": tl_plugin.COUNTS}


def one(shell: InteractiveShell, source: str) -> dict[str, Any]:
    """Run a cell; what became of it, what it said and took."""
    before, printed = dict(shell.user_ns), io.StringIO()
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    with contextlib.redirect_stdout(printed), contextlib.suppress(OverTime):
        result = shell.run_cell(source)
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - begin
    error = result.error_before_exec or result.error_in_exec
    if isinstance(error, OverTime) or seconds > LIMIT:
        shell.user_ns.clear()
        shell.user_ns.update(before)
        return {"state": "cut", "said": "", "text": "", "seconds": seconds}
    where = [frame.name for frame in traceback.extract_tb(error.__traceback__)][-3:] if error else []
    said = f"{type(error).__name__}: {error}".strip() if error else ""
    return {"state": "raised" if error else "ran", "said": said[:600], "where": where,
            "text": printed.getvalue()[:200_000], "seconds": seconds}  # fmt: skip


def keep(namespace: dict[str, Any], seen: dict[str, str], file: Path) -> None:
    """Write the numbers that are new or other than before."""
    arrays: dict[str, Any] = {}
    for name in [*namespace]:
        if name.startswith("_") or name in ("In", "Out", "exit", "quit"):
            continue
        for path, array in leaves(namespace[name], name):
            small = sampled(array)
            digest = hashlib.blake2b(np.ascontiguousarray(small).tobytes(), digest_size=12).hexdigest()
            if seen.get(path) != digest:
                seen[path] = digest
                arrays[path] = small
    np.savez(file, names=np.asarray([*arrays], dtype=str), **{f"v{i}": one for i, one in enumerate(arrays.values())})


def over(*_: Any) -> None:
    """End a cell."""
    raise OverTime


def main() -> None:
    """Run each notebook in a process of its own, forked from this one, which has imported everything."""
    folder, *notebooks = (Path(name).absolute() for name in sys.argv[1:])
    cut = json.loads(os.environ["MIONNX_TL_CUT"])
    without_network()
    for notebook in notebooks:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGPROF, over)
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            (folder / notebook.stem).mkdir(parents=True, exist_ok=True)
            os.chdir(folder / notebook.stem)
            record = run(notebook, folder, cut.get(notebook.stem, []))
            (folder / f"{notebook.stem}.json").write_text(json.dumps(record))
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
