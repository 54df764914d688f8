"""Engines that run ONNX graphs, behind one interface."""

from mionnx.errors import RuntimeMissingError

try:
    import onnxruntime  # noqa: F401  each file of this room imports it after this one has
except ImportError as error:
    raise RuntimeMissingError(
        "mionnx needs ONNX Runtime: pip install 'mionnx[cpu]' (onnxruntime) or 'mionnx[gpu]' (onnxruntime-gpu)"
    ) from error
