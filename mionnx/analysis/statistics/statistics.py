"""`statistics`: moments of hook points over a dataset, from a pass over its texts or from harvested activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.harvest.settings import capturing
from mionnx.analysis.harvest.texts import Source, Texts
from mionnx.bind.spec_rows import choosing_rows
from mionnx.errors import HookError, InputError, nearest
from mionnx.graph.axes import KEYS, sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import make_token_batch
from mionnx.machine.arrays import to_array
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.moments import Moments
from mionnx.machine.progress import shown
from mionnx.machine.ranges import listed
from mionnx.machine.stored import Storable, Stored
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize, check_batch_size
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.prompt import By, check_by, classes_of, one_prompt, prompt_ids
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_choice import Hooks
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.limits import Indices, Positions

Numbers = NDArray[np.float64]
Hook = str | HookPoint
FUNCTION = "function"
AT_ONCE = 256  # texts that are read ahead, to run those of like length together
TOKENS_AT_ONCE = 65_536  # tokens of harvested activations at a time


@typed(InputError, leave=["by", "hook"])
class Statistics(Brief, Stored):
    """Count, mean, variance and covariance of hook points, float64.

    A value of one token is [...], the hook point's axes without batch and seq. Where tokens have classes, all arrays
    have a first axis of classes, those of `classes(hook)`.

    Attributes:
        by: None, "position", "token", or the function that gives the classes; "function" once it is loaded.

    Example:
        stats = model.statistics(texts, "blocks.2.hook_resid_post", covariance=True)
        stats.mean("blocks.2.hook_resid_post"), stats.save("statistics.safetensors")
    """

    INSIDE: ClassVar[tuple[type[Storable], ...]] = (Moments,)

    def __init__(self, by: By = None) -> None:
        self.by: By = by
        self.texts = 0
        self._moments: dict[str, Moments] = {}

    @property
    def _by(self) -> str | None:
        """The kind of classes, as a file can hold it."""
        return FUNCTION if callable(self.by) else self.by

    def _contents(self) -> dict[str, Any]:
        return {"by": self._by, "texts": self.texts, "moments": self._moments}

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        statistics = cls(contents["by"])
        statistics.texts, statistics._moments = contents["texts"], contents["moments"]
        return statistics

    @property
    def hooks(self) -> list[str]:
        """Names of the hook points."""
        return [*self._moments]

    def add(self, hook: Hook, moments: Moments) -> None:
        """Merge moments of further tokens."""
        name = str(hook)
        self._moments[name] = self._moments[name].merged(moments) if name in self._moments else moments

    def merged(self, other: Statistics) -> Statistics:
        """The statistics of both parts of a dataset together, as if they had been one.

        Raises:
            InputError: other hook points or other classes.
        """
        if self._by != other._by or self._moments.keys() != other._moments.keys():
            raise InputError(f"statistics of {self} and of {other} have other hook points or classes: not merged")
        both = Statistics(self.by)
        both.texts = self.texts + other.texts
        both._moments = {name: one.merged(other._moments[name]) for name, one in self._moments.items()}
        return both

    def classes(self, hook: Hook) -> NDArray[np.int64]:
        """[classes]: the classes that occurred: positions, token ids, or a function's integers."""
        return self._of(hook).classes

    def count(self, hook: Hook) -> NDArray[np.int64]:
        """Number of tokens, [classes] or []."""
        return self._shown(self._of(hook).count)

    def mean(self, hook: Hook) -> Numbers:
        """The mean, [classes, ...] or [...]."""
        return self._shown(self._of(hook).mean)

    def variance(self, hook: Hook, ddof: int = 1) -> Numbers:
        """The variance of each number, [classes, ...] or [...]; n - ddof in the denominator."""
        return self._shown(self._of(hook).variance(ddof))

    def std(self, hook: Hook, ddof: int = 1) -> Numbers:
        """The standard deviation of each number; see `variance`."""
        return np.asarray(np.sqrt(self.variance(hook, ddof)))

    def covariance(self, hook: Hook, ddof: int = 1) -> Numbers:
        """The covariance of all numbers of a vector, [d, d].

        Raises:
            InputError: it was not asked for, or there are too few tokens.
        """
        moments = self._of(hook)
        if moments.products is None:
            raise InputError("no covariance was computed: statistics(..., covariance=True)")
        if moments.count[0] <= ddof:
            raise InputError(f"the covariance of {moments.count[0]} tokens with ddof={ddof}")
        return np.asarray(moments.products / (moments.count[0] - ddof))

    def at(self, hook: Hook, ids: NDArray[Any]) -> Numbers:
        """The mean for each token of a text, ids [seq], by its class: [seq, ...].

        Raises:
            InputError: a token of a class that did not occur, or classes of a function that a file does not hold.
        """
        # A loaded file knows that there was a function, and not which.
        if self.by == FUNCTION:
            raise InputError("the classes are a function's, which no file holds: set `by` to it again")
        try:
            tokens = to_array(ids)
        except ValueError as error:  # rows of unequal length
            raise InputError(f"ids of one text are integers [seq]: {error}") from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InputError(f"ids of one text are integers [seq], got {spelled(tokens)}")
        moments, classes = self._of(hook), classes_of(self.by, tokens)
        places = moments.places(classes)
        if (places < 0).any():
            first = int(np.flatnonzero(places < 0)[0])
            what = self.by if isinstance(self.by, str) else "class"
            raise InputError(
                f"{what} {classes[first]}, of the token at {first}, did not occur in the texts of these statistics: "
                "there is no mean for it"
            )
        return np.asarray(moments.mean[places])

    def ablation(
        self,
        model: Runner,
        prompts: Prompt,
        points: Hook | Iterable[Hook] | None = None,
        *,
        positions: Positions | None = None,
        heads: Indices | None = None,
        rows: Indices | None = None,
        neurons: Indices | None = None,
    ) -> HookSpec:
        """The interventions that put means in place of activations (mean ablation), by class.

        Args:
            prompts: the prompts that the spec is for, in the order in which they run, and padded as they are there.
            points: hook points; all of these statistics if left out.
            positions, heads, rows, neurons: limits of the interventions; see `Intervention`.

        Raises:
            HookError: a hook point without statistics.
            InputError: see `at`.

        Example:
            model.forward(prompt, stats.ablation(model, prompt, "blocks.1.attn.hook_z", heads=3))
        """
        spec, texts = HookSpec(), prompt_ids(model, prompts)
        real = make_token_batch(model.ids(prompts), None, None, model.hooked).real
        limits: dict[str, Any] = {"positions": _ascending("positions", positions, real.shape[1])}
        others = {"rows": rows, "heads": heads, "neurons": neurons}
        limits |= {name: _ascending(name, limit) for name, limit in others.items()}
        if isinstance(points, str | HookPoint):
            points = [points]
        for hook in self.hooks if points is None else listed("points", points):
            means = [self.at(hook, ids) for ids in texts]
            value = np.zeros([*real.shape, *means[0].shape[1:]], np.float32)
            value[real] = np.concatenate(means)
            axis = sequence_axis(HookPoint.parse(str(hook)).axes or ("batch", "seq"))
            spec.intervene(str(hook), Intervention.Replace(np.moveaxis(value, 1, axis), **limits))
        return spec

    def _of(self, hook: Hook) -> Moments:
        name = str(hook)
        if name not in self._moments:
            raise HookError(f"no statistics of {name!r}{nearest(name, self.hooks) or '; ' + ', '.join(self.hooks)}")
        return self._moments[name]

    def _shown(self, array: NDArray[Any]) -> NDArray[Any]:
        # Without classes there is one, of all tokens.
        return array[0] if self.by is None else array

    def _facts(self) -> Iterator[str]:
        yield from (count(len(self._moments), "hook point"), count(self.texts, "text"))
        tokens = next(iter(self._moments.values())).count.sum() if self._moments else 0
        yield f"{int(tokens):,} tokens"
        if self.by is not None:
            yield f"by {self._by}"


