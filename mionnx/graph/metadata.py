"""`Metadata`: sizes, hook points, attention and origin, as `metadata_props` of `model.onnx`.

They may come from anybody: `from_props` is their only reader, and checks types and limits. Whether they agree with the
graph is checked by `HookedModel.open`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import starmap, zip_longest
from typing import Any

from mionnx.errors import ModelError
from mionnx.graph.folder_file import parse_json
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.layers import (
    OWN_SIZES,
    RECURRENCE_RULES,
    STATE_SIZES,
    TERMS,
    Attention,
    CachePort,
    Heads,
    Layer,
    Recurrence,
)
from mionnx.graph.sizes import OPTIONAL_SIZES, Sizes, axis_sizes
from mionnx.graph.stock_graph import is_table

FORMAT_VERSION = 1
PREFIX = "mionnx."
COMPILED = f"{PREFIX}compiled"  # of a compiled intervention graph, which is no hooked model
LONGEST_METADATA = 2**24  # characters; 30 layers have 40,000
NORMED_STREAM = "normed_stream"  # key of `exporter`, where the stream is normed between additions
FOUND_BY_STRUCTURE = "found_by_structure"  # key of `exporter`, where no tap shows a hook point in torch
ATTENDS_TO_PADDING = "attends_to_padding"  # key of `exporter`, where attention does not heed its mask
IDENTITIES = "identity_experts"  # key of `exporter`: the first expert without weights, which gives back what it reads
# Fields that are not written while they are those of a decoder of floats: its metadata keep their bytes.
OPTIONAL = (
    *("fused", "hook_dtypes", "stock", "quantised", "exponents", "narrowed"),
    *("direction", "head", "labels", "activation", "pooling", "recurrence"),
)
DIRECTIONS = ("left", "both")  # where the tokens stand that a token reads
NEXT_TOKEN = "next_token"
EFFECTIVE_ATTENTION = ("SsmEffectiveAttn", "SsmEffectiveAttnRaw", "RwkvEffectiveAttn", "RwkvEffectiveAttnRaw")
# What a model is for -> the graph's main output.
MAIN_OUTPUTS = {
    **dict.fromkeys((NEXT_TOKEN, "masked_lm", "classes", "token_classes", "span"), "logits"),
    "embedding": "embedding",
    "none": "last_hidden_state",
}
# What a model is for -> the hook point of its main output.
HEAD_POINTS = {
    **dict.fromkeys((NEXT_TOKEN, "masked_lm"), HookPoint.Logits.name),
    "classes": HookPoint.ClassLogits.name,
    "token_classes": HookPoint.TokenLogits.name,
    "span": HookPoint.SpanLogits.name,
    "embedding": HookPoint.Embedding.name,
}
ACTIVATIONS = ("", "softmax", "sigmoid", "identity")
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
LARGEST_EXPONENT = 64  # of the power of two that a hook point may hold
DTYPE_NAMES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Metadata:
    """The self-description of a hooked model.

    Attributes:
        family: the `model_type` of the checkpoint's config.
        dtype: numpy name of the weights' and activations' dtype.
        hooks: hook name -> axes, in execution order; an axis is a name where it is dynamic, a number where it is not.
        weights_sha256: hash of the checkpoint's weight files, in the order of their names; empty where the export did
            not wait for it (`HookedModel.weights_sha256` does).
        weight_files: weight file -> "size", "sampled" and "sha256" (`mionnx.graph.weight_check`), or "changed" where
            the last is still to come (`mionnx.graph.weight_record`); none in the models that ship.
        context_length: the longest text that the checkpoint was made for, as its config says; None if it does not.
        fused: fused operators that an adopted file came with (`mionnx.graph.fused_operators`); not written if none.
        hook_dtypes: hook name -> dtype, of those that have another than the model's; not written if there are none.
        stock: the graph of an adopted file as it came (`mionnx.graph.stock_graph`); not written if there is none.
        quantised: settings of the blocks that weights of floats were made into (`mionnx.quantise`); not written if the
            weights are as they came.
        exponents: hook name -> e, of those that hold 2^e times their value in the file (`mionnx.graph.exponents`); not
            written if there are none.
        narrowed: how it was made of a model in a wider dtype, and what that costs; not written if it was not.
        direction: which tokens a token reads, those to the "left" of it or "both" those before and behind it.
        head: what the model is for, a key of `MAIN_OUTPUTS`; "next_token" of a decoder.
        labels: names of classes, of the tags of tokens, or of the ends of a span, in the order of the logits.
        activation: what makes probabilities of the logits of classes: "softmax", "sigmoid", "identity" of a regression;
            empty for other heads, but "sigmoid" of tags that do not exclude one another.
        pooling: how a sentence embedding is made of the stream: "modes" (`POOLINGS`, several are concatenated),
            "normalize" (whether embeddings have length 1), "include_prompt" (whether the tokens of a prompt count), and
            for texts "prompts" (name -> text before each text), "default_prompt" (a name, or null), "similarity"
            ("cosine", "dot", "euclidean", "manhattan"), "lower_case". Empty without sentence embeddings.
        attention, recurrence: an entry a layer, null of one that has none of it: see `layers`. Both are empty of an
            RWKV-6 or 7; `recurrence` is not written of one whose layers all have attention.
    """

    family: str
    dtype: str
    sizes: Sizes
    hooks: Mapping[str, list[str | int]]
    attention: list[Attention | None]
    exporter: Mapping[str, str] = field(default_factory=dict)
    weights_sha256: str = ""
    weight_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    context_length: int | None = None
    fused: list[str] = field(default_factory=list)
    hook_dtypes: Mapping[str, str] = field(default_factory=dict)
    stock: Mapping[str, Any] = field(default_factory=dict)
    quantised: Mapping[str, Any] = field(default_factory=dict)
    exponents: Mapping[str, int] = field(default_factory=dict)
    narrowed: Mapping[str, Any] = field(default_factory=dict)
    direction: str = "left"
    head: str = NEXT_TOKEN
    labels: list[str] = field(default_factory=list)
    activation: str = ""
    pooling: Mapping[str, Any] = field(default_factory=dict)
    recurrence: list[Recurrence | None] = field(default_factory=list)

    @property
    def weight_dtype(self) -> str:
        """The dtype of the weights: that of the activations, or int4 or int8 of a quantised model."""
        return f"int{self.quantised['bits']}" if self.quantised else self.dtype

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """What each layer is: attention, a recurrence, or both."""
        if self.attention or self.recurrence:
            return tuple(starmap(Layer, zip_longest(self.attention, self.recurrence)))
        count = min(self.sizes.num_layers, len(self.hooks))  # a damaged number is refused later, and takes no memory
        size, removes = self.sizes.head_dim, HookPoint.RwkvA(0).name in self.hooks
        gates = ["write", *(["erase"] if removes else []), "decay", "token_shift"]
        rule = "delta" if removes else "gated"
        return (Layer(None, Recurrence(rule, self.sizes.num_heads, size, size, token_shift=True, gates=gates)),) * count

    @cached_property
    def attends(self) -> bool:
        """Whether any layer has attention."""
        return any(layer.attention for layer in self.layers)

    @cached_property
    def carries_state(self) -> bool:
        """Whether any layer has a recurrence or a short convolution, and so hands a state to the next call."""
        return any(layer.recurrence for layer in self.layers)

    @cached_property
    def state_alone(self) -> bool:
        """Whether states are all that is handed on: of one size for any text, so that every call returns them."""
        return self.carries_state and not self.attends

    @cached_property
    def shifts_tokens(self) -> bool:
        """Whether layers mix tokens with those before (RWKV): padding is then hidden by gates, not by a mask."""
        return any(layer.recurrence and layer.recurrence.token_shift for layer in self.layers)

    @cached_property
    def state_heads(self) -> int:
        """Heads of the widest state; 0 without one."""
        return max((layer.recurrence.n_heads for layer in self.layers if layer.recurrence), default=0)

    @cached_property
    def state_gates(self) -> list[str]:
        """The terms of a state that interventions can turn in any layer."""
        terms = {term for layer in self.layers if layer.recurrence for term in layer.recurrence.gates}
        return [term for term in TERMS if term in terms]

    def window(self, layer: int) -> int | None:
        """How many keys a layer's queries see; None if all, and of a layer without attention."""
        attention = self.layers[layer].attention
        return None if attention is None else attention.sliding_window

    @property
    def output(self) -> str:
        """The graph's main output: "logits", or "embedding" [batch, d], or "last_hidden_state" without a head."""
        return MAIN_OUTPUTS[self.head]

    @property
    def main_point(self) -> str:
        """The hook point of the main output; without a head the last one."""
        return HEAD_POINTS.get(self.head) or [*self.hooks][-1]

    @property
    def positional(self) -> bool:
        """Whether the main output has an entry for each token; that of classes and embeddings has one a text."""
        return self.head not in ("classes", "embedding")

    @property
    def reference_dtype(self) -> str:
        """The dtype that its checkpoint is run in for comparison: of a narrowed model that which it was made of."""
        return "float32" if self.narrowed else self.dtype

    @property
    def has_distribution(self) -> bool:
        """Whether its main output is logits of probabilities: no embedding, no stream, no number of a regression."""
        return self.output == "logits" and self.activation != "identity"

    @property
    def columns(self) -> int:
        """Entries along the last axis of the main output: tokens, labels, ends of a span, or features."""
        axes = self.hooks.get(HEAD_POINTS.get(self.head, ""), [None])
        if isinstance(axes[-1], int):
            return axes[-1]
        return self.sizes.vocab_size if MAIN_OUTPUTS[self.head] == "logits" else self.sizes.hidden_size

    @property
    def bidirectional(self) -> bool:
        """Whether a token reads those behind it too."""
        return self.direction == "both"

    @property
    def reads_whole(self) -> bool:
        """Whether it reads each text whole and continues none: an encoder, or any head but that of next tokens."""
        return self.bidirectional or self.head != NEXT_TOKEN

    @property
    def exclusive(self) -> bool:
        """Whether its logits are of choices that exclude one another, whose probabilities are a softmax."""
        return self.activation in ("", "softmax")

    def heads(self, layer: int) -> Heads:
        """Return how many keys a layer keeps, and the sizes of a key and of a value; the model's without attention."""
        own = self.attention[layer] if layer < len(self.attention) else None
        own = own or Attention("", False)
        size = self.sizes.head_dim if own.head_dim is None else own.head_dim
        count = self.sizes.num_kv_heads if own.num_kv_heads is None else own.num_kv_heads
        return count, size, size if own.value_dim is None else own.value_dim

    @cached_property
    def ports(self) -> tuple[CachePort, ...]:
        """What the layers carry from call to call, in the order of the graph's inputs."""
        hidden = self.sizes.hidden_size
        return tuple(port for i, layer in enumerate(self.layers) for port in layer.ports(i, self.heads(i), hidden))

    def past_shapes(self, batch: int, past: int) -> dict[str, tuple[int, ...]]:
        """Graph input -> the shape of what it carries: keys and values are [batch, n_kv_heads, past, head_dim]."""
        return {port.past: port.shape(batch, past) for port in self.ports}

    def axis_sizes(self, point: HookPoint) -> dict[str, int]:
        """Axis name -> size, of the axes of a hook point that are as long in every pass."""
        layer = point.layer or 0
        recurrence = self.layers[layer].recurrence if layer < len(self.layers) else None
        named = axis_sizes(point, self.sizes, self.heads(layer), recurrence)
        if point.variant in EFFECTIVE_ATTENTION and self.decays_by_number(layer):
            named["n_heads"] *= named["value_dim"]  # weights differ from channel to channel
        return named

    def decays_by_number(self, layer: int) -> bool:
        """Whether each number of a layer's state has a decay of its own (Mamba, RWKV-4), not a head or a key."""
        own = self.layers[layer].recurrence
        if own is not None and own.token_shift:
            return own.key_dim != own.value_dim  # RWKV-4's state is not square
        decays = self.hooks.get(HookPoint.SsmLogDecay(layer).name, [0])[-1]
        return own is not None and own.value_dim > 1 and decays == own.key_dim * own.value_dim

    def to_props(self) -> dict[str, str]:
        """As `metadata_props`: one JSON text a field."""
        defaults = {one.name: one.default for one in fields(self)}
        own = {key for key, value in asdict(self).items() if value and value != defaults[key]}
        values = {key: value for key, value in asdict(self).items() if key in own or key not in OPTIONAL}
        values["sizes"] = {k: v for k, v in values["sizes"].items() if v is not None or k not in OPTIONAL_SIZES}
        for key, entries in (("attention", self.attention), ("recurrence", self.recurrence)):
            if key in values:
                values[key] = [entry and entry.to_entry() for entry in entries]
        return {
            f"{PREFIX}format": json.dumps(FORMAT_VERSION),
            **{f"{PREFIX}{key}": json.dumps(value, separators=(",", ":")) for key, value in values.items()},
        }

    @classmethod
    def from_props(cls, props: Mapping[str, str]) -> "Metadata":
        """Read back what `to_props` wrote."""
        if sum(len(key) + len(text) for key, text in props.items()) > LONGEST_METADATA:  # before any of it is parsed
            raise ModelError(f"the hooked model's metadata has more than {LONGEST_METADATA:,} characters: refused")
        if f"{PREFIX}format" not in props:
            raise ModelError(
                "this ONNX file is not a hooked model: it has no mionnx metadata; make one with `mionnx export`"
            )
        try:
            own = {key.removeprefix(PREFIX): text for key, text in props.items() if key.startswith(PREFIX)}
            values = {key: parse_json(text) for key, text in own.items()}
        except ModelError as error:
            raise ModelError(f"the hooked model's metadata is damaged: {error}") from error
        version = values.pop("format")
        if version != FORMAT_VERSION:
            raise ModelError(
                f"hooked model of format {version}, but this mionnx reads format {FORMAT_VERSION}: export it again"
            )
        try:
            values["sizes"] = Sizes(**values["sizes"])
            values["attention"] = [None if one is None else Attention(**one) for one in values["attention"]]
            recurrence = values.get("recurrence", [])
            values["recurrence"] = [None if one is None else Recurrence(**one) for one in recurrence]
            read = cls(**values)
            _check(read)
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError(f"the hooked model's metadata is damaged: {error}") from error
        return read


