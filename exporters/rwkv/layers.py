"""Layers of RWKV: token shift, the time mix of RWKV-6 and RWKV-7, channel mix. The formulas are BlinkDL's `rwkv`'s."""

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from exporters.recurrence.forms import BY_KEY, Reads
from exporters.recurrence.open_form import Length, open_form
from exporters.rwkv.build import Build

# The exponent of RWKV-7's strongest decay: exp(-1/2).
SLOWEST = 0.6065306597126334
TINY = 1e-12  # torch's F.normalize divides by at least this


@dataclass(frozen=True)
class Shared:
    """Inputs of one layer besides its tokens."""

    # write, erase: factors of what each token adds to, and takes out of, the state: [batch, seq, n_heads, 1].
    write: ir.Value
    erase: ir.Value | None
    keep: ir.Value  # whether each token's decay applies, bool [batch, seq, n_heads, 1]
    # [batch, seq + 1, 1]: which token each one is mixed with: 0 is the last of the call before, t + 1 is token t of
    # this call. The last entry is what the next call's first token is mixed with.
    shift: ir.Value
    length: Length
    tokens: ir.Value  # int64 [1], the number of the call's tokens


def token_shift(build: Build, value: ir.Value, last: ir.Value, shared: Shared) -> tuple[ir.Value, ir.Value]:
    """Subtract a value [batch, seq, hidden] from that of the token before; also the next pass's first value."""
    op = build.op
    chain = op.Concat(op.Unsqueeze(last, [1]), value, axis=1)
    reached = op.GatherND(chain, shared.shift, batch_dims=1)
    before, following = op.Split(reached, op.Concat(shared.tokens, [1], axis=0), axis=1, outputs=2)
    return op.Sub(before, value), op.Squeeze(following, [1])


def kept_mix(build: Build, value: ir.Value, change: ir.Value, canonical: str) -> ir.Value:
    """Mix a token with the one before, of which RWKV-4's weights say how much of the token itself is kept."""
    op = build.op
    return op.Add(value, op.Mul(change, op.Sub(1.0, build.weight(canonical))))


