"""What clients that read encoders as transformers does ask of a folder: inputs, outputs and a tokenizer.

They feed `input_ids`, `attention_mask` and, where the graph takes them, `token_type_ids`, and read `last_hidden_state`
of a model without a head or of sentences, `start_logits` and `end_logits` of spans, and `logits` of other heads.
Positions are counted in the graph. Of sentences `sentence_embedding` is a second output, with all that follows the
last stream.
"""

import json
from pathlib import Path

import numpy as np
import onnx

from mionnx.compile.layouts.layout import ClientLayout, Content
from mionnx.compile.token_facts import replace_input
from mionnx.errors import ModelError
from mionnx.graph.builder import Builder
from mionnx.graph.edited_graph import edit, to_proto
from mionnx.graph.folder_file import read_json
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import Metadata
from mionnx.graph.report import Report
from mionnx.inputs.tokens import TOKENIZER_FILE

HIDDEN_STATE, SENTENCE_EMBEDDING = "last_hidden_state", "sentence_embedding"
SPAN = ("start_logits", "end_logits")
# What a model is for -> the end of the names of the classes that run it in transformers and what follows it.
HEAD_CLASSES = {
    "masked_lm": "MaskedLM",
    "classes": "SequenceClassification",
    "token_classes": "TokenClassification",
    "span": "QuestionAnswering",
}
TOKENIZER_SETTINGS = "tokenizer_config.json"


def output_of(metadata: Metadata) -> str:
    """The output that shows what an encoder is for."""
    return (
        SENTENCE_EMBEDDING if metadata.head == "embedding" else SPAN[0] if metadata.head == "span" else metadata.output
    )


def last_stream(metadata: Metadata) -> str:
    """The hook point of what pooling reads."""
    last = HookPoint.ResidPost(metadata.sizes.num_layers - 1)
    return (HookPoint.FinalNorm if HookPoint.FinalNorm.name in metadata.hooks else last).name


def check_encoder(layout: ClientLayout, content: Content) -> None:
    """Refuse what such a client would not show, with the reason."""
    layout.need_config(content)
    inputs = {port.name for port in content.interface.inputs}
    if "attention_mask" not in inputs:
        raise layout.refuse(
            f"{layout.client} pads texts, and {content.model.name} was adopted from a file without mask"
        )
    metadata = content.model.metadata
    if metadata.head == "token_classes" and not metadata.exclusive:
        raise layout.refuse(
            f"{layout.client} has no class for tokens whose labels do not exclude one another (ELECTRA's)"
        )
    if metadata.head != "embedding":
        return
    stream = last_stream(metadata)
    values = {name for node in content.proto.graph.node for name in node.output}
    if stream not in values:
        raise layout.refuse(f"{layout.client} pools the last stream, and the graph has no {stream}: use layout='plain'")
    hooks = [*metadata.hooks]
    behind = {*hooks[hooks.index(stream) + 1 :]}
    for intervention in content.facts["interventions"]:  # "add at hook_embedding"
        kind, _, hook = intervention.rpartition(" at ")
        if hook in behind:
            raise layout.refuse(
                f"{layout.client} pools {stream} itself, and would not show {kind} at {hook}, which lies behind it: "
                "use layout='plain', or intervene before it"
            )


def as_transformers(content: Content) -> onnx.ModelProto:
    """The graph with the inputs and outputs of transformers' encoders."""
    graph, report, metadata = edit(content.proto), Report(), content.model.metadata
    tensors = graph.tensors()
    op = Builder(graph, "position_ids", "mionnx.own_positions", report)
    positions = tensors.get("position_ids")
    if positions is not None:
        counted = op.Sub(op.CumSum(tensors["attention_mask"], np.array(1)), [1])
        replace_input(graph, positions, op.Max(counted, [0]))  # of padding in front of a text, -1
    main = next(value for value in graph.outputs if value.name == metadata.output)
    others = [value for value in graph.outputs if value is not main]
    if metadata.head == "span":
        ends = op.Split(main, [1, 1], axis=2, outputs=2)
        first = [op.Squeeze(end, [2], name=name) for end, name in zip(ends, SPAN, strict=True)]
        for value, name in zip(first, SPAN, strict=True):
            value.name, value.shape = name, ["batch", "seq"]
    elif metadata.head == "embedding":
        stream = tensors[last_stream(metadata)]
        # Under a name of its own: it may be an output already, as a capture.
        shown = op.Identity(stream, name=HIDDEN_STATE)
        shown.name, shown.shape = HIDDEN_STATE, ["batch", "seq", metadata.sizes.hidden_size]
        main.name = SENTENCE_EMBEDDING
        first = [shown, main]
    else:
        first = [main]
    graph.outputs = [*first, *others]
    graph.toposort()
    proto = to_proto(graph, content.proto, {})
    proto.metadata_props.extend(content.proto.metadata_props)
    return proto


def write_tokenizer(content: Content, at: Path, classes: frozenset[str] = frozenset()) -> None:
    """Let a tokenizer cut texts where `embed` does.

    Args:
        classes: those of a client's tokenizers that give token types; another becomes BERT's, where the graph takes
            them.
    """
    path = at / TOKENIZER_SETTINGS
    if not (path.is_file() or (at / TOKENIZER_FILE).is_file()):
        return  # a model without a tokenizer
    settings = read_json(path) if path.is_file() else {}
    if not isinstance(settings, dict):
        raise ModelError(f"{content.model.folder / TOKENIZER_SETTINGS} holds no table")
    longest = content.model.longest_text
    if longest is not None:
        settings["model_max_length"] = longest
    name = str(settings.get("tokenizer_class", ""))
    if classes and content.model.has_token_types and name.removesuffix("Fast") not in classes:
        settings["tokenizer_class"] = "BertTokenizer"
    path.write_text(json.dumps(settings, ensure_ascii=False, indent=1))
