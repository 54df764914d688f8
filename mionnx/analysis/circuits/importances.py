"""`importances.json` and `.pt`: scores of edges in the files of EAP-IG and of the MIB circuit track.

1. A score there is what corrupting the edge costs: the negative of a noising score here, or a denoising score.
2. Keys and values of grouped heads stand there once for each query head, as ungrouped nodes do here. Else a group's
   score is the sum over its heads; written, each has an equal share of it.
3. `input` is "embed" here. In a `.pt` file receivers are, by layer, all queries, all keys, all values, then the MLP.
4. EAP-IG divides by the batch size twice, so that its scores are those here by the number of pairs of a batch.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.circuits.nodes import Nodes, all_nodes
from mionnx.errors import InputError, SpecFileError
from mionnx.graph.folder_file import read_json
from mionnx.machine.files import write_atomic
from mionnx.machine.tensor_file import told_of
from mionnx.machine.torch_file import read_torch, write_torch
from mionnx.run.runner import Runner

RECEIVING = re.compile(r"a([0-9]+)\.(h|kv)([0-9]+)<([qkv])>")
LARGEST = 2**30  # bytes of a file of scores
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class _Names:
    """The names of EAP-IG for the nodes of one model."""

    layers: int
    heads: int
    width: int
    parallel: bool
    groups: int  # query heads that share keys and values

    @classmethod
    def of(cls, model: Runner) -> "_Names":
        sizes, nodes = model.hooked.metadata.sizes, all_nodes(model)
        group = sizes.num_heads // max(1, sizes.num_kv_heads)
        return cls(sizes.num_layers, sizes.num_heads, sizes.hidden_size, nodes.parallel, group)

    @property
    def cfg(self) -> dict[str, Any]:
        return {
            "n_layers": self.layers,
            "n_heads": self.heads,
            "parallel_attn_mlp": self.parallel,
            "d_model": self.width,
        }

    @property
    def senders(self) -> list[str]:
        """Senders there, in execution order."""
        blocks = [[*(f"a{layer}.h{head}" for head in range(self.heads)), f"m{layer}"] for layer in range(self.layers)]
        return ["input", *(name for block in blocks for name in block)]

    @property
    def receivers(self) -> list[str]:
        """Receivers there, in the order of a `.pt` file."""
        names: list[str] = []
        for layer in range(self.layers):
            names += [f"a{layer}.h{head}<{role}>" for role in "qkv" for head in range(self.heads)]
            names.append(f"m{layer}")
        return [*names, "logits"]

    def own(self, name: str) -> str:
        """The sender here of a sender there."""
        return "embed" if name == "input" else name

    def receiving(self, name: str, labels: Mapping[str, int]) -> str:
        """The receiver here of a receiver there: a group's keys or values for a head's."""
        if name in labels or (match := RECEIVING.fullmatch(name)) is None:
            return name
        layer, _, head, role = match.groups()
        return f"a{layer}.kv{int(head) // self.groups}<{role}>"


def write_importances(costs: Scores, inside: NDArray[np.bool_], path: Path, model: Runner, nodes: Nodes) -> Path:
    """Write what corrupting each edge costs, [senders, receivers], and which edges are of a circuit."""
    _refuse_other_layers(model, nodes)
    names = _Names.of(model)
    scores, member = np.full((2, len(names.senders), len(names.receivers)), np.nan)
    for row, column, at, group in _places(names, nodes):
        scores[row, column], member[row, column] = costs[at] / group, inside[at]
    if path.suffix == ".pt":
        return write_torch(path, _tensors(names, scores, member))
    if path.suffix != ".json":
        raise SpecFileError(f"{path}: scores of edges are written as .json or .pt")
    entries = {
        f"{names.senders[row]}->{names.receivers[column]}": {
            "score": float(scores[row, column]),
            "in_graph": bool(member[row, column]),
        }
        for row, column in np.argwhere(~np.isnan(scores)).tolist()
    }
    places = {name: {"in_graph": True} for name in [*names.senders, "logits"]}
    write_atomic(path, json.dumps({"cfg": names.cfg, "nodes": places, "edges": entries}).encode())
    return path


def _refuse_other_layers(model: Runner, nodes: Nodes) -> None:
    """Refuse a model with layers that the files have no names for: they name heads and an MLP in each."""
    other = next((i for i in range(nodes.layers) if i not in nodes.attends or i not in nodes.mlps), None)
    if other is not None:
        kind = "a recurrent mixer" if other in nodes.mixers else "no MLP" if other in nodes.attends else "no attention"
        raise InputError(f"layer {other} of {model.hooked.name} has {kind}: EAP-IG's files are of heads and MLPs")


def _tensors(names: _Names, scores: Scores, inside: Scores) -> dict[str, Any]:
    return {
        "cfg": names.cfg,
        "src_nodes": names.senders,
        "dst_nodes": names.receivers,
        "edges_scores": np.nan_to_num(scores).astype(np.float32),
        "edges_in_graph": np.nan_to_num(inside).astype(bool),
        "nodes_in_graph": np.ones(len(names.senders), bool),
    }


def read_importances(path: Path, model: Runner, nodes: Nodes) -> Scores:
    """Read what corrupting each edge costs, [senders, receivers]."""
    _refuse_other_layers(model, nodes)
    names = _Names.of(model)
    with told_of(path):
        cfg, entries = _entries(path)
        sizes = {key: cfg.get(key, size) for key, size in names.cfg.items()}
        if sizes != names.cfg:
            raise InputError(f"scores of another model: {sizes}, and {model.hooked.name} has {names.cfg}")
        senders, receivers = _numbered(nodes)
        costs, count = np.zeros(nodes.edges.shape), 0
        for sender, receiver, score in entries:
            row, column = senders.get(names.own(sender)), receivers.get(names.receiving(receiver, receivers))
            if row is None or column is None or not nodes.edges[row, column]:
                raise InputError(f"{model.hooked.name} has no edge from {sender} to {receiver}")
            if not np.isfinite(score):
                raise InputError(f"the score from {sender} to {receiver} is {score}")
            costs[row, column] += score
            count += 1
        expected = sum(1 for _ in _places(names, nodes))
        if count != expected:
            raise InputError(f"it has scores of {count} edges, and {model.hooked.name} has {expected}")
    return costs


def _entries(path: Path) -> tuple[Mapping[str, Any], Iterator[tuple[str, str, float]]]:
    """The sizes of a file, and its edges: sender, receiver, score."""
    if path.suffix == ".pt":
        payload = read_torch(path, f"{path} has no scores of edges")
        scores, senders, receivers = payload["edges_scores"], payload["src_nodes"], payload["dst_nodes"]
        if scores.shape != (len(senders), len(receivers)):
            raise InputError(f"scores {list(scores.shape)} of {len(senders)} senders and {len(receivers)} receivers")
        pairs = (
            (sender, receiver, float(scores[row, column]))
            for row, sender in enumerate(senders)
            for column, receiver in enumerate(receivers)
            if _writes_before(sender, receiver, bool(payload["cfg"].get("parallel_attn_mlp")))
        )
        return payload["cfg"], pairs
    payload = read_json(path, LARGEST)
    edges = payload["edges"].items()
    return payload["cfg"], ((*_ends(name), float(entry["score"])) for name, entry in edges)


def _ends(edge: str) -> tuple[str, str]:
    sender, arrow, receiver = edge.partition("->")
    if not arrow:
        raise InputError(f"{edge!r:.60} is no edge: they are named SENDER->RECEIVER")
    return sender, receiver


def _writes_before(sender: str, receiver: str, parallel: bool) -> bool:
    """Whether a receiver reads what a sender writes, both by their names there."""
    if sender == "input" or receiver == "logits":
        return True
    (writes, reads), own = (int(name[1:].partition(".")[0].partition("<")[0]) for name in (sender, receiver)), sender[0]
    return writes < reads or (writes == reads and own == "a" and receiver[0] == "m" and not parallel)


def _numbered(nodes: Nodes) -> tuple[dict[str, int], dict[str, int]]:
    """Label -> number of senders, and of receivers."""
    senders, receivers = ({node.label: i for i, node in enumerate(some)} for some in (nodes.senders, nodes.receivers))
    return senders, receivers


def _places(names: _Names, nodes: Nodes) -> Iterator[tuple[int, int, tuple[int, int], int]]:
    """Row and column there of each edge, its place here, and how many edges there have this place."""
    senders, receivers = _numbered(nodes)
    for row, sender in enumerate(names.senders):
        at = senders[names.own(sender)]
        for column, receiver in enumerate(names.receivers):
            own = names.receiving(receiver, receivers)
            if nodes.edges[at, receivers[own]]:
                yield row, column, (at, receivers[own]), names.groups if own != receiver else 1
