"""Inputs of a forward pass: tokens, their masks and positions, key/value caches and recurrent states."""