@typed(leave=["texts", "points", "by"])
def statistics(
    model: Runner,
    texts: Source,
    points: Hooks,
    *,
    hooks: HookSpec | None = None,
    by: By = None,
    covariance: bool = False,
    batch_size: BatchSize = AUTO,
    column: str | None = None,
    progress: bool | None = None,
) -> Statistics:
    """Count, mean, variance and covariance of hook points over a dataset, in one pass.

    No activations are stored. Sums are float64 (Welford's method, by batches). Every token of every text counts, the
    first one too.

    Args:
        texts: a list of texts or ids, an iterator, or a file or folder as `harvest` takes it.
        points: hook points with one value a token.
        hooks: interventions in force, and captures, which count besides.
        by: classes of tokens: "position", "token", or a function: ids [seq] -> integers [seq]; all together if left
            out.
        covariance: of all numbers of a vector [d], as [d, d]; for one class.
        batch_size: rows of a pass; "auto" chooses by their length.
        column: of tables and JSON lines, the one with the texts.
        progress: see `patch_sweep`.

    Raises:
        HookError: no such hook point, or one without one value a token.
        InputError: no texts, or a covariance by classes.

    Example:
        stats = model.statistics(texts, "blocks.*.hook_resid_post", by="position")
        stats.mean("blocks.2.hook_resid_post").shape  # (positions, hidden)
    """
    _check(by, covariance)
    check_batch_size(batch_size)
    spec = capturing(points, hooks)
    names = _captured(model, spec)
    source, moments, done = Texts(texts, column), Statistics(by), 0
    waiting = iter(source)
    with shown(progress) as show:
        # Rows of a spec are those of all texts together.
        most = AT_ONCE if choosing_rows(model.binder.bind(spec)) is None else None
        while entries := [*islice(waiting, most)]:
            rows = [one_prompt(model, text) for text in entries]
            request = ListRequest(rows, spec, batch_size, logits=False)
            caches = map_rows(model, request, lambda _, cache: cache, "statistics", progress=False)
            for ids, cache in zip(rows, caches, strict=True):
                classes = classes_of(by, ids)
                for name in names:
                    # Tokens as the first axis; a row is one text.
                    axis = sequence_axis(HookPoint.parse(name).axes or ())
                    moments.add(name, Moments.of(np.moveaxis(cache[name], axis, 1)[0], classes, covariance))
            done += len(rows)
            moments.texts = done
            show("statistics", done, source.count)
    if not done:
        raise InputError("no texts: statistics of nothing")
    return moments


