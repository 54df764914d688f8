"""Kernels that an execution provider has, the nodes of a graph that it leaves to the CPU, and a warning.

ONNX Runtime computes shapes on the CPU by design, which costs nothing. Any other node there has no kernel in the
provider: what it reads is copied to the CPU, what it makes back, at every run, and CUDA graphs are refused.
"""

import ctypes
import warnings
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from mionnx.engine.device_graph import shape_values
from mionnx.engine.engine import Operator
from mionnx.machine.caller import caller_level

RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"
CPU_PROVIDER = "CPUExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
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
    """Operator and name of each node on the CPU that computes more than shapes; of a session that records them."""
    nodes = {node.name: node for node in _nodes(model.graph) if node.name}
    shapes, kernels = shape_values(model.graph), _kernels(provider)
    operators = []
    for one in providers_of(session).get(CPU_PROVIDER, []):
        node = nodes.get(one.name)
        if node is None:  # made by an optimisation, of shapes too
            computes = bool(kernels) and (one.domain, one.op_type) not in kernels
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


def without_kernel(operators: Iterable[Operator], provider: str, dtype: str) -> list[Operator]:
    """Those of some operators that a provider does not compute in a dtype."""
    kernels = _kernels(provider)
    kind = f"tensor({'float' if dtype == 'float32' else dtype})"
    return [one for one in operators if not any(kind in kinds or not kinds for kinds in kernels.get(one, ()))]


@cache
def _kernels(provider: str) -> dict[Operator, list[frozenset[str]]]:
    """Operator -> for each kernel of a provider, the types of its first parameter, if any."""
    kernels: dict[Operator, list[frozenset[str]]] = {}
    for one in _definitions():
        if one.provider == provider:
            kinds = one.type_constraints.get("T", ())
            kernels.setdefault((one.domain, one.op_name), []).append(frozenset(kinds))
    return kernels


def _definitions() -> list[Any]:
    """The kernels of all providers; empty where this build does not tell."""
    if TENSORRT in onnxruntime.get_available_providers():
        try:
            ctypes.CDLL("libnvinfer.so.10")
        except OSError:  # onnxruntime-gpu without TensorRT: the call would end the process
            return []
    return list(getattr(onnxruntime.capi.onnxruntime_pybind11_state, "get_all_opkernel_def", list)())
