"""`LinearMap`: the product with a weight that gives a hook point, found by following the graph back from it.

What feeds the product is the hook point that the map reads, straight or through a norm. Between the product and the
hook point numbers may be moved (heads split off, a third of a fused product taken), scaled and shifted: weight and bias
are those that give the hook point itself. Where a norm or a clip stands between the two, they are those before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.errors import HookError, ModelError
from mionnx.graph.dataflow import attributes
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.offset_products import unordered_input
from mionnx.graph.value_path import Followed, PathStep, ValuePaths
from mionnx.graph.weight_value import (
    WEIGHT_PLACE,
    Matrix,
    linear_bias,
    linear_weight,
    product_of,
    weight_value,
)

ROW_AXES = ("batch", "seq")
ATTENDING = frozenset(("MatMul", "Attention", "GroupQueryAttention", "MultiHeadAttention"))
TO_ROOT = frozenset(("Sqrt", "Reciprocal", "Pow", "Div", "Cast"))  # from a mean square to one over its root
NORM_NODES = frozenset(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"))


@dataclass(frozen=True)
class NormMap:
    """A norm: weight * (x - c mean(x)) / scale(x) + bias.

    Attributes:
        weight: [hidden]; None where the norm has none.
        bias: [hidden]; None where it has none.
        centred: c, whether the mean is taken out (LayerNorm), or not (RMSNorm).
        epsilon: what is added to the mean square below the root; None where it is not told from the nodes.
    """

    weight: Matrix | None
    bias: Matrix | None
    centred: bool
    epsilon: float | None = None


@dataclass(frozen=True, repr=False)
class LinearMap:
    """A product with a weight, y = x W + b.

    Attributes:
        gives: hook point of y.
        reads: hook point that x is, or is the norm of; empty where the product reads no hook point so.
        into: nodes from `reads` to the product.
        onto: nodes from the product to `gives`.
        axes: lengths of y's axes without batch and seq; an expert's choices are no axis.
        experts: how many matrices the weight is a stack of; None of one matrix.
    """

    paths: ValuePaths
    product: onnx.NodeProto
    value: str
    gives: str
    reads: str
    into: tuple[PathStep, ...]
    onto: tuple[PathStep, ...]
    experts: int | None = None

    def __repr__(self) -> str:
        lengths = [*self.shape]
        return f"<product behind {self.gives}, weight {lengths}, reads {self.reads or 'no hook point'}>"

    @cached_property
    def _after(self) -> Followed:
        followed = self.paths.follow(self.value, self.onto, self.experts)
        axes = self.paths.model.metadata.hooks[self.gives]
        # an expert's matrix is the same for each of a token's choices
        dropped = [axis in ROW_AXES or (self.experts is not None and i == 2) for i, axis in enumerate(axes)]
        return followed.moved(lambda array: array[tuple(0 if drop else slice(None) for drop in dropped)])

    @cached_property
    def _before(self) -> Followed | None:
        """Where each number of the hook point that it reads stands in what the product reads; None of a stack."""
        if self.experts is not None or not self.reads:
            return None
        return self.paths.follow_all(self.reads, self.into)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        return self._after.places.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `weight()`, without its numbers."""
        if self._before is not None:
            return (self._before.places.size, *self.axes)
        if self.experts is not None:
            return (self.experts, self._matrix().shape[-2], *self.axes)
        return self.weight().shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its numbers."""
        return self._matrix().dtype

    @property
    def initializer(self) -> str:
        """The name of the weight as the graph has it."""
        name = self.product.input[0 if self.experts else WEIGHT_PLACE[self.product.op_type]]
        while (node := self.paths.flow.producer(name)) is not None and node.input:
            name = node.input[0]
        return name

    @property
    def normed(self) -> bool:
        """Whether a norm, a clip or a gate stands between the product and the hook point that it gives."""
        return bool(self._after.end)

    @property
    def reads_normed(self) -> bool:
        """Whether the product reads a norm of the hook point `reads`, or another function of it."""
        return self._before is None or bool(self._before.end)

    @cached_property
    def norm_before(self) -> NormMap | None:
        """The norm between `reads` and the product; None where there is none."""
        return norm_of(self.paths, self.into)

    @cached_property
    def norm_behind(self) -> NormMap | None:
        """The norm between the product and `gives`; None where there is none."""
        return norm_of(self.paths, self.onto)

    def weight(self) -> Matrix:
        """The numbers [in, *axes], or [experts, in, *axes]; mapped from the file where it holds them as they are."""
        matrix, after = self._matrix(), self._after
        before = None if self._before is None else self._before
        if before is not None and not (before.places.reshape(-1) == np.arange(before.places.size)).all():
            matrix = matrix[..., np.argsort(before.places.reshape(-1)), :]
        taken = columns_of(matrix, after.places)
        if after.factor is not None:
            taken = (taken * after.factor).astype(matrix.dtype)
        if before is not None and before.factor is not None:
            rows = np.broadcast_to(before.factor, before.places.shape).reshape(-1)[
                np.argsort(before.places.reshape(-1))
            ]
            taken = (taken * rows.reshape(-1, *[1] * len(self.axes))).astype(matrix.dtype)
        return taken

    def bias(self) -> Matrix | None:
        """The numbers [*axes], or [experts, *axes] where each has its own; None where nothing is added."""
        after = self._after
        if after.chosen is not None:
            return after.chosen if after.added is None else after.chosen + after.added
        own = None if self.experts else linear_bias(self.paths.flow, self.paths.model.folder, self.product)
        if own is None and after.added is None:
            return None
        if own is None:
            return np.asarray(after.added)
        taken = own[after.places] if after.factor is None else own[after.places] * after.factor
        return (taken if after.added is None else taken + after.added).astype(own.dtype)

    def _matrix(self) -> Matrix:
        flow, folder = self.paths.flow, self.paths.model.folder
        if self.experts is None:
            settings = attributes(self.product)
            scale = settings.get("alpha", 1.0)
            matrix = linear_weight(flow, folder, self.product)
            return matrix if scale == 1.0 else matrix * np.asarray(scale, matrix.dtype)
        stack = weight_value(flow, folder, self.product.input[0])
        body = next(entry.g for entry in self.product.attribute if entry.name == "body")
        turned = any(node.op_type == "Gemm" and attributes(node).get("transB") for node in body.node)
        return stack.swapaxes(-1, -2) if turned else stack


def columns_of(matrix: Matrix, places: NDArray[np.int64]) -> Matrix:
    """Columns of a matrix [..., in, out], [..., in, *places]: a view where they lie at regular distances."""
    axes = places.shape
    origin = int(places.reshape(-1)[0])
    steps = [
        int(np.take(places, 1, axis).reshape(-1)[0]) - origin if axes[axis] > 1 else 0 for axis in range(len(axes))
    ]
    regular = origin + sum(
        step * np.arange(length).reshape([-1 if i == axis else 1 for i in range(len(axes))])
        for axis, (step, length) in enumerate(zip(steps, axes, strict=True))
    )
    if not np.array_equal(np.broadcast_to(regular, axes), places):
        return matrix[..., places]
    strides = (*matrix.strides[:-1], *(step * matrix.strides[-1] for step in steps))
    return np.lib.stride_tricks.as_strided(matrix[..., origin:], (*matrix.shape[:-1], *axes), strides, writeable=False)


def norm_of(paths: ValuePaths, steps: Sequence[PathStep]) -> NormMap | None:
    """The norm that a path goes through; None where it goes through none."""
    weight: NDArray[Any] | None = None
    bias: NDArray[Any] | None = None
    normed, centred, epsilon = False, False, None
    for step in steps:
        node, varying = step.node, paths.flow.varying
        others = [name for name in node.input if name and name != step.read]
        if node.op_type in NORM_NODES:
            normed, centred = True, centred or node.op_type == "LayerNormalization"
            epsilon = float(attributes(node).get("epsilon", 1e-5))
            constants = [paths.constant(name) for name in node.input[1:] if name]
            weight, bias = (*constants, None, None)[:2]
        elif node.op_type in ("Mul", "Div") and {*others} & varying:
            normed, epsilon = True, _epsilon(paths, next(name for name in others if name in varying))
        elif node.op_type == "Sub" and {*others} & varying:
            centred = True
        elif normed and node.op_type == "Mul" and others:
            factor = paths.constant(others[0])
            weight = factor if weight is None else weight * factor
            bias = None if bias is None else bias * factor
        elif normed and node.op_type == "Add" and others and not {*others} & varying:
            bias = paths.constant(others[0]) if bias is None else bias + paths.constant(others[0])
    return NormMap(weight, bias, centred, epsilon) if normed else None


def _epsilon(paths: ValuePaths, scale: str) -> float | None:
    """What is added to the mean square that a scale is the root of; None where it is no such root."""
    flow, added = paths.flow, 0.0
    while (node := flow.producer(scale)) is not None and node.op_type in (*TO_ROOT, "Add"):
        inner = [name for name in node.input if name in flow.varying]
        if len(inner) != 1:
            return None
        if node.op_type == "Add":
            constant = next(paths.constant(name) for name in node.input if name not in flow.varying)
            added += float(np.asarray(constant).reshape(-1)[0])
        scale = inner[0]
    return added if node is not None and node.op_type == "ReduceMean" else None


class LinearMaps:
    """The products of one hooked model, by the hook points that they give."""

    def __init__(self, model: HookedModel) -> None:
        self.model, self.paths = model, ValuePaths(model)
        self._maps: dict[str, LinearMap] = {}

    def behind(self, point: str) -> LinearMap:
        """The product with a weight that a hook point comes from.

        Raises:
            HookError: the model has no such hook point.
            ModelError: it comes from no product with a weight, or its numbers cannot be told apart.
        """
        if point not in self._maps:
            self._maps[point] = self._find(point)
        return self._maps[point]

    def norm(self, value: str, start: str) -> NormMap | None:
        """The norm between two values; None where there is none."""
        steps = self.paths.back(value, lambda name: name == start)
        return None if steps is None else norm_of(self.paths, steps)

    def _find(self, point: str) -> LinearMap:
        if point not in self.model.metadata.hooks:
            raise HookError(f"{self.model.metadata.family}: the model has no hook point {point}")
        onto = (
            []
            if self._product(point) is not None
            else self.paths.through(point, lambda one: self._product(one) is not None)
        )
        if onto is None:
            raise ModelError(f"{self.model.metadata.family}: {point} comes from no product with a weight")
        if any(self._of_two_values(step.node) for step in onto):
            raise ModelError(f"{self.model.metadata.family}: {point} is a product of values that depend on the text")
        value = onto[0].read if onto else point
        product = self._product(value)
        assert product is not None
        experts = None
        entry = product.input[0]
        if product.op_type == "MatMulNBits":  # whose weight is read in the order of what stands before a Gather
            entry = unordered_input(self.paths.flow, self.model.folder, product)
        if product.op_type == "Scan":
            experts, *_ = self._stack_shape(product.input[0])
            return LinearMap(self.paths, product, value, point, "", (), tuple(onto), experts)
        hooks = self.model.metadata.hooks
        into: list[PathStep] | None = []
        if entry not in hooks:
            into = self.paths.back(entry, lambda one: one in hooks or self._product(one) is not None)
        reads = entry if into == [] else into[0].read if into else ""
        try:
            if reads in hooks:
                self.paths.follow_all(reads, into or ())
        except ModelError:  # a mixture of several values or tokens
            reads = ""
        if reads not in hooks:
            reads, into = "", []
        return LinearMap(self.paths, product, value, point, reads, tuple(into or ()), tuple(onto))

    def _stack_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stack of matrices, perhaps one matrix in the file (DBRX); () of what depends on a text."""
        stack = self.paths.flow.initializers.get(name)
        if stack is not None:
            return (*stack.dims,)
        return () if name in self.paths.flow.varying else self.paths.shape(name)

    def _of_two_values(self, node: onnx.NodeProto) -> bool:
        """Whether a node multiplies matrices that both depend on the text, as scores do."""
        return node.op_type in ATTENDING and len({*node.input} & self.paths.flow.varying) > 1

    def _product(self, value: str) -> onnx.NodeProto | None:
        """The product with a weight that gives a value itself."""
        flow = self.paths.flow
        node = flow.producer(value)
        if node is None or node.op_type == "Reshape":
            return None
        if node.op_type == "Scan":
            return node if len(node.input) == 3 and len(self._stack_shape(node.input[0])) == 3 else None
        product = product_of(flow, node)
        if product is None or product.input[WEIGHT_PLACE[product.op_type]] in flow.varying:
            return None
        return product