def _check(read: Metadata) -> None:
    """Check types and limits."""
    for name, value in asdict(read.sizes).items():
        if not (value is None and name in ("max_positions", *OPTIONAL_SIZES)):
            _check_number(f"sizes.{name}", value)
    for name, text in (("family", read.family), ("weights_sha256", read.weights_sha256)):
        _expect(isinstance(text, str) and len(text) <= 100, name, "a short text", text)
    _expect(read.dtype in DTYPE_NAMES, "dtype", f"one of {', '.join(DTYPE_NAMES)}", read.dtype)
    _expect(isinstance(read.exporter, dict), "exporter", "a table of versions", read.exporter)
    first = read.exporter.get(IDENTITIES, "0")
    _expect(isinstance(first, str) and first.isdecimal(), f"exporter.{IDENTITIES}", "a number in digits", first)
    _expect(isinstance(read.hooks, dict), "hooks", "a table of axes", read.hooks)
    for hook, axes in read.hooks.items():
        named = isinstance(axes, list) and all(type(axis) in (str, int) for axis in axes)
        _expect(named, f"hooks[{hook!r}]", "a list of axes", axes)
    if read.context_length is not None:
        _check_number("context_length", read.context_length)
    _expect(isinstance(read.weight_files, dict), "weight_files", "a table of files", read.weight_files)
    for file, facts in read.weight_files.items():
        _expect(isinstance(facts, dict), f"weight_files[{file!r}]", "a table", facts)
    texts = isinstance(read.fused, list) and all(isinstance(text, str) for text in read.fused)
    _expect(texts, "fused", "a list of texts", read.fused)
    dtypes = isinstance(read.hook_dtypes, dict) and {*read.hook_dtypes.values()} <= {*DTYPE_NAMES}
    dtypes = dtypes and read.hook_dtypes.keys() <= read.hooks.keys()
    _expect(dtypes, "hook_dtypes", "dtypes of hooks", read.hook_dtypes)
    settings = isinstance(read.quantised, dict) and (not read.quantised or read.quantised.get("bits") in (4, 8))
    _expect(settings, "quantised", "a table of settings with bits 4 or 8", read.quantised)
    powers = isinstance(read.exponents, dict) and read.exponents.keys() <= read.hooks.keys()
    powers = powers and all(type(one) is int and abs(one) <= LARGEST_EXPONENT for one in read.exponents.values())
    _expect(powers, "exponents", f"powers of two of hooks, {-LARGEST_EXPONENT} to {LARGEST_EXPONENT}", read.exponents)
    _expect(isinstance(read.narrowed, dict), "narrowed", "a table", read.narrowed)
    _check_head(read)
    table = "a graph, whether it was expanded, and the difference that is allowed"
    _expect(is_table(read.stock), "stock", table, read.stock)
    _check_layers(read)


