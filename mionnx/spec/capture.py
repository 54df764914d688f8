"""`Capture`: one request of a spec to read activations, by name, glob or predicate."""

from dataclasses import dataclass
from typing import Any, ClassVar

from mionnx.spec.hook_choice import HookChoice


@dataclass(frozen=True)
class Capture(HookChoice):
    """One capture request: a hook point, a glob over names or a predicate on them, and limits."""

    before: bool = False
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    title: ClassVar[str] = "a capture"

    def to_entry(self) -> dict[str, Any]:
        """The capture's entry in a spec file.

        Raises:
            SpecFileError: a predicate.
        """
        limits = {"positions": self.positions, "heads": self.heads}
        limited = {name: limit for name, limit in limits.items() if limit is not None}
        return {"hook": self.text, "before": self.before, **limited}
