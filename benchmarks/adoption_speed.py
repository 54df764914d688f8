"""Opening a foreign ONNX file for the first time: seconds, and bytes added to the disk.

    python benchmarks/adoption_speed.py STOCK [--files FOLDER ...] [--save]

STOCK is the folder of `stock_files.py`, whose environments are used. Makes Llama-shaped files as optimum exports them:
of 12 layers, and of 16 layers with 1.1 billion random parameters in float32, 4.4 GB beside the graph (removed at the
end). Each is opened by `from_pretrained` in a process of its own, with an empty store. `--files` names other folders
with ONNX files; `--save` writes benchmarks/results/adoption_speed.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tables import present

HERE = Path(__file__).parent
HIDDEN, MLP = (96, 160), (2048, 8192)  # sizes that are small when the file is made, and those of its weights then
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
VOCABULARY = 32000
TOKENIZER = HERE.parent / "models" / "world-llama"
SCALE = 0.02  # of random weights


@dataclass(frozen=True)
class Opened:
    """What one opening took.

    Attributes:
        recognised, adopted, imports, opened, logits: seconds, the last two until the model is there and until its
            first logits.
        cpu: seconds of the processor until the model is there.
        weights, graph: bytes of the weights, and of the graph that was written.
        copied: bytes of weights that were copied.
    """

    recognised: float
    adopted: float
    imports: float
    opened: float
    logits: float
    cpu: float
    weights: int
    graph: int
    copied: int


def narrow(stock: Path, folder: Path, layers: int) -> Path:
    """A file of optimum with few numbers in its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = folder / "checkpoint"
    config = LlamaConfig(
        hidden_size=HIDDEN[0],
        intermediate_size=HIDDEN[1],
        num_hidden_layers=layers,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        **HEADS,
    )
    LlamaForCausalLM(config).save_pretrained(checkpoint)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).write_bytes((TOKENIZER / name).read_bytes())
    said = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(said | {"rope_theta": 10000.0, "torch_dtype": "float32"}))
    job = {"checkpoint": str(checkpoint), "kind": "optimum-past", "folder": str(folder / "narrow"), "source": ""}
    (folder / "jobs.json").write_text(json.dumps([job]))
    python = stock / ".environments" / "optimum" / "bin" / "python"
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), str(HERE / "stock_kinds.py"), str(folder / "jobs.json"), str(folder / "results.json")]
    subprocess.run(command, check=True, env=known, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    made = json.loads((folder / "results.json").read_text())
    if "error" in made:
        raise RuntimeError(made["error"])
    return folder / "narrow"


def widen(folder: Path) -> None:
    """Give the weights of a file their full sizes, with random numbers, beside the graph."""
    file, sizes = folder / "model.onnx", dict(zip(HIDDEN, MLP, strict=True))
    proto, rng = onnx.load(file), np.random.default_rng(0)
    del proto.graph.value_info[:]
    with (folder / "model.onnx_data").open("wb") as stream:
        for tensor in proto.graph.initializer:
            if not {*tensor.dims} & {*sizes}:
                continue
            dims = [sizes.get(size, size) for size in tensor.dims]
            made = SCALE * rng.standard_normal(dims, np.float32) + (1 if len(dims) == 1 else 0)
            tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=dims))
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", stream.name), ("offset", stream.tell()), ("length", made.nbytes)):
                tensor.external_data.add(key=key, value=Path(str(value)).name)
            made.tofile(stream)
    file.write_bytes(proto.SerializeToString())
    said = json.loads((folder / "config.json").read_text())
    wide = {"hidden_size": MLP[0], "intermediate_size": MLP[1]}
    (folder / "config.json").write_text(json.dumps(said | wide))


def measure(folder: Path) -> dict[str, Any]:
    """Open a folder for the first time."""
    start = time.perf_counter()
    from mionnx import MIModel

    times, imported = dict[str, float](), time.perf_counter()
    stages = ("reading", "recognising", "running once", "checking", "writing")

    def progress(stage: str, _done: int, _total: int) -> None:
        if stage in stages:
            times[stage] = time.perf_counter()

    from mionnx.run.find_model import find_model

    found = find_model(folder, "auto", progress)
    adopted = time.perf_counter()
    model = MIModel.from_pretrained(found)
    opened, cpu = time.perf_counter(), time.process_time()
    model.forward(np.arange(5, 15)[None])
    done = time.perf_counter()
    data = [path for path in found.iterdir() if path.suffix not in (".json", ".jinja", ".txt")]
    return {
        "recognised": times["running once"] - times["recognising"],
        "adopted": adopted - times["reading"],
        "imports": imported - start,
        "opened": opened - start,
        "logits": done - start,
        "cpu": cpu,
        "weights": sum(path.stat().st_size for path in data if path.name != "model.onnx"),
        "graph": (found / "model.onnx").stat().st_size,
        "copied": sum(path.stat().st_size for path in data if path.name != "model.onnx" and path.stat().st_nlink == 1),
    }


def in_process(folder: Path) -> Opened:
    """`measure` in a process of its own, with an empty store on the file's disk."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as store:
        known = {**os.environ, "MIONNX_CACHE": store, "PYTHONPATH": str(HERE.parent)}
        command = [sys.executable, __file__, str(folder), "--measure"]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=known).stdout
    return Opened(**json.loads(said.splitlines()[-1]))


def row(name: str, found: Opened) -> list[str]:
    """A row of the table."""
    seconds = (found.recognised, found.adopted, found.opened, found.logits, found.cpu)
    sizes = [f"{found.weights / 1e6:.0f}", f"{found.graph / 1e3:.0f}", f"{found.copied / 1e3:.0f}"]
    return [name, sizes[0], *(f"{one:.1f}" for one in seconds), *sizes[1:]]


def main() -> None:
    """Make files, open them and show what that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stock", type=Path)
    parser.add_argument("--files", type=Path, nargs="*", default=[])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.stock)))
        return
    rows = []
    for name, layers, wide in (("optimum, 12 layers", 12, False), ("optimum, 16 layers, 1.1 B parameters", 16, True)):
        with tempfile.TemporaryDirectory(dir=asked.stock) as folder:
            made = narrow(asked.stock, Path(folder), layers)
            if wide:
                widen(made)
            rows.append(row(name, in_process(made)))
    rows += [row(folder.name, in_process(folder)) for folder in asked.files]
    columns = "file|weights, MB|recognised, s|adopted, s|open, s|first logits, s|processor, s|graph, kB|copied, kB"
    present(
        "adoption_speed",
        "Opening a foreign ONNX file for the first time",
        f"Seconds in a process of its own, with an empty store; {os.cpu_count()} cores, "
        f"{platform.machine()}, load average {os.getloadavg()[0]:.0f}",
        [(columns.split("|"), rows)],
        asked.save,
        "Open and first logits count from the start of the imports, adopted from the first byte read to the model's "
        "folder; the processor's seconds are those of all threads until the model is open.",
    )


if __name__ == "__main__":
    main()
