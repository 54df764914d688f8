"""What a checkpoint is for: its head, the class of transformers that has it, and what it shows.

The head is that of `architectures[0]` in config.json; a folder with `modules.json` is a sentence embedding whatever
that says.
"""

from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import modeling_auto

from exporters.head_facts import activation_of, head_named, label_names, tells_replaced
from exporters.sentence_folder import SentenceModules, sentence_modules, stated_activation
from exporters.transformers.encoder_families import is_encoder
from exporters.transformers.sentence import SENTENCE, make
from mionnx.errors import ExportError
from mionnx.graph.metadata import NEXT_TOKEN

# TaskHead -> transformers' table of classes by config.
MAPPINGS = {
    NEXT_TOKEN: "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "classes": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "token_classes": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "span": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "embedding": "MODEL_MAPPING",
    "none": "MODEL_MAPPING",
}


@dataclass(frozen=True)
class TaskHead:
    """What a checkpoint is for.

    Attributes:
        kind: a key of `mionnx.graph.metadata.MAIN_OUTPUTS`.
        architecture: the class that the config names; empty if none.
        sentence: what makes an embedding of the stream; None for other heads.
        stated: what a CrossEncoder's folder says makes its scores.
    """

    kind: str = NEXT_TOKEN
    architecture: str = ""
    sentence: SentenceModules | None = None
    stated: str = ""

    def make(self, config: Any, dtype: torch.dtype) -> PreTrainedModel:
        """A model with this head."""
        if self.kind == NEXT_TOKEN:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        kind = self.model_class(config)
        pooled = self.kind == "embedding" and "add_pooling_layer" in signature(kind.__init__).parameters
        model = kind._from_config(config, dtype=dtype, **({"add_pooling_layer": False} if pooled else {}))
        if self.sentence is not None:
            model.add_module(SENTENCE, make(self.sentence).to(dtype))
        return model

    def model_class(self, config: Any) -> type[PreTrainedModel]:
        """transformers' class with this head for a config.

        Raises:
            ExportError: it has none.
        """
        named = "MODEL_FOR_PRETRAINING_MAPPING" if tells_replaced(self.architecture) else MAPPINGS[self.kind]
        mapping = getattr(modeling_auto, named)
        encoding = modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING  # of T5's the encoder alone
        if self.kind in ("none", "embedding") and is_encoder(config) and type(config) in encoding:
            mapping = encoding
        if type(config) not in mapping:
            raise ExportError(f"transformers has no {config.model_type!r} model with the head {self.kind!r}")
        return mapping[type(config)]

    def labels(self, config: Any) -> list[str]:
        """Names of the head's logits in their order; empty where they are the vocabulary's."""
        return label_names(self.kind, config.id2label, config.num_labels, self.architecture)

    def activation(self, config: Any) -> str:
        """What makes probabilities of the logits of classes, as transformers' pipeline has it."""
        problem = getattr(config, "problem_type", None)
        return activation_of(self.kind, problem, config.num_labels, self.architecture, self.stated)


DECODER = TaskHead()


def head_of(config: Any, folder: Path | None = None) -> TaskHead:
    """The head of a checkpoint, by its config and the files beside it."""
    sentence = sentence_modules(folder) if folder is not None else None
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    if sentence is not None:
        return TaskHead("embedding", name, sentence)
    kind = head_named(name)
    # A decoder's weights without a head are tied to it.
    if kind is None or (kind in ("masked_lm", "none") and not is_encoder(config)):
        kind = "none" if is_encoder(config) and not name else NEXT_TOKEN
    stated = stated_activation(folder) if folder is not None and kind == "classes" else ""
    return TaskHead(kind, name, stated=stated)
