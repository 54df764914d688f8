"""Edges between the parts of a model: their attribution, and circuits made of the leading ones."""
