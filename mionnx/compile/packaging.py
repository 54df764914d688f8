"""`Packaging`: how a compiled folder is written."""

from dataclasses import dataclass

from mionnx.compile.layouts import CLIENT_LAYOUTS
from mionnx.errors import InputError, nearest
from mionnx.graph.hooked_model import ROUNDING_LEVEL
from mionnx.rewrite.plan import ALL, NONE, PADDED

WEIGHT_PLACES = ("embedded", "alongside", "referenced")
PACKAGE_TARGETS = {"generic": None, "ort-cpu": "cpu", "ort-cuda": "cuda", "web": None}
PRODUCT_LEVELS = (0, ROUNDING_LEVEL)  # of accuracy, see `Packaging`
FUSED = (NONE, PADDED, ALL)


@dataclass(frozen=True)
class Packaging:
    """Weights, target runtime and layout of a compiled folder.

    Attributes:
        weights: "embedded" in model.onnx (up to 2 GiB), "alongside" as files of its own, or "referenced": hard links
            to the hooked model's files, on the same disk. By default alongside, for the web embedded.
        target: "generic" (the model's own operators: standard ones, and ONNX Runtime's `MatMulNBits` and
            `GatherBlockQuantized` where its weights are blocks), "ort-cpu" or "ort-cuda" (optimised for this version of
            ONNX Runtime, with its own operators), or "web" (one file, for onnxruntime-web).
        layout: of the folder, by the client that opens it: a name in `mionnx.compile.layouts.CLIENT_LAYOUTS`.
        fused: fused operators where nothing inside them is touched: "none", "padded" (right for texts padded on either
            side) or "all": those that an adopted file came with; of any other model the attention of a layer, which
            takes several tokens after a past in one row only, and norms with the sums that they read. With "all" it
            also rotates queries and keys, where the graph rotates them as their products make them, by the positions
            of the texts alone: such a file takes no text padded on the left, and none longer than the model's context.
            Only ONNX Runtime has these operators.
        accuracy_level: of products with weights in blocks: 0, in floats, or 4, what they read rounded to 8 bits. None
            is the level of the graph as it is.
    """

    weights: str | None = None
    target: str = "generic"
    layout: str = "plain"
    fused: str = NONE
    accuracy_level: int | None = None

    def __post_init__(self) -> None:
        weights = ("weights", self.weights or "alongside", WEIGHT_PLACES)
        target, layout = ("target", self.target, PACKAGE_TARGETS), ("layout", self.layout, CLIENT_LAYOUTS)
        for what, choice, choices in (weights, target, layout, ("fused", self.fused, FUSED)):
            if choice not in choices:
                raise InputError(f"{what} {choice!r}; one of {', '.join(choices)}{nearest(str(choice), choices)}")
        if self.accuracy_level not in (None, *PRODUCT_LEVELS):
            raise InputError(f"accuracy_level={self.accuracy_level!r}; one of {', '.join(map(str, PRODUCT_LEVELS))}")
        if self.target.startswith("ort-") and self.weights == "referenced":
            raise InputError(
                f"target {self.target} writes weights anew: they cannot be references to the model's files"
            )

    @property
    def placed(self) -> str:
        """The place of the weights: "embedded", "alongside" or "referenced"."""
        return self.weights or ("embedded" if self.target == "web" else "alongside")