def _check_layers(read: Metadata) -> None:
    """Check what the metadata say of each layer."""
    for name, entries in (("attention", read.attention), ("recurrence", read.recurrence)):
        fits = isinstance(entries, list) and (not read.recurrence or len(entries) in (0, read.sizes.num_layers))
        _expect(fits, name, f"a list of {read.sizes.num_layers} layers", entries)
    for layer, own in enumerate(read.recurrence):
        if own is None:
            continue
        is_rule = isinstance(own.rule, str) and own.rule in RECURRENCE_RULES
        _expect(is_rule, f"recurrence[{layer}].rule", "a rule", own.rule)
        _expect(isinstance(own.token_shift, bool), f"recurrence[{layer}].token_shift", "true or false", own.token_shift)
        gates = isinstance(own.gates, list) and all(isinstance(one, str) and one in TERMS for one in own.gates)
        _expect(gates, f"recurrence[{layer}].gates", f"among {', '.join(TERMS)}", own.gates)
        needed = dict.fromkeys(STATE_SIZES[:3], own.has_state)
        needed |= dict.fromkeys(STATE_SIZES[3:], bool(own.kernel or own.channels) or not own.has_state)
        for name, has in needed.items():
            if has or getattr(own, name) != 0:
                _check_number(f"recurrence[{layer}].{name}", getattr(own, name))
        _expect(own.kernel != 1, f"recurrence[{layer}].kernel", "2 or more, or none", own.kernel)
    for layer, entry in enumerate(read.attention):
        if entry is None:
            _expect(bool(read.recurrence), f"attention[{layer}]", "an entry", entry)
            continue
        _expect(isinstance(entry.output_projection, str), f"attention[{layer}]", "of a weight by its name", entry)
        _expect(isinstance(entry.output_is_rows, bool), f"attention[{layer}].output_is_rows", "true or false", entry)
        if entry.sliding_window is not None:
            _check_number(f"attention[{layer}].sliding_window", entry.sliding_window)
        for name in OWN_SIZES:
            # num_kv_heads of 0: a layer that reads the keys and values of an earlier one
            if getattr(entry, name) not in (None, 0) or (name != "num_kv_heads" and getattr(entry, name) == 0):
                _check_number(f"attention[{layer}].{name}", getattr(entry, name))


