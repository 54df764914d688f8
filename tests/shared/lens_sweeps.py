"""Run beside TransformerLens: every `get_act_patch_*` and the same sweep here; prints the largest differences as JSON.

python tests/shared/lens_sweeps.py CHECKPOINT HOOKED TOKENIZER
"""

import json
import os
import sys

os.environ["TQDM_DISABLE"] = "1"

import numpy as np
import torch
from transformer_lens import patching
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer

from mionnx import MIModel

ANSWER, VERSUS, SEQ = 5, 9, 6
BY_POS, ALL_POS = ("layer", "position", "head"), ("layer", "head")
SWEEPS = {
    "resid_pre": ("hook_resid_pre", ("layer", "position")),
    "resid_mid": ("hook_resid_mid", ("layer", "position")),
    "attn_out": ("hook_attn_out", ("layer", "position")),
    "mlp_out": ("hook_mlp_out", ("layer", "position")),
    "attn_head_out_by_pos": ("hook_z", BY_POS),
    "attn_head_q_by_pos": ("hook_q", BY_POS),
    "attn_head_k_by_pos": ("hook_k", BY_POS),
    "attn_head_v_by_pos": ("hook_v", BY_POS),
    "attn_head_pattern_by_pos": ("hook_pattern", ("layer", "head", "position")),
    "attn_head_pattern_dest_src_pos": ("hook_pattern", ("layer", "head", "position", "source")),
    "attn_head_out_all_pos": ("hook_z", ALL_POS),
    "attn_head_q_all_pos": ("hook_q", ALL_POS),
    "attn_head_k_all_pos": ("hook_k", ALL_POS),
    "attn_head_v_all_pos": ("hook_v", ALL_POS),
    "attn_head_pattern_all_pos": ("hook_pattern", ALL_POS),
}


def main(checkpoint: str, hooked: str, tokenizer: str) -> None:
    """Compare all sweeps on one model."""
    model = MIModel.from_pretrained(hooked, threads=1)
    eager = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    words = AutoTokenizer.from_pretrained(tokenizer)
    bridge = TransformerBridge.boot_transformers(checkpoint, hf_model=eager, tokenizer=words)
    clean = np.random.default_rng(0).integers(3, model.vocab_size, SEQ)
    corrupted = clean.copy()
    corrupted[[1, 3]] = (clean[[1, 3]] + 7) % model.vocab_size
    _, cache = bridge.run_with_cache(torch.from_numpy(clean[None]))
    found = {}
    for name, (hook, over) in SWEEPS.items():
        sweep = getattr(patching, f"get_act_patch_{name}")
        with torch.no_grad():
            theirs = sweep(
                bridge,
                torch.from_numpy(corrupted[None]),
                cache,
                lambda logits: logits[0, -1, ANSWER] - logits[0, -1, VERSUS],
            ).numpy()
        ours = model.patch_sweep(clean, corrupted, hook, over, answer=ANSWER, versus=VERSUS)
        theirs = theirs[tuple(slice(size) for size in ours.values.shape)]  # theirs counts query heads for k and v, too
        found[name] = {"apart": float(np.abs(theirs - ours.values).max()), "effect": float(np.abs(ours.effect).max())}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
