"""Sparse autoencoders and transcoders as parts of the graph."""
