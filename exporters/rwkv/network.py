"""The whole network: embedding, blocks, head; states in and out; the gates as inputs that need not be given."""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from exporters.checkpoint_tensors import StoredTensor
from exporters.op_writer import OpWriter
from exporters.recurrence.forms import STATE_DTYPE
from exporters.recurrence.open_form import Length
from exporters.rwkv.build import RWKV_OPSET, Build
from exporters.rwkv.checkpoint import Shape, TensorLayout
from exporters.rwkv.layers import Shared, channel_mix, time_mix6, time_mix7
from exporters.rwkv.means import time_mix4
from mionnx.graph.io_names import SHIFTED_STATE


def build_network(layout: TensorLayout, tensors: Mapping[str, StoredTensor], shape: Shape, dtype: ir.DataType) -> Build:
    """The graph of a checkpoint, its weights without data so far."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": RWKV_OPSET}, name="mionnx")
    build = Build(layout, tensors, shape, dtype, OpWriter(graph))
    op = build.op
    ids = build.input("input_ids", ir.DataType.INT64, ["batch", "seq"])
    states = [_state_inputs(build, layer) for layer in range(shape.num_layers)]
    shared = list(_shared(build, ids))
    stream = build.hook("hook_embed", op.Gather(build.weight("emb.weight"), ids))
    if build.has("blocks.0.ln0.weight"):
        stream = build.norm(stream, "blocks.0.ln0")
    after: list[tuple[ir.Value, ir.Value, ir.Value]] = []
    first = None
    for layer in range(shape.num_layers):
        stream, first, new = _block(build, layer, stream, first, states[layer], shared[layer])
        after.append(new)
    final = build.hook("hook_final_norm", build.norm(stream, "ln_out", shape.final_eps))
    head = "head.weight" if build.has("head.weight") else "emb.weight"
    table = op.Transpose(build.weight(head), perm=[1, 0])
    logits = build.hook("hook_logits", op.MatMul(final, table))
    logits.type, logits.shape = ir.TensorType(dtype), ir.Shape(["batch", "seq", shape.vocab_size])
    _output(build, "logits", logits, logits.shape)
    for layer, parts in enumerate(after):
        for name, value, dims in zip(SHIFTED_STATE.layer_outputs(layer), parts, _state_dims(shape), strict=True):
            _output(build, name, value, ir.Shape(dims))
    graph.extend(op.nodes)
    _name_apart(graph, {*build.hooks, *build.parameters})
    return build


def _state_dims(shape: Shape) -> list[list[str | int]]:
    return [
        ["batch", shape.hidden_size],
        ["batch", shape.num_heads, shape.key_dim, shape.head_dim],
        ["batch", shape.hidden_size],
    ]


def _state_inputs(build: Build, layer: int) -> tuple[ir.Value, ...]:
    dtypes = (build.dtype, STATE_DTYPE, build.dtype)
    return tuple(
        build.input(name, dtype, dims)
        for name, dtype, dims in zip(SHIFTED_STATE.layer_inputs(layer), dtypes, _state_dims(build.shape), strict=True)
    )


def _output(build: Build, name: str, value: ir.Value, shape: ir.Shape) -> None:
    output = build.op.Identity(value)
    output.name, output.shape = name, shape
    output.type = output.type or value.type or ir.TensorType(STATE_DTYPE)
    build.op.graph.outputs.append(output)


def _shared(build: Build, ids: ir.Value) -> Iterator[Shared]:
    """The gates of every layer: inputs with a default that leaves the model as it is."""
    op, layers = build.op, build.shape.num_layers
    tokens = op.Shape(ids, start=1, end=2)
    batch = op.Shape(ids, start=0, end=1)
    length = Length.of(op, tokens)

    def gate(name: str, default: np.ndarray, axes: list[str]) -> ir.Value:
        dims = [f"{name}.{axis}" for axis in axes]
        tensor = ir.tensor(default.reshape(-1, *[1] * len(axes)), name=name)
        value = build.input(name, tensor.dtype, [layers, *dims])
        value.const_value = tensor
        build.op.graph.register_initializer(value)
        return value

    def per_layer(value: ir.Value, perm: list[int]) -> list[ir.Value]:
        turned = op.Transpose(value, perm=perm)
        parts = op.Split(turned, axis=-1, num_outputs=layers, outputs=layers)
        return [parts] if isinstance(parts, ir.Value) else list(parts)  # one output comes alone

    ones, by_head = np.ones(layers, np.float32), ["batch", "seq", "n_heads"]
    write = per_layer(gate("state_write", ones, by_head), [1, 2, 3, 0])
    erase = per_layer(gate("state_erase", ones, by_head), [1, 2, 3, 0]) if build.shape.version == 7 else [None] * layers
    keep = per_layer(gate("state_decay", ones.astype(bool), by_head), [1, 2, 3, 0])
    distance = gate("shift_distance", ones.astype(np.int64), ["batch", "seq"])
    entries = op.Range(0, op.Squeeze(op.Add(tokens, [1])), 1)
    # token t stands at place t + 1 of the chain; `distance` before it, at the farthest the last of the call before
    reached = op.Max(op.Sub(op.Add(entries, [1]), distance), [0])
    everywhere = op.Expand(reached, op.Concat([layers], batch, op.Add(tokens, [1]), axis=0))
    shift = per_layer(everywhere, [1, 2, 0])
    for i in range(layers):
        yield Shared(write[i], erase[i], keep[i], shift[i], length, tokens)


def _block(
    build: Build,
    layer: int,
    stream: ir.Value,
    first: ir.Value | None,
    states: tuple[ir.Value, ...],
    shared: Shared,
) -> tuple[ir.Value, ir.Value | None, tuple[ir.Value, ir.Value, ir.Value]]:
    op, where, shape = build.op, f"blocks.{layer}", build.shape
    att_last, state, ffn_last = states
    stream = build.hook(f"{where}.hook_resid_pre", stream)
    normed = build.norm(stream, f"{where}.ln1")
    if shape.version < 7:
        mix = time_mix4 if shape.version == 4 else time_mix6
        out, att_next, after = mix(build, layer, normed, att_last, state, shared)
    else:
        out, att_next, after, first = time_mix7(build, layer, normed, att_last, state, shared, first)
    after = build.hook(f"{where}.rwkv.hook_state", after)
    stream = op.Add(stream, build.hook(f"{where}.hook_attn_out", _rescaled(build, layer, out)))
    stream = build.hook(f"{where}.hook_resid_mid", stream)
    inner = build.hook(f"{where}.mlp.hook_pre", build.norm(stream, f"{where}.ln2"))
    out, ffn_next = channel_mix(build, layer, inner, ffn_last, shared)
    stream = op.Add(stream, build.hook(f"{where}.hook_mlp_out", _rescaled(build, layer, out)))
    stream = build.hook(f"{where}.hook_resid_post", stream)
    if shape.rescale_every and (layer + 1) % shape.rescale_every == 0:
        # float16 would overflow in deep layers; outputs of later layers are scaled alike, and norms see no difference
        stream = op.Mul(stream, _factor(build, 0.5))
    return stream, first, (att_next, after, ffn_next)


def _rescaled(build: Build, layer: int, out: ir.Value) -> ir.Value:
    """Scale a layer's output down where the stream is halved every few layers."""
    if not build.shape.rescale_every or layer < build.shape.rescale_every:
        return out
    return build.op.Mul(out, _factor(build, 2.0 ** -(layer // build.shape.rescale_every)))


def _factor(build: Build, value: float) -> ir.Value:
    return build.op.CastLike(build.constant(f"factor.{value:g}", np.float32(value)), build.weight("emb.weight"))


def _name_apart(graph: ir.Graph, fixed: set[str]) -> None:
    """Give every value a unique name: bodies share one name space with the outer graph."""
    taken = {value.name for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())} | fixed
    for node in ir.traversal.RecursiveGraphIterator(graph):
        for value in node.outputs:
            if value.name in fixed or value.is_graph_output():
                continue
            name, number = value.name or node.op_type, 0
            while value.name in taken or not value.name:
                number += 1
                value.name = f"{name}.{number}"
            taken.add(value.name)
        node.name = f"{node.outputs[0].name}:{node.op_type}"
