"""`Plan`: the structure of a rewritten graph. It holds hooks, kinds and limits, never a value."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from mionnx.graph.fragment import FittedFragment, InnerHook, inner_names
from mionnx.graph.hook_points import HookPoint


class EditKind(Protocol):
    """A kind of intervention, as far as it shapes the graph.

    Hashable; its `repr` is part of cache keys.

    `mionnx.spec.kinds.kind.Kind` is one.

    Attributes:
        name: part of the names of nodes and inputs.
        values: names of the values, each of which becomes a graph input.
    """

    name: ClassVar[str]
    values: ClassVar[tuple[str, ...]]

    def rank(self, activation: int, name: str) -> int:
        """The rank of a value, at an activation of some rank."""
        ...

    def nodes(self, op: Any, x: Any, *values: Any) -> Any:
        """Add the nodes that change an activation; the changed activation."""
        ...

    def reference(self, x: Any, *values: Any) -> Any:
        """Compute in numpy what the nodes have to equal."""
        ...


@dataclass(frozen=True)
class Edit:
    """One intervention, as far as it shapes the graph."""

    hook: str
    kind: EditKind
    index: int  # which of the interventions at this hook point it is, from 0
    axes: tuple[str, ...]
    at_positions: bool = False  # whether an input says at which token positions it applies
    # Whether an input says at which heads, rows, columns of router logits and neurons it applies, and which scores are
    # not of padding.
    masked: bool = False
    fit: FittedFragment | None = None  # the structure of a splice's fragment
    reads: str | None = None  # of a splice, the hook point that it reads besides
    # The hook point that holds the choice, where an input says at which chosen experts it applies.
    at_experts: str | None = None
    switched: bool = False  # whether an input says that it applies at all
    counted: bool = False  # whether tokens' positions are an input: the mask that they are counted on hides some

    @property
    def prefix(self) -> str:
        """Prefix of the names of its inputs and nodes."""
        return f"{self.hook}.{self.index}.{self.kind.name}"

    @property
    def value_inputs(self) -> tuple[str, ...]:
        """The inputs of its values, in the order of the kind's."""
        return tuple(f"{self.prefix}.{name}" for name in self.kind.values)

    @property
    def value_input(self) -> str:
        """The input of its value, of a kind that has one."""
        (name,) = self.value_inputs
        return name

    @property
    def positions_input(self) -> str:
        """The input of its positions: int64 [batch or 1, n], absolute; negative ones select nothing."""
        return f"{self.prefix}.positions"

    @property
    def mask_input(self) -> str:
        """The input of its heads, rows and neurons: bool, of the value's rank, broadcast to it."""
        return f"{self.prefix}.where"

    @property
    def experts_input(self) -> str:
        """The input of its experts: int64 [n]."""
        return f"{self.prefix}.experts"

    @property
    def switch_input(self) -> str:
        """The input that turns it on: bool, no axes."""
        return f"{self.prefix}.on"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of its values and limits."""
        limits = (self.at_positions, self.positions_input), (self.masked, self.mask_input)
        chosen = *limits, (self.at_experts is not None, self.experts_input)
        return (*self.value_inputs, *(name for limited, name in chosen if limited))

    def weight_input(self, name: str) -> str:
        """The input of one of its fragment's weights."""
        return f"{self.prefix}.{name}"


@dataclass(frozen=True)
class CaptureNode:
    """One capture: a hook point, after or before its interventions, whole or in part."""

    hook: str
    before: bool = False  # whether what came in is meant
    at_positions: bool = False  # whether an input says of which token positions
    at_heads: bool = False  # whether an input says of which heads
    # Of a hook point that a splice brings, what is known of it.
    inner: InnerHook | None = field(default=None, compare=False, repr=False)
    dtype: str | None = None  # to which it is cast; None where it keeps its own

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the value's axes."""
        return HookPoint.parse(self.hook).axes or () if self.inner is None else self.inner.axes

    @property
    def output(self) -> str:
        return f"{self.hook}.before" if self.before else self.hook

    @property
    def fetched(self) -> str:
        """The name of the graph's output; a part or a cast cannot have the name of the whole."""
        part = ".part" if self.at_positions or self.at_heads else ""
        return self.output + part + (f".{self.dtype}" if self.dtype else "")

    @property
    def columns_input(self) -> str:
        """The input of its positions: int64 [batch, n], indices along the sequence axis."""
        return f"{self.output}.capture.columns"

    @property
    def heads_input(self) -> str:
        """The input of its heads: int64 [n]."""
        return f"{self.output}.capture.heads"

    @property
    def inputs(self) -> tuple[str, ...]:
        limits = (self.at_positions, self.columns_input), (self.at_heads, self.heads_input)
        return tuple(name for limited, name in limits if limited)


