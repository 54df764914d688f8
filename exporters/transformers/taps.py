"""Taps: where the instrumented torch model hands each hook point's tensor to whoever listens.

The same taps serve tracing (a marker in the graph), recording (the value in eager mode) and editing (another value in
eager mode), so that the exported graph and the eager model mean the same thing by a hook point. Those inside attention
are in `attention`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from exporters.transformers.attention import ATTENTION, Listener, Taps, active, replace_for, tap_rotation
from exporters.transformers.families import Layout
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint


class _KeepAxes(TorchFunctionMode):
    """Undo a block's `x.reshape(-1, width)`: batch and sequence axes stay apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.reshape and len(args) == 3 and args[1] == -1 and args[0].dim() == 3:
            return args[0]
        return func(*args, **(kwargs or {}))


class _TapHalves(TorchFunctionMode):
    """Tap the two halves into which an MLP splits its fused gate-and-up projection."""

    def __init__(self, taps: Taps, layer: int) -> None:
        super().__init__()
        self.taps, self.layer = taps, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.chunk:
            return result
        gate, up = result
        return self.taps.at(HookPoint.MlpGate(self.layer), gate), self.taps.at(HookPoint.MlpUp(self.layer), up)


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


def submodule(model: PreTrainedModel, path: str, root: nn.Module | None = None) -> nn.Module:
    """A module by its path.

    Args:
        model: the whole model.
        path: from the root on.
        root: a block of it; the model itself if None.

    Raises:
        ExportError: there is none.
    """
    try:
        return (model if root is None else root).get_submodule(path)
    except AttributeError as error:
        raise ExportError(
            f"{model.config.model_type!r} models have no module {path!r} where it was expected: "
            "the family needs an entry in exporters/transformers/families.py"
        ) from error


class _Attachment:
    """The hooks of one `attached` context, collected so that all of them come off together."""

    def __init__(self, model: PreTrainedModel, layout: Layout, taps: Taps, stack: ExitStack) -> None:
        self.model, self.layout, self.taps, self.stack = model, layout, taps, stack

    def module(self, path: str, root: nn.Module | None = None) -> nn.Module:
        return submodule(self.model, path, root)

    def has(self, path: str | None, root: nn.Module) -> bool:
        """Whether there is such a module."""
        return path is not None and path in dict(root.named_modules())

    def before(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if args:
                return (function(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"])}

        self.stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def after(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        def hook(_module: nn.Module, _args: tuple, output: Any) -> Any:
            return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)

        self.stack.callback(module.register_forward_hook(hook).remove)

    def enter_around(self, module: nn.Module, mode: Callable[[], Any]) -> None:
        """Run a module's forward inside a context of its own."""
        forward = module.forward

        def inside(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return forward(*args, **kwargs)

        replace_for(self.stack, module, "forward", inside)

    def outside_blocks(self) -> None:
        at, layout = self.taps.at, self.layout
        embedding = self.module(layout.embedding) if layout.embedding else self.model.get_input_embeddings()
        self.after(embedding, lambda x: at(HookPoint.Embed, x))
        if layout.positions:
            self.after(self.module(layout.positions), lambda x: at(HookPoint.PosEmbed, x))
        if layout.final_norm:
            self.after(self.module(layout.final_norm), lambda x: at(HookPoint.FinalNorm, x))

    def block(self, i: int, block: nn.Module) -> None:
        at, layout = self.taps.at, self.layout
        self.before(block, lambda x: at(HookPoint.ResidPre(i), x))
        self.rope(self.module(layout.attention, block), i)
        self.after(self.module(layout.attention_added, block), lambda x: at(HookPoint.AttnOut(i), x))
        if layout.middle:
            self.before(self.module(layout.middle, block), lambda x: at(HookPoint.ResidMid(i), x, stream=True))
        self.mlp(i, block)
        self.after(block, lambda x: at(HookPoint.ResidPost(i), x))
        if layout.flattens:
            self.enter_around(block, _KeepAxes)

    def mlp(self, i: int, block: nn.Module) -> None:
        at, layout = self.taps.at, self.layout
        self.before(self.module(layout.mlp_input, block), lambda x: at(HookPoint.MlpPre(i), x))
        if not layout.experts or self.has(layout.down, block):
            self.neurons(i, block)
        self.after(self.module(layout.mlp_output, block), lambda x: at(HookPoint.MlpPost(i), x))
        self.after(self.module(layout.mlp_added, block), lambda x: at(HookPoint.MlpOut(i), x))

    def neurons(self, i: int, block: nn.Module) -> None:
        at, layout = self.taps.at, self.layout
        for path, point in ((layout.gate, HookPoint.MlpGate(i)), (layout.up, HookPoint.MlpUp(i))):
            if path:
                self.after(self.module(path, block), lambda x, point=point: at(point, x))
        if layout.gate_and_up:
            self.module(layout.gate_and_up, block)
            self.enter_around(self.module(layout.mlp_input, block), lambda: _TapHalves(self.taps, i))
        if layout.down:
            self.before(self.module(layout.down, block), lambda x: at(HookPoint.MlpAct(i), x))

    def rope(self, attention: nn.Module, i: int) -> None:
        """Let the family's rotation function know which layer calls it."""

        def enter(_module: nn.Module, _args: tuple) -> None:
            self.taps.layer = i

        self.stack.callback(attention.register_forward_pre_hook(enter).remove)


@contextmanager
def attached(model: PreTrainedModel, layout: Layout, listen: Listener) -> Iterator[Taps]:
    """Instrument a causal language model: `listen` gets each hook point's tensor.

    Args:
        model: a transformers causal language model.
        layout: where its family keeps its modules.
        listen: called as (hook name, tensor, stream); what it returns is what the model goes on with.

    Raises:
        ExportError: the model has no module where the layout says it has.
    """
    taps = Taps(listen)
    with ExitStack() as stack:
        attachment = _Attachment(model, layout, taps, stack)
        blocks = attachment.module(layout.blocks)
        attachment.outside_blocks()
        for i, block in enumerate(blocks):
            if not isinstance(block, Passed):
                attachment.block(i, block)
        tap_rotation(stack, taps, attachment.module(layout.attention, blocks[0]))
        replace_for(stack, model.config, "_attn_implementation", ATTENTION)
        stack.callback(active.remove, taps)
        active.append(taps)
        yield taps
