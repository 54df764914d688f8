"""`Statistics`: the moments of hook points over a dataset, merged, saved, and put in place of activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import HookError, InputError, nearest
from mionnx.graph.axes import sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.arrays import to_array
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.moments import Moments
from mionnx.machine.ranges import listed
from mionnx.machine.stored import Storable, Stored
from mionnx.machine.typed import typed
from mionnx.run.prompt import By, classes_of, prompt_ids
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.limits import Indices, Positions

Numbers = NDArray[np.float64]
Hook = str | HookPoint
FUNCTION = "function"


@typed(InputError, leave=["by", "hook"])
class Statistics(Brief, Stored):
    """Count, mean, variance and covariance of hook points, float64.

    A value of one token is [...], the hook point's axes without batch and seq. Where tokens have classes, all arrays
    have a first axis of classes, those of `classes(hook)`.

    Attributes:
        by: None, "position", "token", or the function that gives the classes; "function" once it is loaded.
        texts: number of texts.

    Example:
        stats = model.statistics(texts, "blocks.2.hook_resid_post", covariance=True)
        stats.mean("blocks.2.hook_resid_post"), stats.save("statistics.safetensors")
    """

    INSIDE: ClassVar[tuple[type[Storable], ...]] = (Moments,)

    def __init__(self, by: By = None) -> None:
        self.by: By = by
        self.texts = 0
        self._moments: dict[str, Moments] = {}

    def _contents(self) -> dict[str, Any]:
        return {"by": FUNCTION if callable(self.by) else self.by, "texts": self.texts, "moments": self._moments}

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        statistics = cls(contents["by"])
        statistics.texts, statistics._moments = contents["texts"], contents["moments"]
        return statistics

    @property
    def hooks(self) -> list[str]:
        """The hook points."""
        return [*self._moments]

    def add(self, hook: Hook, moments: Moments) -> None:
        """Merge the moments of further tokens of a hook point."""
        name = str(hook)
        self._moments[name] = self._moments[name].merged(moments) if name in self._moments else moments

    def merged(self, other: Statistics) -> Statistics:
        """The statistics of both parts of a dataset together, as if they had been one.

        Raises:
            InputError: other hook points or other classes.
        """
        names = [FUNCTION if callable(one.by) else one.by for one in (self, other)]
        if names[0] != names[1] or self._moments.keys() != other._moments.keys():
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
            prompts: the prompts that the spec is for, in the order in which they run.
            points: hook points; all of these statistics if left out.
            positions, heads, rows, neurons: limits of the interventions; see `Intervention`.

        Raises:
            HookError: a hook point without statistics.
            InputError: see `at`.

        Example:
            model.forward(prompt, stats.ablation(model, prompt, "blocks.1.attn.hook_z", heads=3))
        """
        spec, texts = HookSpec(), prompt_ids(model, prompts)
        longest = max(map(len, texts))
        chosen = (
            self.hooks
            if points is None
            else [points]
            if isinstance(points, str | HookPoint)
            else listed("points", points)
        )
        for hook in chosen:
            means = [self.at(hook, ids) for ids in texts]
            padded = [np.pad(one, [(longest - len(one), 0), *[(0, 0)] * (one.ndim - 1)]) for one in means]
            axis = sequence_axis(HookPoint.parse(str(hook)).axes or ("batch", "seq"))
            value = np.moveaxis(np.stack(padded), 1, axis).astype(np.float32)
            edit = Intervention.Replace(value, positions=positions, heads=heads, rows=rows, neurons=neurons)
            spec.intervene(str(hook), edit)
        return spec

    def _of(self, hook: Hook) -> Moments:
        name = str(hook)
        if name not in self._moments:
            raise HookError(f"no statistics of {name!r}{nearest(name, self.hooks) or '; ' + ', '.join(self.hooks)}")
        return self._moments[name]

    def _shown(self, array: NDArray[Any]) -> NDArray[Any]:
        """All classes, or the only one."""
        return array[0] if self.by is None else array

    def _facts(self) -> Iterator[str]:
        yield from (count(len(self._moments), "hook point"), count(self.texts, "text"))
        tokens = next(iter(self._moments.values())).count.sum() if self._moments else 0
        yield f"{int(tokens):,} tokens"
        if self.by is not None:
            yield f"by {self.by if isinstance(self.by, str) else FUNCTION}"
