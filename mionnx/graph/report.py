"""`Report`: the nodes, inputs and outputs that a rewrite adds and removes."""

import json
from dataclasses import asdict, dataclass, field

from mionnx.errors import SpecFileError


@dataclass
class Report:
    """Names of nodes added and removed, new inputs and outputs; count of fused operators."""

    added: dict[str, list[str]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    restored: int = 0

    def add(self, where: str, node: str) -> None:
        """Note a node added at a hook point."""
        self.added.setdefault(where, []).append(node)

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Report":
        """Parse the text of `to_json`.

        Raises:
            SpecFileError: it is none.
        """
        try:
            return Report(**json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecFileError(f"no report of a rewrite: {error}") from error

    def __str__(self) -> str:
        lines = [f"at {where}: {', '.join(nodes)}" for where, nodes in self.added.items()]
        lines += [f"removed: {len(self.removed)} nodes that nothing reads any more"] if self.removed else []
        lines += [f"new inputs: {', '.join(self.inputs)}"] if self.inputs else []
        lines += [f"new outputs: {', '.join(self.outputs)}"] if self.outputs else []
        lines += [f"fused operators of the file that stand: {self.restored}"] if self.restored else []
        return "\n".join(lines) or "the graph is untouched"
