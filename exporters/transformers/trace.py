"""From a config to an ONNX graph with markers at the hook points, without reading a weight.

The model is built on torch's meta device and traced under `FakeTensorMode`: its parameters have shapes and no storage,
so a 70B model traces in the memory of its graph. Initializers keep the names of the parameters. Only layers that show
every kind are traced (`kinds`), under their own numbers; the others hand the stream on, and are made later (`stamp`).
"""

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import onnx_ir as ir
import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from exporters.transformers.attention import (
    ATTENTION_FUNCTION,
    TAPS,
    Listener,
    TappedCache,
    Taps,
    cache_word,
    replace_for,
    tap_rotation,
)
from exporters.transformers.carried import Carries, carries, parted
from exporters.transformers.config import rope_parameters
from exporters.transformers.decomposition import one_trace
from exporters.transformers.encoder_families import is_encoder
from exporters.transformers.experts import EXPERTS_FUNCTION, drop_spare
from exporters.transformers.families import layout_in, layout_of
from exporters.transformers.headed import Headed
from exporters.transformers.heads import DECODER, TaskHead
from exporters.transformers.kinds import Kinds, Recorder, all_different, kinds_of
from exporters.transformers.layout import Layout
from exporters.transformers.own_attention import plain_maximum
from exporters.transformers.quirks import attachment_of
from exporters.transformers.rearranged import rearrange
from exporters.transformers.recurrent import Columns, kernel_of, mixer_of
from exporters.transformers.taps import submodule
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.layers import CachePort
from mionnx.graph.metadata import MAIN_OUTPUTS, NEXT_TOKEN

OPSET = 23
MARKER_DOMAIN = "mionnx"
# Stand-ins for dynamic sizes while tracing: all different, none of them 0 or 1, so that nothing is specialised.
TRACE_BATCH, SEQ, TRACE_PAST = 2, 3, 5
TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")

# The cache of fake results costs more than it saves in one trace of a few layers.
UNCACHED = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
PastSizes = tuple[Sequence[Carries], torch.dtype]


class Passed(nn.Module):
    """Stand-in for a layer that is not traced: it hands the stream on, and has its attributes."""

    def __init__(self, layer: nn.Module, returned: int) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, returned=returned)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stream as it came, in the place where the layer returns it."""
        stream = args[0] if args else kwargs["hidden_states"]
        return (stream, *[None] * (self.returned - 1)) if self.returned else stream

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


@contextmanager
def attached(model: PreTrainedModel, taps: Taps) -> Iterator[None]:
    """Instrument a causal language model: the taps' listener gets each hook point's tensor."""
    layout, attachment = taps.layout, attachment_of(model.config)
    with ExitStack() as stack:
        blocks = [*submodule(model, layout.blocks).children()]
        outside = attachment(model, layout, taps, stack)
        outside.outside_blocks()
        layers = [(block, layout.layer(number)) for block in blocks for number in range(layout.layers)]
        for i, (block, own_layout) in enumerate(layers):
            if not isinstance(block, Passed):
                own_layout = own_layout.of_mixer() if mixer_of(block, own_layout) else own_layout
                attachment(model, own_layout, taps, stack).block(i, block)
        for module in [module for block in blocks for module in block.modules()]:
            vars(module)[TAPS] = taps
            stack.callback(vars(module).pop, TAPS, None)  # blocks may share a module
        if layout.keys == "own":
            stack.enter_context(plain_maximum(model))
        run = [block for block in blocks if not isinstance(block, Passed)]
        if attending := [block for block in run if outside.attends(block)]:
            tap_rotation(stack, taps, submodule(model, layout.layer(0).attention, attending[0]))
        if mixers := [mixer for block in run if (mixer := mixer_of(block, layout)) is not None]:
            outside.recurrences(mixers[0])
        # an encoder of T5's kind has a copy of the model's config
        configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        for config in configs.values():
            replace_for(stack, config, "_attn_implementation", ATTENTION_FUNCTION)
        yield


class Cached(nn.Module):
    """A causal language model as a function of tensors; its cache is a list of what each layer carries."""

    def __init__(
        self, model: PreTrainedModel, layout: Layout, listen: Listener, layers: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.model, self.layout, self.listen, self.layers = model, layout, listen, layers
        self.word, self.kernel = cache_word(model), kernel_of(model, layout)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[tuple[Tensor, ...]]
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        cache = TappedCache(self._pasts(past), self.listen, self.layout)
        alone = self.layout.keys == "none"  # transformers masks such a model's tokens, and here each layer does
        tokens = {} if alone else {"attention_mask": attention_mask, "position_ids": position_ids}
        if self.layout.recurrent:
            own = torch.arange(input_ids.shape[1], device=input_ids.device) - input_ids.shape[1]
            cache.taps.mask = attention_mask.index_select(1, own + attention_mask.shape[1])
        if self.kernel:
            cache.taps.columns = Columns(cache.taps.mask, self.kernel)
        with attached(self.model, cache.taps):
            output = self.model(input_ids=input_ids, **tokens, **{self.word: cache}, use_cache=True)
            logits = cache.taps.at(HookPoint.Logits, output.logits)
        every = range(len([*submodule(self.model, self.layout.blocks).children()]) * self.layout.layers)
        return logits, cache.present(every if self.layers is None else self.layers)

    def _pasts(self, past: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """What every layer carries; nobody asks those that are passed over."""
        layers = range(len(past)) if self.layers is None else self.layers
        by_layer = dict(zip(layers, past, strict=True))
        other = next((own for own in past if parted(own)[1]), past[0]) if past else ()
        return [by_layer.get(i, other) for i in range(max(layers, default=-1) + 1)]


def run_eagerly(
    model: PreTrainedModel,
    listen: Listener,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    past: list[tuple[Tensor, ...]],
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Run a loaded model once in eager torch, its hook points handed to `listen`."""
    prepare(model.config)
    with torch.no_grad():
        return Cached(model, layout_in(model), listen)(input_ids, attention_mask, position_ids, past)


