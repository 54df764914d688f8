"""`Metadata`: sizes, hook points, attention and origin, as `metadata_props` of `model.onnx`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mionnx.errors import ModelError

FORMAT_VERSION = 1
PREFIX = "mionnx."


@dataclass(frozen=True)
class Sizes:
    """The sizes a user asks for. `max_positions` is None where a sequence may be of any length."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None = None


# Names of the context length in configs, in the order in which they count.
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "context_length", "ctx_len", "max_seq_len")


def context_length(config: Mapping[str, Any]) -> int | None:
    """The context length that a checkpoint's config names; None if it names none.

    Args:
        config: the table of `config.json`.
    """
    inner = config.get("text_config")
    found = [config.get(name) for name in CONTEXT_NAMES] + ([context_length(inner)] if isinstance(inner, dict) else [])
    return next((length for length in found if type(length) is int and length > 0), None)


@dataclass(frozen=True)
class Attention:
    """One layer's attention.

    Attributes:
        output_projection: name of the initializer of the output projection.
        output_is_rows: True if it is stored [n_heads * head_dim, hidden], False if [hidden, n_heads * head_dim].
        sliding_window: how many keys a query sees, itself included; None if it sees all before it.
    """

    output_projection: str
    output_is_rows: bool
    sliding_window: int | None = None


@dataclass(frozen=True)
class Metadata:
    """The self-description of a hooked model.

    Attributes:
        family: the `model_type` of the checkpoint's config.
        dtype: numpy name of the weights' and activations' dtype.
        hooks: hook name -> axes, in execution order; an axis is a name where it is dynamic, a number where it is not.
        attention: one entry a layer; none in a recurrent model.
        exporter: versions of what made the file.
        weights_sha256: hash of the checkpoint's weight files, in the order of their names.
        weight_files: weight file -> "size", "sampled" and "sha256" (`mionnx.graph.weight_check`); none in a model of
            an earlier mionnx.
        context_length: the longest text that the checkpoint was made for, as its config says; None if it does not.
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

    @property
    def recurrent(self) -> bool:
        """Whether the model carries a recurrent state, and no keys and values."""
        return not self.attention

    @property
    def has_removal(self) -> bool:
        """Whether its recurrence takes something out of the state at every token (RWKV-7)."""
        return self.family == "rwkv7"

    def to_props(self) -> dict[str, str]:
        """As `metadata_props`: one JSON text a field."""
        return {
            f"{PREFIX}format": json.dumps(FORMAT_VERSION),
            **{f"{PREFIX}{key}": json.dumps(value, separators=(",", ":")) for key, value in asdict(self).items()},
        }

    @classmethod
    def from_props(cls, props: Mapping[str, str]) -> "Metadata":
        """Read back what `to_props` wrote.

        Raises:
            ModelError: the file is no hooked model, is of another format version, or its metadata is damaged.
        """
        if f"{PREFIX}format" not in props:
            raise ModelError(
                "this ONNX file is not a hooked model: it has no mionnx metadata; make one with `mionnx export`"
            )
        try:
            values = {
                key.removeprefix(PREFIX): json.loads(text) for key, text in props.items() if key.startswith(PREFIX)
            }
            version = values.pop("format")
            if version != FORMAT_VERSION:
                raise ModelError(
                    f"hooked model of format {version}, but this mionnx reads format {FORMAT_VERSION}: export it again"
                )
            values["sizes"] = Sizes(**values["sizes"])
            values["attention"] = [Attention(**entry) for entry in values["attention"]]
            length = values.get("context_length")
            if length is not None and (type(length) is not int or length < 1):
                raise ModelError(f"the hooked model's metadata is damaged: context_length {length!r}")
            if not all(isinstance(known, dict) for known in values.get("weight_files", {}).values()):
                raise TypeError("weight_files must be dictionaries")
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"the hooked model's metadata is damaged: {error}") from error
