"""Run beside TransformerLens: its own bridge and `mionnx.transformer_lens.bridge`; prints largest differences as JSON.

python tests/shared/lens_bridge.py CHECKPOINT HOOKED PART

PART: "raw", "folded" (after `enable_compatibility_mode()`), "refactored" (and circuits of heads), "gradients", "calls".
Values are relative to 1.
"""

import json
import os
import sys
from collections.abc import Callable

os.environ["TQDM_DISABLE"] = "1"

import numpy as np
import torch
from lens_weights import open_theirs
from transformer_lens import patching
from transformer_lens.head_detector import detect_head
from transformer_lens.model_bridge.transformer_bridge import TransformerBridge
from transformer_lens.tools.analysis.logit_lens import logit_lens

from mionnx import MIError, MIModel
from mionnx.transformer_lens import bridge

MASKED = 1e37  # scores of masked keys: TransformerLens has the lowest number there, or -inf
Found = dict[str, float]


def no_torch(ours: TransformerBridge) -> None:
    """A pass of the module would be a defect: it is refused."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a pass in torch")

    ours.original_model.forward = refuse


def apart(ours: object, theirs: object) -> float:
    """The largest difference, relative to 1 or the largest number; infinite for other shapes."""
    one, other = (
        np.asarray(value.detach() if hasattr(value, "detach") else value, np.float64) for value in (ours, theirs)
    )
    if one.shape != other.shape:
        return float("inf")
    finite = np.isfinite(other) & (np.abs(other) < MASKED)
    if not np.array_equal(finite, np.isfinite(one) & (np.abs(one) < MASKED)):
        return float("inf")
    one, other = one[finite], other[finite]
    return float(np.abs(one - other).max(initial=0) / max(1, np.abs(other).max(initial=0)))


def kind(name: str) -> str:
    """A name without its layer."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def cached(ours: TransformerBridge, theirs: TransformerBridge, tokens: torch.Tensor) -> Found:
    """All that a cache has, name by name; a name that only one has is infinitely far."""
    found: Found = {}
    with torch.no_grad():
        (mine, here), (logits, there) = ours.run_with_cache(tokens), theirs.run_with_cache(tokens)
        again = ours.run_with_cache(tokens)[1]  # without a hook at each name
    found["logits"] = apart(mine, logits)
    found["order of a cache"] = float([*again.cache_dict] != [*here.cache_dict])
    found["cache again"] = max(apart(again[name], value) for name, value in here.cache_dict.items())
    for name, value in there.cache_dict.items():
        key = f"cache {kind(name)}"
        found[key] = max(found.get(key, 0.0), apart(here[name], value) if name in here.cache_dict else float("inf"))
    return found


ACTING = (
    *("hook_embed", "hook_pos_embed", "blocks.0.hook_resid_pre", "blocks.1.ln1.hook_in", "blocks.1.attn.hook_q"),
    *("blocks.1.attn.hook_k", "blocks.1.attn.hook_v", "blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_pattern"),
    *("blocks.1.attn.hook_z", "blocks.1.hook_attn_out", "blocks.1.hook_resid_mid", "blocks.1.ln2.hook_out"),
    *("blocks.1.mlp.hook_pre", "blocks.1.mlp.hook_post", "blocks.1.hook_mlp_out", "blocks.1.hook_resid_post"),
    *("ln_final.hook_in", "ln_final.hook_out", "unembed.hook_out", "blocks.1.attn.hook_rot_q"),
)


def change(value: torch.Tensor, hook: object) -> torch.Tensor:
    """Something that no norm undoes, at one position."""
    changed = value.clone()
    changed[:, 1] = changed[:, 1] * 0.5 + 0.3 * torch.arange(changed.shape[-1]).remainder(5).sub(1).to(changed)
    return changed


def in_place(value: torch.Tensor, hook: object) -> None:
    """A hook that writes, and returns nothing."""
    value[..., ::2] *= 0.25


