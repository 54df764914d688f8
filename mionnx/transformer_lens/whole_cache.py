"""`WholeCache`: a cache of every name, without a hook at each.

TransformerLens' `run_with_cache` puts a hook at each of its names and takes it away again, which takes longer than the
pass of a small model does. The first call goes that way, and tells which names a cache has; later ones are given the
same values by the pass itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformer_lens.ActivationCache import ActivationCache
from transformer_lens.hook_points import HookPoint as TheirHook
from transformer_lens.model_bridge.bridge_core import _input_batch_size

from mionnx.transformer_lens.live_hooks import Live, has_hooks

# Arguments of a pass that change no name; with any other, hooks are put where it says.
HARMLESS = {"return_type", "prepend_bos", "padding_side", "attention_mask", "loss_per_token", "labels"}
HARMLESS |= {"output_attentions"}
GATES = ("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in")


class Names(NamedTuple):
    """Names of a cache, in its order, with their hooks; each of these once, with its point."""

    hooks: tuple[tuple[str, TheirHook], ...]
    live: tuple[Live, ...]


class WholeCache:
    """The names that the caches of a bridge have."""

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge
        self._names: dict[Any, Names | None] = {}

    def serves(self, options: dict[str, Any]) -> bool:
        """Whether a call asks for every name and nothing else, and no hook is there to act."""
        arguments = {name for name, value in options.items() if value is not None}
        return arguments <= HARMLESS and not any(map(has_hooks, self.bridge._hook_registry.values()))

    @property
    def _stamp(self) -> Any:
        self.bridge.lens_points()
        config = self.bridge.cfg
        return self.bridge._points[0], self.bridge.compatibility_mode, *(getattr(config, gate, None) for gate in GATES)

    @property
    def names(self) -> Names | None:
        """What the first call told; None before it, or where a name of its cache is that of no hook."""
        return self._names.get(self._stamp)

    def learn(self, cache: Any) -> None:
        """Keep the names of a cache that TransformerLens made."""
        hooks, table = self.bridge.hook_dict, self.bridge.lens_points()
        pairs = [(name, hooks.get(name)) for name in cache]
        if all(id(hook) in table for _, hook in pairs):
            ids = {id(hook) for _, hook in pairs}
            by_id = {id(hook): hook for _, hook in pairs}
            live = (Live(point, by_id[key], True, False, False) for key, point in table.items() if key in ids)
            self._names[self._stamp] = Names(tuple(pairs), tuple(live))

    def run(self, names: Names, prompt: Any, as_object: bool, unbatched: bool, options: dict[str, Any]) -> Any:
        """Run the model; what it returns, and the cache."""
        values: dict[int, torch.Tensor] = {}
        self.bridge.__dict__["_wanted"] = (names.live, values)
        try:
            output = self.bridge.forward(prompt, **options)
        finally:
            self.bridge.__dict__["_wanted"] = ((), {})
        for one in names.live:
            if one.hook.hook_conversion is not None:
                values[id(one.hook)] = one.hook.hook_conversion.convert(values[id(one.hook)])
        cache = ActivationCache({name: values[id(hook)] for name, hook in names.hooks}, self.bridge)
        if unbatched:
            cache.remove_batch_dim(batch_size=_input_batch_size(prompt))
        return output, cache if as_object else cache.cache_dict
