"""Stock files: small random decoders of twelve families as other tools write them, to recognise hook points in.

    python benchmarks/stock_files.py FOLDER [--families llama gpt2] [--kinds optimum-past q4-qdq] [--again] [--save]

Makes a checkpoint of every family (2 layers, every parameter perturbed: no bias is 0, no norm weight 1) in
FOLDER/checkpoints, and from it, or from a file of another kind, each kind of file of `stock_kinds.py` in
FOLDER/KIND-FAMILY, with config.json and tokenizer.json beside it. Tools that pin other packages run in virtual
environments that this program makes in --environments. Each file is run once in ONNX Runtime beside transformers in
eager mode. FOLDER/manifest.json says of each kind and family which file there is, of what, by which versions, in how
many seconds, how far its logits are from transformers, or why it cannot be made. What the manifest has is not made
again, unless --again asks for it; the tokenizer gives the size of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from environments import python_of
from safetensors.torch import load_file, save_file
from stock_kinds import KINDS
from tables import present
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

ROOT = Path(__file__).parent.parent
RUNTIME, SCRIPT = "onnxruntime==1.31.1", "onnxscript==0.7.2"
REQUIREMENTS = {
    "optimum": ("optimum-onnx==0.1.0", "transformers==4.57.6", "onnxruntime-genai==0.11.4", "onnx-ir==1.1.0", RUNTIME),
    "optimum-1": (
        "onnx==1.18.0",
        "optimum==1.23.3",
        "transformers==4.46.3",
        "datasets==3.6.0",
        "onnxscript==0.7.2",
        "onnx==1.18.0",
        RUNTIME,
    ),
    "genai": ("onnxruntime-genai==0.18.0", "transformers==5.23.0", "onnx-ir==1.1.0", "onnx==1.23.2", RUNTIME),
}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # magnitudes of MXFP4's codes
BATCH, SEQ = 2, 12  # longer than the windows
WINDOW = 8
COLUMNS = 6  # of a table
NOTE = 160  # characters of a reason
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
NO_GROUPS = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
GEMMA = {**TINY, "head_dim": 16, "tie_word_embeddings": True}
LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}
CAPPED = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 1},
    "gemma2": {**GEMMA, **LAYERS, **CAPPED},
    "qwen2": TINY,
    "qwen3": {**TINY, "head_dim": 32},
    "gemma": GEMMA,
    "gemma3_text": {**GEMMA, **LAYERS, "query_pre_attn_scalar": 32},
    "phi3": {**TINY, "original_max_position_embeddings": 128},
    "mistral": {**TINY, "sliding_window": WINDOW},
    "gpt_neox": NO_GROUPS,
    "mixtral": EXPERTS,
    "gpt_oss": {**EXPERTS, **LAYERS, "head_dim": 32},
}
Entry = dict[str, Any]
SAID = "One pass over 2 x 12 random tokens, windows of 8; seconds: the median of a kind."


def make_checkpoint(family: str, folder: Path, tokenizer: Path) -> None:
    """Write a random checkpoint, its tokenizer beside it; the same one every time."""
    vocabulary = len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"])
    torch.manual_seed(list(CONFIGS).index(family))
    config = AutoConfig.for_model(family, vocab_size=vocabulary, **CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    if family == "gpt_oss":
        _add_mxfp4(folder / "model.safetensors")
    _older_rope(folder / "config.json")


def _add_mxfp4(path: Path) -> None:
    """Keep the experts also as MXFP4, as OpenAI's checkpoint has them: the genai builder makes its QMoE of those."""
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = tensors[name].transpose(1, 2)  # (expert, out, in)
        blocks = weight.reshape(*weight.shape[:2], -1, 32)
        exponents = blocks.abs().amax(-1).log2().floor() - 2  # the largest step is 6, in [4, 8)
        scaled = blocks / exponents.exp2().unsqueeze(-1)
        codes = (scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1) + 8 * (scaled < 0)
        tensors[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})


def _older_rope(path: Path) -> None:
    """Say the rotation also as configs before transformers 5 do, as those on the Hub say it."""
    config = json.loads(path.read_text())
    rope = config.get("rope_parameters", {})
    full = rope.get("full_attention", rope)
    if full:
        config["rope_theta"] = full["rope_theta"]
        config["rope_scaling"] = None if full["rope_type"] == "default" else full
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    path.write_text(json.dumps(config, indent=2))


