"""Files as quantisers write them, made from the shipped models: one file, without hook points."""

import shutil
from pathlib import Path

import onnx
import onnxruntime as ort
from onnxruntime.quantization import QuantFormat, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from repository import REPOSITORY

from mionnx import MIModel
from mionnx.graph import onnx_file

KINDS = ("plain", "int4", "int8", "qdq", "dynamic")


def foreign_file(folder: Path, kind: str = "int4", model: str = "world-llama") -> Path:
    """Write a shipped model as a foreign file, quantised in one of the ways of `KINDS`.

    Args:
        folder: new; the tokenizer goes there too.
        kind: "int4" and "int8" are MatMulNBits in blocks of 32, "qdq" is DequantizeLinear of 4 bits, "dynamic" is
            `quantize_dynamic`.
        model: name of a shipped model.
    """
    source = REPOSITORY / "models" / model
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC  # turns weights that stand turned
    options.optimized_model_filepath = str(folder / "model.onnx")
    whole = onnx_file.read(source / "model.onnx")
    onnx_file.embed(whole, source)  # onnx's own loader refuses weights that another test has linked
    ort.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
    proto = onnx.load(folder / "model.onnx")
    del proto.metadata_props[:]
    if kind == "dynamic":
        quantize_dynamic(proto, folder / "model.onnx", op_types_to_quantize=["MatMul", "Gather"])
        return folder
    if kind != "plain":
        form = QuantFormat.QDQ if kind == "qdq" else QuantFormat.QOperator
        bits = 8 if kind == "int8" else 4
        quantiser = MatMulNBitsQuantizer(proto, bits=bits, block_size=32, is_symmetric=False, quant_format=form)
        quantiser.process()
        proto = quantiser.model.model
    onnx.save(proto, folder / "model.onnx")
    return folder


def bits_of(model: MIModel) -> dict[str, int]:
    """Weight -> bits, of the products with blocks of a model."""
    return {
        node.input[1].removesuffix("_blocks"): entry.i
        for node in model.hooked.proto.graph.node
        if node.op_type == "MatMulNBits"
        for entry in node.attribute
        if entry.name == "bits"
    }