def _check_head(read: Metadata) -> None:
    """Check what the metadata say of the head."""
    for name, choices in (("direction", DIRECTIONS), ("head", (*MAIN_OUTPUTS,)), ("activation", ACTIVATIONS)):
        value = getattr(read, name)
        _expect(isinstance(value, str) and value in choices, name, f"one of {', '.join(choices)}", value)
    texts = isinstance(read.labels, list) and all(isinstance(text, str) for text in read.labels)
    _expect(texts, "labels", "a list of texts", read.labels)
    _expect(isinstance(read.pooling, dict), "pooling", "a table", read.pooling)
    modes = read.pooling.get("modes", [])
    _expect(isinstance(modes, list) and {*map(str, modes)} <= {*POOLINGS}, "pooling.modes", "poolings", modes)
    prompts = read.pooling.get("prompts", {})
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    _expect(texts, "pooling.prompts", "a table of texts", prompts)
    default = read.pooling.get("default_prompt")
    _expect(default is None or default in prompts, "pooling.default_prompt", "the name of a prompt", default)


def _check_number(name: str, value: object) -> None:
    count = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31  # True is an int in Python
    _expect(count, name, "a positive number", value)


def _expect(right: bool, name: str, form: str, value: object) -> None:
    if not right:
        text = repr(value)
        raise ValueError(f"{name} {text[:60]}{' ...' if len(text) > 60 else ''} must be {form}")