def run_jobs(jobs: list[Entry], python: Path, folder: Path) -> Iterator[Entry]:
    """Do jobs in one process of an environment; one that ends it is reported, and the next gets a process anew."""
    todo, results = folder / "jobs.json", folder / "results.jsonl"
    while jobs:
        todo.write_text(json.dumps(jobs))
        results.unlink(missing_ok=True)
        with (folder / "tools.log").open("a") as log:
            command = [python, Path(__file__).parent / "stock_kinds.py", todo, results]
            code = subprocess.run(command, stdout=log, stderr=log).returncode
        done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        if len(done) < len(jobs):
            done.append({**jobs[len(done)], "error": f"the process of the tool ended with code {code}"})
        yield from done
        jobs = jobs[len(done) :]
    todo.unlink(missing_ok=True)
    results.unlink(missing_ok=True)


class Stock:
    """A folder of stock files and its manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "manifest.json"
        found = json.loads(self.path.read_text()) if self.path.exists() else []
        self.entries: dict[tuple[str, str], Entry] = {(entry["kind"], entry["family"]): entry for entry in found}

    def job(self, kind: str, family: str) -> Entry:
        """What `stock_kinds.py` is told: paths, and the file that this kind takes."""
        files = (self.entries.get((name, family), {}).get("file") for name in KINDS[kind].sources)
        source = next(filter(None, files), None)
        return {
            "kind": kind,
            "family": family,
            "folder": str(self.folder / f"{kind}-{family}"),
            "checkpoint": str(self.checkpoint(family)),
            "source": str(self.folder / source) if source else None,
        }

    def checkpoint(self, family: str) -> Path:
        """Folder of a family's checkpoint."""
        return self.folder / "checkpoints" / family

    def keep(self, result: Entry) -> None:
        """Check what a job made, and write it down; paths in the manifest are relative to the folder."""
        entry: Entry = {key: result[key] for key in ("kind", "family", "tools", "seconds") if key in result}
        if "error" in result:
            entry["error"] = result["error"].replace(f"{self.folder}/", "")
        for key in ("checkpoint", "source"):
            entry[key] = str(Path(result[key]).relative_to(self.folder)) if result[key] else None
        if "file" in result:
            made = Path(result["folder"])
            entry["file"] = str((made / result["file"]).relative_to(self.folder))
            entry["bytes"] = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
            entry |= checked(self.folder / entry["file"], Path(result["checkpoint"]))
        self.entries[result["kind"], result["family"]] = entry
        self.write()

    def check(self) -> None:
        """Check every file once more."""
        made = ("kind", "family", "tools", "seconds", "error", "checkpoint", "source", "file", "bytes")
        for key, entry in self.entries.items():
            kept = {name: entry[name] for name in made if name in entry}
            if "file" in kept:
                kept |= checked(self.folder / kept["file"], self.folder / kept["checkpoint"])
            self.entries[key] = kept
        self.write()

    def write(self) -> None:
        """Write the manifest, kinds and families in their order."""
        order = [(kind, family) for kind in KINDS for family in CONFIGS]
        self.path.write_text(json.dumps([self.entries[key] for key in order if key in self.entries], indent=1) + "\n")


