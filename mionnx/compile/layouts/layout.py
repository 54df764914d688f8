"""`ClientLayout`: the base of layouts, with all that a compiled folder asks of one."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx

from mionnx.compile.interface import GraphInterface, interface_of
from mionnx.compile.knobs import Knob
from mionnx.errors import InputError
from mionnx.graph.hooked_model import GRAPH, HookedModel

CARD_PROMPT = "The capital of France is"  # of the loops on cards
NEW_TOKENS = 16


@dataclass(frozen=True)
class Content:
    """What a folder is made of.

    Attributes:
        proto: the compiled graph, its axes named as clients name them.
        name: what the folder is called, which a client may take for the model's name.
        facts: what the graph's own metadata say, `mionnx.compiled`.
        knobs: name of an input -> what it turns.
        last: whether the graph gives the logits of the last position alone.
        embedded: whether the weights stand in the graph's file.
        config: the checkpoint's `config.json`, empty without one; a layout may add to it.
        generation: its `generation_config.json`.
    """

    model: HookedModel
    proto: onnx.ModelProto
    name: str
    facts: Mapping[str, Any]
    knobs: Mapping[str, Knob]
    last: bool
    embedded: bool
    config: dict[str, Any]
    generation: Mapping[str, Any]

    @property
    def encodes(self) -> bool:
        """Whether the model reads a text whole, and continues none."""
        return self.model.metadata.reads_whole

    @property
    def interface(self) -> GraphInterface:
        """The graph's inputs and outputs."""
        return interface_of(self.proto.graph)

    @property
    def bits(self) -> list[int]:
        """Bits of its weights in blocks; none of a model of floats."""
        return self.facts["blocks"].get("bits", [])

    @property
    def activations(self) -> str:
        """The dtype of its activations: "float32", "float16", "bfloat16"."""
        return self.model.metadata.dtype

    def value(self, key: str) -> Any:
        """An entry of the generation config, else of the config; None if neither has it."""
        inner = self.config.get("text_config")
        sources = (self.generation, self.config, inner if isinstance(inner, dict) else {})
        return next((one[key] for one in sources if one.get(key) is not None), None)


class ClientLayout(ABC):
    """One layout: where its client looks for the graph and the weights, and the files that it reads besides.

    A subclass stands in a file of its own in this folder, where `CLIENT_LAYOUTS` finds it.
    """

    name: ClassVar[str]
    client: ClassVar[str]  # the program that opens it, as the card names it
    required_knobs: ClassVar[bool] = False  # the client feeds no input that has a default
    turns_knobs: ClassVar[bool] = True  # the client feeds further inputs at all
    takes_encoders: ClassVar[bool] = False  # the client runs models that read a text whole
    takes_decoders: ClassVar[bool] = True  # the client runs models that continue a text
    language: ClassVar[str] = "python"  # of `loop`

    def check(self, content: Content) -> None:  # noqa: B027  a layout need not refuse anything
        """Refuse what the client cannot run, with the reason."""

    def adapt(self, content: Content) -> onnx.ModelProto:
        """The graph with the inputs and outputs that the client knows."""
        return content.proto

    def graph(self, content: Content) -> str:
        """The path of the graph in the folder."""
        return GRAPH

    def data(self, files: Sequence[str], content: Content) -> dict[str, str]:
        """The model's weight files -> their names beside the graph."""
        return {name: name for name in files}

    def home(self, content: Content) -> str:
        """The folder, in the folder, of config, tokenizer, spec and card."""
        return "."

    def write(self, content: Content, at: Path) -> None:  # noqa: B027  nor need its client read any
        """Write the files that the client reads besides, at `home`."""

    @abstractmethod
    def loop(self, content: Content) -> str:
        """A program of about 15 lines for the card, which runs in the folder as it stands."""

    def refuse(self, reason: str) -> InputError:
        """The error of something that this layout cannot hold."""
        return InputError(f"layout {self.name!r}: {reason}")

    def need_past(self, content: Content, states: Collection[str] = ()) -> None:
        """Refuse a model whose past has other parts than keys, values and the client's `states`."""
        metadata = content.model.metadata
        parts = [*dict.fromkeys(port.part for port in metadata.ports if not port.positional)]
        if not {*parts} <= {*states}:
            carried = "a key and a value" + (f", {' and '.join(states)}" if states else "")
            raise self.refuse(
                f"{self.client} carries {carried} from call to call, and a {metadata.family} model a state of "
                f"other parts ({', '.join(parts)}): use layout='plain'"
            )
        if not content.model.has_cache:
            raise self.refuse(
                f"{self.client} decodes with a past, and {content.model.name} was adopted from a file without one: use "
                "layout='plain'"
            )

    def need_config(self, content: Content) -> None:
        """Refuse a model without `config.json`."""
        if not content.config:
            raise self.refuse(
                f"{content.model.folder} has no config.json, and {self.client} loads no model without one"
            )


def write_json(path: Path, content: Any) -> None:
    """Write JSON as people read it."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