def run_once(
    model: PreTrainedModel, head: TaskHead, listen: Listener, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Run a loaded model with some head once in eager torch on ids, mask, positions and types, each [batch, seq]."""
    prepare(model.config)
    rearrange(model)
    with torch.no_grad():
        return wrapped(model, listen, head)(*inputs)


def wrapped(
    model: PreTrainedModel, listen: Listener, head: TaskHead = DECODER, layers: Sequence[int] | None = None
) -> Any:
    """A model as a function of tensors: `Cached` of a decoder, of any other head `Headed`."""
    if head.kind == NEXT_TOKEN:
        return Cached(model, layout_in(model), listen, layers).eval()
    return Headed(model, layout_in(model), head, listen, attached).eval()


def prepare(config: Any) -> None:
    """Make a config traceable: our attention, and experts computed for every token."""
    config._attn_implementation = ATTENTION_FUNCTION
    config.use_cache = not is_encoder(config)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = EXPERTS_FUNCTION
    for rope in rope_parameters(config):
        if rope.get("rope_type") == "dynamic":
            raise ExportError(
                "rope_type 'dynamic' recomputes its frequencies in Python as the text grows; no graph can"
            )


def skeleton_of(config: Any, dtype: torch.dtype, plain: bool = False, head: TaskHead = DECODER) -> PreTrainedModel:
    """A config's model without weights, on the meta device; `plain` computes attention and experts by its own code."""
    prepare(config)
    if plain or layout_of(config).keys in ("own", "split"):
        config._attn_implementation = "eager"  # whose classes some of them look up by this name
    if plain and hasattr(config, "_experts_implementation"):
        config._experts_implementation = "batched_mm"
    # no such architecture, or attention code of its own for each backend; for a plain trace whatever is raised
    unbuilt: tuple[type[Exception], ...] = (Exception,) if plain else (KeyError, ValueError)
    try:
        with torch.device("meta"):
            skeleton = head.make(config, dtype).eval()
    except unbuilt as error:
        raise ExportError(f"transformers builds no {config.model_type!r} with such attention: {error}") from error
    if not plain:
        drop_spare(skeleton)
        rearrange(skeleton)
    for module in skeleton.modules():
        # The long factors apply beyond `Sizes.max_positions`; the graph holds the short ones only.
        if getattr(module, "rope_type", None) == "longrope":
            module.rope_type, module.compute_default_rope_parameters = "default", ROPE_INIT_FUNCTIONS["longrope"]
    return skeleton


def buffers_of(skeleton: PreTrainedModel) -> dict[str, Tensor]:
    """Buffers that no checkpoint holds (rotation frequencies, embedding scales), with values."""
    buffers = dict[str, Tensor]()
    for path, module in skeleton.named_modules():
        names = sorted(module._non_persistent_buffers_set)
        before = {name: module._buffers[name] for name in names}
        for name in names:
            module._buffers[name] = torch.empty_like(before[name], device="cpu")
        if names:
            owner = _owner(skeleton, path)
            for own in (module, owner):  # which may fill a buffer of its parts (Falcon-H1)
                owner._init_weights(own)
        buffers |= {f"{path}.{name}".lstrip("."): module._buffers[name] for name in names}
        module._buffers.update(before)
    return buffers


def _owner(skeleton: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost model that a module is part of: it knows how its buffers begin."""
    inside = {name: module for name, module in skeleton.named_modules() if isinstance(module, PreTrainedModel)}
    return inside[max((name for name in inside if not name or f"{path}.".startswith(f"{name}.")), key=len)]


def carried_by(skeleton: PreTrainedModel, head: TaskHead = DECODER) -> list[Carries]:
    """Find what each layer carries by a pass over two tokens on the meta device."""
    seen = set[str]()

    def listen(name: str, value: Tensor, _stream: bool) -> Tensor:
        seen.add(name)
        return value

    with torch.device("meta"), quiet(), torch.no_grad():
        ids = torch.ones(1, 2, dtype=torch.long)
        module = wrapped(skeleton, listen, head)
        if head.kind == NEXT_TOKEN:
            _, pasts = module(ids, ids, ids, [])
        else:
            module(ids, ids, ids, ids)
            pasts = [module.read[layer] for layer in sorted(module.read)]
    return [carries(own, HookPoint.SsmWrite(layer).name in seen) for layer, own in enumerate(pasts)]


def find_kinds(
    skeleton: PreTrainedModel, sizes: PastSizes, buffers: Mapping[str, Tensor], head: TaskHead = DECODER
) -> Kinds:
    """Find which layers of a model on the meta device compute the same."""
    layout, layers = layout_in(skeleton), len(sizes[0])
    with torch.device("meta"):
        example = _example(range(layers), sizes, head)
    tokens = [value for value in example if isinstance(value, Tensor)]
    recorder = Recorder(skeleton, layout.blocks, tokens, example[3] if head.kind == NEXT_TOKEN else [], layout.layers)
    try:
        with quiet(), torch.no_grad(), recorder:
            wrapped(skeleton, recorder.listen, head)(*example)
    except ExportError:
        raise
    except Exception:  # whatever torch raises where the meta device cannot follow: nothing is known of the layers
        return all_different(layers // layout.layers, layout.layers)
    return kinds_of(skeleton, layout.blocks, recorder, buffers)


def _mark(name: str, value: Tensor, stream: bool) -> Tensor:
    attributes: dict[str, Any] = {"name": name, "stream": int(stream)}
    return torch.onnx.ops.symbolic(
        f"{MARKER_DOMAIN}::HookPoint", [value], attributes, dtype=value.dtype, shape=value.shape, version=1
    )


def example_ids(past: int = TRACE_PAST) -> tuple[Tensor, ...]:
    """Token ids, mask and positions of a call to trace."""
    return tuple(torch.ones(TRACE_BATCH, width, dtype=torch.long) for width in (SEQ, past + SEQ, SEQ))


def _example(layers: Sequence[int], sizes: PastSizes, head: TaskHead) -> tuple[Any, ...]:
    if head.kind != NEXT_TOKEN:
        ids, mask, positions = example_ids(past=0)
        return ids, mask, positions, torch.ones_like(ids)
    carried, dtype = sizes

    def zeros(port: CachePort) -> Tensor:
        kind = torch.promote_types(dtype, torch.float32) if port.sums else dtype
        return torch.zeros(port.shape(TRACE_BATCH, TRACE_PAST), dtype=kind)

    return *example_ids(), [tuple(map(zeros, carried[layer].ports(layer))) for layer in layers]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's exporter: missing torchvision and deprecations do not concern the caller."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def trace(skeleton: PreTrainedModel, sizes: PastSizes, kinds: Kinds, head: TaskHead = DECODER) -> ir.Model:
    """Trace a model of `skeleton_of` to ONNX with `mionnx::HookPoint` marker nodes; its parameters are fake afterwards.

    Raises:
        ExportError: the family is laid out in an unknown way, or the torch exporter refused the model.
    """
    layout = layout_in(skeleton)
    try:
        with quiet(), UNCACHED, torch.no_grad(), ExitStack() as stack:
            with FakeTensorMode():
                allocate(skeleton)  # all of it: layers that are traced may share weights with others
                example = _example(kinds.hooked, sizes, head)
            stack.enter_context(_passed_over(skeleton, layout, kinds))
            carried = sizes[0] if head.kind == NEXT_TOKEN else ()
            ports = [carried[layer].ports(layer) for layer in kinds.hooked] if carried else []
            return to_onnx(wrapped(skeleton, _mark, head, kinds.hooked), example, ports, MAIN_OUTPUTS[head.kind])
    except torch.onnx.errors.OnnxExporterError as error:
        if isinstance(error.__cause__, ExportError):
            raise error.__cause__ from None
        raise ExportError(f"torch could not export {skeleton.config.model_type!r}: {error}") from error


def to_onnx(
    module: nn.Module, example: tuple[Any, ...], ports: Sequence[Sequence[CachePort]], output: str = "logits"
) -> ir.Model:
    """Export a function of tokens, and of what some layers carry if it takes any, by torch's own exporter."""
    dynamic = torch.export.Dim.DYNAMIC
    tokens = [value for value in example if isinstance(value, Tensor)]
    two = {0: dynamic, 1: dynamic}

    def shape(port: CachePort) -> dict[int, Any]:
        return {axis: dynamic for axis, dim in enumerate([None, *port.dims]) if dim is None}

    pasts = [[tuple(map(shape, own)) for own in ports] for _ in example[len(tokens) :]]
    flat = [port for own in ports for port in own]
    with one_trace():
        program = torch.onnx.export(
            module.eval(),
            example,
            dynamo=True,
            dynamic_shapes=(*(two for _ in tokens), *pasts),
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            input_names=[*TOKEN_INPUTS[: len(tokens)], *(port.past for port in flat)],
            output_names=[output, *(port.present for port in flat)],
        )
    for value in list(program.model.graph.initializers.values()):  # by the model's names, not by those of the wrapper
        del program.model.graph.initializers[value.name]
        value.name = value.name.removeprefix("model.")
        program.model.graph.register_initializer(value)
    return program.model


@contextmanager
def _passed_over(skeleton: PreTrainedModel, layout: Layout, kinds: Kinds) -> Iterator[None]:
    """Let the layers that are not traced hand the stream on."""
    blocks = submodule(skeleton, layout.blocks)
    modules = dict(blocks.named_children())
    try:
        for name, block in modules.items():
            if int(name) not in kinds.traced:
                setattr(blocks, name, Passed(block, kinds.returned))
        yield
    finally:
        for name, block in modules.items():
            setattr(blocks, name, block)


def allocate(model: nn.Module) -> None:
    """Move parameters and buffers to the CPU, inside a `FakeTensorMode`; tied ones stay tied."""
    fakes: dict[int, Tensor] = {}
    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                    parameter = isinstance(tensor, nn.Parameter)
                    fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if parameter else fake
                table[name] = fakes[id(tensor)]
