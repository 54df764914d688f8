"""Pairs of prompts that sweeps run on."""

import numpy as np

SEQ, DIFFERENT = 7, (2, 4)
HEADS = ("hook_q", "hook_k", "hook_v", "hook_z", "hook_pattern", "hook_scores")


def prompts(seed: int = 0, seq: int = SEQ, vocab: int = 101) -> tuple[np.ndarray, np.ndarray]:
    """A pair that differs at the positions `DIFFERENT`."""
    clean = np.random.default_rng(seed).integers(3, vocab, seq)
    corrupted = clean.copy()
    corrupted[[*DIFFERENT]] = (clean[[*DIFFERENT]] + 7) % vocab
    return clean, corrupted


def difference(logits: np.ndarray, answer: int, versus: int) -> float:
    return float(logits[answer] - logits[versus])
