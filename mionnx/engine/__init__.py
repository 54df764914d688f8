"""Engines that run ONNX graphs, behind one interface."""
