"""ONNX graphs without weights: hook points, metadata, checks, dataflow, and the builder of nodes."""
