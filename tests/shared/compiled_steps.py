"""A compiled model that carries a cache, run in several calls by ONNX Runtime alone."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnxruntime

from mionnx import MIModel


def logits_in_calls(model: MIModel, graph: Path, ids: np.ndarray, calls: Iterable[tuple[int, int]]) -> np.ndarray:
    """Logits [1, seq, vocab] of a text whose tokens come in calls, what one call carries given to the next."""
    session = onnxruntime.InferenceSession(graph)
    names = [one.name for one in session.get_outputs()]
    past = {name: np.zeros(shape, np.float32) for name, shape in model.hooked.metadata.past_shapes(1, 0).items()}
    logits = []
    for start, stop in calls:
        feeds = {"input_ids": ids[None, start:stop], "attention_mask": np.ones((1, stop), np.int64)}
        feeds |= {"position_ids": np.arange(start, stop)[None], **past}
        feeds = {one.name: feeds[one.name] for one in session.get_inputs()}  # some read no positions
        found = dict(zip(names, session.run(None, feeds), strict=True))
        logits.append(found["logits"])
        past = {port.past: found[port.present] for port in model.hooked.metadata.ports}
    return np.concatenate(logits, 1)
