"""Exports: seconds and memory over the number of layers, beside tracing every layer and beside optimum.

    python benchmarks/export_speed.py [--optimum PYTHON] [--smollm2 CHECKPOINT] [--save]

Every export runs in a process of its own, from its start to a model that is open, imports included. The first table
has whole models: SmolLM2-135M, a Llama of 1.1 billion parameters (random float32 weights, 4 GB, in the temporary
folder), and the configuration of an 80-layer Llama of 70 billion, whose graph is exported without weights. The second
has a Llama of 64 channels at several depths, so that little but the graph takes time: mionnx, mionnx with every layer
traced, as it was before layers were stamped, and optimum's exporter, in an interpreter of its own (`stock_files.py`
makes one).

Wall seconds are of a machine that may be busy; processor seconds are those of all threads, the hashing of weights too.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tables import Rows, present

DEPTHS = (4, 8, 16, 30, 80)
DEEPEST = 30  # layers that the slower ways are asked for
NARROW = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LARGE = {
    **NARROW,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
}
OPEN = "import sys; from mionnx import MIModel; MIModel.from_pretrained(sys.argv[1])"
TRACED = f"""
from exporters.transformers import hooked_graph, kinds
hooked_graph.find_kinds = lambda skeleton, *_: kinds.all_different(skeleton.config.num_hidden_layers)
{OPEN}"""
GRAPH_ONLY = """
import sys; from pathlib import Path; from mionnx import MIModel; from mionnx.run import exporting, find_model
exporting.export(Path(sys.argv[1]), Path(sys.argv[2]), "bfloat16", lambda *_: None, graph_only=True)
MIModel.from_pretrained(sys.argv[2])"""
OPTIMUM = """
import sys; from optimum.exporters.onnx import main_export
main_export(sys.argv[1], sys.argv[2], task="text-generation-with-past", do_validation=False)"""
NARROW_CHECKPOINT = """
import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM
AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).save_pretrained(sys.argv[1])"""
LARGE_CHECKPOINT = """
import sys; from pathlib import Path; from export_1b import make_checkpoint; make_checkpoint(Path(sys.argv[1]))"""
Cost = tuple[float, float, float]  # wall seconds, processor seconds, GiB at most


def cost(code: str, *folders: Path, python: str = sys.executable) -> Cost:
    """Run code in a process of its own, with an empty store."""
    root = Path(__file__).parent
    with tempfile.TemporaryDirectory() as store:
        places = {"PYTHONPATH": f"{root.parent}:{root}"} if python == sys.executable else {"PYTHONPATH": ""}
        begin = time.monotonic()
        child = subprocess.Popen(
            [python, "-c", code, *map(str, folders)],
            env={**os.environ, **places, "MIONNX_CACHE": store},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert child.stderr is not None
        said = child.stderr.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(said.decode()[-2000:])
        return time.monotonic() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20


def checkpoint(folder: Path, layers: int) -> Path:
    """A narrow Llama with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**NARROW, "num_hidden_layers": layers}))
    cost(NARROW_CHECKPOINT, folder)
    return folder


def shown(found: Cost) -> list[str]:
    """Cells of a table."""
    wall, processor, peak = found
    return [f"{wall:.1f}", f"{processor:.1f}", f"{peak:.2f}"]


def over_depth(scratch: Path, optimum: str | None) -> Rows:
    """One row a depth."""
    rows = []
    for layers in DEPTHS:
        folder = checkpoint(scratch / str(layers), layers)
        row = [str(layers), *shown(cost(OPEN, folder))]
        row += shown(cost(TRACED, folder)) if layers <= DEEPEST else ["", "", ""]
        asked = optimum is not None and layers <= DEEPEST
        row += shown(cost(OPTIMUM, folder, scratch / f"optimum-{layers}", python=str(optimum))) if asked else [""] * 3
        rows.append(row)
        print(*row, flush=True)
    return rows


def whole_models(scratch: Path, smollm2: Path | None) -> Rows:
    """One row a model."""
    large, bare = scratch / "large", scratch / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(LARGE))
    rows = [["Llama 70B, graph only", "80", *shown(cost(GRAPH_ONLY, bare, scratch / "graph"))]]
    if smollm2 is not None:
        rows.insert(0, ["SmolLM2 135M", "30", *shown(cost(OPEN, smollm2))])
    cost(LARGE_CHECKPOINT, large)
    rows.insert(-1, ["Llama 1.1B", "16", *shown(cost(OPEN, large))])
    return rows


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimum", help="interpreter of an environment with optimum-onnx")
    parser.add_argument("--smollm2", type=Path, help="checkpoint of SmolLM2-135M")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        whole = whole_models(Path(scratch), asked.smollm2)
        depths = over_depth(Path(scratch), asked.optimum)
    each = ("seconds", "processor", "GiB")
    ways = [f"{way}: {what}" for way in ("mionnx", "every layer traced", "optimum") for what in each]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "onnxscript"))
    title = f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors, {packages}"
    said = f"Processes from their start to an open model; the slower ways up to {DEEPEST} layers."
    tables = [(("model", "layers", *each), whole), (("layers", *ways), depths)]
    present("export_speed", "Seconds and memory of exports", title, tables, asked.save, said, [load()])


def load() -> str:
    """How busy the machine was."""
    return f"Load of the machine when the run ended: {os.getloadavg()[1]:.1f} (five minutes)."


if __name__ == "__main__":
    main()