def edited(ours: TransformerBridge, theirs: TransformerBridge, tokens: torch.Tensor) -> Found:
    """A hook that changes each kind of value: the logits, and the streams behind it; what it changed at all."""
    found: Found = {}
    late = [
        f"blocks.{theirs.cfg.n_layers - 1}.{name}" for name in ("hook_in", "ln2.hook_in", "attn.hook_out", "hook_out")
    ]
    with torch.no_grad():
        plain = theirs(tokens)
        rotary = hasattr(theirs, "rotary_emb")  # then hook_pos_embed is a name that never fires
        for name in (name for name in ACTING if name in theirs.hook_dict and not (rotary and name == "hook_pos_embed")):
            for function in (change, in_place)[: 1 if name in WRITTEN_TWICE else 2]:  # theirs is one row, shown often
                outs = []
                # what writes to its norm's input writes to TransformerLens' cache of the stream before it
                seen = late[1:] if function is in_place and late[0].startswith(name[:9]) else late
                for one in (ours, theirs):
                    with one.hooks(fwd_hooks=[(name, function)]):
                        outs.append(one.run_with_cache(tokens, names_filter=seen))
                (mine, here), (logits, there) = outs
                key = f"hook {kind(name)} {function.__name__}"
                found[key] = max(apart(mine, logits), *(apart(here[one], there[one]) for one in seen))
                found[f"moved {key}"] = apart(logits, plain)
    return found


def muted(ours: TransformerBridge, theirs: TransformerBridge, tokens: torch.Tensor) -> Found:
    """Components of queries, keys, values and z in the basis of their circuits, set to 0 or halved; their gradients."""
    found: Found = {}

    def mute(value: torch.Tensor, hook: object) -> torch.Tensor:
        value = value.clone()
        value[:, 1:, 1, 2] = 0
        value[:, :, 0, 0] *= 0.5
        return value

    for name in ("hook_q", "hook_k", "hook_v", "hook_z"):
        outs, sizes = [], []
        for one in (ours, theirs):
            kept: list[torch.Tensor] = []
            hooks = {
                "fwd_hooks": [(f"blocks.1.attn.{name}", mute)],
                "bwd_hooks": [(f"blocks.1.attn.{name}", lambda value, hook, kept=kept: kept.append(value.clone()))],
            }
            with one.hooks(**hooks):
                logits = one(tokens)
                (logits[:, -1, 5] - logits[:, -1, 9]).sum().backward()
            outs.append(logits)
            sizes.append(kept[0].abs())
        plain = theirs(tokens)
        found |= {f"muted {name}": apart(*outs), f"gradient of {name}": apart(*sizes)}
        found[f"moved {name}"] = apart(outs[1], plain)
    return found


def weights(ours: TransformerBridge, theirs: TransformerBridge) -> Found:
    """All parameters by TransformerLens' names."""
    mine, known = ours.tl_parameters(), theirs.tl_parameters()
    return {f"weight {kind(name)}": apart(mine[name], value) for name, value in known.items()}


