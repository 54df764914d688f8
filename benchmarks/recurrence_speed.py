"""The forms of one recurrence, by turns: steps, chunks, the open form of the file, and ONNX Runtime's one node.

    python benchmarks/recurrence_speed.py [--repeats 11] [--save]

Sizes of layers that models have, at 1, 64, 512 and 2048 tokens, batch 1, gates included. Processor time of one thread;
milliseconds are the fastest run's, ratios medians over neighbouring runs. `--save` writes
benchmarks/results/recurrence_speed.md.
"""

import argparse
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time

import onnx
import onnxruntime
from rich.progress import track
from tables import present
from turns import alternate, ratio

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "shared"))
from recurrences import expanded, fed, opened, random_reads

from mionnx.engine.fused_recurrence import fuse_recurrences

LENGTHS = (1, 64, 512, 2048)
CASES = {
    "gated, 16 heads of 64 x 64": ("gated", "head", (16, 64, 64)),
    "delta, 16 heads of 64 x 64 (gated DeltaNet)": ("delta", "head", (16, 64, 64)),
    "delta by key, 16 heads of 64 x 64 (KDA)": ("delta", "key", (16, 64, 64)),
    "gated, 24 heads of 128 x 64 (Mamba-2 130M)": ("gated", "head", (24, 128, 64)),
    "gated by number, 16 x 1536 (Mamba 130M)": ("gated", "number", (1, 16, 1536)),
    "gated by number, 1 x 2560 (RG-LRU 2B)": ("gated", "number", (1, 1, 2560)),
}
FORMS = {"steps": "steps, ms", "chunks": "chunks, ms", "file": "the file, ms", "node": "one node, ms"}
RATIOS = {"steps / file": ("steps", "file"), "file / node": ("file", "node")}
COLUMNS = ("recurrence", "tokens", *FORMS.values(), *RATIOS)


def alone(model: onnx.ModelProto, form: str) -> bytes | None:
    """A graph that takes one form at every length; None if it does not have it."""
    (place,) = (at for at, node in enumerate(model.graph.node) if node.op_type == "If")
    recurrence = model.graph.node[place]
    branch = find(recurrence, f".{form}")
    if branch is None:
        return None
    chosen = onnx.ModelProto.FromString(model.SerializeToString())
    nodes = [*model.graph.node[:place], *branch.node]
    for own, output in zip(branch.output, recurrence.output, strict=True):
        nodes.append(onnx.helper.make_node("Identity", [own.name], [output]))
    del chosen.graph.node[:]
    chosen.graph.node.extend([*nodes, *model.graph.node[place + 1 :]])
    return chosen.SerializeToString()


def find(node: onnx.NodeProto, ending: str) -> onnx.GraphProto | None:
    """A branch inside of a node whose name ends in this way."""
    graphs = [one.g for one in node.attribute if one.type == onnx.AttributeProto.GRAPH]
    inner = (find(one, ending) for graph in graphs for one in graph.node)
    return next((graph for graph in graphs if graph.name.endswith(ending)), None) or next(filter(None, inner), None)


def programs(rule: str, by: str, sizes: tuple[int, int, int]) -> dict[str, onnxruntime.InferenceSession]:
    """A session of each form that the recurrence has."""
    model = expanded({0: random_reads(rule, by, 2, sizes=sizes)})
    graphs = {form: alone(onnx.load_from_string(model), form) for form in ("steps", "chunks")} | {"file": model}
    proto = onnx.load_from_string(model)
    if fuse_recurrences(proto):
        graphs["node"] = proto.SerializeToString()
    return {form: opened(graph) for form, graph in graphs.items() if graph is not None}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=11)
    options.add_argument("--save", action="store_true")
    chosen = options.parse_args()
    onnxruntime.set_default_logger_severity(3)
    rows = []
    for title, (rule, by, sizes) in track(CASES.items(), "recurrences"):
        sessions = programs(rule, by, sizes)
        for length in LENGTHS:
            reads = random_reads(rule, by, length, sizes=sizes)
            feeds = fed({0: {name: array[:1] for name, array in reads.items()}})

            def work(session: onnxruntime.InferenceSession, feeds: dict = feeds) -> Callable[[], object]:
                return lambda: session.run(None, feeds)

            # below a millisecond one run is noise: several of them a turn
            runs = {name: work(session) for name, session in sessions.items()}
            times = alternate(runs, chosen.repeats * (20 if length == 1 else 1), process_time)
            rows.append(row(title, length, times))
    machine = f"{platform.machine()}, ONNX Runtime {onnxruntime.__version__}, one thread, {chosen.repeats} repeats"
    present("recurrence_speed", "Forms of a recurrence", f"Processor time, {machine}", [(COLUMNS, rows)], chosen.save)


def row(title: str, length: int, times: dict[str, list[float]]) -> list[str]:
    """Milliseconds of each form, and ratios."""
    fastest = [f"{1e3 * min(times[form]):.2f}" if form in times else "" for form in FORMS]
    pairs = RATIOS.values()
    ratios = [ratio(times[one], times[other], 2) if {one, other} <= {*times} else "" for one, other in pairs]
    return [title, str(length), *fastest, *ratios]


if __name__ == "__main__":
    main()
