"""Makers of stock files: each turns a checkpoint, or a file that another one made, into an ONNX decoder.

    python benchmarks/stock_kinds.py JOBS RESULTS

`stock_files.py` runs this in the environment that a kind asks for; the tools are imported by the maker that needs them.
JOBS is a JSON list of {kind, checkpoint, source, folder}; RESULTS gets one JSON line as soon as a job is done.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import runpy
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

MODEL = "model.onnx"
BLOCK = 32  # weights that share one scale in a 4-bit file
Maker = Callable[[Path, Path | None, Path], str]  # checkpoint, source file, new folder -> file in that folder


@dataclass(frozen=True)
class Kind:
    """How one kind of file is made.

    Attributes:
        make: writes the files into a folder that exists, and returns the name of the decoder.
        environment: name of the environment whose packages it needs; empty: the present one.
        sources: kinds of which it takes a file, the first that exists; none: it takes the checkpoint.
        families: the only ones that it is made of; none: all.
    """

    make: Maker
    environment: str = ""
    sources: tuple[str, ...] = ()
    families: tuple[str, ...] = field(default=())


def optimum(checkpoint: Path, _source: Path | None, folder: Path, task: str = "text-generation-with-past") -> str:
    """Export as `optimum-cli export onnx --task TASK` does."""
    from optimum.exporters.onnx import main_export

    main_export(str(checkpoint), folder, task=task, do_validation=False)
    return MODEL


def optimum_1(checkpoint: Path, _source: Path | None, folder: Path, legacy: bool = False) -> str:
    """Export as optimum 1.x did; `legacy`: two files, and their merger, an `If` on `use_cache_branch`."""
    import torch.onnx

    torch.onnx.export = partial(torch.onnx.export, dynamo=False)  # what it was when this optimum was written
    from optimum.exporters.onnx import main_export

    main_export(str(checkpoint), folder, task="text-generation-with-past", legacy=legacy, do_validation=False)
    return "decoder_model_merged.onnx" if legacy else MODEL


def merged(checkpoint: Path, _source: Path | None, folder: Path) -> str:
    """Export without and with past and merge: an `If` on `use_cache_branch`, as `optimum_1` writes.

    optimum-onnx no longer asks for the two parts, but its configs of them and the merger are there still.
    """
    import torch
    from optimum.exporters.onnx.convert import export_models
    from optimum.exporters.tasks import TasksManager
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    config_of = TasksManager.get_exporter_config_constructor(
        "onnx", model=model, task="text-generation", library_name="transformers"
    )
    parts = {
        name: (model, config_of(model.config, use_past=True, use_past_in_inputs=past))
        for name, past in {"decoder_model": False, "decoder_with_past_model": True}.items()
    }
    files = [f"{name}.onnx" for name in parts]
    export_models(parts, folder, output_names=files)
    parts["decoder_model"][1].post_process_exported_models(folder, parts, files)
    return "decoder_model_merged.onnx"


def dynamo(
    checkpoint: Path, _source: Path | None, folder: Path, attention: str | None, opset: int | None = None
) -> str:
    """Export with torch's own exporter: ids and mask in, logits out, no cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=attention, dtype=torch.float32).eval()
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "batched_mm"  # the other one loops over the experts that were chosen

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    example = torch.ones(2, 12, dtype=torch.long)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    torch.onnx.export(
        Logits(),
        (example, example.clone()),
        folder / MODEL,
        input_names=["input_ids", "attention_mask"],
        output_names=["logits"],
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
        opset_version=opset,
        dynamo=True,
        verbose=False,
    )
    return MODEL


def genai(
    checkpoint: Path,
    _source: Path | None,
    folder: Path,
    precision: str,
    device: str = "cpu",
    options: tuple[str, ...] = (),
) -> str:
    """Build with `python -m onnxruntime_genai.models.builder`."""
    cache = folder / "cache"
    asked = {"-i": checkpoint, "-o": folder, "-p": precision, "-e": device, "-c": cache}
    sys.argv = ["builder", *(str(part) for pair in asked.items() for part in pair)]
    sys.argv += ["--extra_options", *options] if options else []
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
    shutil.rmtree(cache, ignore_errors=True)
    return MODEL


def ort_optimizer(checkpoint: Path, source: Path | None, folder: Path, float16: bool = False) -> str:
    """Fuse with `python -m onnxruntime.transformers.optimizer`, as GPT-2 or as the family where the tool knows it."""
    from onnxruntime.transformers.optimizer import MODEL_TYPES, optimize_model

    config = json.loads((checkpoint / "config.json").read_text())
    family = config["model_type"] if config["model_type"] in MODEL_TYPES else "gpt2"
    heads = config.get("num_attention_heads", config.get("n_head"))
    optimised = optimize_model(str(source), family, heads, config.get("hidden_size", config.get("n_embd")))
    if float16:
        optimised.convert_float_to_float16(keep_io_types=True)
    optimised.save_model_to_file(str(folder / MODEL))
    return MODEL


def session_optimised(_checkpoint: Path, source: Path | None, folder: Path) -> str:
    """Keep what a session makes of a file, all its optimisations on."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(folder / MODEL)
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return MODEL


def int8(_checkpoint: Path, source: Path | None, folder: Path, name: str = MODEL) -> str:
    """Quantise weights to int8, activations when it runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, folder / name, weight_type=QuantType.QInt8)
    return name