def gradients(ours: TransformerBridge, theirs: TransformerBridge, tokens: torch.Tensor) -> Found:
    """Backward hooks: read, changed, behind functions; torch's own gradients of what hooks kept."""
    found: Found = {}
    loss, here = ours.run_with_cache(tokens, incl_bwd=True, return_type="loss")
    other, there = theirs.run_with_cache(tokens, incl_bwd=True, return_type="loss")
    found["loss"] = apart(loss, other)
    for name in (name for name in there.cache_dict if name.endswith("_grad")):
        key = f"gradient {kind(name)}"
        if name in here.cache_dict:
            found[key] = max(found.get(key, 0.0), apart(here[name], there[name]))
    found["gradients"] = -float(sum(name.endswith("_grad") for name in here.cache_dict))

    def with_functions(one: TransformerBridge) -> list[torch.Tensor]:
        kept: dict[str, torch.Tensor] = {}

        def keep(gradient: torch.Tensor, hook: object) -> None:
            kept[f"gradient {hook.name}"] = gradient.clone()

        def halve(gradient: torch.Tensor, hook: object) -> tuple[torch.Tensor]:
            return (gradient * 0.5,)

        def live(value: torch.Tensor, hook: object) -> None:
            kept["live"] = value

        forward = [("blocks.1.attn.hook_z", square), ("blocks.1.mlp.hook_post", live)]
        names = ["hook_embed", "blocks.0.hook_resid_post", "blocks.1.attn.hook_pattern", "blocks.1.ln2.hook_in"]
        backward = [(name, keep) for name in names] + [
            ("blocks.1.hook_mlp_out", halve),
            ("blocks.0.hook_mlp_out", keep),
        ]
        with one.hooks(fwd_hooks=forward, bwd_hooks=backward):
            logits = one(tokens)
            metric = logits[:, -1, 5] - logits[:, -1, 9] + 0.1 * logits[0, 2].pow(2).sum()
            (own,) = torch.autograd.grad(metric.sum() + kept["live"].sum(), [kept["live"]], retain_graph=True)
            metric.sum().backward()
        kept["own"] = own
        return kept

    found |= copies(ours, theirs, tokens)
    found |= frozen(ours, theirs, tokens) | {"behind a cache of keys": gradients_behind_a_cache(ours, tokens)}
    mine, their = with_functions(ours), with_functions(theirs)
    return found | {f"functions {name}": apart(mine[name], value) for name, value in their.items()}


def change_all(value: torch.Tensor, hook: object) -> torch.Tensor:
    """Something that no norm undoes, alike at every position."""
    return value + 0.4 * torch.arange(value.shape[-1]).remainder(3).sub(1).to(value)


def refused(call: Callable[[], object]) -> float:
    """0 where a call raises, 1 where it has no effect in silence."""
    try:
        call()
    except MIError:
        return 0.0
    return 1.0


def without_effect(ours: TransformerBridge, tokens: torch.Tensor, places: torch.Tensor) -> dict[str, Callable]:
    """Calls that could do nothing on the engine."""
    return {
        "other positions": lambda: ours(tokens, position_ids=places + 1),
        "output_attentions": lambda: ours(tokens, output_attentions=True),
        "output_attentions of a cache": lambda: ours.run_with_cache(tokens, output_attentions=True),
        "an unknown argument": lambda: ours(tokens, output_hidden_states=True),
        "training": lambda: ours.train(),
        "half": lambda: ours.half(),
        "generation in torch": lambda: ours.hf_generate(tokens),
    }


def gradients_behind_a_cache(ours: TransformerBridge, tokens: torch.Tensor) -> float:
    """Gradients by the last position's values, in one pass and behind a cache of keys."""

    def of(ids: torch.Tensor, **options: object) -> torch.Tensor:
        kept: dict[str, torch.Tensor] = {}
        backward = [("blocks.0.hook_resid_post", lambda gradient, hook: kept.update(own=gradient[:, -1].clone()))]
        with ours.hooks(fwd_hooks=[("blocks.1.mlp.hook_post", square)], bwd_hooks=backward):
            logits = ours(ids, **options)
            (logits[:, -1, 5] - logits[:, -1, 9]).sum().backward()
        return kept["own"]

    with ours.hooks(fwd_hooks=[("blocks.1.mlp.hook_post", square)]):
        past = ours(tokens[:, :-1], return_type="logits_and_cache")[1]
    return apart(of(tokens[:, -1:], past_key_values=past), of(tokens))


def square(value: torch.Tensor, hook: object) -> torch.Tensor:
    """A function whose gradient depends on the value."""
    return value * value.abs()


