"""Models that are run once on a whole text, without a cache, as functions of tensors: encoders, and any other head."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from exporters.head_facts import tells_replaced
from exporters.transformers.attention import Calls, Listener, TappedCache, Taps, cache_word, replace_for
from exporters.transformers.encoder_families import is_encoder
from exporters.transformers.heads import TaskHead
from exporters.transformers.layout import Layout
from exporters.transformers.sentence import SENTENCE, at_token, first_columns, last_columns
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import HEAD_POINTS

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_TOKEN = -1  # in the place of a padding token that a config does not name
Attach = Callable[[PreTrainedModel, Taps], Any]


class Headed(nn.Module):
    """A model as a function of ids, mask, positions and token types, each [batch, seq]; it gives its head's outputs.

    Args:
        attach: instruments the model, as `trace.attached`.
    """

    def __init__(
        self, model: PreTrainedModel, layout: Layout, head: TaskHead, listen: Listener, attach: Attach
    ) -> None:
        super().__init__()
        self.model, self.layout, self.head, self.listen, self.attach = model, layout, head, listen, attach
        self.read: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of the last call

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, token_type_ids: Tensor
    ) -> tuple[Tensor, ...]:
        causal = not is_encoder(self.model.config)
        taps = TappedCache([], self.listen, self.layout).taps if causal else Taps(self.listen, self.layout)
        taps.mask = attention_mask
        arguments: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids + (self.layout.offset or 0),
        }
        if causal:  # whose token types, of one that knows any, are rows of its vocabulary
            arguments |= {cache_word(base_of(self.model)): taps.cache, "use_cache": True}
        else:
            types = token_type_ids if has_types(self.model.config) else torch.zeros_like(input_ids)
            arguments["token_type_ids"] = types
        reads = _reads_last(self.model.config, input_ids, attention_mask) if causal else _first(attention_mask)
        with ExitStack() as stack:
            handed = _handed(stack, self.model, arguments)  # before a tap takes the place of a forward
            stack.enter_context(self.attach(self.model, taps))
            stack.enter_context(_tapped_head(self.model, self.head, taps))
            stack.enter_context(Calls(reads))
            if causal:  # transformers takes no several rows without a padding token
                text = self.model.config.get_text_config()
                replace_for(stack, text, "pad_token_id", NO_TOKEN if text.pad_token_id is None else text.pad_token_id)
            output = self.model(**handed)
            results = self._results(taps, output, attention_mask)
        self.read = taps.read
        return results

    def __repr__(self) -> str:
        """Its own name: the tracing prints the model, and modules of some families read buffers for that."""
        return type(self).__name__

    def _results(self, taps: Taps, output: Any, mask: Tensor) -> tuple[Tensor, ...]:
        if self.head.kind == "embedding":
            return (self.model.get_submodule(SENTENCE)(output[0], mask, taps.at),)
        if self.head.kind == "none":
            pooled = output.get("pooler_output")
            return output[0], *(() if pooled is None else (taps.at(HookPoint.Pooler, pooled),))
        if self.head.kind == "span":
            logits = torch.stack([output.start_logits, output.end_logits], -1)
        else:
            logits = output.logits.unsqueeze(-1) if tells_replaced(self.head.architecture) else output.logits
        return (taps.at(HookPoint.parse(HEAD_POINTS[self.head.kind]), logits),)


def has_types(config: Any) -> bool:
    """Whether a family has several token types."""
    return (getattr(config, "type_vocab_size", 0) or 0) > 1


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head."""
    return getattr(model, model.base_model_prefix, model)


def _handed(stack: ExitStack, model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a model takes for its base; those that the base alone takes reach it past the head."""
    outer, inner = ({*signature(one.forward).parameters} for one in (model, base_of(model)))
    beside = {name: value for name, value in arguments.items() if name in inner - outer}

    def past_the_head(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **beside}

    if beside:
        stack.callback(base_of(model).register_forward_pre_hook(past_the_head, with_kwargs=True).remove)
    takes = (outer & inner) | {"input_ids", "attention_mask"}
    return {name: value for name, value in arguments.items() if name in takes}


def _first(mask: Tensor) -> Callable[[Any, Any, Any], Any]:
    """Let `stream[:, 0]` be each row's first token, where texts are padded on the left too."""

    def answer(func: Any, args: Any, options: Any) -> Any:
        if func is not Tensor.__getitem__ or args[0].dim() != 3 or not args[0].is_floating_point():
            return func(*args, **options)
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        every = slice(None)
        first = len(index) > 1 and index[0] == every and type(index[1]) is int and index[1] == 0
        if not first or any(one != every for one in index[2:]):
            return func(*args, **options)
        return at_token(args[0], first_columns(mask))

    return answer


def _reads_last(config: Any, ids: Tensor, mask: Tensor) -> Callable[[Any, Any, Any], Any]:
    """Let `logits[rows, columns]` be those of each row's last token that is no padding, whatever stands for padding.

    transformers looks for the last token that is not the one for padding, whatever the mask says.
    """
    padding = config.get_text_config().pad_token_id

    def answer(func: Any, args: Any, options: Any) -> Any:
        if func is not Tensor.__getitem__ or args[0].dim() != 3 or not args[0].is_floating_point():
            return func(*args, **options)
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if len(index) != 2 or not all(isinstance(one, Tensor) and one.dim() == 1 for one in index):
            return func(*args, **options)
        real = mask if padding is None else mask * (ids != padding)
        return at_token(args[0], last_columns(real))

    return answer


@contextmanager
def _tapped_head(model: PreTrainedModel, head: TaskHead, taps: Taps) -> "Iterator[None]":
    """Tap what the last product of a head reads."""
    with ExitStack() as stack:
        if head.kind == "masked_lm":
            module = model.get_output_embeddings()
            point = HookPoint.MlmHead
        else:
            module = _classifier(model) if head.kind == "classes" else None
            point = HookPoint.Pooler
        if module is not None:

            def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
                fits = args[0].dim() == len(point.axes or ())
                return (taps.at(point, args[0]), *args[1:]) if fits else None

            stack.callback(module.register_forward_pre_hook(before).remove)
        yield


def _classifier(model: PreTrainedModel) -> nn.Module | None:
    """The last product of a classifier."""
    inside = {id(module) for module in base_of(model).modules()}
    linear = [one for one in model.modules() if isinstance(one, nn.Linear) and id(one) not in inside]
    fitting = [one for one in linear if one.out_features == model.config.num_labels]
    return fitting[-1] if fitting else None
