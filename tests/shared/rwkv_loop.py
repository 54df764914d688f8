"""RWKV-4, RWKV-6 and RWKV-7 token by token in float64, with gates and edits: the oracle of interventions.

Written from the recurrences and from BlinkDL's formulas, sharing nothing with the exporter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEAD = 64
Array = NDArray[np.float64]
Edit = Callable[[str, int, Array], Array]
EMPTY = -1e4  # exponent of RWKV-4's state before anything is written to it


def state_sizes(version: int, width: int) -> tuple[int, int, int]:
    """Heads, key and value of a state."""
    return (1, 3, width) if version == 4 else (width // HEAD, HEAD, HEAD)


@dataclass
class Gates:
    """Per [layer, token]: factors of the write [.., head] and the removal, whether decay and token shift apply.

    `convolution`, of other models, whether a convolution at later tokens reads it.
    """

    write: Array
    erase: Array
    decay: NDArray[np.bool_]
    shift: NDArray[np.bool_]
    convolution: NDArray[np.bool_]

    @staticmethod
    def ones(layers: int, seq: int, heads: int) -> "Gates":
        shape = (layers, seq)
        switches = (np.ones(shape, bool) for _ in range(3))
        return Gates(np.ones((*shape, heads)), np.ones((*shape, heads)), *switches)


@dataclass
class Loop:
    """A model; `values[name]` collects what stood at each hook point of the last run, [seq, ...]."""

    tensors: dict[str, Array]
    version: int
    group_eps: float = 64e-5
    rescale_every: int = 0
    xp: Any = np  # numpy, or torch for tensors that are differentiated
    values: dict[str, list[Array]] = field(default_factory=dict)
    states: list[list[Array]] = field(default_factory=list)

    @property
    def layers(self) -> int:
        return 1 + max(int(name.split(".")[1]) for name in self.tensors if name.startswith("blocks"))

    def run(
        self,
        ids: list[int],
        gates: Gates | None = None,
        edit: Edit = lambda name, t, value: value,
        states: list[list[Array]] | None = None,
    ) -> Array:
        """Logits [seq, vocab], from other states than zeros if they are given."""
        width = self.tensors["emb.weight"].shape[1]
        sizes = state_sizes(self.version, width)
        gates = gates or Gates.ones(self.layers, len(ids), sizes[0])
        self.values, logits = {}, []
        empty = [[np.zeros(width), np.zeros(sizes), np.zeros(width)] for _ in range(self.layers)]
        self.states = states or empty
        for t, token in enumerate(ids):

            def see(name: str, value: Array, t: int = t) -> Array:
                value = edit(name, t, value)
                self.values.setdefault(name, []).append(value)
                return value

            logits.append(self._token(token, t, gates, see))
        return self.xp.stack(logits)

    def _token(self, token: int, t: int, gates: Gates, see: Callable[[str, Array], Array]) -> Array:
        z = self.tensors
        x = self._norm(see("hook_embed", z["emb.weight"][token]), "blocks.0.ln0")
        first = None
        for i in range(self.layers):
            scale = 2.0 ** -(i // self.rescale_every) if self.rescale_every else 1.0
            state, block = self.states[i], f"blocks.{i}"
            x = see(f"{block}.hook_resid_pre", x)
            normed = self._norm(x, f"{block}.ln1")
            mix = {4: self._mix4, 6: self._mix6, 7: self._mix7}[self.version]
            out, first = mix(i, t, normed, state, gates, see, first)
            x = see(f"{block}.hook_resid_mid", x + see(f"{block}.hook_attn_out", out * scale))
            inner = see(f"{block}.mlp.hook_pre", self._norm(x, f"{block}.ln2"))
            out = self._channel(block, inner, inner_last=state[2], see=see)
            x = see(f"{block}.hook_resid_post", x + see(f"{block}.hook_mlp_out", out * scale))
            if gates.shift[i, t]:
                state[0], state[2] = normed, inner
            if self.rescale_every and (i + 1) % self.rescale_every == 0:
                x = x / 2
        return see("hook_logits", z["head.weight"] @ see("hook_final_norm", self._norm(x, "ln_out")))

    def _norm(self, x: Array, name: str) -> Array:
        x = x - x.mean()
        x = x / ((x**2).mean() + 1e-5) ** 0.5
        return x * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def _heads_norm(self, y: Array, name: str) -> Array:
        y = y - y.mean(-1, keepdims=True)
        y = y / ((y**2).mean(-1, keepdims=True) + self.group_eps) ** 0.5
        return y.reshape(-1) * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def _channel(self, block: str, x: Array, inner_last: Array, see: Callable[[str, Array], Array]) -> Array:
        z, name, change = self.tensors, f"{block}.ffn", inner_last - x
        mixes = {4: ("time_mix_k", "time_mix_r"), 6: ("time_maa_k", "time_maa_r"), 7: ("x_k",)}[self.version]
        amounts = [z[f"{name}.{mix}"].reshape(-1) for mix in mixes]
        mixed = [x + change * (1 - amount if self.version == 4 else amount) for amount in amounts]
        neurons = see(f"{block}.mlp.hook_act", (z[f"{name}.key.weight"] @ mixed[0]).clip(0) ** 2)
        out = z[f"{name}.value.weight"] @ neurons
        return out * sigmoid(z[f"{name}.receptance.weight"] @ mixed[1]) if self.version < 7 else out

    def _mix4(self, i, t, x, state, gates, see, first):
        xp, z, name, where = self.xp, self.tensors, f"blocks.{i}.att", f"blocks.{i}.rwkv"
        mixes = {w: z[f"{name}.time_mix_{w}"].reshape(-1) for w in "rkv"}
        r, k, v = (
            z[f"{name}.{weight}.weight"] @ (x * mixes[w] + state[0] * (1 - mixes[w]))
            for w, weight in (("r", "receptance"), ("k", "key"), ("v", "value"))
        )
        r, k, v = (see(f"{where}.hook_{w}", one[None])[0] for w, one in (("r", sigmoid(r)), ("k", k), ("v", v)))
        decay = see(f"{where}.hook_decay", xp.exp(-xp.exp(z[f"{name}.time_decay"]))[None])[0]
        numerator, denominator, exponent = state[1][0]
        exponent = xp.where(denominator != 0, exponent, xp.full_like(exponent, EMPTY))
        own = k + z[f"{name}.time_first"]
        highest = xp.maximum(exponent, own)
        before, mine = xp.exp(exponent - highest), xp.exp(own - highest)
        y = see(f"{where}.hook_wkv", ((before * numerator + mine * v) / (before * denominator + mine))[None])[0]
        write, kept = gates.write[i, t][0], decay if gates.decay[i, t] else xp.ones_like(decay)
        written = k if write != 0 else xp.full_like(k, EMPTY)
        after = xp.maximum(exponent + xp.log(abs(kept) + 1e-300), written)
        faded, added = kept * xp.exp(exponent - after), write * xp.exp(written - after)
        numerator, denominator = faded * numerator + added * v, faded * denominator + added
        after = xp.where(denominator != 0, after, xp.zeros_like(after))
        state[1] = see(f"{where}.hook_states", xp.stack([numerator, denominator, after])[None])
        return z[f"{name}.output.weight"] @ (r * y), first

    def _mix6(self, i, t, x, state, gates, see, first):
        z, name, where = self.tensors, f"blocks.{i}.att", f"blocks.{i}.rwkv"
        change = state[0] - x
        low = self.xp.tanh((x + change * z[f"{name}.time_maa_x"].reshape(-1)) @ z[f"{name}.time_maa_w1"]).reshape(5, -1)
        share = self.xp.einsum("mr,mrc->mc", low, z[f"{name}.time_maa_w2"])
        mixed = {
            w: x + change * (z[f"{name}.time_maa_{w}"].reshape(-1) + s) for w, s in zip("wkvrg", share, strict=True)
        }
        r, k, v = (
            see(f"{where}.hook_{w}", (z[f"{name}.{weight}.weight"] @ mixed[w]).reshape(-1, HEAD))
            for w, weight in (("r", "receptance"), ("k", "key"), ("v", "value"))
        )
        gate = z[f"{name}.gate.weight"] @ mixed["g"]
        gate = gate * sigmoid(gate)
        speed = self.xp.tanh(mixed["w"] @ z[f"{name}.time_decay_w1"]) @ z[f"{name}.time_decay_w2"]
        decay = self.xp.exp(-self.xp.exp(z[f"{name}.time_decay"].reshape(-1) + speed)).reshape(-1, HEAD)
        decay = see(f"{where}.hook_decay", decay)
        bonus = (r * z[f"{name}.time_faaaa"] * k).sum(-1, keepdims=True)
        y = see(f"{where}.hook_wkv", self.xp.einsum("hk,hkv->hv", r, state[1]) + bonus * v)
        kept = decay if gates.decay[i, t] else self.xp.ones_like(decay)
        write = gates.write[i, t][:, None, None] * k[:, :, None] * v[:, None, :]
        state[1] = see(f"{where}.hook_states", kept[:, :, None] * state[1] + write)
        return z[f"{name}.output.weight"] @ (self._heads_norm(y, f"{name}.ln_x") * gate), first

    def _mix7(self, i, t, x, state, gates, see, first):
        z, name, where = self.tensors, f"blocks.{i}.att", f"blocks.{i}.rwkv"
        change = state[0] - x
        xr, xw, xk, xv, xa, xg = (x + change * z[f"{name}.x_{w}"].reshape(-1) for w in "rwkvag")

        def low(which: str, value: Array, inner: Callable[[Array], Array] = lambda a: a) -> Array:
            return inner(value @ z[f"{name}.{which}1"]) @ z[f"{name}.{which}2"] + z[f"{name}.{which}0"].reshape(-1)

        r, k, v = (z[f"{name}.{w}.weight"] @ m for w, m in (("receptance", xr), ("key", xk), ("value", xv)))
        rate, gate = sigmoid(low("a", xa)), sigmoid(xg @ z[f"{name}.g1"]) @ z[f"{name}.g2"]
        decay = self.xp.exp(-math.exp(-0.5) * sigmoid(low("w", xw, self.xp.tanh))).reshape(-1, HEAD)
        first = v if first is None else first
        if i:
            v = v + (first - v) * sigmoid(low("v", xv))
        removal = (k * z[f"{name}.k_k"].reshape(-1)).reshape(-1, HEAD)
        removal = removal / self.xp.linalg.norm(removal, axis=-1, keepdims=True).clip(1e-12)
        k = k * (1 + (rate - 1) * z[f"{name}.k_a"].reshape(-1))
        r, k, v = (see(f"{where}.hook_{n}", value.reshape(-1, HEAD)) for n, value in (("r", r), ("k", k), ("v", v)))
        a = see(f"{where}.hook_a", -removal)
        b = see(f"{where}.hook_b", removal * rate.reshape(-1, HEAD))
        decay = see(f"{where}.hook_decay", decay)
        kept = decay if gates.decay[i, t] else self.xp.ones_like(decay)
        read = self.xp.einsum("hk,hkv->hv", a, state[1])
        new = kept[:, :, None] * state[1] + gates.erase[i, t][:, None, None] * b[:, :, None] * read[:, None, :]
        state[1] = see(f"{where}.hook_states", new + gates.write[i, t][:, None, None] * k[:, :, None] * v[:, None, :])
        y = see(f"{where}.hook_wkv", self.xp.einsum("hk,hkv->hv", r, state[1]))
        own = ((r * k * z[f"{name}.r_k"]).sum(-1, keepdims=True) * v).reshape(-1)
        return z[f"{name}.output.weight"] @ ((self._heads_norm(y, f"{name}.ln_x") + own) * gate), first


def sigmoid(x: Array) -> Array:
    return 1 / (1 + math.e**-x)
