"""Exporting a Llama-shaped checkpoint of one billion parameters: time, memory, disk.

    python benchmarks/export_1b.py [--save]

Makes the checkpoint (random fp32 weights from a config, 4 GB, in the temporary folder), exports it in a process of its
own, and prints what that took. `--save` writes benchmarks/results/export_1b.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

HERE = Path(__file__).parent
SHAPE = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
}
EXPORT = """
import json, resource, sys, time
from pathlib import Path
begin = time.monotonic()
from exporters.transformers import export
stages = []
def note(stage, done, total):
    if not stages or stages[-1][0] != stage:
        stages.append((stage, time.monotonic() - begin))
export(Path(sys.argv[1]), Path(sys.argv[2]), progress=note)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.monotonic() - begin, "peak_kib": peak, "stages": stages}))
"""


def make_checkpoint(folder: Path) -> int:
    """Write the checkpoint shard by shard, never holding more than one layer; returns the number of parameters."""
    config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"], dtype="float32")
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in AutoModelForCausalLM.from_config(config).state_dict().items()}
    config.save_pretrained(folder)
    shards: dict[str, list[str]] = {}
    for name in shapes:
        shards.setdefault(name.split(".")[2] if ".layers." in name else name, []).append(name)
    where = {}
    for number, names in enumerate(shards.values(), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: torch.randn(shapes[name]) * 0.02 for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sum(shape.numel() for shape in shapes.values())


def new_bytes(folder: Path) -> int:
    """What a folder takes on the disk beyond files that are linked from elsewhere."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.stat().st_nlink == 1)


def measure(folder: Path) -> list[tuple[str, str]]:
    """Make, export, and account for it."""
    parameters = make_checkpoint(folder / "checkpoint")
    command = [sys.executable, "-c", EXPORT, str(folder / "checkpoint"), str(folder / "hooked")]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    ends = [begin for _, begin in found["stages"][1:]] + [found["seconds"]]
    stages = [(stage, f"{end - begin:.1f} s") for (stage, begin), end in zip(found["stages"], ends, strict=True)]
    return [
        ("parameters", f"{parameters:,}"),
        *stages,
        ("whole export", f"{found['seconds']:.1f} s"),
        ("peak resident memory, torch included", f"{found['peak_kib'] / 1024**2:.2f} GiB"),
        ("new bytes on disk", f"{new_bytes(folder / 'hooked'):,}"),
        ("of these the graph", f"{(folder / 'hooked' / 'model.onnx').stat().st_size:,}"),
    ]


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    save = parser.parse_args().save
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    drawn = Table("what", "how much", title="Export of a Llama-shaped 1B checkpoint, fp32")
    for row in rows:
        drawn.add_row(*row)
    Console().print(drawn)
    if save:
        (HERE / "results").mkdir(exist_ok=True)
        lines = ["# Export of a Llama-shaped 1B checkpoint, fp32", "", "what | how much", "--- | ---"]
        lines += [" | ".join(row) for row in rows]
        (HERE / "results" / "export_1b.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
