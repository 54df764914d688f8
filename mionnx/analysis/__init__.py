"""Analyses of a model: sweeps, lens, attribution, attention, steering, features, Python hooks."""
