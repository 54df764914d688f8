"""`MetricSpec`: the number of a forward pass whose gradients a spec asks for."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import GradientError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.spec.hook_choice import Hook

Token = int | str
Tokens = Token | Sequence[Token] | None
Answers = Tokens | Sequence[Sequence[Token]]  # of "loss": of each row one token for each of its masks
# name -> what it reads besides the logits
READS: Mapping[str, tuple[str, ...]] = {
    "logit": ("answer",),
    "logit_diff": ("answer", "versus"),
    "log_probability": ("answer",),
    "probability": ("answer",),
    "kl": ("reference",),
    "loss": (),
    "cosine": ("reference",),
    "dot": ("reference",),
    "cotangent": ("cotangent",),
}
MAY_READ: Mapping[str, tuple[str, ...]] = {"loss": ("answer",)}  # of a masked language model
OF_VECTORS = ("cosine", "dot")  # those of embeddings
OF_CHOICES = ("log_probability", "probability", "kl")  # those of a softmax: of choices that exclude one another
NO_CHOICE = (
    "is of choices that exclude one another, and the labels of this model do not: metric 'logit' is that of one label"
)
READS_ALL = ("loss",)  # those that read every position
NO_GRADIENT = {"rank": "a rank changes in steps"}
# sets of rules by which nodes are gone through backwards; see `mionnx.rewrite.gradient.rules`
GRADIENT_RULES = ("gradient", "frozen_norm", "relp", "relp_frozen_pattern", "frozen_norm_pattern")


class MetricSpec:
    """A metric, one number a row, by its name and what it reads; see `HookSpec.set_metric`.

    Attributes:
        name: "logit", "logit_diff", "log_probability" and "probability" of the answer, "kl" from a reference, "loss",
            the mean of the negative log-probabilities of a row's own next tokens, or "cotangent", the sum of logits
            times numbers. Of an embedding, "cosine" and "dot" with a reference [d] or [batch, d]. The "loss" of a
            masked language model is that of the tokens which a row's masks hide: `answer` is one for all masks, or of
            each row one, or a list with one for each of its masks.
        position: at which the logits are read, "mask" for that of the text's one mask token; None where all are
            ("loss", a cotangent for all logits) or none (`of`).
    """

    def __init__(
        self,
        name: str,
        answer: Answers = None,
        versus: Tokens = None,
        position: int | str | None = None,
        reference: ArrayLike | None = None,
        cotangent: ArrayLike | None = None,
        of: Hook | None = None,
        rules: str = "gradient",
    ) -> None:
        check_metric(name)
        check_rules(rules)
        _check_read(name, {"answer": answer, "versus": versus, "reference": reference, "cotangent": cotangent})
        if of is not None and name != "cotangent":
            raise GradientError(f"metric {name!r} reads the logits; only 'cotangent' reads another value, of {of}")
        if name not in READS_ALL and any(_listed(entry) for entry in (answer if _listed(answer) else ())):  # type: ignore[union-attr]
            raise GradientError(
                f"metric {name!r} reads one answer of a row; lists of them are the hidden tokens of 'loss'"
            )
        self.name, self.answer, self.versus, self.rules = name, answer, versus, rules
        self.reference = _numbers("reference", reference, (1, 2))
        # The value at a hook point may have up to five axes, logits have three.
        self.cotangent = _numbers("cotangent", cotangent, (1, 2, 3) if of is None else (1, 2, 3, 4, 5))
        self.of = None if of is None else HookPoint.parse(of).name
        self.position = _position(name, position, self.cotangent, self.of)

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """Its arrays by name, for a file."""
        arrays = {"reference": self.reference, "cotangent": self.cotangent}
        return {name: array for name, array in arrays.items() if array is not None}

    def to_entry(self) -> dict[str, Any]:
        """The metric's entry in a spec file, without its arrays."""
        tokens = {"answer": _plain(self.answer), "versus": _plain(self.versus)}
        where = {name: value for name, value in (("position", self.position), ("of", self.of)) if value is not None}
        return {"name": self.name, "rules": self.rules, **tokens, **where}

    def __str__(self) -> str:
        words = [f"{part}={value!r}" for part, value in (("answer", self.answer), ("versus", self.versus)) if value]
        words += [] if self.of is None else [f"of={self.of}"]
        return f"{self.name}({', '.join(words)})" if words else self.name


def check_metric(name: str) -> None:
    """Refuse an unknown metric, or one without a gradient."""
    if reason := NO_GRADIENT.get(name):
        raise GradientError(f"metric {name!r} has no gradient: {reason}; there are {', '.join(READS)}")
    if name not in READS:
        raise GradientError(f"no metric {name!r}; there are {', '.join(READS)}{nearest(name, READS)}")


def check_rules(rules: str) -> None:
    """Refuse an unknown set of rules."""
    if rules not in GRADIENT_RULES:
        raise GradientError(
            f"no rules {rules!r}; there are {', '.join(GRADIENT_RULES)}{nearest(str(rules), GRADIENT_RULES)}"
        )


def _plain(tokens: Answers) -> Any:
    if tokens is None or isinstance(tokens, str):
        return tokens
    if isinstance(tokens, Sequence | np.ndarray):
        return [_plain(token) for token in tokens]
    return operator.index(tokens)


def _listed(tokens: Any) -> bool:
    return isinstance(tokens, Sequence | np.ndarray) and not isinstance(tokens, str)


def _check_read(name: str, parts: Mapping[str, Any]) -> None:
    for part, value in parts.items():
        if value is None and part in READS[name]:
            raise GradientError(f"metric {name!r} needs {part}=")
        if value is not None and part not in (*READS[name], *MAY_READ.get(name, ())):
            raise GradientError(f"metric {name!r} reads no {part}; it reads {', '.join(READS[name]) or 'none'}")


def _position(name: str, position: object, cotangent: NDArray[Any] | None, of: str | None) -> int | str | None:
    """The position of the logits to read; None for all of them, or none."""
    read = "the loss reads every position" if name in READS_ALL else None
    if of is not None:
        read = f"the value at {of} is read, and no logits"
    elif cotangent is not None and cotangent.ndim == 3:
        read = f"a cotangent {list(cotangent.shape)} has numbers for every position"
    if read and position is not None:
        raise GradientError(f"position={position} has no effect: {read}")
    if read:
        return None
    if position == "mask":
        return position
    try:
        return -1 if position is None else operator.index(position)  # type: ignore[arg-type]
    except TypeError:
        raise GradientError(f"position {position!r} is no integer") from None


def _numbers(what: str, numbers: ArrayLike | None, ranks: tuple[int, ...]) -> NDArray[Any] | None:
    if numbers is None:
        return None
    array = np.asarray(numbers)
    if array.ndim not in ranks or array.dtype.kind not in "fiu":
        raise GradientError(f"{what} is {array.dtype} {list(array.shape)}; it has {' or '.join(map(str, ranks))} axes")
    if not np.isfinite(array).all():
        raise GradientError(f"{what} has NaN or infinity")
    return array
