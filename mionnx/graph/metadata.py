"""`Metadata`: sizes, hook points, attention and origin, as `metadata_props` of `model.onnx`.

They may come from anybody: `from_props` is their only reader, and checks types and limits. Whether they agree with the
graph is checked by `HookedModel.open`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from mionnx.errors import ModelError
from mionnx.graph.folder_file import parse_json
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.io_names import KEYS_AND_VALUES
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
    *("direction", "head", "labels", "activation", "pooling"),
)
DIRECTIONS = ("left", "both")  # where the tokens stand that a token reads
NEXT_TOKEN = "next_token"
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
class Sizes:
    """The sizes a user asks for.

    `max_positions` is None where a sequence may be of any length; of a mixture of experts `n_experts` is how many a
    layer has, `n_chosen` how many a token goes through, `d_expert` the neurons of each. None without experts.
    `embedding_size` is the width of embeddings that are projected to the hidden size (ALBERT); None where it is that.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None = None
    n_experts: int | None = None
    n_chosen: int | None = None
    d_expert: int | None = None
    embedding_size: int | None = None


# Names of the context length in configs, in the order in which they count.
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "context_length", "ctx_len", "max_seq_len")


def context_length(config: Mapping[str, Any]) -> int | None:
    """The context length that a checkpoint's config names; None if it names none."""
    inner = config.get("text_config")
    lengths = [config.get(name) for name in CONTEXT_NAMES] + (
        [context_length(inner)] if isinstance(inner, dict) else []
    )
    return next((length for length in lengths if type(length) is int and length > 0), None)


@dataclass(frozen=True)
class Attention:
    """One layer's attention.

    Attributes:
        output_projection: name of the initializer of the output projection; empty where each token chooses its own.
        output_is_rows: True if it is stored [n_heads * head_dim, hidden], False if [hidden, n_heads * head_dim].
        sliding_window: how many keys a query sees, itself included; None if it sees all before it. Where tokens read
            both ways, as many on either side.
        num_kv_heads: keys and values that the layer keeps, 0 where it reads those of an earlier layer; None if as many
            as `Sizes` say.
        head_dim: size of a head's query and key; None if as `Sizes` say.
        value_dim: size of a head's value; None if that of its key.
    """

    output_projection: str
    output_is_rows: bool
    sliding_window: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None


Heads = tuple[int, int, int]  # of a layer: how many keys it keeps, the size of a key, the size of a value
OWN_SIZES = ("num_kv_heads", "head_dim", "value_dim")  # of `Attention`, not written where they are those of the model
EXPERT_SIZES = ("n_experts", "n_chosen", "d_expert")  # of `Sizes`; axes bear the same names
OPTIONAL_SIZES = (*EXPERT_SIZES, "embedding_size")  # not written where there are none
EMBEDDINGS = ("Embed", "PosEmbed", "TokenTypeEmbed")  # hook points before the projection to the hidden size


def axis_sizes(point: HookPoint, sizes: Sizes, heads: Heads) -> dict[str, int]:
    """Axis name -> size, of the axes of a hook point that are as long in every pass."""
    count, size, value_size = heads
    named = {"hidden": sizes.hidden_size, "n_heads": sizes.num_heads, "vocab": sizes.vocab_size}
    named |= {axis: own for axis in EXPERT_SIZES if (own := getattr(sizes, axis)) is not None}
    named |= {"n_kv_heads": count} if count else {}
    if sizes.embedding_size is not None and point.variant in EMBEDDINGS:
        named["hidden"] = sizes.embedding_size
    width = value_size if point.variant in ("AttnV", "AttnZ") else size
    return named | dict.fromkeys(("head_dim", "key_dim", "value_dim"), width)


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
    """

    family: str
    dtype: str
    sizes: Sizes
    hooks: Mapping[str, list[str | int]]
    attention: list[Attention]
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

    @property
    def weight_dtype(self) -> str:
        """The dtype of the weights: that of the activations, or int4 or int8 of a quantised model."""
        return f"int{self.quantised['bits']}" if self.quantised else self.dtype

    @property
    def recurrent(self) -> bool:
        """Whether the model carries a recurrent state, and no keys and values."""
        return not self.attention

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

    @property
    def has_removal(self) -> bool:
        """Whether its recurrence takes something out of the state at every token (RWKV-7)."""
        return HookPoint.RwkvA(0).name in self.hooks

    def heads(self, layer: int) -> Heads:
        """Return how many keys a layer keeps, and the sizes of a key and of a value."""
        own = self.attention[layer] if layer < len(self.attention) else Attention("", False)
        size = self.sizes.head_dim if own.head_dim is None else own.head_dim
        count = self.sizes.num_kv_heads if own.num_kv_heads is None else own.num_kv_heads
        return count, size, size if own.value_dim is None else own.value_dim

    def past_shapes(self, batch: int, past: int) -> dict[str, tuple[int, ...]]:
        """Graph input -> the shape of its keys or values: [batch, n_kv_heads, past, head_dim]."""
        return {name: (batch, count, past, width) for name, (count, width) in self._past_sizes.items()}

    @cached_property
    def _past_sizes(self) -> dict[str, tuple[int, int]]:
        """Graph input -> n_kv_heads and head_dim of its keys or values."""
        sizes: dict[str, tuple[int, int]] = {}
        for layer in range(self.sizes.num_layers):
            count, *widths = self.heads(layer)
            names = KEYS_AND_VALUES.layer_inputs(layer)
            sizes |= {name: (count, width) for name, width in zip(names, widths, strict=True)}
        return sizes

    def axis_sizes(self, point: HookPoint) -> dict[str, int]:
        """Axis name -> size, of the axes of a hook point that are as long in every pass."""
        return axis_sizes(point, self.sizes, self.heads(point.layer or 0))

    def to_props(self) -> dict[str, str]:
        """As `metadata_props`: one JSON text a field."""
        defaults = {one.name: one.default for one in fields(self)}
        own = {key for key, value in asdict(self).items() if value and value != defaults[key]}
        values = {key: value for key, value in asdict(self).items() if key in own or key not in OPTIONAL}
        values["sizes"] = {k: v for k, v in values["sizes"].items() if v is not None or k not in OPTIONAL_SIZES}
        for entry in values["attention"]:
            for name in OWN_SIZES:
                if entry[name] is None:
                    del entry[name]
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
            values["attention"] = [Attention(**entry) for entry in values["attention"]]
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
    for layer, entry in enumerate(read.attention):
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