def time_mix6(
    build: Build, layer: int, value: ir.Value, last: ir.Value, state: ir.Value, shared: Shared
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """RWKV-6's attention. Returns its output, the value for the next token shift, and the state."""
    op, name = build.op, f"blocks.{layer}.att"
    change, following = token_shift(build, value, last, shared)
    mixes = _mixes6(build, name, value, change)
    r, k, v = (
        build.hook(f"blocks.{layer}.rwkv.hook_{which}", build.to_heads(build.project(mixes[which], f"{name}.{weight}")))
        for which, weight in (("r", "receptance.weight"), ("k", "key.weight"), ("v", "value.weight"))
    )
    gate = build.project(mixes["g"], f"{name}.gate.weight")
    gate = op.Mul(gate, op.Sigmoid(gate))  # SiLU
    speed = build.project(op.Tanh(build.project(mixes["w"], f"{name}.time_decay_w1")), f"{name}.time_decay_w2")
    speed = op.Add(build.exact(speed), build.exact(build.weight(f"{name}.time_decay")))
    # exp(-exp(w)): between 0 and 1 for every w
    decay = build.hook(f"blocks.{layer}.rwkv.hook_decay", op.Exp(op.Neg(op.Exp(build.to_heads(speed)))))
    # y_t = r_t S_(t-1), and outside, (sum r u k) v_t
    reads = _gated(build, layer, Reads(_sizes(build), BY_KEY, r, k, v, decay, own=False), shared)
    first = build.exact(build.weight(f"{name}.time_faaaa"))  # the bonus u of the token itself
    bonus = op.ReduceSum(op.Mul(op.Mul(r, k), first), [-1], keepdims=1)
    bonus.name = f"blocks.{layer}.rwkv.bonus"
    y, after = open_form(op, reads, state, shared.length, f"blocks.{layer}.rwkv")
    y = build.hook(f"blocks.{layer}.rwkv.hook_wkv", op.Add(y, op.Mul(bonus, v)))
    out = op.Mul(_normed(build, name, y), gate)
    return build.project(out, f"{name}.output.weight"), following, after


def _mixes6(build: Build, name: str, value: ir.Value, change: ir.Value) -> dict[str, ir.Value]:
    """Five mixtures of each token with the one before, in data-dependent amounts."""
    op, order = build.op, ("w", "k", "v", "r", "g")
    rank = build.tensors[build.layout.name(f"{name}.time_maa_w2")].shape[1]
    low = op.Add(value, op.Mul(change, build.weight(f"{name}.time_maa_x")))
    low = op.Tanh(build.project(low, f"{name}.time_maa_w1"))
    low = op.Transpose(op.Reshape(low, [0, 0, len(order), rank]), perm=[2, 0, 1, 3])
    share = op.MatMul(low, op.Unsqueeze(build.weight(f"{name}.time_maa_w2"), [1]))
    shares = op.Split(share, axis=0, num_outputs=len(order), outputs=len(order))
    mixed = {}
    for which, one in zip(order, shares, strict=True):
        amount = op.Add(op.Squeeze(one, [0]), build.weight(f"{name}.time_maa_{which}"))
        mixed[which] = op.Add(value, op.Mul(change, amount))
    return mixed


def time_mix7(
    build: Build,
    layer: int,
    value: ir.Value,
    last: ir.Value,
    state: ir.Value,
    shared: Shared,
    first: ir.Value | None,
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """RWKV-7's attention; returns layer 0's values [batch, seq, hidden] too, which later layers read as `first`."""
    op, name = build.op, f"blocks.{layer}.att"
    change, following = token_shift(build, value, last, shared)
    mixed = {
        which: op.Add(value, op.Mul(change, build.mix(layer, f"x_{which}"))) for which in ("r", "w", "k", "v", "a", "g")
    }
    r = build.project(mixed["r"], f"{name}.receptance.weight")
    k = build.project(mixed["k"], f"{name}.key.weight")
    v = build.project(mixed["v"], f"{name}.value.weight")
    rate = op.Sigmoid(_low_rank(build, name, "a", mixed["a"]))
    gate = build.project(op.Sigmoid(build.project(mixed["g"], f"{name}.g1")), f"{name}.g2")
    speed = op.Sigmoid(build.exact(_low_rank(build, name, "w", mixed["w"])))
    if first is None:
        first = v
    else:
        # mixed with layer 0's values, by a gate of each channel
        v = op.Add(v, op.Mul(op.Sub(first, v), op.Sigmoid(_low_rank(build, name, "v", mixed["v"]))))
    # kappa: the key by which the state is read and taken from, of length 1 in each head
    removal = build.to_heads(op.Mul(k, build.weight(f"{name}.k_k")))
    length = op.Sqrt(op.ReduceSumSquare(removal, [-1], keepdims=1))
    removal = op.Div(removal, op.Max(length, build.constant("tiny", np.float32(TINY))))
    # the replacement key, k (1 + (rate - 1) k_a)
    k = op.Mul(k, op.Add(op.Mul(op.Sub(rate, 1.0), build.weight(f"{name}.k_a")), 1.0))
    slowest = build.constant("slowest", np.float32(-SLOWEST))

    def hook(which: str, one: ir.Value) -> ir.Value:
        return build.hook(f"blocks.{layer}.rwkv.hook_{which}", one)

    r, k, v = hook("r", build.to_heads(r)), hook("k", build.to_heads(k)), hook("v", build.to_heads(v))
    # b a S = -rate kappa (kappa S): takes out what is stored for kappa, as far as the rate goes
    a, b = hook("a", op.Neg(removal)), hook("b", op.Mul(removal, build.to_heads(rate)))
    # exp(-exp(-1/2) sigmoid(w)), so not below exp(-0.61)
    decay = hook("decay", op.Exp(op.Mul(build.to_heads(speed), slowest)))
    reads = _gated(build, layer, Reads(_sizes(build), BY_KEY, r, k, v, decay, a=a, b=b), shared)
    y, after = open_form(op, reads, state, shared.length, f"blocks.{layer}.rwkv")
    y = hook("wkv", y)
    # the token's own value once more, r_k times the product of its receptance and key, outside the recurrence
    own = op.ReduceSum(op.Mul(op.Mul(r, k), build.exact(build.weight(f"{name}.r_k"))), [-1], keepdims=1)
    own = build.plain(op.Reshape(op.Mul(own, v), [0, 0, -1]))
    out = op.Mul(op.Add(_normed(build, name, y), own), gate)
    return build.project(out, f"{name}.output.weight"), following, after, first


def _low_rank(build: Build, name: str, which: str, value: ir.Value) -> ir.Value:
    """w0 + tanh(x W1) W2; without the tanh for all but the decay."""
    low = build.project(value, f"{name}.{which}1")
    low = build.op.Tanh(low) if which == "w" else low
    return build.op.Add(build.project(low, f"{name}.{which}2"), build.weight(f"{name}.{which}0"))


def _sizes(build: Build) -> tuple[int, int, int]:
    return build.shape.num_heads, build.shape.head_dim, build.shape.head_dim


def _gated(build: Build, layer: int, reads: Reads, shared: Shared) -> Reads:
    """Gated inputs of the recurrence, named so that derived values can be computed from them."""
    op, where = build.op, f"blocks.{layer}.rwkv"
    k = op.Mul(reads.k, shared.write)
    decay = op.Where(shared.keep, reads.decay, build.constant("fill.1", np.float32(1)))
    b = None if reads.b is None else op.Mul(reads.b, shared.erase)
    for name, value in (("written_k", k), ("kept_decay", decay), ("erased_b", b)):
        if value is not None:
            value.name = f"{where}.{name}"
    return replace(reads, k=k, decay=decay, b=b)


def _normed(build: Build, name: str, y: ir.Value) -> ir.Value:
    """The heads' outputs, each normalised by itself: [batch, seq, hidden]."""
    op = build.op
    ones = build.constant("norm_scale", np.ones(build.shape.head_dim, np.float32))
    # torch's GroupNorm with a group a head: normed by itself, scaled and shifted by channel
    alone = op.LayerNormalization(y, ones, axis=-1, epsilon=build.shape.group_norm_eps)
    flat = build.plain(op.Reshape(alone, [0, 0, -1]))
    return op.Add(op.Mul(flat, build.weight(f"{name}.ln_x.weight")), build.weight(f"{name}.ln_x.bias"))


def channel_mix(build: Build, layer: int, value: ir.Value, last: ir.Value, shared: Shared) -> tuple[ir.Value, ir.Value]:
    """The feed-forward part, relu(x W_k)^2 W_v, but for RWKV-7 gated; and the value for the next token shift."""
    op, name, version = build.op, f"blocks.{layer}.ffn", build.shape.version
    change, following = token_shift(build, value, last, shared)

    def mixed(which: str) -> ir.Value:
        if version == 4:
            return kept_mix(build, value, change, f"{name}.time_mix_{which}")
        amount = build.weight(f"{name}.time_maa_{which}" if version == 6 else f"{name}.x_{which}")
        return op.Add(value, op.Mul(change, amount))

    neurons = op.Relu(build.project(mixed("k"), f"{name}.key.weight"))
    neurons = build.hook(f"blocks.{layer}.mlp.hook_act", op.Mul(neurons, neurons))  # squared ReLU
    out = build.project(neurons, f"{name}.value.weight")
    if version != 7:
        out = op.Mul(op.Sigmoid(build.project(mixed("r"), f"{name}.receptance.weight")), out)
    return out, following
