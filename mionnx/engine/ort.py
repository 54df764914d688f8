"""ONNX Runtime, or what to install."""

from mionnx.errors import RuntimeMissingError

try:
    import onnxruntime
except ImportError as error:
    raise RuntimeMissingError(
        "mionnx needs ONNX Runtime: pip install 'mionnx[cpu]' (onnxruntime) or 'mionnx[gpu]' (onnxruntime-gpu)"
    ) from error

__all__ = ["onnxruntime"]
