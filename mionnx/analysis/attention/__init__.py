"""Attention patterns, and scores of heads on repeated random sequences."""
