"""Weights by name, the circuits of heads that they make, and foldings of norms."""
