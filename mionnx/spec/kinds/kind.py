"""`Kind`: the base of intervention kinds, with all that other rooms ask of one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, Unpack

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InterventionError
from mionnx.graph.fragment import Fragment
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.arrays import to_array
from mionnx.spec.limits import Limits, checked

Array = NDArray[Any]


class ValueShape(Enum):
    """Relation of a value's shape to the activation's."""

    BROADCAST = "broadcasts to the activation, or to the part that the limits select"
    EXACT = "the activation's own shape; with limits, one that broadcasts to it or to the selected part"
    DIRECTIONS = "[k, width]: directions along the activation's last axis"
    COORDINATES = "as BROADCAST, with the number k of directions in place of the activation's width"
    ATTENTION_MASK = "broadcasts to [batch, n_heads, seq_q, seq_k] of each row's own text, past included"


class Operators(Protocol):
    """Nodes added as calls, `op.Mul(a, b)`; see `mionnx.graph.builder.Builder`."""

    def __getattr__(self, operator: str) -> Callable[..., Any]: ...

    def fragment(self, x: Any) -> Any:
        """Insert the fragment of a splice behind `x`; its output."""
        ...


class ValueReader(Protocol):
    """Reads values on a command line; the others shape attention masks.

    Attributes:
        seq_len: None without a text.
        both: whether queries read later keys too.
    """

    n_heads: int
    seq_len: int | None
    both: bool

    def array(self, text: str) -> Array:
        """A number, or a tensor of a file."""
        ...


@dataclass(frozen=True, eq=False)
class Change:
    """The data of one intervention; see `mionnx.spec.intervention.Intervention`."""

    kind: str
    value: Array | None = None
    positions: tuple[Any, ...] | str | None = None
    heads: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    fragment: Fragment | None = None
    reads: str | None = None
    several: tuple[Array, ...] = ()
    experts: tuple[int, ...] | None = None
    neurons: tuple[int, ...] | None = None

    @property
    def values(self) -> tuple[Array, ...]:
        """The values, in the order of the kind's `values`."""
        return self.several if self.value is None else (self.value,)


