"""The logit lens, and reads through the unembedding."""
