"""Weights of sparse autoencoders, and what SAELens itself computes with them.

    python tests/shared/saelens_fixture.py

writes `saelens.npz` beside it, where sae-lens is installed: a value `x` [1, 5, 128], and for each case the activations
and the output. It was made with sae-lens 6.54.12.
"""

from pathlib import Path

import numpy as np

D_IN, D_SAE, K = 128, 96, 7
CASES = {
    "standard": ("standard", {}),
    "standard, layer norm": ("standard", {"normalize_activations": "layer_norm"}),
    "standard, constant norm": ("standard", {"normalize_activations": "constant_norm_rescale"}),
    "standard, expected average": (
        "standard",
        {"normalize_activations": "expected_average_only_in", "apply_b_dec_to_input": False},
    ),
    "jumprelu": ("jumprelu", {}),
    "gated": ("gated", {}),
    "topk": ("topk", {"k": 7}),
    "topk, by decoder norm": ("topk", {"k": 7, "rescale_acts_by_decoder_norm": True}),
    "transcoder": ("transcoder", {"d_out": 128, "apply_b_dec_to_input": False}),
    "skip transcoder": ("skip_transcoder", {"d_out": 128, "apply_b_dec_to_input": False}),
    "jumprelu skip transcoder": ("jumprelu_skip_transcoder", {"d_out": 128, "apply_b_dec_to_input": False}),
}


def random_weights(kind: str, seed: int = 0, d_in: int = D_IN, d_out: int = D_IN) -> dict[str, np.ndarray]:
    """Weights of a plausible size: about half of the features active."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) * 0.1).astype(np.float32)

    weights = {"W_enc": normal(d_in, D_SAE), "W_dec": normal(D_SAE, d_out), "b_dec": normal(d_out)}
    if kind == "gated":
        return {**weights, "b_gate": normal(D_SAE), "b_mag": normal(D_SAE), "r_mag": normal(D_SAE)}
    if "jumprelu" in kind:
        weights["threshold"] = np.abs(normal(D_SAE)) * 3
    if "skip" in kind:
        weights["W_skip"] = normal(d_out, d_in)
    return {**weights, "b_enc": normal(D_SAE)}


def value() -> np.ndarray:
    """What is encoded: of the length that a residual stream has."""
    return (np.random.default_rng(7).normal(size=(1, 5, 128)) * 2).astype(np.float32)


def main() -> None:
    import torch
    from sae_lens.saes import gated_sae, jumprelu_sae, standard_sae, topk_sae, transcoder

    classes = {
        "standard": (standard_sae.StandardSAE, standard_sae.StandardSAEConfig),
        "jumprelu": (jumprelu_sae.JumpReLUSAE, jumprelu_sae.JumpReLUSAEConfig),
        "gated": (gated_sae.GatedSAE, gated_sae.GatedSAEConfig),
        "topk": (topk_sae.TopKSAE, topk_sae.TopKSAEConfig),
        "transcoder": (transcoder.Transcoder, transcoder.TranscoderConfig),
        "skip_transcoder": (transcoder.SkipTranscoder, transcoder.SkipTranscoderConfig),
        "jumprelu_skip_transcoder": (transcoder.JumpReLUSkipTranscoder, transcoder.JumpReLUSkipTranscoderConfig),
    }
    found = {"x": value()}
    for name, (architecture, config) in CASES.items():
        kind, of = classes[architecture]
        sae = kind(of(d_in=128, d_sae=96, **config))
        sae.load_state_dict({key: torch.from_numpy(array) for key, array in random_weights(architecture).items()})
        with torch.no_grad():
            x = torch.from_numpy(value())
            found[f"{name}: acts"], found[f"{name}: out"] = sae.encode(x).numpy(), sae(x).numpy()
    np.savez_compressed(Path(__file__).parent / "saelens.npz", **found)


if __name__ == "__main__":
    main()
