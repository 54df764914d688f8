"""Graphs without weights: exported from a config alone, to be rewritten, compiled and estimated.

Their weights are external data like any other's, with shapes and dtypes, in a file that does not exist. Nothing is
run: whatever needs a number of a weight is refused.
"""

from pathlib import Path

import onnx

from mionnx.errors import ModelError

LOCATION = "no-weights"  # the file that all weights of such a graph point to


def lacks_weights(proto: onnx.ModelProto) -> bool:
    """Whether a graph was exported without weights."""
    return any(entry.value == LOCATION for tensor in proto.graph.initializer for entry in tensor.external_data)


def refuse(folder: Path, what: str) -> None:
    """Refuse a use of weights that a graph does not have.

    Args:
        what: is refused, as "running it".

    Raises:
        ModelError: always.
    """
    raise ModelError(
        f"{folder} has no weights: it was exported from a config alone (--graph-only). Its graph can be rewritten, "
        f"compiled and estimated; {what} needs the weights: export the checkpoint itself"
    )
