"""RWKV-4's attention: for each channel the mean of all values so far, weighted by exp(key) and forgotten by the token.

    y_t = (e^(u + k_t) v_t + N_(t-1)) / (e^(u + k_t) + D_(t-1))
    N_t = decay N_(t-1) + e^(k_t) v_t      D_t = decay D_(t-1) + e^(k_t)

N and D are held as e^(-m) N and e^(-m) D, beside the exponent m, a running maximum of keys: neither overflows, and D
does not vanish. They are one recurrence of [N, D], one number a channel, which writes e^(k - m) [v, 1].
"""

import numpy as np
import onnx_ir as ir

from exporters.op_writer import OpWriter
from exporters.recurrence.forms import BY_NUMBER, Outputs, Reads, scan
from exporters.recurrence.open_form import open_form
from exporters.rwkv.build import Build
from exporters.rwkv.layers import Shared, kept_mix, token_shift

EMPTY = -1e4  # exponent of a state in which nothing is written: beside it any key is large
FAINTEST = np.finfo(np.float32).tiny  # a decay below it counts as it where exponents are compared: its log is a number


def time_mix4(
    build: Build, layer: int, stream: ir.Value, last: ir.Value, state: ir.Value, shared: Shared
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """RWKV-4's attention. Returns its output, the value for the next token shift, and the state."""
    op, name, where = build.op, f"blocks.{layer}.att", f"blocks.{layer}.rwkv"
    change, following = token_shift(build, stream, last, shared)

    def read(which: str, weight: str) -> ir.Value:
        return build.project(kept_mix(build, stream, change, f"{name}.time_mix_{which}"), f"{name}.{weight}.weight")

    r = build.hook(f"{where}.hook_r", build.to_heads(op.Sigmoid(read("r", "receptance"))))
    k = build.hook(f"{where}.hook_k", build.to_heads(read("k", "key")))
    v = build.hook(f"{where}.hook_v", build.to_heads(read("v", "value")))
    first = len(op.nodes)
    decay = op.Exp(op.Neg(op.Exp(build.exact(build.weight(f"{name}.time_decay")))))
    decay = build.hook(f"{where}.hook_decay", op.Expand(decay, op.Shape(k)))
    own = op.Add(k, build.exact(build.weight(f"{name}.time_first")))
    wkv, after = _means(build, where, (k, v, decay, own), state, shared)
    wkv = build.hook(f"{where}.hook_wkv", wkv)
    for node in op.nodes[first:]:  # whatever narrows the model leaves the recurrence float32, by these names
        for value in node.outputs:
            value.name = value.name or f"{where}.{node.op_type}"
    out = build.plain(op.Reshape(op.Mul(r, wkv), [0, 0, -1]))
    return build.project(out, f"{name}.output.weight"), following, after


def _means(
    build: Build, where: str, reads: tuple[ir.Value, ...], state: ir.Value, shared: Shared
) -> tuple[ir.Value, ir.Value]:
    """The means [batch, seq, 1, channels] and the state [batch, 1, 3, channels] after the last token."""
    op, channels, (k, v, decay, own) = build.op, build.shape.head_dim, reads
    numbers, denominator, exponent = (op.Slice(state, [a], [b], [2]) for a, b in ((0, 2), (1, 2), (2, 3)))
    empty, zero = build.constant("empty", np.float32(EMPTY)), build.constant("zero", np.float32(0))
    start = op.Where(op.Equal(denominator, zero), empty, exponent)
    # a token that does not write must not move the exponent either: what is there could vanish beside it
    written = op.Where(op.Equal(shared.write, zero), empty, k)
    persistence = op.Where(shared.keep, decay, build.constant("fill.1", np.float32(1)))
    log_decay = op.Log(op.Max(op.Abs(persistence), build.constant("faintest", np.float32(FAINTEST))))
    last, before = _exponents(op, written, log_decay, start, where)
    exponents = op.Max(op.Add(before, log_decay), written)
    # not e^(before + log_decay - exponents): a decay close to 1 is lost beside an exponent
    decayed = op.Mul(persistence, op.Exp(op.Sub(before, exponents)))
    weight = op.Mul(op.Exp(op.Sub(written, exponents)), shared.write)
    one = op.Expand(build.constant("ones", np.ones((1, 1, 1, 1), np.float32)), op.Shape(op.Slice(k, [0], [1], [3])))
    pairs = Reads(
        (1, 1, 2 * channels),
        BY_NUMBER,
        one,
        one,
        op.Concat(op.Mul(weight, v), weight, axis=3),
        op.Unsqueeze(op.Concat(decayed, decayed, axis=3), [3]),
        own=False,
    )
    flat = op.Reshape(numbers, [0, 1, 1, 2 * channels])
    sums, after = open_form(op, pairs, flat, shared.length, where)
    numerator, denominator = op.Split(op.Reshape(sums, [0, 0, 2, channels]), axis=2, num_outputs=2, outputs=2)
    highest = op.Max(before, own)
    read, bonus = (op.Exp(op.Sub(which, highest)) for which in (before, own))
    total = op.Add(op.Mul(read, denominator), bonus)
    named = {"written_k": weight, "kept_decay": decayed, "read": read, "bonus": bonus, "total": total}
    for name, one_named in {**named, "exponent": exponents}.items():
        one_named.name = f"{where}.{name}"
    wkv = op.Div(op.Add(op.Mul(read, numerator), op.Mul(bonus, v)), total)
    numbers = op.Reshape(after, [0, 1, 2, channels])
    nothing = op.Equal(op.Slice(numbers, [1], [2], [2]), zero)
    return wkv, op.Concat(numbers, op.Where(nothing, zero, last), axis=2)  # an empty state is zeros


def _exponents(op: OpWriter, k: ir.Value, log_decay: ir.Value, start: ir.Value, where: str) -> Outputs:
    """The exponent after the last token [batch, 1, 1, channels], and those before each [batch, seq, 1, channels]."""

    def body(op: OpWriter, before: ir.Value, *read: ir.Value) -> Outputs:
        return op.Max(op.Add(before, read[0]), read[1]), op.Identity(before)

    scanned = {"g": op.Unsqueeze(log_decay, [2]), "k": op.Unsqueeze(k, [2])}
    last, before = scan(op, body, start, scanned, f"{where}.exponents", scan_input_axes=[1, 1], scan_output_axes=[1])
    return last, op.Squeeze(before, [2])