def copies(ours: TransformerBridge, theirs: TransformerBridge, tokens: torch.Tensor) -> Found:
    """Gradients by each head's copy of the stream, as attribution patching over edges reads them; functions there."""
    found: Found = {}
    kept: list[dict[str, torch.Tensor]] = [{}, {}]
    for one, own in zip((ours, theirs), kept, strict=True):
        one.set_use_split_qkv_input(True)
        for part in ("q", "k", "v", "all"):
            name = f"blocks.1.attn.hook_{part}_input"
            if part == "all":  # one copy for queries, keys and values
                one.set_use_split_qkv_input(False)
                one.set_use_attn_in(True)
                name = "blocks.1.attn.hook_attn_in"

            def keep(gradient: torch.Tensor, hook: object, part: str = part, own: dict = own) -> None:
                own[f"gradient by copies of {part}"] = gradient.clone()

            with one.hooks(bwd_hooks=[(name, keep)]):
                logits = one(tokens)
                (logits[:, -1, 5] - logits[:, -1, 9]).sum().backward()
            own[f"function at copies of {part}"] = one.run_with_hooks(tokens, fwd_hooks=[(name, change)])
        one.set_use_attn_in(False)
    for name, value in kept[1].items():
        found[name] = apart(kept[0][name], value)
        if name.startswith("function"):
            found[name] += float(apart(value, logits) < 1e-3)  # it has to change something
    return found


def frozen(ours: TransformerBridge, theirs: TransformerBridge, tokens: torch.Tensor) -> Found:
    """A model without a free weight has a gradient behind tensors that hooks bring, and no other."""
    outs: list[tuple[torch.Tensor, bool]] = []
    for one in (ours, theirs):
        for weight in one.original_model.parameters():
            weight.requires_grad_(False)
        leaf = torch.zeros(one.cfg.d_model, requires_grad=True)
        free = one(tokens).requires_grad
        with one.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda value, hook, leaf=leaf: value + leaf)]):
            one(tokens)[:, -1, 5].sum().backward()
        outs.append((leaf.grad, free))
        for weight in one.original_model.parameters():
            weight.requires_grad_(True)
    return {"frozen": apart(outs[0][0], outs[1][0]), "a frozen model's logits": float(outs[0][1] or outs[1][1])}


