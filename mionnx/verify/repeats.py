"""Determinism: is a run the same, bit for bit, when it is repeated, on one thread, or with its rows in a batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mionnx.call import Call
from mionnx.verify.difference import Difference
from mionnx.verify.named import WITH_THREADS, runtime_of
from mionnx.verify.runtime import Runtime
from mionnx.verify.subject import Subject
from mionnx.verify.tape import Tape

TWICE, ONE_THREAD, BATCH = "the same run twice", "1 thread and all", "row alone and in a batch"


@dataclass(frozen=True)
class Repeat:
    """What repeating a run in another way changed.

    Attributes:
        runtime: its title.
        what: `TWICE`, `ONE_THREAD` or `BATCH`.
        identical: whether all bits are, at every hook point.
        max_abs: the largest absolute difference.
        first: the first hook point that differs; None if none does.
        relative: the largest difference as a share of its hook point's largest value.
    """

    runtime: str
    what: str
    identical: bool
    max_abs: float
    relative: float
    first: str | None


def repeats(runtime: Runtime, subject: Subject, checkpoint: Path | None = None) -> Iterator[Repeat]:
    """Run a subject again in each way that a runtime has.

    A batch is the prompt and the same prompt backwards: rows of one length need no padding, and differ.
    """
    with TemporaryDirectory() as scratch:
        tape = Tape(Path(scratch) / "first")
        stream(runtime, subject, tape)
        yield _repeat(runtime.title, TWICE, runtime, subject, subject, tape)
        name, *settings = runtime.title.split(":")
        with_threads = name in WITH_THREADS or name.endswith("ExecutionProvider")
        if with_threads and not any(setting.startswith("threads=") for setting in settings):
            single = runtime_of(f"{runtime.title}:threads=1", checkpoint)
            yield _repeat(runtime.title, ONE_THREAD, single, subject, subject, tape)
        doubled = Subject(subject.model, subject.spec, subject.names, [_doubled(call) for call in subject.calls])
        yield _repeat(runtime.title, BATCH, runtime, doubled, subject, tape)


def stream(runtime: Runtime, subject: Subject, tape: Tape) -> None:
    """Put every value of a run on a tape."""
    for group in runtime.groups(subject, subject.names):
        with runtime.passes(subject, group) as run:
            for prompt, call in enumerate(subject.calls):
                run(call, lambda name, value, prompt=prompt: tape.add(prompt, name, value))  # type: ignore[misc]


def _doubled(call: Call) -> Call:
    ids = np.concatenate([call.input_ids, call.input_ids[:, ::-1]])
    return Call(ids, np.ones_like(ids), np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy())


def _repeat(title: str, what: str, runtime: Runtime, subject: Subject, first: Subject, tape: Tape) -> Repeat:
    found = {name: Difference() for name in first.names}
    for group in runtime.groups(subject, first.names):
        with runtime.passes(subject, group) as run:
            for prompt, call in enumerate(subject.calls):
                rows = first.calls[prompt].batch

                def compare(name: str, value: np.ndarray, prompt: int = prompt, rows: int = rows) -> None:
                    found[name].add(tape.get(prompt, name), value[:rows])

                run(call, compare)
    differing = [name for name in first.names if not found[name].identical]
    largest = max(one.max_abs for one in found.values())
    relative = max(one.relative for one in found.values())
    return Repeat(title, what, not differing, largest, relative, differing[0] if differing else None)
