"""`FloatGraph`: the numbers of a graph, as a narrower dtype would meet them: which values are computed, by what kind.

The one place that knows operators by what they do to numbers: move them, add them up, norm them, absorb infinities.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from mionnx.graph.dataflow import Dataflow, attributes

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
NORM_OPERATORS = frozenset(("RMSNormalization", "LayerNormalization", "SimplifiedLayerNormalization"))
# Operators that move numbers and compute none: their first input's numbers are their output's.
MOVING_OPERATORS = frozenset(
    ("Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Slice", "Split", "Tile", "Flatten")
) | {"Gather", "GatherND", "GatherElements", "Dropout"}
PRODUCTS = frozenset(("MatMul", "Gemm", "MatMulNBits", "Conv", "Einsum", "GroupedMatMul"))
ACTIVATIONS = frozenset(
    ("Sigmoid", "Gelu", "FastGelu", "QuickGelu", "Tanh", "Erf", "Relu", "Swish", "Silu", "HardSigmoid", "Softplus")
) | {"Elu", "LeakyRelu", "Mish"}
ROTATION = frozenset(("RotaryEmbedding", "Cos", "Sin"))
# Operators that make a finite number of an infinity, by place of the input.
ABSORBS: Mapping[str, Collection[int]] = {
    **dict.fromkeys(("Reciprocal", "Tanh", "Sigmoid", "Erf", "HardSigmoid", "Clip", "Min", "Greater", "Less"), (0, 1)),
    "Div": (1,),
}
# Operators through which an infinity passes on its way to one that absorbs it.
PASSES = MOVING_OPERATORS | {"ReduceMean", "ReduceSum", "Add", "Sqrt", "Mul", "Pow", "Cast", "Neg"}
ABSORBING_STEPS = 6  # nodes between a square and the reciprocal of its root

OF_WEIGHTS, OF_STREAM, NORM_OUTPUTS, NORM_INSIDES = "weights", "stream", "norms", "norms' insides"
GROUPS = (
    *(OF_STREAM, "products", "attention products", "softmax", "rotation", "activation", NORM_OUTPUTS, NORM_INSIDES),
    *("elementwise", "logits", OF_WEIGHTS),
)


@dataclass(frozen=True)
class Norm:
    """A norm written as its own nodes.

    Attributes:
        source: what is normed.
        insides: values between it and the normed one, in order; the first is the square.
        epsilon: the number that is added to the mean square.
    """

    source: str
    insides: tuple[str, ...]
    epsilon: float


class FloatGraph:
    """A graph with the types of its values, from its tokens to its logits.

    Attributes:
        hooks: hook points that are values of it, in execution order.
    """

    def __init__(self, proto: onnx.ModelProto, hooks: Collection[str]) -> None:
        self.proto = onnx.shape_inference.infer_shapes(proto)
        self.flow = Dataflow(self.proto)
        outputs = {name for node in self.proto.graph.node for name in node.output}
        self.hooks = [name for name in hooks if name in outputs]

    @cached_property
    def opset(self) -> int:
        """The version of the standard operators."""
        return max((one.version for one in self.proto.opset_import if one.domain in ("", "ai.onnx")), default=0)

    def is_float(self, name: str) -> bool:
        """Whether a value has numbers of a floating dtype."""
        return bool(name) and self.flow.facts.types.get(name, 0) in FLOATS

    @cached_property
    def varying(self) -> set[str]:
        """Values that depend on the tokens."""
        return self.flow.varying

    @cached_property
    def carrying(self) -> set[str]:
        """Floats that depend on a weight that tokens chose, or on the past: not masks, not angles."""
        values = {name for name in self.hooks if self.is_float(name)}
        first = [name for name in self.hooks[:3] if "embed" in name or "resid" in name]
        before = (name for at in self.flow.ancestors(first) for name in self.flow.nodes[at].output)
        values |= {name for name in before if name in self.varying and self.is_float(name)}  # up to the embedding
        values |= {one.name for one in self.proto.graph.input if self.is_float(one.name)}
        for node, reads in zip(self.flow.nodes, self.flow.reads, strict=True):
            if not values.isdisjoint(reads):  # a shape is no float: what follows from it alone carries nothing
                values.update(name for name in node.output if self.is_float(name))
        return values

    @cached_property
    def angles(self) -> set[str]:
        """Values up to cosines and sines of positions, which a converter leaves in float32."""
        ends = [name for node in self.flow.nodes if node.op_type in ("Cos", "Sin") for name in node.output]
        values = {name for at in self.flow.ancestors(ends) for name in self.flow.nodes[at].output}
        return {name for name in values - self.carrying if self.is_float(name)}

    @cached_property
    def angle_weights(self) -> set[str]:
        """Weights that only the angles are computed from: frequencies."""
        reads = self.flow.read_by(i for i, node in enumerate(self.flow.nodes) if {*node.output} & self.angles)
        others = self.flow.read_by(i for i, node in enumerate(self.flow.nodes) if not {*node.output} & self.angles)
        return reads - others

    @cached_property
    def masks(self) -> set[str]:
        """Floats that hold no activation: what is added to scores, and what it is made of."""
        return {name for name in self.varying if self.is_float(name)} - self.carrying - self.angles

    @cached_property
    def masked(self) -> set[str]:
        """Values between a mask and the softmax: some of their numbers are minus infinity by intention."""
        ends = [name for node in self.flow.nodes if node.op_type in ("Softmax", "LogSoftmax") for name in node.output]
        behind = {*self.masks}
        for node in self.flow.nodes:
            reads = behind.intersection(node.input)
            activations = self.carrying.intersection(node.input) - behind
            # ones and zeros times an activation, as of convolutions: nothing there is minus infinity
            gate = node.op_type == "Mul" and bool(activations) and reads.isdisjoint(self.carrying)
            if reads and not gate:
                behind.update(name for name in node.output if self.is_float(name) and name not in ends)
        reaching = {name for at in self.flow.ancestors(ends) for name in self.flow.nodes[at].output}
        return behind & reaching

    def computed(self) -> Iterator[tuple[NodeProto, str]]:
        """Nodes that compute floats, with each of these values, in execution order; what only moves is left out."""
        for node in self.flow.nodes:
            if node.op_type in MOVING_OPERATORS and node.input[0] in self.varying:
                continue
            for name in node.output:
                if name in self.varying and self.is_float(name):
                    yield node, name

    def origin(self, name: str) -> str:
        """The value that nodes moved to a place, or the value itself."""
        while (node := self.flow.producer(name)) is not None and node.op_type in MOVING_OPERATORS:
            if node.op_type == "Split" or not node.input or node.input[0] not in self.varying:
                break
            name = node.input[0]
        return name

    @cached_property
    def decomposed(self) -> list[Norm]:
        """Norms that are written as their own nodes, as exports up to opset 22 have them."""
        return [norm for node in self.flow.nodes if node.op_type == "ReduceMean" if (norm := self._norm(node))]

    def _norm(self, mean: NodeProto) -> Norm | None:
        square = self.flow.producer(mean.input[0])
        if square is None or not self._squares(square):
            return None
        plus = self._reader(mean.output[0], "Add")
        root = self._reader(plus.output[0], "Sqrt") if plus else None
        if plus is None or root is None:
            return None
        number = next((self.flow.facts.number(name) for name in plus.input if name != mean.output[0]), None)
        insides = [square.output[0], mean.output[0], plus.output[0], root.output[0]]
        back = self._reader(root.output[0], "Reciprocal")
        insides += [back.output[0]] if back else []
        return Norm(square.input[0], tuple(insides), 0.0 if number is None else float(np.ravel(number)[0]))

    def _squares(self, node: NodeProto) -> bool:
        if node.op_type == "Mul":
            return node.input[0] == node.input[1]
        exponent = self.flow.facts.number(node.input[1]) if node.op_type == "Pow" else None
        return exponent is not None and exponent.size == 1 and float(np.ravel(exponent)[0]) == 2

    def _reader(self, value: str, operator: str) -> NodeProto | None:
        return next((node for node in self.flow.readers(value) if node.op_type == operator), None)

    def absorbed(self, name: str) -> bool:
        """Whether an infinity at a value is a finite number a few nodes on, on every way from it."""
        waiting, seen = [(name, 0)], set[str]()
        while waiting:
            value, step = waiting.pop()
            readers = self.flow.readers(value)
            if not readers or step > ABSORBING_STEPS:
                return False
            for node in readers:
                if any(node.input[at] == value for at in ABSORBS.get(node.op_type, ()) if at < len(node.input)):
                    continue
                if node.op_type not in PASSES or node.output[0] in self.hooks:
                    return False
                if node.output[0] not in seen:
                    seen.add(node.output[0])
                    waiting.append((node.output[0], step + 1))
        return True

    @cached_property
    def _insides(self) -> set[str]:
        return {name for norm in self.decomposed for name in norm.insides}

    @cached_property
    def _after(self) -> set[str]:
        return self.flow.descendants(["hook_final_norm"]) - {"hook_final_norm"}

    def group(self, node: NodeProto, name: str) -> str:
        """The group of a value, by the operator that computes it and by its place: one of `GROUPS`."""
        kinds = ((NORM_OPERATORS, NORM_OUTPUTS), (ROTATION, "rotation"), (ACTIVATIONS, "activation"))
        if name in self._after:
            return "logits"
        if name in self.stream:
            return OF_STREAM
        if name in self._insides:
            return NORM_INSIDES
        if node.op_type in PRODUCTS:
            return "products" if any(one not in self.varying for one in node.input) else "attention products"
        if node.op_type == "Softmax":
            return "softmax"
        return next((group for operators, group in kinds if node.op_type in operators), "elementwise")

    @cached_property
    def stream(self) -> set[str]:
        """Values of the residual stream, as its hook points have them or as they are moved there."""
        names = [name for name in self.hooks if "hook_resid" in name or name == "hook_embed"]
        return {*names, *map(self.origin, names)}

    def products(self) -> Iterator[NodeProto]:
        """Products that read a weight."""
        for node in self.flow.nodes:
            if node.op_type == "MatMul" and node.input[1] not in self.varying and node.output[0] in self.carrying:
                yield node


def epsilon_of(node: NodeProto) -> float:
    """The number that a fused norm adds to the mean square; 1e-5 is the operators' default."""
    return float(attributes(node).get("epsilon", 1e-5))
