"""Fused operators to put back into an adopted graph, tried beside the nodes in their place."""

import json
from collections.abc import Iterable
from pathlib import Path

import onnx

from exporters.adopt.operators.fused import Fused
from exporters.adopt.self_check import INT8, compare, rounds_activations
from exporters.probe import Probe, open_session, run
from mionnx.errors import ExportError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.fused_operators import FusedOperator, read_fused, restore, standing, written
from mionnx.graph.metadata import PREFIX


def keep_fused(
    proto: onnx.ModelProto, folder: Path, probed: Probe, fused: Iterable[Fused], layers: int, notes: list[str]
) -> None:
    """Put the fused operators into the metadata of an adopted graph."""
    texts = restorable(proto, folder, probed, fused, layers, notes)
    if texts:
        proto.metadata_props.add(key=f"{PREFIX}fused", value=json.dumps(texts, separators=(",", ":")))


def restorable(
    proto: onnx.ModelProto, folder: Path, probed: Probe, fused: Iterable[Fused], layers: int, notes: list[str]
) -> list[str]:
    """The fused operators of an adopted graph, as its metadata hold them.

    All are tried together, and then those alone that are right for padded texts.

    Args:
        probed: a run of it.
        fused: the operators that it came with.
        layers: how many the model has.
        notes: takes what keeps them from being put back.
    """
    flow = Dataflow(proto)
    allowed = layers * (INT8 if rounds_activations(proto) else probed.rounding)
    operators = read_fused(flow, standing(flow, filter(None, (one.proto() for one in fused))))
    for chosen in (operators, [one for one in operators if not one.unpadded]):
        if not chosen:
            return []
        problem = _problem(proto, flow, folder, probed, chosen, allowed)
        if problem is None:
            return [written(one.node) for one in chosen]
        left = sorted({one.node.op_type for one in chosen})
        notes.append(f"{', '.join(left)}: standard nodes always stand for them: {problem}")
    return []


def _problem(
    proto: onnx.ModelProto, flow: Dataflow, folder: Path, probed: Probe, fused: list[FusedOperator], allowed: float
) -> str | None:
    """Why some operators cannot be put back; None if they can."""
    restored, _ = restore(proto, flow, fused, padding=False)
    names = [entry.name for entry in restored.graph.output]
    try:
        session = open_session(restored, folder, [])
        feeds = {entry.name: probed.feeds[entry.name] for entry in session.get_inputs()}
        values = run(session, names, feeds)
    except ExportError as error:
        return str(error)
    for name, value in zip(names, values, strict=True):
        result = compare(f"fused {name} = that of its nodes", None, value, probed.values[name], allowed)
        if not result.holds:
            return str(result)
    return None
