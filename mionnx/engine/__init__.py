"""Engines that run ONNX graphs, behind one interface."""

from mionnx.errors import RuntimeMissingError, install

try:
    import onnxruntime  # noqa: F401  each file of this room imports it after this one has
except ImportError as error:
    raise RuntimeMissingError(
        f"mionnx needs ONNX Runtime: {install('cpu')}, or '.[gpu]' for onnxruntime-gpu"
    ) from error
