"""ONNX files under other names: nothing that an adoption reads is a name."""

import random
import shutil
from pathlib import Path

import onnx


def renamed(source: Path, target: Path, seed: int) -> None:
    """The same graph with every value and node renamed, and its nodes in another order that can run."""
    target.mkdir()
    if (source / "config.json").exists():
        shutil.copyfile(source / "config.json", target / "config.json")
    proto, rng = onnx.load(source / "model.onnx"), random.Random(seed)
    graph, names = proto.graph, dict[str, str]()

    def new(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}") if name else ""

    for entry in [*graph.input, *graph.output, *graph.initializer]:
        entry.name = new(entry.name)
    del graph.value_info[:]
    for number, node in enumerate(graph.node):
        node.name = f"n{rng.randrange(10**9)}.{number}"
        node.input[:], node.output[:] = [new(name) for name in node.input], [new(name) for name in node.output]
    known = {entry.name for entry in [*graph.input, *graph.initializer]} | {""}
    waiting, order = list(graph.node), []
    while waiting:
        ready = [node for node in waiting if set(node.input) <= known]
        node = rng.choice(ready)
        waiting.remove(node)
        order.append(onnx.NodeProto.FromString(node.SerializeToString()))
        known |= set(node.output)
    del graph.node[:]
    graph.node.extend(order)
    onnx.save(proto, target / "anything.onnx")
