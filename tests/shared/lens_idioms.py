"""Run beside TransformerLens: what its notebooks do with a bridge; prints largest differences as JSON.

python tests/shared/lens_idioms.py CHECKPOINT HOOKED

Functions at all names that a filter of names gives, caches under each flag of the attention, logits that hooks change,
the module's own pass, and gradients by weights.
"""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from lens_bridge import Found, apart, change, refused, square
from lens_weights import open_theirs
from transformer_lens.model_bridge.transformer_bridge import TransformerBridge

from mionnx import MIModel
from mionnx.transformer_lens import bridge

Both = tuple[TransformerBridge, TransformerBridge]
# These names are reached here with folded weights too, and where queries, keys and values are one product.
MORE = ("mlp.gate.hook_in", "mlp.in.hook_in", "attn.hook_rot_q", "attn.hook_rot_k")
ACTING = ("blocks.0.attn.o.hook_out", "blocks.1.ln2_post.hook_in", "blocks.1.mlp.hook_out", "blocks.1.hook_attn_out",
          "blocks.0.attn.hook_q_input", "embed_ln.hook_out")  # fmt: skip
FLAGS = ("use_attn_result", "use_split_qkv_input", "use_attn_in")


def seen(one: TransformerBridge, tokens: torch.Tensor, back: bool) -> dict[str, torch.Tensor]:
    """What a function sees that a filter puts at all names that the graph has, silent ones among them."""
    values: dict[str, torch.Tensor] = {}

    def look(value: torch.Tensor, hook: Any) -> None:
        values[hook.name] = value.detach().clone()

    hooks = {
        "bwd_hooks" if back else "fwd_hooks": [(lambda name: "_input" not in name and not unserved(one, name), look)]
    }
    with one.hooks(**hooks):
        logits = one(tokens)
        if back:
            (logits[:, -1, 5] - logits[:, -1, 9]).sum().backward()
    return values


def filters(both: Both, tokens: torch.Tensor) -> Found:
    """Names that functions see, and what they see there."""
    found: Found = {}
    for back in (False, True):
        mine, theirs = (seen(one, tokens, back) for one in both)
        lacking = {name for name in theirs if name not in mine}
        more = {name for name in mine if name not in theirs and not name.endswith(MORE)}
        found[f"names seen, {back=}"] = float(len(lacking | more))
        for name in theirs.keys() & mine.keys():
            key = f"seen, {back=} {name.split('.')[-2:]}"
            found[key] = max(found.get(key, 0.0), apart(mine[name], theirs[name]))
    alone = lambda: both[0].run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.qkv.hook_in", change)])  # noqa: E731
    if "blocks.0.attn.qkv.hook_in" in both[0].hook_dict:
        found["a silent name alone is refused"] = refused(alone)
    return found


def unserved(one: TransformerBridge, name: str) -> bool:
    """BLOOM's embedding, whose norm the graph takes in; copies for each head that BLOOM and Qwen 3 norm otherwise."""
    before = "embed" in name and not name.endswith("embed_ln.hook_out")
    otherwise = hasattr(one, "embed_ln") or "blocks.0.attn.q_norm.hook_in" in one.hook_dict
    return (hasattr(one, "embed_ln") and before) or (otherwise and name.endswith(("_input", "hook_attn_in")))


def flags(both: Both, tokens: torch.Tensor) -> Found:
    """Names of caches as the attention goes."""
    found: Found = {}
    for flag in FLAGS:
        names = []
        for one in both:
            setter = getattr(one, f"set_{flag}")
            setter(True)
            with torch.no_grad():
                names.append({*one.run_with_cache(tokens)[1].keys()})
            setter(False)
        more = {name for name in names[0] - names[1] if not name.endswith(MORE)}
        less = {name for name in names[1] - names[0] if not unserved(both[0], name)}
        found[f"names with {flag}"] = float(len(more | less))
    return found


def logits(both: Both, tokens: torch.Tensor) -> Found:
    """A function at the logits: what comes out, and gradients there and before."""
    outs: list[list[torch.Tensor]] = []
    for one in both:
        kept: dict[str, torch.Tensor] = {}
        keep = lambda value, hook, kept=kept: kept.update({hook.name: value.clone()})  # noqa: E731
        backward = [("unembed.hook_out", keep), ("blocks.0.hook_out", keep)]
        with one.hooks(fwd_hooks=[("unembed.hook_out", square)], bwd_hooks=backward):
            out = one(tokens)
            out[:, -1, :9].square().sum().backward()
        outs.append([out, *kept.values()])
    return {f"logits {number}": apart(mine, theirs) for number, (mine, theirs) in enumerate(zip(*outs, strict=True))}


