"""Blocks of GGUF files: those that ONNX Runtime's operator can hold are the file's own, number for number."""

import numpy as np
import pytest
from families import make_model
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf

from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.matrices import embedding
from mionnx.graph.onnx_file import weight
from mionnx.graph.quantised_weight import weight_numbers
from mionnx.run.exporting import export


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "bits"), [("Q4_0", "int4", 4), ("Q8_0", "int8", 8), ("Q8_0", "int4", 8)])
def test_blocks_of_a_file_are_kept_bit_for_bit(kind, dtype, bits, tmp_path):
    """Against the numbers that the gguf package makes of the file; 8-bit weights stay so in a model of 4 bits."""
    file = write_gguf(make_model("llama"), tmp_path / "model.gguf", Type[kind])
    for name in ("float32", dtype):
        export(file, tmp_path / name, name, lambda *_: None)
    floats, made = (HookedModel.open(tmp_path / name) for name in ("float32", dtype))
    blocks = [one.name for one in made.proto.graph.initializer if one.name.endswith("_blocks")]
    assert len(blocks) == 15  # seven in each of two layers, and the unembedding
    for name in blocks:
        expected = weight(floats.proto, floats.folder, name.removesuffix("_blocks"))
        np.testing.assert_array_equal(weight_numbers(made.proto, made.folder, name), expected)
    np.testing.assert_array_equal(embedding(made), embedding(floats))
    held = {entry.i for node in made.proto.graph.node for entry in node.attribute if entry.name == "bits"}
    assert held == {bits}