def four_bits(
    _checkpoint: Path,
    source: Path | None,
    folder: Path,
    name: str = MODEL,
    qdq: bool = False,
    symmetric: bool = False,
    operators: tuple[str, ...] = ("MatMul",),
) -> str:
    """Quantise weights to 4 bits: MatMulNBits and GatherBlockQuantized, or DequantizeLinear before each MatMul."""
    import onnx
    from onnxruntime.quantization import QuantFormat
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantiser = MatMulNBitsQuantizer(
        onnx.load(str(source)),
        block_size=BLOCK,
        is_symmetric=symmetric,
        quant_format=QuantFormat.QDQ if qdq else QuantFormat.QOperator,
        op_types_to_quantize=operators,
        quant_axes=tuple((operator, 1 if operator == "Gather" else 0) for operator in operators),
    )
    quantiser.process()
    quantiser.model.save_model_to_file(str(folder / name))
    return name


def half(_checkpoint: Path, source: Path | None, folder: Path, name: str) -> str:
    """Turn weights and activations to float16; inputs and outputs keep their types."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(str(source)), keep_io_types=True), folder / name)
    return name


def transformersjs(checkpoint: Path, source: Path | None, folder: Path) -> str:
    """Lay files out as the Hub has them for transformers.js: `onnx/model.onnx` and its quantised companions."""
    import onnx

    inner = folder / "onnx"
    inner.mkdir()
    onnx.save(onnx.load(str(source)), inner / MODEL)
    int8(checkpoint, inner / MODEL, inner, "model_quantized.onnx")
    four_bits(checkpoint, inner / MODEL, inner, "model_q4.onnx", symmetric=True)
    half(checkpoint, inner / MODEL, inner, "model_fp16.onnx")
    half(checkpoint, inner / "model_q4.onnx", inner, "model_q4f16.onnx")
    return f"onnx/{MODEL}"


OPTIMISED = ("optimum-past", "dynamo-sdpa")
WINDOWED = ("gemma2", "gemma3_text", "mistral", "gpt_oss")
KINDS: dict[str, Kind] = {
    "optimum-past": Kind(optimum, "optimum"),
    "optimum-nopast": Kind(partial(optimum, task="text-generation"), "optimum"),
    "optimum-merged": Kind(merged, "optimum"),
    "optimum1-past": Kind(optimum_1, "optimum-1"),
    "optimum1-merged": Kind(partial(optimum_1, legacy=True), "optimum-1"),
    "dynamo-sdpa": Kind(partial(dynamo, attention="sdpa")),
    "dynamo-eager": Kind(partial(dynamo, attention="eager")),
    "dynamo-opset23": Kind(partial(dynamo, attention=None, opset=23)),
    "genai-fp32": Kind(partial(genai, precision="fp32"), "genai"),
    "genai-fp32-whole-cache": Kind(
        partial(genai, precision="fp32", options=("windowed_kv_cache=false",)), "genai", families=WINDOWED
    ),
    "genai-fp16": Kind(partial(genai, precision="fp16"), "genai"),
    "genai-fp16-cuda": Kind(partial(genai, precision="fp16", device="cuda"), "genai"),
    "genai-int4": Kind(partial(genai, precision="int4"), "genai"),
    "genai-int4-whole-cache": Kind(
        partial(genai, precision="int4", options=("windowed_kv_cache=false",)), "genai", families=WINDOWED
    ),
    "genai0.11-fp32": Kind(partial(genai, precision="fp32"), "optimum"),
    "genai0.11-int4": Kind(partial(genai, precision="int4"), "optimum"),
    "ort-optimizer": Kind(ort_optimizer, sources=OPTIMISED),
    "ort-optimizer-fp16": Kind(partial(ort_optimizer, float16=True), sources=OPTIMISED),
    "ort-optimizer-optimum1": Kind(ort_optimizer, sources=("optimum1-past",)),
    "session-optimised": Kind(session_optimised, sources=OPTIMISED),
    "int8-dynamic": Kind(int8, sources=OPTIMISED),
    "q4-qoperator": Kind(partial(four_bits, operators=("MatMul", "Gather")), sources=OPTIMISED),
    "q4-qdq": Kind(partial(four_bits, qdq=True), sources=OPTIMISED),
    "transformersjs": Kind(transformersjs, sources=OPTIMISED),
}
PACKAGES = ("torch", "transformers", "optimum", "optimum-onnx", "onnxruntime-genai", "onnx", "onnx-ir", "onnxruntime")


def versions() -> dict[str, str]:
    """Versions of the tools that this environment has."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def whole(source: Path, folder: Path) -> Path:
    """A copy of a file with its weights inside: onnx opens no weights that have hard links, and these may have."""
    import onnx

    copied = shutil.copytree(source.parent, folder / "copied", ignore=shutil.ignore_patterns("onnx"))
    onnx.save(onnx.load(str(copied / source.name)), folder / MODEL)
    return folder / MODEL


def made(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job; what it made, or why it could not."""
    start, folder = time.perf_counter(), Path(job["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkpoint, kind = Path(job["checkpoint"]), KINDS[job["kind"]]
    try:
        with tempfile.TemporaryDirectory() as temporary:
            if kind.sources and not job["source"]:
                raise FileNotFoundError(f"there is none of {', '.join(kind.sources)}")
            source = whole(Path(job["source"]), Path(temporary)) if job["source"] else None
            found: dict[str, Any] = {"file": kind.make(checkpoint, source, folder)}
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(checkpoint / name, folder / name)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        shutil.rmtree(folder)
        found = {"error": f"{type(error).__name__}: {error}"[:1000]}
    return {**job, **found, "tools": versions(), "seconds": round(time.perf_counter() - start, 2)}


def main() -> None:
    """Do the jobs of a file, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    for job in json.loads(given.jobs.read_text()):
        with given.results.open("a") as results:
            results.write(json.dumps(made(job)) + "\n")


if __name__ == "__main__":
    main()
