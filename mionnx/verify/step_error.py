"""What one step adds to an error: the second runtime's step run on the first one's values.

The error at a hook point is what came in, as far as the step amplifies it, and what the step itself does differently.
The second part alone is had by feeding the step what the other runtime had there.
"""

from collections.abc import Sequence

from mionnx.verify.difference import Difference
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.runtime import GraphRuntime


def local_difference(
    runtime: GraphRuntime, subject: GraphUnderTest, tape: RecordedValues, known: Sequence[str], end: str, unit: str
) -> Difference:
    """The difference that one step makes.

    Args:
        runtime, subject: what runs the step.
        tape: what the other one had; read only.
        known: the hook points before the step, all on the tape.
        end: the hook point after it, on the tape too.
        unit: the coarser dtype of the two.

    Raises:
        ModelError: the runtime cannot run the step.
    """
    found = Difference(unit=unit)
    starts = subject.starts_of(known, [end])
    with runtime.opened_part(subject, starts, [end]) as piece:
        for prompt, call in enumerate(subject.calls):
            feeds = subject.feeds(call) | {name: tape.get(prompt, name) for name in starts}
            found.add(tape.get(prompt, end), piece(feeds)[end])
    return found


def nodes_of(subject: GraphUnderTest, known: Sequence[str], end: str) -> list[str]:
    """The nodes of a step, as `name (operator)`, in the order in which they run."""
    wiring = subject.wiring
    return [spell(wiring.nodes[i].name, wiring.nodes[i].op_type) for i in sorted(wiring.ancestors([end], known))]


def spell(name: str, operator: str) -> str:
    """A node as people read it."""
    return f"{name} ({operator})"