def checked(path: Path, checkpoint: Path) -> Entry:
    """Operators outside the standard; the largest difference of logits in one pass, and in two with a cache."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    found: Entry = {
        "operators": dict(Counter(f"{n.domain}.{n.op_type}" for n in nodes if n.domain not in ("", "ai.onnx")))
    }
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, (BATCH, SEQ))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    found["largest_logit"] = float(np.abs(expected).max())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return found | {"error_when_opened": said(error)}
    found["inputs"] = [value.name for value in session.get_inputs()]
    ways = {"one_pass": (BATCH, [SEQ]), "one_pass_one_row": (1, [SEQ])}
    if any(name.startswith("past") for name in found["inputs"]):
        ways |= {"cached_token": (BATCH, [SEQ - 1, SEQ]), "cached_half": (BATCH, [SEQ // 2, SEQ])}
    for way, (rows, ends) in ways.items():
        try:
            found[way] = float(np.abs(logits(session, ids[:rows], ends, model) - expected[:rows]).max())
        except Exception as error:
            found[f"error_{way}"] = said(error)
    return found


def said(error: Exception) -> str:
    """An error in one line that is not too long."""
    return f"{type(error).__name__}: {error}"[:1000]


def logits(
    session: onnxruntime.InferenceSession, ids: np.ndarray, ends: list[int], model: PreTrainedModel
) -> np.ndarray:
    """The logits (batch, seq, vocab), each pass up to one of the ends."""
    config, inputs, outputs = model.config, session.get_inputs(), [value.name for value in session.get_outputs()]
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    start, parts = 0, []
    past = {
        value.name: np.zeros((len(ids), kv_heads, 0, head_dim), np.float16 if "16" in value.type else np.float32)
        for value in inputs
        if value.name.startswith("past")
    }
    for end in ends:
        ready = {
            "input_ids": ids[:, start:end],
            "attention_mask": np.ones((len(ids), end), np.int64),
            "position_ids": np.broadcast_to(np.arange(start, end), (len(ids), end - start)),
            "use_cache_branch": np.array([start > 0]),
            **past,
        }
        found = dict(zip(outputs, session.run(None, {value.name: ready[value.name] for value in inputs}), strict=True))
        past = {name: found[name.replace("past_key_values", "present")] for name in past}
        parts.append(found["logits"].astype(np.float32))
        start = end
    return np.concatenate(parts, axis=1)


def rows(stock: Stock, kinds: list[str], families: list[str]) -> list[tuple[str, ...]]:
    """Kinds by families: the difference of logits, or what happened instead."""

    def cell(entry: Entry | None) -> str:
        if entry is None or "error" in entry:
            return "not made" if entry else "-"
        if "one_pass" in entry:
            return f"{entry['one_pass']:.0e}"
        return f"{entry['one_pass_one_row']:.0e}, one row" if "one_pass_one_row" in entry else "does not run"

    def seconds(kind: str) -> str:
        spent = [entry["seconds"] for (other, _), entry in stock.entries.items() if other == kind and "file" in entry]
        return f"{np.median(spent):.1f}" if spent else "-"

    return [(kind, *(cell(stock.entries.get((kind, family))) for family in families), seconds(kind)) for kind in kinds]


def notes(stock: Stock, kinds: list[str], families: list[str]) -> list[str]:
    """Why files are missing, or do not run on the CPU: each reason once, with the files that it concerns."""
    reasons: dict[str, list[str]] = {}
    for (kind, family), entry in stock.entries.items():
        told = [entry[key] for key in ("error", "error_when_opened", "error_one_pass_one_row") if key in entry]
        if told and kind in kinds and family in families:
            reason = told[0].replace(family, "FAMILY").split("Status Message: ")[-1].splitlines()[0][:NOTE]
            reasons.setdefault(reason, []).append(f"{kind}-{family}")
    return [f"{', '.join(files)}: {reason}" for reason, files in reasons.items()]


def main() -> None:
    """Make what is missing, check it, write the manifest and print a table of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--families", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models" / "world-llama", help="folder that has one")
    parser.add_argument("--environments", type=Path, help="folder for virtual environments; default: in FOLDER")
    parser.add_argument("--again", action="store_true", help="make also what the manifest has")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/stock_files.md")
    parser.add_argument("--check", action="store_true", help="check once more what was made")
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    stock = Stock(given.folder.resolve())
    environments = (given.environments or stock.folder / ".environments").resolve()
    for family in given.families:
        if given.again or not stock.checkpoint(family).exists():
            make_checkpoint(family, stock.checkpoint(family), given.tokenizer)
    if given.check:
        stock.check()
    for kind in given.kinds:
        families = [name for name in given.families if name in (KINDS[kind].families or CONFIGS)]
        missing = [name for name in families if given.again or (kind, name) not in stock.entries]
        jobs = [stock.job(kind, family) for family in missing]
        name = KINDS[kind].environment
        python = python_of(environments / name, REQUIREMENTS[name]) if name else Path(sys.executable)
        for result in run_jobs(jobs, python, stock.folder):
            stock.keep(result)
            print(kind, result["family"], result.get("error", result.get("seconds")), flush=True)
    title = "Largest difference of logits from transformers in eager mode"
    parts = [given.families[at : at + COLUMNS] for at in range(0, len(given.families), COLUMNS)]
    tables = [(("kind", *part, "seconds"), rows(stock, given.kinds, part)) for part in parts]
    present("stock_files", "Stock files", title, tables, given.save, SAID, notes(stock, given.kinds, given.families))


if __name__ == "__main__":
    main()