def calls(ours: TransformerBridge, theirs: TransformerBridge, tokens: torch.Tensor) -> Found:
    """Losses, parts of passes, generation, padded texts, patching, heads, stacks of the cache."""
    found: Found = {}
    both = (ours, theirs)

    def beside(name: str, call: object, their: object = None) -> None:
        torch.manual_seed(0)
        one = call(ours)
        torch.manual_seed(0)
        found[name] = apart(one, (their or call)(theirs))

    with torch.no_grad():
        beside("loss per token", lambda b: b(tokens, return_type="loss", loss_per_token=True))
        beside("stop_at_layer", lambda b: b(tokens, stop_at_layer=1))
        beside("stop of a cache", lambda b: b.run_with_cache(tokens, stop_at_layer=-1)[0])
        beside("start_at_layer", lambda b: b(b(tokens, stop_at_layer=1), start_at_layer=1))
        options = {"max_new_tokens": 6, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
        # Theirs reads the whole text at each step: with its cache of keys it gives other tokens under transformers 5.
        greedy, sampled = {"do_sample": False, **options}, {"temperature": 0.8, "top_k": 20, **options}
        for name, words in (("generate", greedy), ("generate, sampled", sampled)):
            whole = {"use_past_kv_cache": False, **words}
            beside(name, lambda b, w=words: b.generate(tokens, **w), lambda b, w=whole: b.generate(tokens, **w))
        beside("generate, without a cache", lambda b: b.generate(tokens, use_past_kv_cache=False, **greedy))
        past = ours(tokens[:, :-1], return_type="logits_and_cache")[1]
        found["cache of keys"] = apart(ours(tokens[:, -1:], past_key_values=past)[:, -1], theirs(tokens)[:, -1])
        places = torch.arange(tokens.shape[1])[None]
        beside("positions that are meant", lambda b: b(tokens, position_ids=places), lambda b: b(tokens))
        found |= {f"{name} is refused": refused(call) for name, call in without_effect(ours, tokens, places).items()}
        hooks = [("blocks.0.hook_resid_post", change_all), ("blocks.1.attn.hook_k", change_all)]
        with ours.hooks(fwd_hooks=hooks), theirs.hooks(fwd_hooks=hooks):
            past = ours(tokens[:, :-2], return_type="logits_and_cache")[1]
            found["cache of keys, hooked"] = apart(ours(tokens[:, -2:], past_key_values=past), theirs(tokens)[:, -2:])
            beside("generate, hooked", lambda b: b.generate(tokens, **greedy),
                   lambda b: b.generate(tokens, use_past_kv_cache=False, **greedy))  # fmt: skip
        pairs = ["The capital of France is", "Twelve plus one is"]
        beside("texts", lambda b: b(pairs, padding_side="left")[:, -1])
        caches = [one.run_with_cache(tokens)[1] for one in both]
        stacks = {
            "accumulated_resid": lambda cache: cache.accumulated_resid(1),
            "decompose_resid": lambda cache: cache.decompose_resid(),
            "every head and neuron": lambda cache: cache.get_full_resid_decomposition(),
            "neurons": lambda cache: cache.get_neuron_results(1),
            "heads": lambda cache: cache.stack_head_results(1),
            "normed": lambda cache: cache.apply_ln_to_stack(cache.accumulated_resid()),
            "logit_attrs": lambda cache: cache.logit_attrs(cache.decompose_resid(), tokens=torch.tensor([5, 9])),
        }
        for name, stack in stacks.items():
            found[name] = apart(*(stack(cache) for cache in caches))
        corrupted = tokens.clone()
        corrupted[:, 1] += 3
        for name in SWEEPS:
            sweep = getattr(patching, f"get_act_patch_{name}")
            values = [sweep(one, corrupted, cache, lambda out: (out[:, -1, 5] - out[:, -1, 9]).sum()) for one, cache in
                      zip(both, caches, strict=True)]  # fmt: skip
            found[f"patching {name}"] = apart(*values)
        text = "The capital of France is The capital of France is"
        beside("logit_lens", lambda b: logit_lens(b, tokens).values)
        beside("detect_head", lambda b: detect_head(b, text, "previous_token_head"))
    return found


SWEEPS = ("resid_pre", "resid_mid", "attn_out", "mlp_out", "attn_head_out_by_pos", "attn_head_pattern_all_pos")
SWEEPS += ("attn_head_k_by_pos", "attn_head_v_all_pos")
# Theirs is one row of positions, shown often; and what writes to ln_final.hook_in writes to its caches.
WRITTEN_TWICE = ("hook_pos_embed", "ln_final.hook_in")
PARTS = {"gradients": gradients, "calls": calls}


def main(checkpoint: str, hooked: str, part: str) -> None:
    """Compare one model."""
    ours, theirs = bridge(MIModel.from_pretrained(hooked, threads=1)), open_theirs(checkpoint)
    no_torch(ours)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, min(ours.cfg.d_vocab, 400), (2, 6)))
    if part == "folded":
        for one in (ours, theirs):
            one.enable_compatibility_mode(disable_warnings=True)
    if part == "refactored":
        for one in (ours, theirs):
            one.enable_compatibility_mode(disable_warnings=True, refactor_factored_attn_matrices=True)
        known = cached(ours, theirs, tokens)
        # the sign of a pair of singular vectors is nobody's: what it turns is compared by what hooks there change
        signed = ("hook_q", "hook_k", "hook_v", "hook_z", "q.hook_out", "k.hook_out", "v.hook_out", "o.hook_in")
        found = {name: value for name, value in known.items() if not name.endswith(signed)}
        found |= muted(ours, theirs, tokens) | {
            "loss": apart(*(one(tokens, return_type="loss") for one in (ours, theirs)))
        }
    elif part in ("raw", "folded"):
        found = cached(ours, theirs, tokens) | edited(ours, theirs, tokens) | weights(ours, theirs)
    else:
        found = PARTS[part](ours, theirs, tokens)
    if part == "gradients":
        for one in (ours, theirs):
            one.enable_compatibility_mode(disable_warnings=True)
        found |= {f"folded {name}": value for name, value in gradients(ours, theirs, tokens).items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
