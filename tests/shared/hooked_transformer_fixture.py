"""Writes tests/shared/hooked_transformers: checkpoints that TransformerLens itself saved, with its own activations.

    pip install transformer-lens==3.8.0
    python tests/shared/hooked_transformer_fixture.py

Of each kind a state dict, its config as it is kept (JSON beside toy models, a pickle beside InterpBench's), and what
`run_with_cache` gives for two texts.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent / "hooked_transformers"
IDS = [[1, 2, 3, 4, 5], [10, 9, 8, 7, 6]]
SIZES: dict[str, Any] = {
    **{"n_layers": 2, "d_model": 12, "n_ctx": 8, "d_head": 5, "n_heads": 2, "d_mlp": 16, "d_vocab": 11},
    **{"act_fn": "gelu", "normalization_type": "LN", "seed": 0, "device": "cpu"},
}
KINDS: dict[str, dict[str, Any]] = {
    "layer-norms": {"act_fn": "gelu_new"},
    "interpbench": {"normalization_type": None, "d_vocab_out": 4},
    "attention-only": {"attn_only": True, "act_fn": None, "d_mlp": None},
    "solu": {"act_fn": "solu_ln", "normalization_type": "LNPre"},
    "rms": {"normalization_type": "RMS", "act_fn": "silu", "final_rms": True, "use_attn_scale": False},
    "rms-alone": {"normalization_type": "RMSPre", "act_fn": "relu", "scale_attn_by_inverse_layer_idx": True},
}
PICKLED = ("interpbench", "rms")  # the first as an object, the second as a table


def main() -> None:
    """Write every kind."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    for name, changes in KINDS.items():
        model = HookedTransformer(HookedTransformerConfig(**{**SIZES, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        logits, cache = model.run_with_cache(torch.tensor(IDS))
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        if name in PICKLED:
            torch.save(model.state_dict(), folder / "ll_model.pth")
            with (folder / "ll_model_cfg.pkl").open("wb") as file:
                pickle.dump(model.cfg if name == "interpbench" else model.cfg.to_dict(), file)
        else:
            torch.save(model.state_dict(), folder / "model_final.pth")
            (folder / "config.json").write_text(json.dumps(model.cfg.to_dict(), default=str))
        values = {name: value.detach().numpy() for name, value in cache.items()}
        np.savez_compressed(folder / "expected.npz", logits=logits.detach().numpy(), **values)


if __name__ == "__main__":
    main()
