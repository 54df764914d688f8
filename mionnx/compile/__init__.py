"""Compiled folders: a spec baked into a plain ONNX model."""
