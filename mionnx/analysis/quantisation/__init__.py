"""Quantisation by what it costs: bits within a bound of KL, scales by importance, the loss of each matrix."""
