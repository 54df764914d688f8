"""The float twin of a quantised model: what it was made from, with the numbers of the blocks in its weights."""

import shutil
from pathlib import Path

import numpy as np

from mionnx import MIModel
from mionnx.graph import matrices
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.weight_value import weight_numbers
from mionnx.quantise.matrices import find_weights


def float_twin(source: Path, blocks: HookedModel, folder: Path) -> MIModel:
    """Write the numbers over the bytes of a copy's weights, and open it."""
    made = HookedModel.open(Path(shutil.copytree(source, folder)))
    found, held = find_weights(made), {tensor.name for tensor in blocks.proto.graph.initializer}
    turned = {one.weight: one.turned for one in found.products}
    places = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in made.proto.graph.initializer
    }
    for name in {*turned, found.table}:
        if f"{name}_blocks" in held:
            numbers = weight_numbers(blocks.proto, blocks.folder, f"{name}_blocks")
        elif f"{name}_table" in held:
            numbers = matrices.embedding(blocks)
        else:
            continue
        array = numbers if turned.get(name, True) else numbers.T
        place = places[name]
        file = np.memmap(folder / place["location"], array.dtype, "r+", int(place.get("offset", 0)), array.shape)
        file[:] = array
        file.flush()
    return MIModel.from_pretrained(folder, threads=1, check="none")
