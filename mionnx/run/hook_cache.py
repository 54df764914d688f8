"""`HookCache`: the logits of a forward pass and everything that was captured on the way; its rows, cut and joined."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.plan import BoundCapture
from mionnx.errors import HookError, InputError, SpecFileError, nearest
from mionnx.graph.axes import KEYS, TOKEN_AXES, sequence_axis
from mionnx.graph.hook_points import HookPoint, layer_of, short_names
from mionnx.inputs.kv_cache import KVCache
from mionnx.inputs.layer_cache import BY_POSITION, LayerCache, Value
from mionnx.inputs.past import take_present
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.brief import Brief, count, shape_of
from mionnx.machine.dialects import Translated
from mionnx.machine.stored import Storable, Stored
from mionnx.machine.typed import typed
from mionnx.rewrite.plan import GRADIENT, METRIC, TOP_IDS

Key = HookPoint | str | tuple[str, int]
BEFORE_SUFFIX = ".before"  # ends the names of values before their interventions

CACHED = ("batch", "n_kv_heads", KEYS, "head_dim")  # axes of keys and values
Columns = slice | NDArray[np.bool_]
Arrays = dict[str, tuple[NDArray[Any], list[str]]]  # name -> values and their axes
SHOWN_NAMES = 3  # names of hook points in a refusal


@typed(InputError, leave=["hook"])
class HookCache(Brief, Stored, Translated, Mapping[str, NDArray[Any]]):
    """Logits and captures of one forward pass.

    A mapping from hook names to arrays, in execution order. Besides by name, values are found by `HookPoint` and by
    short name and layer: `cache["blocks.5.attn.hook_pattern"]`, `cache[HookPoint.AttnPattern(5)]`,
    `cache["pattern", 5]`; layers may count from the end, `cache["resid_post", -1]`. Outside of the layers
    a short name alone will do, `cache["embed"]`. Values captured before their interventions have names that end in
    `.before`.

    Arrays that another device than the CPU computed stay there until they are read. `save("name.safetensors")` writes
    everything, the captures under their names; `HookCache.load` reads it.

    Attributes:
        past: what the next pass goes on from: of a transformer the key/value cache and of a hybrid the `LayerCache`, if
            `use_cache=True` asked for it, of a model without attention the recurrent state; None if there is none.
        top_ids: the tokens of the largest logits, [batch, seq, k], if `Logits(k=k)` asked for them.
        num_layers: of the model, for layers that are counted from the end; None if it is not known.
        metric: the spec's metric, float32 [batch]; None if it has none.
        grad: the gradients of the metric, found as captures are: `cache.grad["z", 3]`; None if none were asked for.
    """

    INSIDE: ClassVar[tuple[type[Storable], ...]] = (KVCache, RWKVState, LayerCache)

    def __init__(
        self,
        logits: Value | None,
        captured: Mapping[str, Value],
        kv_cache: LayerCache[Any] | None = None,
        state: LayerCache[Any] | None = None,
        top_ids: Value | None = None,
        *,
        num_layers: int | None = None,
        metric: Value | None = None,
        grad: "HookCache | None" = None,
    ) -> None:
        self._logits = logits
        self._captured = dict(captured)
        self.past = kv_cache if state is None else state
        self.top_ids = None if top_ids is None else np.asarray(top_ids)
        self.num_layers = num_layers
        self.metric = None if metric is None else np.asarray(metric)
        self.grad = grad

    __eq__, __hash__ = object.__eq__, object.__hash__  # arrays are compared one by one, by numpy

    def _contents(self) -> dict[str, Any]:
        state = self.state if self.kv_cache is None else None  # a hybrid's is stored once
        past = {"kv_cache": self.kv_cache, "state": state}
        fields = {"logits": self._logits, **past, "top_ids": self.top_ids, "num_layers": self.num_layers}
        if self.metric is not None:
            fields |= {"metric": self.metric, "grad": self.grad}
        if taken := fields.keys() & self._captured.keys():
            raise SpecFileError(f"a capture that is called {taken.pop()!r} has no place in a file")
        return {**fields, **self._captured}

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        fields = {name: contents.pop(name) for name in ("logits", "kv_cache", "state", "top_ids", "num_layers")}
        fields |= {name: contents.pop(name) for name in ("metric", "grad") if name in contents}
        return cls(captured=contents, **fields)

    @property
    def kv_cache(self) -> Any:
        """The key/value cache after this pass, if it was asked for; of a hybrid with its states, a `LayerCache`."""
        return None if self.past is None or self.past.states_alone else self.past

    @property
    def state(self) -> Any:
        """The recurrent state after this pass: an `RWKVState`, or a `LayerCache` with states; None in transformers."""
        return None if isinstance(self.past, KVCache) else self.past

    @property
    def has_logits(self) -> bool:
        """Whether there are logits: asked for, and not taken by `into_output`."""
        return self._logits is not None

    def output(self) -> NDArray[Any]:
        """The logits, [batch, seq, vocab], or the part that `logits=` asked for.

        Of an encoder they are those of its head: [batch, labels] of classes, [batch, seq, labels] of tags, [batch, seq,
        2] of a span; of an embedding model the embeddings [batch, d], of one without a head its last stream.

        Raises:
            HookError: there are none: `logits=False`, or `into_output` took them.
        """
        if self._logits is None:
            raise HookError("this cache has no logits: `logits=False` was asked for, or `into_output` took them")
        return np.asarray(self._logits)

    def into_output(self) -> NDArray[Any]:
        """The logits, [batch, seq, vocab]; the cache gives up its hold on them."""
        logits, self._logits = self.output(), None
        return logits

    def get(self, hook: Key, default: Any = None) -> Any:
        """The captured array, or `default` if the hook point was not captured."""
        name = self._name(hook)
        return np.asarray(self._captured[name]) if name in self._captured else default

    def require(self, hook: Key) -> NDArray[Any]:
        """The captured array.

        Raises:
            HookError: the hook point was not captured, and the message says how it is; or no such layer or name, with
                the nearest that was captured.
        """
        self._check_layer(hook)
        name = self._name(hook)
        if name not in self._captured:
            raise HookError(f"{name!r} was not captured{self._remedy(name)}")
        return np.asarray(self._captured[name])

    def _remedy(self, name: str) -> str:
        """End of a message: how to capture a hook point, or the nearest name that was captured."""
        captured = f"; captured: {', '.join(islice(self, SHOWN_NAMES))}" if self._captured else "; nothing was captured"
        captured += f" and {len(self) - SHOWN_NAMES} more" * (len(self) > SHOWN_NAMES)
        plain = name.removesuffix(BEFORE_SUFFIX)
        point = HookPoint.parse(plain)
        if self.num_layers is not None and point.layer is not None and point.layer >= self.num_layers:
            return f": the model has the layers 0 to {self.num_layers - 1}"
        if point.variant == "Custom":  # of a splice, or misspelled
            return nearest(name, self._captured) or captured
        before = ", before=True" * (plain != name)
        return f"{captured}. HookSpec().capture({plain!r}{before}) captures it, or a names_filter of run_with_cache"

    def num_captures(self) -> int:
        """Number of captured arrays."""
        return len(self._captured)

    def __getitem__(self, hook: Key) -> NDArray[Any]:
        return self.require(hook)

    def __contains__(self, hook: object) -> bool:
        return isinstance(hook, HookPoint | str | tuple) and self._name(hook) in self._captured

    def __iter__(self) -> Iterator[str]:
        return iter(self._captured)

    def __len__(self) -> int:
        return len(self._captured)

    def _facts(self) -> Iterator[str]:
        total = sum(array.nbytes for array in self._captured.values())
        yield from (count(len(self), "capture"), f"{total / 1e6:.1f} MB")

    def _lines(self) -> Iterator[str]:
        if self._logits is not None:
            yield f"logits: {shape_of(self._logits)}"
        alike = Counter(
            (name.replace(f"blocks.{layer_of(name)}.", "blocks.{i}.", 1), shape_of(value))
            for name, value in self._captured.items()
        )
        yield from (f"{name}: {shape}{f', {times} layers' * (times > 1)}" for (name, shape), times in alike.items())
        yield from [] if self.metric is None else [f"metric: {shape_of(self.metric)}"]
        yield from [] if self.grad is None else [f"gradients: {len(self.grad)}"]
        yield from [] if self.past is None else [repr(self.past)]

    def _name(self, hook: Key) -> str:
        if not isinstance(hook, tuple):
            name = str(hook)
            if name not in self._captured:  # TransformerLens' names of recurrent mixers are other spellings of ours
                name = _outside(name)
                with suppress(HookError):
                    name = HookPoint.parse(name).name
            return name
        if len(hook) != 2:
            raise HookError(f"{hook!r} is no pair of a short name and a layer, such as ('pattern', 5)")
        short, layer = hook[0], self._from_start(hook[1])
        templates = short_names().get(short)
        inner = [name for name in self._captured if name.endswith(f".hook_{short}")]
        inner = [name for name in inner if layer_of(name) == layer]
        if templates is None and len(inner) == 1:  # of a splice
            return inner[0]
        if templates is None:
            raise HookError(f"no hook point ends in {short!r}{nearest(short, short_names())}")
        names = [template.format(i=layer) for template in templates]
        return next((name for name in names if name in self._captured), names[0])

    def _from_start(self, layer: int) -> int:
        """A layer counted from 0; one that does not exist stays as it is."""
        if isinstance(layer, int | np.integer) and self.num_layers and -self.num_layers <= layer < 0:
            return int(layer) + self.num_layers
        return layer

    def _check_layer(self, hook: Key) -> None:
        """Refuse a layer that the model does not have."""
        if not isinstance(hook, tuple) or len(hook) != 2:
            return
        layer, count, name = hook[1], self.num_layers, _outside(hook[0])
        if name != hook[0]:
            raise HookError(f"{hook!r}: {name!r} stands in no layer: cache[{name!r}]")
        if not isinstance(layer, int | np.integer) or isinstance(layer, bool):
            raise HookError(f"{hook!r}: a layer is an integer, got {layer!r}")
        if count is not None and not -count <= layer < count:
            raise HookError(f"{hook!r}: the model has the layers 0 to {count - 1}, or -{count} to -1 from the end")
        if count is None and layer < 0:
            raise HookError(f"{hook!r}: this cache does not know its model's number of layers: count from 0")

    def stack(self, short: str) -> NDArray[Any]:
        """One hook point of every captured layer, [layer, ...].

        Raises:
            HookError: it was not captured in any layer.

        Example:
            cache = model.forward("The capital of France is", HookSpec().capture("blocks.*.hook_resid_post"))
            cache.stack("resid_post").shape  # (n_layers, 1, seq, hidden)
        """
        names = [name for name in self._captured if HookPoint.parse(name).short == short]
        if not names:
            raise HookError(f"no hook point {short!r} was captured{nearest(short, short_names())}")
        return np.stack([np.asarray(self._captured[name]) for name in names])


HookCache.INSIDE = (KVCache, RWKVState, LayerCache, HookCache)  # gradients are a cache of their own


def _outside(short: str) -> str:
    """The name of a hook point outside the blocks from its short name; any other name as it is."""
    return next((one for one in short_names().get(short, ()) if "{i}" not in one), short)


def collect(bound: BoundSpec, batch: TokenBatch, results: Mapping[str, Value], use_cache: bool) -> HookCache:
    """The cache of one pass, from the outputs that `BoundSpec.outputs` names."""
    captured = {capture.node.output: results[capture.node.fetched] for capture in bound.captures}
    carried = bound.plan.outputs.carried
    past = take_present(bound.model, results, batch, use_cache) if carried else None
    count = bound.model.metadata.sizes.num_layers
    by = {one.node.output.removesuffix(GRADIENT): _of_texts(results, one, batch) for one in bound.gradients}
    grad = HookCache(None, by, num_layers=count) if by else None
    metric = results.get(METRIC)
    top = results.get(TOP_IDS)
    logits = results.get("logits")
    return HookCache(logits, captured, past, top_ids=top, num_layers=count, metric=metric, grad=grad)


def _of_texts(results: Mapping[str, Value], gradient: BoundCapture, batch: TokenBatch) -> Value:
    """A gradient, 0 at keys that are padding: interventions leave them alone."""
    value, axes = results[gradient.node.fetched], gradient.node.axes
    if axes[-1] != KEYS or batch.attention_mask.all():
        return value
    keys = batch.attention_mask.reshape(batch.batch, *[1] * (len(axes) - 2), -1)
    return np.where(keys == 1, np.asarray(value), 0)


def rows_of(cache: HookCache, bound: BoundSpec, batch: TokenBatch) -> list[HookCache]:
    """Cut the results of a padded batch into one `HookCache` a row, without padding."""
    logits = cache.output() if cache.has_logits else None  # copied from their device once
    captures = _arrays(cache, bound.captures)
    gradients = None if cache.grad is None else _arrays(cache.grad, bound.gradients, GRADIENT)
    logits_axes, layers = _logits_axes(bound), cache.num_layers

    def of(row: int) -> HookCache:
        columns = _Columns.of(batch, row)

        def part(value: NDArray[Any] | None, axes: Sequence[str]) -> NDArray[Any] | None:
            return None if value is None else value[(slice(row, row + 1), *columns.along(axes))]

        def parts(values: Arrays) -> dict[str, Any]:
            return {name: part(value, axes) for name, (value, axes) in values.items()}

        return HookCache(
            part(logits, logits_axes),
            parts(captures),
            None if cache.past is None else cache.past.row(row),
            top_ids=part(cache.top_ids, logits_axes),
            num_layers=layers,
            metric=None if cache.metric is None else cache.metric[row : row + 1],
            grad=None if gradients is None else HookCache(None, parts(gradients), num_layers=layers),
        )

    return [of(row) for row in range(batch.batch)]


def joined(rows: Sequence[HookCache], bound: BoundSpec, batch: TokenBatch) -> HookCache:
    """Join the results of single rows, each of which gives up its logits, as those of one batch padded with 0."""
    places, first = [_Columns.of(batch, row) for row in range(batch.batch)], rows[0]

    def put(values: Sequence[Any], axes: Sequence[str]) -> NDArray[Any]:
        sizes = [batch.total if axis == KEYS else batch.seq if axis in TOKEN_AXES else None for axis in axes[1:]]
        shape = [own if size is None else size for own, size in zip(values[0].shape[1:], sizes, strict=True)]
        array = np.zeros((len(rows), *shape), values[0].dtype)
        for row, (place, value) in enumerate(zip(places, values, strict=True)):
            columns = place.along(axes)
            if any(isinstance(one, np.ndarray) for one in columns):  # padding between tokens, or behind them
                columns = np.ix_(*(np.arange(size)[one] for size, one in zip(shape, columns, strict=True)))
            array[row][columns] = value[0]
        return array

    def captured(caches: Sequence[HookCache], captures: Sequence[BoundCapture], ending: str = "") -> dict[str, Any]:
        return {name: put([cache[name] for cache in caches], axes) for name, axes in _axes(captures, ending)}

    def past(caches: Sequence[Any]) -> Any:
        if caches[0] is None:
            return None
        layers = [
            {name: of_part(name, [own[name] for own in layer]) for name in layer[0]}
            for layer in zip(*(cache.device_parts() for cache in caches), strict=True)
        ]
        return type(caches[0])([*map(caches[0].layer_of, layers)], batch.attention_mask)

    def of_part(name: str, values: Sequence[Any]) -> NDArray[Any]:
        return put([*map(np.asarray, values)], CACHED) if name in BY_POSITION else np.concatenate(values)

    logits_axes = _logits_axes(bound)
    grad = [row.grad for row in rows if row.grad is not None]
    return HookCache(
        None if not first.has_logits else put([row.into_output() for row in rows], logits_axes),
        captured(rows, bound.captures),
        past([row.past for row in rows]),
        top_ids=None if first.top_ids is None else put([row.top_ids for row in rows], logits_axes),
        num_layers=first.num_layers,
        metric=None if first.metric is None else np.concatenate([np.asarray(row.metric) for row in rows]),
        grad=HookCache(None, captured(grad, bound.gradients, GRADIENT), num_layers=first.num_layers) if grad else None,
    )


def _arrays(cache: HookCache, captures: Sequence[BoundCapture], ending: str = "") -> Arrays:
    return {name: (cache[name], axes) for name, axes in _axes(captures, ending)}


def _logits_axes(bound: BoundSpec) -> tuple[str, ...]:
    part = bound.logits
    if not bound.model.metadata.positional:
        return "batch", "last"
    return ("batch", "chosen" if part is not None and part.positions is not None else "seq", "last")


def _axes(captures: Sequence[BoundCapture], ending: str) -> list[tuple[str, list[str]]]:
    """Names of captured values and their axes; "chosen" positions have no padding."""
    named = []
    for capture in captures:
        axes = [*capture.node.axes]
        if capture.request.positions is not None:
            axes[sequence_axis(axes)] = "chosen"
        named.append((capture.node.output.removesuffix(ending), axes))
    return named


@dataclass(frozen=True)
class _Columns:
    """The columns of one row's tokens, and of the keys that they read."""

    tokens: Columns
    keys: Columns

    @classmethod
    def of(cls, batch: TokenBatch, row: int) -> Self:
        return cls(_run(batch.real[row]), _run(batch.attention_mask[row] == 1))

    def along(self, axes: Sequence[str]) -> tuple[Any, ...]:
        """The row's own entries of each axis but the first."""
        own = {**dict.fromkeys(TOKEN_AXES, self.tokens), KEYS: self.keys}
        return tuple(own.get(axis, slice(None)) for axis in axes[1:])


def _run(real: NDArray[np.bool_]) -> Columns:
    """The columns of a row's tokens: a slice where they follow each other."""
    first = int(real.argmax())
    last = first + int(real.sum())
    return slice(first, last) if real[first:last].all() else real
