"""Facts of a head for the metadata, by the words of a config.json: its kind, labels and activation. Without torch."""

from collections.abc import Mapping
from typing import Any

from mionnx.graph.metadata import NEXT_TOKEN

# End of an architecture's name -> the head; the first that fits.
ARCHITECTURES = {
    "ElectraForPreTraining": "token_classes",
    "ForMaskedLM": "masked_lm",
    "ForPreTraining": "masked_lm",
    "ForSequenceClassification": "classes",
    "ForTokenClassification": "token_classes",
    "ForQuestionAnswering": "span",
    "ForQuestionAnsweringSimple": "span",
    "WithLMHeadModel": "masked_lm",  # XLM's
    "LMHeadModel": NEXT_TOKEN,
    "EncoderModel": "none",
    "Model": "none",
}
ENDS = ["start", "end"]  # of a span
REPLACED = "replaced"  # the one label of a head that tells tokens of a text from those that were put in their place


def head_named(architecture: str) -> str | None:
    """The head that the name of an architecture says; None if it says none."""
    return next((kind for end, kind in ARCHITECTURES.items() if architecture.endswith(end)), None)


def tells_replaced(architecture: str) -> bool:
    """Whether a head has one logit a token, that of its being another than the text's own (ELECTRA's)."""
    return architecture == "ElectraForPreTraining"


def label_names(kind: str, id2label: Mapping[Any, Any], count: int, architecture: str = "") -> list[str]:
    """Names of a head's logits in their order; empty where they are the vocabulary's."""
    if tells_replaced(architecture):
        return [REPLACED]
    if kind == "span":
        return [*ENDS]
    if kind not in ("classes", "token_classes"):
        return []
    named = {str(key): str(label) for key, label in id2label.items()}  # numbers in transformers, texts in a file
    return [named.get(str(i), f"LABEL_{i}") for i in range(count)]


def activation_of(kind: str, problem: str | None, count: int, architecture: str = "", stated: str = "") -> str:
    """What makes probabilities of the logits of classes, as transformers' pipeline has it; empty for other heads.

    `stated` is what a CrossEncoder's folder says; of several labels it says Identity where nobody chose.
    """
    if tells_replaced(architecture):
        return "sigmoid"
    if kind != "classes":
        return ""
    if stated == "Sigmoid" or (stated == "Identity" and count == 1):
        return stated.lower()
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or count == 1 else "softmax"
