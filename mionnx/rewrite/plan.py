"""What shapes a rewritten graph: the hooks, the kinds, which limits there are. Never a value."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Edit:
    """One intervention, as far as it shapes the graph.

    Attributes:
        hook: name of the value it changes.
        kind: a key of `mionnx.intervention.KINDS`.
        index: which of the interventions at this hook point it is, from 0.
        axes: the names of the value's axes.
        at_positions: whether an input says at which token positions it applies.
        masked: whether an input says at which heads and rows it applies.
    """

    hook: str
    kind: str
    index: int
    axes: tuple[str, ...]
    at_positions: bool = False
    masked: bool = False

    @property
    def prefix(self) -> str:
        """What the names of its inputs and nodes begin with."""
        return f"{self.hook}.{self.index}.{self.kind}"

    @property
    def value_input(self) -> str:
        """The input of its value."""
        return f"{self.prefix}.value"

    @property
    def positions_input(self) -> str:
        """The input of its positions: int64 [batch or 1, n], absolute; entries below 0 select nothing."""
        return f"{self.prefix}.positions"

    @property
    def mask_input(self) -> str:
        """The input of its heads and rows: bool, of the value's rank, broadcast to it."""
        return f"{self.prefix}.where"


@dataclass(frozen=True)
class Want:
    """One capture: a hook point, after or before its interventions."""

    hook: str
    before: bool = False

    @property
    def output(self) -> str:
        """The name of the graph output, and of the captured array."""
        return f"{self.hook}.before" if self.before else self.hook


@dataclass(frozen=True)
class Plan:
    """Everything that distinguishes one rewritten graph of a model from another; equal plans share a session.

    Attributes:
        edits: interventions, in registration order.
        wants: captures, in execution order.
        last_only: whether logits are computed for the last position of each row only.
    """

    edits: tuple[Edit, ...] = ()
    wants: tuple[Want, ...] = ()
    last_only: bool = False

    @property
    def empty(self) -> bool:
        """Whether the untouched graph serves."""
        return not (self.edits or self.wants or self.last_only)


@dataclass
class Report:
    """What a rewrite did: nodes added and removed, by name, and what became input or output."""

    added: dict[str, list[str]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def add(self, where: str, node: str) -> None:
        """Note a node added at a hook point."""
        self.added.setdefault(where, []).append(node)

    def __str__(self) -> str:
        lines = [f"at {where}: {', '.join(nodes)}" for where, nodes in self.added.items()]
        lines += [f"removed: {len(self.removed)} nodes that nothing reads any more"] if self.removed else []
        lines += [f"new inputs: {', '.join(self.inputs)}"] if self.inputs else []
        lines += [f"new outputs: {', '.join(self.outputs)}"] if self.outputs else []
        return "\n".join(lines) or "the graph is untouched"
