"""The nodes of a graph left to the CPU by another provider, and a warning.

ONNX Runtime computes shapes on the CPU by design, which costs nothing. Any other node there has no kernel in the
provider: what it reads is copied to the CPU, what it makes back, at every run, and CUDA graphs are refused.
"""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from mionnx.engine.device_graph import shape_values
from mionnx.engine.kernels import has_kernel
from mionnx.machine.caller import caller_level

RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"
CPU_PROVIDER = "CPUExecutionProvider"
CONTROL = ("If", "Loop", "Scan")
SHOWN_OPERATORS = 5  # operators that a message names


class FallbackWarning(UserWarning):
    """Nodes of a graph run on the CPU, where another provider was asked for."""


def providers_of(session: onnxruntime.InferenceSession) -> dict[str, list[Any]]:
    """Provider -> its nodes (`name`, `op_type`, `domain`); empty before ONNX Runtime 1.24."""
    nodes: dict[str, list[Any]] = {}
    for part in getattr(session, "get_provider_graph_assignment_info", list)():
        nodes.setdefault(part.ep_name, []).extend(part.get_nodes())
    return nodes


def left_to_cpu(session: onnxruntime.InferenceSession, model: onnx.ModelProto, provider: str) -> list[tuple[str, str]]:
    """Operator and name of each node on the CPU that computes more than shapes.

    Args:
        session: opened with `RECORD`.
    """
    named = {node.name: node for node in _nodes(model.graph) if node.name}
    shapes = shape_values(model.graph)
    operators = []
    for one in providers_of(session).get(CPU_PROVIDER, []):
        node = named.get(one.name)
        if node is None:  # made by an optimisation, of shapes too
            computes = not has_kernel((one.domain, one.op_type), provider)
        else:
            computes = not shapes.issuperset(name for name in node.output if name)
        if computes:
            operators.append((one.op_type, one.name))
    return operators


def _nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    inner = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return [*graph.node, *(node for one in inner for node in _nodes(one))]


def named(nodes: list[tuple[str, str]]) -> str:
    """Operators, how often each, and a node's name: "Mod (2 nodes, "v_Mod_7")"."""
    first = dict(reversed(nodes))
    counts = Counter(kind for kind, _ in nodes).most_common()
    shown = [f"{kind} ({count} node{'s' * (count > 1)}, {first[kind]!r})" for kind, count in counts[:SHOWN_OPERATORS]]
    more = [f"{len(counts) - SHOWN_OPERATORS} more operators"] if len(counts) > SHOWN_OPERATORS else []
    return ", ".join([*shown, *more])


def warn_of_fallback(
    session: onnxruntime.InferenceSession, model: onnx.ModelProto, folder: Path, provider: str
) -> None:
    """Warn of nodes that a provider leaves to the CPU; shapes do not count."""
    if nodes := left_to_cpu(session, model, provider):
        warnings.warn(
            f"{folder.name}: {provider} leaves {named(nodes)} to the CPU, for lack of a kernel in this dtype: their "
            "values are copied there and back at every run",
            FallbackWarning,
            stacklevel=caller_level(),
        )


def why_no_cuda_graph(session: onnxruntime.InferenceSession, model: onnx.ModelProto, provider: str) -> str:
    """The nodes for which CUDA graphs are refused."""
    control = [(node.op_type, node.name) for node in _nodes(model.graph) if node.op_type in CONTROL]
    nodes = control or left_to_cpu(session, model, provider)
    return (
        f"{named(nodes)} {'is control flow' if control else 'runs on the CPU'}" if nodes else "values move to the CPU"
    )