def acting(both: Both, tokens: torch.Tensor) -> Found:
    """Functions at what layers add, before norms of that and with the stream, and at a copy: gradients there."""
    found: Found = {}
    for one in both:
        one.set_use_split_qkv_input(True)
    for name in (name for name in ACTING if name in both[0].hook_dict and not unserved(both[0], name)):
        outs = []
        for one in both:
            kept: list[torch.Tensor] = []
            backward = [(name, lambda value, hook, kept=kept: kept.append(value.clone()))]
            with one.hooks(fwd_hooks=[(name, change)], bwd_hooks=backward):
                out = one(tokens)
                (out[:, -1, 5] - out[:, -1, 9]).sum().backward()
            outs.append((out, kept[0]))
        found |= {f"at {name}": apart(outs[0][0], outs[1][0]), f"gradient at {name}": apart(outs[0][1], outs[1][1])}
    for one in both:
        one.set_use_split_qkv_input(False)
    return found


def module(both: Both, tokens: torch.Tensor) -> Found:
    """The module's own pass."""
    outs = [one.original_model(tokens, labels=tokens) for one in both]
    asked = lambda: both[0].original_model(tokens, output_hidden_states=True)  # noqa: E731
    return {
        "module": apart(outs[0].logits, outs[1].logits),
        "loss of the module": apart(outs[0].loss, outs[1].loss),
        "hidden states of the module are refused": refused(asked),
    }


def modules(one: TransformerBridge) -> Iterator[tuple[str, Any]]:
    """Modules with weights, by name."""
    yield from (
        (name, getattr(one, name)) for name in ("embed", "pos_embed", "ln_final", "unembed") if hasattr(one, name)
    )
    for block in one.blocks:
        for parent, names in ((block, ("ln1", "ln2")), (block.attn, "qkvo"), (block.mlp, ("in", "gate", "out"))):
            yield from (
                (f"{type(parent).__name__}.{name}", parent._modules[name]) for name in names if name in parent._modules
            )


def weights_of(one: TransformerBridge) -> list[tuple[str, torch.Tensor]]:
    """Free weights with a gradient in the graph."""
    found = []
    for (name, part), key in product(modules(one), ("weight", "bias")):
        weight = getattr(getattr(part, "original_component", part), key, None)
        lacking = hasattr(one, "embed_ln") and name in ("embed", "unembed")
        if isinstance(weight, torch.nn.Parameter) and weight.device.type == "cpu" and not lacking:
            found.append((f"{name}.{key}", weight))
    return found


def weights(both: Both, tokens: torch.Tensor) -> Found:
    """Gradients by all weights, behind functions; `backward()` leaves them unset."""
    gradients: list[list[tuple[str, torch.Tensor]]] = []
    for one in both:
        known = weights_of(one)
        if one is both[1]:  # biases that transformers has not, and TransformerLens adds
            names = [name for name, _ in gradients[0]]
            known = [pair for pair in known if pair[0] in names]
        hooks = [("blocks.1.attn.hook_z", square), ("blocks.0.hook_out", change)]
        with one.hooks(fwd_hooks=hooks):
            loss = one(tokens)[:, -1].log_softmax(-1)[:, 7].sum()
            found = torch.autograd.grad(loss, [weight for _, weight in known], retain_graph=True)
            gradients.append([(name, value) for (name, _), value in zip(known, found, strict=True)])
            loss.backward()
    unset = [weight.grad is None for _, weight in weights_of(both[0])]
    found = {"weights are unset": float(not all(unset)), "weights": -float(len(gradients[1]))}
    for (name, mine), (_, theirs) in zip(*gradients, strict=True):
        scale = max(1e-2, float(theirs.abs().max()))
        found[f"weight {name}"] = max(found.get(f"weight {name}", 0.0), apart(mine / scale, theirs / scale))
    return found


PARTS: tuple[Callable[[Both, torch.Tensor], Found], ...] = (filters, flags, logits, acting, module, weights)


def main(checkpoint: str, hooked: str) -> None:
    """Compare one model, raw and folded."""
    both = bridge(MIModel.from_pretrained(hooked, threads=1)), open_theirs(checkpoint)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, min(both[0].cfg.d_vocab, 400), (2, 6)))
    found: Found = {}
    for form in ("raw", "folded"):
        if form == "folded":
            for one in both:
                one.enable_compatibility_mode(disable_warnings=True)
        for part in PARTS:
            found |= {f"{form}: {name}": value for name, value in part(both, tokens).items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
