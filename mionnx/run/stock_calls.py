"""The kinds of calls in which the graph of an adopted file as it came serves, each tried when it is first asked for.

To try a kind is to run the file's own graph and the hooked graph side by side on a few tokens, both without
optimisations: whatever both give must differ by no more than rounding explains. The verdict is kept beside the model's
graph in `stock_calls.json`, with the hash of that graph; where it cannot be written, it lasts as long as the process.
"""

import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mionnx.engine.engine import Program
from mionnx.engine.engines import open_to_try
from mionnx.errors import MIError, ModelError
from mionnx.graph.folder_file import read_json
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.graph.io_names import KEYS_AND_VALUES, STATE
from mionnx.graph.stock_graph import (
    KINDS_OF_CALLS,
    PADDED_BIT,
    PAST_BIT,
    PAST_TOKENS,
    ROWS_BIT,
    SEVERAL_BIT,
    SEVERAL_TOKENS,
    StockGraph,
    check_stock,
    described,
    difference,
)
from mionnx.inputs.past import past_inputs, present_names, take_present
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.machine.caller import caller_level
from mionnx.machine.files import write_atomic
from mionnx.machine.once import Once, once_property

CALLS_FILE = "stock_calls.json"
CALLS_LOCK = f".{CALLS_FILE}.lock"
WAIT = 10.0  # seconds for another process that writes
Arrays = Mapping[str, NDArray[Any]]

_verdicts: Once[tuple[Path, str, int], str] = Once()  # folder, hash of the graph, kind -> what speaks against it


class StockGraphWarning(UserWarning):
    """An adopted file's own graph does not give what its hooked graph gives, in a kind of call."""


def serves(model: HookedModel, kind: int) -> bool:
    """Whether a file's own graph gives what the hooked one gives in a kind of call; it is tried if it never was."""
    return not problem(model, kind)


def try_all(model: HookedModel) -> dict[str, str]:
    """Try every kind of call before its first; returns a kind in words -> what speaks against it, "" if nothing."""
    if model.stock is None:
        return {}
    trial = Trial(model, model.stock)
    kinds = [kind for kind in range(KINDS_OF_CALLS) if model.has_cache or not kind & PAST_BIT]
    kinds = [kind for kind in kinds if kind & (PAST_BIT | SEVERAL_BIT) or not kind & PADDED_BIT]  # nothing before it
    return {described(kind): problem(model, kind, trial) for kind in kinds}


def problem(model: HookedModel, kind: int, trial: "Trial | None" = None) -> str:
    """What speaks against the file's own graph in a kind of call; "" if nothing does."""
    return _verdicts.get((model.folder, model.digest, kind), lambda: _judged(model, kind, trial))


def _judged(model: HookedModel, kind: int, trial: "Trial | None") -> str:
    """The verdict of the record, or of a trial, which is recorded and said."""
    stock = model.stock
    assert stock is not None  # as the caller knows
    try:
        check_stock(stock, model.proto, model.folder, kind)  # whatever the record says: both may come from anybody
        recorded = _calls(model).get(str(kind))
        verdict = (trial or Trial(model, stock)).problem(kind) if recorded is None else recorded
        if recorded is None:
            _record(model, kind, verdict)
    except MIError as error:  # memory may have run out: tried again by the next process
        recorded, verdict = None, str(error).rpartition("Status Message: ")[2]
    if verdict and recorded is None and trial is None:
        warnings.warn(
            f"{model.name}: calls of {described(kind)} run the hooked graph, not the file's own: {verdict}",
            StockGraphWarning,
            stacklevel=caller_level(),
        )
    return verdict


