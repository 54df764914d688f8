"""Worked examples of the command line."""