class GradientNode(CaptureNode):
    """A gradient by the value of a hook point, after or before its interventions."""

    @property
    def source(self) -> str:
        """The name of the value by which the metric is differentiated."""
        return super().output

    @property
    def output(self) -> str:
        return gradient_name(self.source)


def gradient_name(value: str) -> str:
    """The name of the gradient by a value."""
    return f"{value}{GRADIENT}"


GRADIENT = ".gradient"  # end of the names of gradients
METRIC = "mionnx.metric"
METRIC_WEIGHTS, METRIC_SEED, METRIC_REFERENCE = f"{METRIC}.weights", f"{METRIC}.seed", f"{METRIC}.reference"
METRIC_ANSWER, METRIC_VERSUS = f"{METRIC}.answer", f"{METRIC}.versus"


@dataclass(frozen=True)
class Gradients:
    """A metric of the logits, and its gradients."""

    metric: str
    by: tuple[GradientNode, ...] = ()  # the gradients, in execution order; none if the metric alone is wanted
    # The name of the rules by which nodes are gone through backwards; see `mionnx.rewrite.gradient.rules`.
    rules: str = "gradient"
    of: str = "logits"  # the value that the metric reads: the logits, or one at a hook point
    # With a value at a hook point, further ones whose sums are added to its, each with numbers of its own.
    beside: tuple[str, ...] = ()
    # Whether rows of numbers for one text go back from the hook point; see `mionnx.rewrite.gradient.rows`.
    rows: bool = False

    @property
    def seeds(self) -> dict[str, str]:
        """Value at a hook point -> the input of the numbers that it is weighed with."""
        return {self.of: METRIC_SEED} | {name: f"{METRIC_SEED}.{name}" for name in self.beside}


LOGIT_COLUMNS, LOGIT_TOKENS, LOGIT_TOP_K = "mionnx.logits.columns", "mionnx.logits.tokens", "mionnx.logits.top_k"
LOGIT_BEGIN = "mionnx.logits.begin"
TOP_IDS = "mionnx.logits.top_ids"
NONE, PADDED, ALL, STOCK = "none", "padded", "all", "stock"  # fused operators that may stand


@dataclass(frozen=True)
class Outputs:
    """The model's own outputs that a graph computes, and the part of the logits."""

    logits: bool = True
    last: bool = False
    at_positions: bool = False  # of the positions in the input `LOGIT_COLUMNS`, int64 [batch, n]
    of_tokens: bool = False  # of the tokens in the input `LOGIT_TOKENS`, int64 [n]
    only_these: bool = False  # and the head is computed for these tokens alone, which may change the last bits
    ranked: bool = False  # the largest only, as many as the input `TOP_K` says, int64 [1]; `TOP_IDS` has their tokens
    carried: bool = True  # whether keys, values and states are given, for a call that goes on
    begins: bool = False  # of the columns from the input `LOGIT_BEGIN` on, int64 [1]: 0 for all, -1 for the last
    readout: bool = False  # what a lens reads off the logits, in their place; see `mionnx.rewrite.lens_head`


@dataclass(frozen=True)
class Plan:
    """The structure of one rewritten graph of a model; equal plans share a session.

    Attributes:
        starts: values that are inputs of the graph, which begins with them; none if it begins with the tokens.
        fused: of the fused operators that an adopted file came with, those that may stand where nothing inside them is
            asked for: "none", "padded" (those that are right for padded texts too), or "all"; "stock" is the file's own
            graph in the place of the hooked one.
        blocks: of queries in which attention is computed where nobody reads scores or pattern; 0 for one product.
    """

    edits: tuple[Edit, ...] = ()
    captures: tuple[CaptureNode, ...] = ()
    outputs: Outputs = Outputs()
    starts: tuple[str, ...] = ()
    fused: str = NONE
    gradients: Gradients | None = None
    blocks: int = 0

    @property
    def touches(self) -> bool:
        """Whether anything between tokens and outputs is changed, captured or differentiated."""
        return bool(self.edits or self.captures or self.starts or self.gradients)

    @property
    def differentiated(self) -> bool:
        """Whether it has the derivatives of something."""
        return self.gradients is not None and bool(self.gradients.by)

    @property
    def empty(self) -> bool:
        """Whether the untouched graph serves."""
        return self == Plan()

    @property
    def inner(self) -> set[str]:
        """The hook points inside splices, which the model's own graph does not have."""
        return {name for edit in self.edits for name in inner_names(edit.hook, edit.fit)}
