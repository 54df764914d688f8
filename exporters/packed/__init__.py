"""Checkpoints whose matrices are integers of 4 or 8 bits: GPTQ, AWQ, compressed-tensors, MXFP4.

`config.json` names the format in its `quantization_config`; a layer's integers, scales and zero points are tensors of
its own. Here they become `Stored` tensors of transformers' names, whose numbers are made when they are loaded, and
which have the file's own blocks beside (`mionnx.graph.blocks`).
"""

from pathlib import Path
from typing import Any

from mionnx.errors import ModelError
from mionnx.graph.folder_file import inside, read_json

METHODS = ("gptq", "awq", "compressed-tensors", "mxfp4")  # values of quant_method
CONFIG = "quantization_config"


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a checkpoint in one of the formats; None for any other."""
    # Cheap: torch is not imported.
    try:
        table = read_json(inside(folder, "config.json")).get(CONFIG)
    except (ModelError, AttributeError):
        return None
    return table if isinstance(table, dict) and table.get("quant_method") in METHODS else None


def bits_of(table: dict[str, Any]) -> int | None:
    """The bits of the blocks of most of its numbers, as it says; None if it does not."""
    if table.get("quant_method") == "mxfp4":
        return 4  # see `mxfp4`
    groups = table.get("config_groups")
    if isinstance(groups, dict):
        schemes = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        bits = [weights.get("num_bits") for weights in schemes if isinstance(weights, dict)]
        return next((count for count in bits if type(count) is int), None)
    bits = table.get("bits", table.get("w_bit"))  # AutoAWQ's own key is w_bit
    return bits if type(bits) is int else None
