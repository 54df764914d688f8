"""Decoding with weights of 4 bits: compiled files in onnxruntime beside the file of onnxruntime-genai's own builder.

One process, one thread, processor time of a step of one token after 32 and 512 others; sessions run by turns, and a
ratio is the median of those of neighbouring turns, the builder's file being 1. The builder quantises the numbers of the
model's floats anew: symmetric blocks of 32, the head in as many bits as the model's. Compiled files have the model's
own blocks (SmolLM2's are Q4_1, with offsets, which the builder's have not; the head in 8 bits), or the builder's
settings: "the same bits". Of each: a node a product, as files were before products of one value were merged; as
`compile` writes it; and with `fused="all"`, attention as one node.

    python benchmarks/int4_decode.py [--model smollm2] [--environments DIR] [--repeats 15] [--save]
"""

import argparse
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime
from environments import python_of
from tables import present
from turns import Work, alternate, ratio

from mionnx import HookSpec, MIModel
from mionnx.graph.dataflow import attributes

GENAI = ["onnxruntime-genai==0.18.0", "transformers", "onnx-ir", "onnx"]
PASTS = (32, 512)
STEPS = 8  # of a turn
ALGORITHMS = {4: "rtn", 8: "rtn_last"}  # of the builder, by the bits of the head


def head_bits(graph: onnx.GraphProto) -> int:
    """Bits of a graph's last product with blocks, the head's; 0 of a graph of floats."""
    bits = [attributes(node).get("bits", 4) for node in graph.node if node.op_type == "MatMulNBits"]
    return bits[-1] if bits else 0


def builders_file(folder: Path, environments: Path, model: Path, head: int) -> Path:
    """The file of onnxruntime-genai's builder, from a folder with the names of a checkpoint.

    Args:
        head: bits of the head, the others having 4; 0 for a file of floats.
    """
    program = [python_of(environments / "genai", GENAI), "-m", "onnxruntime_genai.models.builder"]
    options = ["-p", "int4" if head else "fp32", "-e", "cpu", "-c", folder.with_suffix(".cache")]
    # genai 0.18 passes over options that it does not know, among them the former names, `int4_algo_config`.
    options += ["--extra_options", "accuracy_level=4", f"algo_config={ALGORITHMS[head]}"] if head else []
    subprocess.run([*map(str, [*program, "-m", model, "-o", folder, *options])], check=True, capture_output=True)
    file = folder / "model.onnx"
    if (made := head_bits(onnx.load(file, load_external_data=False).graph)) != head:
        raise RuntimeError(f"the builder made a head of {made} bits, not of {head}")
    return file


def step(file: Path, past: int, width: int) -> Work:
    """A few steps of decoding after a past; `width` is that of a head."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {
        "input_ids": np.array([[338]]),
        "attention_mask": np.ones((1, past + 1), np.int64),
        "position_ids": np.array([[past]]),
    }
    feeds = {one.name: feeds[one.name] for one in session.get_inputs() if one.name in feeds}
    random = np.random.default_rng(0)
    for one in session.get_inputs():
        if one.name.startswith("past_key"):
            shape = (1, one.shape[1], past, width)
            feeds[one.name] = random.normal(size=shape).astype(np.float32) / 10
        elif one.name.startswith("past"):  # a recurrent state
            feeds[one.name] = np.zeros([1, *one.shape[1:]], np.float32)

    def run() -> None:
        for _ in range(STEPS):
            session.run(None, feeds)

    return run


def compiled(model: MIModel, folder: Path) -> dict[str, Path]:
    """Title -> a compiled file."""
    folder.mkdir()
    write = partial(model.compile, HookSpec(), plain=True)
    with patch("mionnx.compile.package.merge_blocks"):  # as files were written before
        write(folder / "before")
    write(folder / "now")
    write(folder / "fused", fused="all")
    titles = {"a node a product": "before", "compiled": "now", "compiled, fused": "fused"}
    return {title: folder / name / "model.onnx" for title, name in titles.items()}


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "mionnx-clients")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        floats = MIModel.from_pretrained(asked.model)
        build = partial(builders_file, environments=asked.environments.resolve(), model=floats.hooked.folder)
        models = {
            "its own": MIModel.from_pretrained(asked.model, dtype="int4"),
            "the same bits": MIModel.from_pretrained(floats.quantise(folder / "blocks", bits=4)),
        }
        rows = []
        for title, model in models.items():
            files = compiled(model, folder / title.replace(" ", "-"))
            head = head_bits(model.hooked.proto.graph)
            files[f"the builder's, its head in {head} bits"] = build(folder / f"builders-{head}", head=head)
            cells: dict[str, list[str]] = {name: [] for name in files}
            for past in PASTS:
                programs = {name: step(file, past, model.head_dim) for name, file in files.items()}
                times = alternate(programs, asked.repeats, process_time)
                *_, last = times.values()
                for name, each in times.items():
                    cells[name] += [f"{np.median(each) / STEPS * 1e3:.2f}", ratio(each, last, 2)]
            rows += [[title, name, *numbers] for name, numbers in cells.items()]
    columns = ["blocks", "file", *(text for past in PASTS for text in (f"ms a token after {past}", "ratio"))]
    title = f"{asked.model}, one thread, processor time, {asked.repeats} turns of {STEPS} tokens"
    present("int4_decode", "Decoding with weights of 4 bits", title, [(columns, rows)], asked.save)


if __name__ == "__main__":
    main()
