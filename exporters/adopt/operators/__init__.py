"""Fused operators of ONNX Runtime and ONNX, written in standard ones that a hook can stand between."""
