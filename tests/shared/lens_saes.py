"""Run beside SAELens: its autoencoders attached to TransformerLens' bridge and to that on the engine; prints JSON.

python tests/shared/lens_saes.py CHECKPOINT HOOKED

Largest differences, relative to 1; "moved" is what autoencoders change at all.
"""

import json
import sys

from mionnx.transformer_lens.attached_saes import with_saes  # before sae_lens, which it gives moved names

# isort: split
import numpy as np
import torch
from lens_bridge import Found, apart, no_torch
from lens_weights import open_theirs
from sae_lens import SAE, StandardSAE, StandardSAEConfig, Transcoder, TranscoderConfig
from sae_lens.analysis.sae_transformer_bridge import SAETransformerBridge

from mionnx import MIModel
from mionnx.transformer_lens import bridge

FEATURES = 96


def autoencoder(hook: str, width: int, seed: int) -> StandardSAE:
    """One with random weights, about half of its features active."""
    return filled(StandardSAE(StandardSAEConfig(d_in=width, d_sae=FEATURES)), seed, hook_name=hook)


def filled(sae: SAE, seed: int, **places: str) -> SAE:
    """Random weights, and where it is attached."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in sae.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.1)
    for name, place in places.items():
        setattr(sae.cfg.metadata, name, place)
    return sae


def compared(ours: SAETransformerBridge, theirs: SAETransformerBridge, tokens: torch.Tensor) -> Found:
    """`SAE.encode` of a cache, and each way in which SAELens runs a model with autoencoders."""
    found: Found = {}
    width = theirs.cfg.d_model
    streams = [autoencoder(f"blocks.{layer}.hook_resid_post", width, layer) for layer in (0, 2)]
    options = {"d_in": width, "d_sae": FEATURES, "d_out": width, "apply_b_dec_to_input": False}
    places = {"hook_name": "blocks.1.mlp.hook_in", "hook_name_out": "blocks.1.mlp.hook_out"}
    transcoder = filled(Transcoder(TranscoderConfig(**options)), 5, **places)
    acts = f"{theirs._resolve_hook_name('blocks.0.hook_resid_post')}.hook_sae_acts_post"

    def mute(value: torch.Tensor, hook: object) -> torch.Tensor:
        value = value.clone()
        value[..., : FEATURES // 2] = 0
        return value

    def each(name: str, call: object, *saes: SAE) -> torch.Tensor:
        outs = [call(one) for one in (ours, theirs)]
        found[name] = apart(*outs)
        return outs[1]

    with torch.no_grad():
        plain = theirs(tokens)
        each("encoded", lambda b: streams[0].encode(b.run_with_cache(tokens)[1]["blocks.0.hook_resid_post"]))
        for error in (False, True):
            out = each(f"saes, error term {error}",
                       lambda b, e=error: b.run_with_saes(tokens, saes=streams, use_error_term=e))  # fmt: skip
            found[f"{'same' if error else 'moved'}"] = apart(out, plain)
        found["moved by a transcoder"] = apart(
            each("transcoder", lambda b: b.run_with_saes(tokens, saes=[transcoder])), plain
        )
        caches = [one.run_with_cache_with_saes(tokens, saes=streams)[1] for one in (ours, theirs)]
        inner = [name for name in caches[1] if "hook_sae" in name]
        found["names inside"] = float(len(inner) < 8 or not {*inner} <= {*caches[0]})
        found["inside"] = max(apart(caches[0][name], caches[1][name]) for name in inner)
        found["behind"] = max(apart(caches[0][name], caches[1][name]) for name in caches[1]
                              if name in caches[0] and name.startswith("blocks.3"))  # fmt: skip
        muted = each(
            "hooks inside", lambda b: b.run_with_hooks_with_saes(tokens, saes=streams, fwd_hooks=[(acts, mute)])
        )
        found["moved inside"] = apart(muted, theirs.run_with_saes(tokens, saes=streams))
        each("without them again", lambda b: b(tokens))
    gradients = []
    for one in (ours, theirs):
        kept: dict[str, torch.Tensor] = {}
        with one.saes(streams), one.hooks(bwd_hooks=[(acts, lambda g, hook, kept=kept: kept.update(own=g.clone()))]):
            logits = one(tokens)
            (logits[:, -1, 5] - logits[:, -1, 9]).sum().backward()
        gradients.append(kept["own"])
    found["gradients of features"] = apart(*gradients)
    return found


def main(checkpoint: str, hooked: str) -> None:
    """Compare one model."""
    ours, theirs = with_saes(bridge(MIModel.from_pretrained(hooked, threads=1))), open_theirs(checkpoint)
    no_torch(ours)
    theirs.__class__ = SAETransformerBridge  # as its `boot_transformers` does
    theirs._acts_to_saes, theirs._transcoder_output_hooks = {}, {}
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, min(ours.cfg.d_vocab, 400), (2, 6)))
    print(json.dumps(compared(ours, theirs, tokens)))


if __name__ == "__main__":
    main(*sys.argv[1:])