@dataclass(frozen=True)
class Kind(ABC):
    """One kind of intervention: its nodes, their numpy reference, and rules for its values.

    A subclass is a frozen dataclass in a file of its own in this folder, where `KINDS` finds it. Its fields, if it has
    any, are structure: they shape the graph and are part of cache keys through `repr`. Values are never part of it.
    """

    name: ClassVar[str]
    values: ClassVar[tuple[str, ...]] = ("value",)  # names of its value inputs; a single one is called "value"
    shape: ClassVar[ValueShape] = ValueShape.BROADCAST
    infinities: ClassVar[Mapping[str, float]] = {}  # name of a value -> the infinity that it may hold
    infinity_remedy: ClassVar[str] = "only Knockout takes -inf, at hook_scores"
    spelling: ClassVar[str | None] = "VALUE"  # on the command line, "" without a value; None: it has no option
    of_prompt: ClassVar[bool] = False  # reading the spelling needs the length of a prompt
    has_fragment: ClassVar[bool] = False  # an ONNX fragment takes the place of values
    overwrites: ClassVar[bool] = False  # nothing is left of the activation where it applies, whatever the values
    by_distance: ClassVar[bool] = False  # its mask follows from distances of queries and keys: the value is a number
    has_strength: ClassVar[bool] = False  # a compiled graph can have its strength as an input; see `strength`
    strength_step: ClassVar[str | None] = None  # node whose input the strength multiplies; None: the value itself

    def __str__(self) -> str:
        return self.name

    @classmethod
    @abstractmethod
    def make(cls, *args: Any, **options: Any) -> Change:
        """The public constructor; `Intervention.{class name}` has its signature and docstring."""

    @abstractmethod
    def nodes(self, op: Operators, x: Any, *values: Any) -> Any:
        """The changed activation, as nodes; `values` are graph inputs of the activation's dtype."""

    @abstractmethod
    def reference(self, x: Array, *values: Any) -> Array:
        """Compute in numpy what the nodes have to equal; arguments as for `nodes`."""

    def shape_of(self, name: str) -> ValueShape:
        """How the shape of one of its values is related to the activation's."""
        return self.shape

    def rank(self, activation: int, name: str) -> int:
        """The rank of the input of a value, at an activation of some rank."""
        return 2 if self.shape_of(name) is ValueShape.DIRECTIONS else activation

    def at(self, point: HookPoint, axes: Sequence[str], recurrent: bool) -> "Kind":
        """The kind at a hook point, with the structure that it has there; refused where it makes no sense."""
        return self

    def strength(self, *values: Array) -> float | None:
        """The default of a strength input; None if these values have no strength."""
        return 1.0 if self.has_strength else None

    def with_strength(self, op: Operators, value: Any, strength: Any) -> Any:
        """The value at a strength, as a node."""
        return op.Mul(value, strength)

    def read(self, text: str, reader: ValueReader) -> Sequence[Any]:
        """The constructor's arguments from their spelling on the command line."""
        return [reader.array(text)] if self.values else []

    def check(self, values: tuple[Array, ...]) -> tuple[Array, ...]:
        """The values as the kind holds them; refused where it cannot have them."""
        return values

    @property
    def title(self) -> str:
        """Name of the public constructor."""
        return type(self).__name__

    @property
    def help(self) -> str:
        """The first line of its docstring."""
        return (self.__doc__ or "").strip().partition("\n")[0]

    @property
    def stored_values(self) -> tuple[str, ...]:
        """Names of the tensors of a spec file."""
        return self.values

    def stored(self, change: Change) -> dict[str, Array]:
        """The tensors of a spec file, by the names in `stored_values`."""
        # Not ascontiguousarray: it adds an axis.
        return {name: np.asarray(value, order="C") for name, value in zip(self.values, change.values, strict=True)}

    def restored(self, tensors: Mapping[str, Array], reads: str | None, **limits: Any) -> Change:
        """The change of tensors in a spec file; a `ValueError` where no constructor makes these."""
        return self.change([tensors[name] for name in self.values], **limits)

    def change(self, values: Sequence[ArrayLike], **limits: Unpack[Limits]) -> Change:
        """One intervention of this kind, its values and limits checked."""
        named = zip(self.values, values, strict=True)
        arrays = self.check(tuple(self._numbers(name, value) for name, value in named))
        if self.values == ("value",):
            return Change(self.name, arrays[0], **checked(limits))
        return Change(self.name, several=arrays, **checked(limits))

    def _numbers(self, name: str, value: ArrayLike) -> Array:
        what = "the value" if name == "value" else name
        try:
            array = np.array(to_array(value))  # a copy: what the caller changes later is not part of the spec
        except ValueError as error:  # rows of unequal length, or a tensor that numpy cannot read
            raise InterventionError(f"{self}: {what} is no array of numbers: {error}") from error
        if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
            raise InterventionError(f"{self}: {what} must be numbers, got dtype {array.dtype}")
        if array.size == 0:
            raise InterventionError(f"{self}: {what} is empty (shape {list(array.shape)})")
        numbers = array.astype(np.float64)
        if np.isnan(numbers).any():
            raise InterventionError(f"{self}: {what} has NaN at {np.argwhere(np.isnan(numbers))[0].tolist()}")
        # NaN equals nothing: without an infinity of its own, a value may have none.
        forbidden = np.isinf(numbers) & (numbers != self.infinities.get(name, np.nan))
        if forbidden.any():
            where = np.argwhere(np.isinf(numbers))[0].tolist()
            raise InterventionError(f"{self}: {what} is infinite at {where}; {self.infinity_remedy}")
        return array


def at_scores(point: HookPoint) -> bool:
    """Whether a hook point has attention scores, masked by the dtype's lowest number."""
    return point.name.endswith(".hook_scores")


def lowest(dtype: Any) -> Any:
    """The lowest finite number of a dtype: attention scores hold it where they are masked."""
    return ml_dtypes.finfo(np.dtype(dtype)).min
