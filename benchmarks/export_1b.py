"""Exporting a Llama-shaped checkpoint of one billion parameters: time, memory, disk.

    python benchmarks/export_1b.py [--save]

Makes the checkpoint (random fp32 weights from a config, 4 GB, in the temporary folder), exports it in a process of its
own, and prints what that took, stage by stage. `--save` writes benchmarks/results/export_1b.md.

Two kinds of memory: *resident* counts the pages of mapped files too, libraries and weights alike, which the kernel
takes back when it needs them; *anonymous* is what only swap can take back.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from tables import present
from transformers import AutoModelForCausalLM, LlamaConfig

from exporters.transformers import export

SHAPE = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
}
COLUMNS = ("what", "seconds", "resident, GiB", "anonymous, GiB")
PAUSE = 0.01  # seconds between two looks at the memory
Row = tuple[str, str, str, str]


def make_checkpoint(folder: Path, shape: dict[str, int] = SHAPE, dtype: torch.dtype = torch.float32) -> int:
    """Write a checkpoint shard by shard, one layer in memory; return its parameter count."""
    config = LlamaConfig(**shape, architectures=["LlamaForCausalLM"], dtype=str(dtype).removeprefix("torch."))
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in AutoModelForCausalLM.from_config(config).state_dict().items()}
    config.save_pretrained(folder)
    shards: dict[str, list[str]] = {}
    for name in shapes:
        shards.setdefault(name.split(".")[2] if ".layers." in name else name, []).append(name)
    where = {}
    for number, names in enumerate(shards.values(), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: (torch.randn(shapes[name]) * 0.02).to(dtype) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sum(shape.numel() for shape in shapes.values())


def memory(kind: str) -> int:
    """Memory of this process, KiB: "VmRSS" resident, "VmHWM" its peak, "RssAnon" anonymous.

    Not `getrusage`: what that calls a child's peak includes the parent's memory at the moment of the fork.
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[kind].split()[0])


class Watch:
    """The stages of an export as they pass: when each began, and the most memory seen in it."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}
        self.note("starting")
        threading.Thread(target=self._look, daemon=True).start()

    def note(self, stage: str, done: int = 0, total: int = 0) -> None:
        """The exporter's progress callback."""
        self.current = self.stages.setdefault(stage, {"began": time.monotonic(), "resident": 0, "anonymous": 0})

    def _look(self) -> None:
        while True:
            entry = self.current
            for key, kind in (("resident", "VmRSS"), ("anonymous", "RssAnon")):
                entry[key] = max(entry[key], memory(kind))
            time.sleep(PAUSE)


def export_and_account(checkpoint: Path, target: Path) -> None:
    """Export, and print the stages as JSON; runs in a process of its own."""
    watch = Watch()
    export(checkpoint, target, progress=watch.note)
    watch.note("end")
    print(json.dumps({"stages": watch.stages, "peak": memory("VmHWM")}))


def new_bytes(folder: Path) -> int:
    """Bytes that a folder adds on the disk; hard links to other files do not count."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.stat().st_nlink == 1)


def measure(folder: Path) -> list[Row]:
    """Make, export, and account for it."""
    parameters = make_checkpoint(folder / "checkpoint")
    command = [sys.executable, __file__, "--export", str(folder / "checkpoint"), str(folder / "hooked")]
    begin = time.monotonic()
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    whole = time.monotonic() - begin
    checkpoint = sum(path.stat().st_size for path in (folder / "checkpoint").iterdir())
    anonymous = max(stage["anonymous"] for stage in found["stages"].values())
    return [
        *_stages(found["stages"]),
        ("whole process, imports included", f"{whole:.1f}", _gib(found["peak"]), _gib(anonymous)),
        ("", "", "", ""),
        ("parameters", f"{parameters:,}", "", ""),
        ("bytes of the checkpoint", f"{checkpoint:,}", "", ""),
        ("bytes the export added on disk", f"{new_bytes(folder / 'hooked'):,}", "", ""),
        ("of these the graph", f"{(folder / 'hooked' / 'model.onnx').stat().st_size:,}", "", ""),
    ]


def _stages(stages: dict[str, dict[str, float]]) -> list[Row]:
    ends = [stage["began"] for stage in list(stages.values())[1:]]
    return [
        (name, f"{end - stage['began']:.1f}", _gib(stage["resident"]), _gib(stage["anonymous"]))
        for (name, stage), end in zip(stages.items(), ends, strict=False)
    ]


def _gib(kib: float) -> str:
    return f"{kib / 1024**2:.2f}"


def machine() -> str:
    """Machine and versions."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "onnxscript"))
    return f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {packages}"


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--export", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.export:
        export_and_account(*asked.export)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    title = "Export of a Llama-shaped 1B checkpoint, fp32"
    present("export_1b", title, machine(), [(COLUMNS, rows)], asked.save)


if __name__ == "__main__":
    main()
