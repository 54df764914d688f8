"""Activation patching, ablation and path patching over every cell of a grid."""