@typed(leave=["by"])
def statistics_of(
    activations: Activations, points: Sequence[str] | None = None, *, by: By = None, covariance: bool = False
) -> Statistics:
    """The statistics of harvested activations; see `statistics`.

    Args:
        points: hook points; all if left out.
        by, covariance: see `statistics`; a function gets the ids of the harvested tokens of many texts at a time.

    Raises:
        HookError: a hook point that was not harvested.
        InputError: a covariance by classes.

    Example:
        mionnx.statistics_of(Activations("folder"), covariance=True).covariance("blocks.2.hook_resid_post")
    """
    _check(by, covariance)
    moments = Statistics(by)
    moments.texts = activations.texts
    names = [*activations] if points is None else [*points]
    for batch in activations.batches(TOKENS_AT_ONCE, shuffle=False, points=names):
        classes = classes_of(by, batch["token_ids"], batch["positions"])
        for name in names:
            moments.add(name, Moments.of(batch[name], classes, covariance))
    return moments


def _ascending(what: str, limit: Any, length: int = 0) -> Any:
    """Indices of a limit in ascending order, negative ones of a text of a length.

    A value with an entry for each index is read in the order given where a limit chooses all of them.
    """
    if limit is None or isinstance(limit, str | int | np.integer):
        return limit
    entries = listed(what, limit)
    if any(isinstance(one, str) for one in entries):
        return entries
    if not all(isinstance(one, int | np.integer) for one in entries):  # those of each row
        return [_ascending(what, one, length) for one in entries]
    return sorted(entries, key=lambda one: one + length if one < 0 else one)


def _check(by: By, covariance: bool) -> None:
    check_by(by)
    if covariance and by is not None:
        raise InputError("covariance= is of all tokens together: leave by= out")


def _captured(model: Runner, spec: HookSpec) -> list[str]:
    if any(one.positions is not None or one.heads is not None or one.before for one in spec.captures):
        raise InputError("statistics are of whole values after interventions: capture without positions, heads, before")
    names = [capture.node.hook for capture in model.binder.bind(spec).captures]
    if not names:
        raise HookError("no hook points: statistics of nothing")
    for name in names:
        axes = HookPoint.parse(name).axes or ()
        if "seq" not in axes or KEYS in axes:
            raise HookError(f"{name} is [{', '.join(axes)}]: it has no value of its own for each token")
    return names
