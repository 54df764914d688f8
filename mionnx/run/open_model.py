"""`OpenModel`: a hooked model, its open graphs and its tokenizer; `Recipe`: how it is pickled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from tokenizers import Tokenizer

from mionnx.bind.bound_spec import Binder
from mionnx.engine.options import Options
from mionnx.errors import InputError, ModelError, TokenizerError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.graph.packed_weight import at_accuracy_level
from mionnx.inputs.chat_template import ChatTemplate, load_chat_template
from mionnx.inputs.tokens import UnknownWords, load_tokenizer
from mionnx.inputs.world_tokenizer import WorldTokenizer
from mionnx.machine.caller import caller_level
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.once import Once, once_property
from mionnx.machine.typed import typed
from mionnx.rewrite import Plan
from mionnx.run.find_model import cache_folder
from mionnx.run.graph_memory import IdleMemory, idle_limit
from mionnx.run.open_graphs import OpenGraph, OpenGraphs

T = TypeVar("T")


@typed(InputError)
class OpenModel:
    """A hooked model with its open graphs: what verbs of models are functions of."""

    def __init__(self, hooked: HookedModel, options: Options | None = None) -> None:
        self.options = options or Options()
        refuse_unpacked_blocks(hooked.name, hooked.in_blocks, self.options)
        self.hooked = at_level(hooked, self.options.accuracy_level)
        # The open graphs; specs that differ in values only share one.
        self.variants = OpenGraphs(self.hooked, self.options)
        self.binder = Binder(self.hooked)
        self.idle = IdleMemory()
        # What `from_pretrained` was given, and the dtype, if any; None for a model that was made from parts.
        self.source: tuple[str, str | None] | None = None
        self._opened: Once[Any, Any] = Once()

    @once_property
    def tokenizer(self) -> Tokenizer | WorldTokenizer:
        """The tokenizer: a `tokenizers.Tokenizer`, or a `WorldTokenizer` for an RWKV World model."""
        return load_tokenizer(self.hooked.folder)

    @once_property
    def unknown_words(self) -> UnknownWords:
        """Watcher of the unknown words in this model's prompts."""
        return UnknownWords(self.tokenizer, self.hooked.name)

    @once_property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the model's folder."""
        return load_chat_template(self.hooked.folder)

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return self.hooked.metadata.sizes.num_layers

    @property
    def num_heads(self) -> int:
        """Query heads a layer."""
        return self.hooked.metadata.sizes.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads a layer."""
        return self.hooked.metadata.sizes.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hooked.metadata.sizes.head_dim

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.hooked.metadata.sizes.hidden_size

    @property
    def bidirectional(self) -> bool:
        """Whether tokens read those behind them too, as in an encoder."""
        return self.hooked.metadata.bidirectional

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.hooked.metadata.sizes.vocab_size

    def hook_points(self) -> list[HookPoint]:
        """All hook points of this model, in execution order."""
        return self.hooked.hook_points()

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model's folder has a tokenizer."""
        try:
            return self.tokenizer is not None
        except TokenizerError:
            return False

    def opened(self, kind: Callable[[HookedModel, Options], T]) -> T:
        """Return the one instance of a class that opens parts of this model; made on first use.

        Example:
            lens = model.opened(Lens)
        """
        self.idle.expect(idle_limit(self.variants.weights), self.release_memory)
        based = self.variants.base is not None  # parts from before there was a base hold weights of their own
        self._opened.keep(lambda key: key[1] is based)
        return self._opened.get((kind, based), lambda: kind(self.hooked, self.options))

    @property
    def parts(self) -> list[Any]:
        """The instances that `opened` made."""
        return self._opened.values()

    @property
    def pools(self) -> list[OpenGraphs]:
        """The open graphs of this model and of its parts."""
        parts = [getattr(part, "variants", None) for part in self.parts]
        return [self.variants, *(part for part in parts if isinstance(part, OpenGraphs))]

    def release_memory(self) -> None:
        """Return free memory now, and pages of weights that several graphs hold."""
        self.variants.engine.release()
        for pool in self.pools:
            pool.limit_pages()

    def watch_memory(self) -> None:
        """Return memory in the next pause, if the process has grown: at the end of every pass."""
        self.variants.watch_pages()
        self.idle.watch(idle_limit(self.variants.weights), self.release_memory)

    @property
    def compiled(self) -> Mapping[Plan, OpenGraph]:
        """Open graphs, the least recently used first; chains of cut graphs are left out."""
        graphs = [*self.variants.open.items()]
        return {plan: one for plan, one in graphs if isinstance(plan, Plan) and isinstance(one, OpenGraph)}

    def __reduce__(self) -> tuple[Any, ...]:
        return Recipe.open, (Recipe.of(self),)

    def __copy__(self) -> Self:
        return type(self)(self.hooked, self.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __repr__(self) -> str:
        sizes = self.hooked.metadata.sizes
        return (
            f"{type(self).__name__}({self.hooked.metadata.family}, {sizes.num_layers} layers, {sizes.num_heads} heads, "
            f"hidden {sizes.hidden_size}, vocabulary {sizes.vocab_size}, {self.options.provider})"
        )


M = TypeVar("M", bound=OpenModel)


@dataclass(frozen=True)
class Recipe(Generic[M]):
    """Folder and options of a model, to open it again in any process with that folder."""

    kind: type[M]
    folder: Path
    options: Options

    @classmethod
    def of(cls, model: M) -> Recipe[M]:
        """The recipe of an open model."""
        return cls(type(model), model.hooked.folder.absolute(), model.options)

    def open(self) -> M:
        """Open the model: read and check its graph; sessions are made when it first runs."""
        if not (self.folder / GRAPH).is_file():
            raise ModelError(
                f"{self.folder} has no {GRAPH}: a model is pickled as its folder and options, without weights, and can "
                "be opened where that folder is"
            )
        DiskCache(cache_folder()).use(self.folder)
        return self.kind(HookedModel.open(self.folder), self.options)


def refuse_unpacked_blocks(model: str, in_blocks: bool, options: Options) -> None:
    """Refuse to open a model of blocks, or one that will be, unpacked."""
    if in_blocks and options.prepack is False:
        raise InputError(
            f"prepack=False has no effect on {model}: its weights are blocks, which are always packed (unpacked, "
            "every product would make floats of them first, and a token take 40 to 80 times as long); leave it out"
        )


def at_level(hooked: HookedModel, level: int | None) -> HookedModel:
    """The same model with all products of blocks at one accuracy level; as it is for None."""
    # ONNX Runtime's MatMulNBits computes in floats at level 0. At level 4 it rounds what it reads to 8 bits, by blocks:
    # some 1.5 times as fast in decoding.
    # A sum of attention over padding, or over a past, has other last bits. At level 4 a value between two steps is then
    # rounded to the other one: the logits of SmolLM2 move by up to 0.9 of 17 for a change of 1e-7 in its stream, as
    # much as the rounding costs. At level 0 batches and pasts change last bits alone.
    if level is None:
        return hooked
    proto, products = at_accuracy_level(hooked.proto, level)
    if not products:
        raise InputError(
            f"accuracy_level={level} has no effect: {hooked.name} has no products with weights in blocks "
            '(MatMulNBits); from_pretrained(..., dtype="int4") makes some'
        )
    return replace(hooked, proto=proto)


class DynamicRoundingWarning(UserWarning):
    """Activations are rounded with one scale for a call: batches change results."""


def warn_of_dynamic_rounding(model: HookedModel) -> None:
    """Warn of a dynamically quantised model, when it is opened."""
    if model.rounds_by_call:
        warnings.warn(
            f"{model.name} rounds its activations to 8 bits with one scale for all tokens of a call (dynamic "
            "quantisation): rows of a batch, padding, earlier positions and cached decoding change each other's "
            "results by about the size of a step. Sweeps run one cell a call, all positions of it",
            DynamicRoundingWarning,
            stacklevel=caller_level(),
        )