class Trial:
    """An adopted file's own graph and its hooked graph, open to be compared."""

    def __init__(self, model: HookedModel, stock: StockGraph) -> None:
        self._model, self._stock = model, stock
        self._pasts: dict[int, Past | None] = {}

    @once_property
    def _own(self) -> Program:
        return open_to_try(self._stock.proto.SerializeToString(), self._model.folder)

    @once_property
    def _hooked(self) -> Program:
        model = self._model
        own = model.folder / GRAPH if model.as_on_disk else model.proto.SerializeToString()
        return open_to_try(own, model.folder)

    def problem(self, kind: int) -> str:
        """Run a call of a kind in both, and say what differs; "" if nothing does."""
        model, outputs = self._model, {entry.name for entry in self._model.proto.graph.output}
        shared = [entry.name for entry in self._stock.proto.graph.output if entry.name in outputs]
        past = self._past(kind) if kind & PAST_BIT else None
        batch = self._batch(kind, SEVERAL_TOKENS if kind & SEVERAL_BIT else 1, past)
        feeds = {**batch.feeds(), **past_inputs(model, past, batch)}
        own, expected = self._own.run(shared, feeds), self._hooked.run(shared, feeds)
        return _difference(own, expected, batch, self._stock.allowed)

    def _past(self, kind: int) -> Past | None:
        """A past of the hooked graph; made once for the kinds that have the same."""
        key = kind & (ROWS_BIT | PADDED_BIT)
        if key not in self._pasts:
            batch, names = self._batch(key, PAST_TOKENS, None), present_names(self._model, True)
            feeds = {**batch.feeds(), **past_inputs(self._model, None, batch)}
            self._pasts[key] = take_present(self._model, self._hooked.run(names, feeds), batch, True)
        return self._pasts[key]

    def _batch(self, kind: int, seq: int, past: Past | None) -> TokenBatch:
        """Tokens behind a past; without one, the first row may begin with padding."""
        rows, sizes = 1 + bool(kind & ROWS_BIT), self._model.metadata.sizes
        ids = (np.arange(rows * seq).reshape(rows, seq) * 7 % 97 + 3) % sizes.vocab_size
        mask = np.ones((rows, seq), np.int64)
        mask[0, 0] = past is not None or not kind & PADDED_BIT
        return make_token_batch(ids, mask, past, self._model)


def _difference(actual: Arrays, expected: Arrays, batch: TokenBatch, allowed: float) -> str:
    """The first output in which two graphs differ by more than rounding, padding left out."""
    for name, left in actual.items():
        right, of_past = expected[name], name.startswith(f"{KEYS_AND_VALUES.present}.")
        if left.shape != right.shape:
            return f"{name} has the shape {list(left.shape)}, and {list(right.shape)} in the hooked graph"
        if left.ndim < 3 or name.startswith(STATE.present):  # one vector, or state, a text
            real: Any = slice(None)
        else:
            real = batch.attention_mask.astype(bool) if of_past else batch.real[:, -left.shape[1] :]
        one, other = (np.moveaxis(array, 2, 1)[real] if of_past else array[real] for array in (left, right))
        if not (off := difference(one, other)) <= allowed:  # NaN is more
            return f"{name} differs by {off:.1e} of its largest number, allowed {allowed:.1e}"
    return ""


def _calls(model: HookedModel) -> dict[str, str]:
    """The record of this graph: kind -> what speaks against it."""
    record: Any = None
    with suppress(ModelError):
        record = read_json(model.folder / CALLS_FILE)
    valid = isinstance(record, dict) and record.get("graph") == model.digest and isinstance(record.get("calls"), dict)
    return {kind: text for kind, text in record["calls"].items() if isinstance(text, str)} if valid else {}


def _record(model: HookedModel, kind: int, verdict: str) -> None:
    unwritable = (OSError, Timeout, NotImplementedError, MIError)  # read-only, full, or without locks
    with suppress(*unwritable), FileLock(model.folder / CALLS_LOCK, timeout=WAIT):
        record = {"graph": model.digest, "calls": {**_calls(model), str(kind): verdict}}
        write_atomic(model.folder / CALLS_FILE, json.dumps(record, indent=1).encode())
