"""`Noise`: Gaussian noise at the embeddings of a subject's tokens, the corruption of causal tracing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mionnx.analysis.sweep.places import Place, find_places
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import Brief, spelled
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.run.prompt import prompt_ids
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention


@typed(InputError, leave=["positions"])
@dataclass(frozen=True, repr=False)
class Noise(Brief):
    """Gaussian noise at some tokens, as causal tracing corrupts its runs.

    The method is that of Meng et al. 2022 (arXiv:2202.05262, section 2.1).

    The numbers come from numpy's PCG64 generator, seeded with (`seed`, number of the prompt): the same arguments
    give the same noise. They are values of `Intervention.Add`, and never drawn inside the graph.

    Attributes:
        positions: the tokens: a string, whose tokens they are; an index; or a list with one of these for each prompt.
        sigmas: standard deviation of the noise, in standard deviations of the values that it is added to, over all
            numbers at the chosen tokens of all prompts of a call.
        std: standard deviation of the noise itself, in place of `sigmas`.
        repeats: draws for each prompt.
        hook: a hook point [batch, seq, width].

    Example:
        noise = Noise("France", repeats=10)
        model.patch_sweep("The capital of France is", noise, metric="probability", answer="Paris")
    """

    positions: Place | Sequence[Place]
    sigmas: float | None = None
    std: float | None = None
    seed: int = 0
    repeats: int = 1
    hook: str | HookPoint = "hook_embed"

    def __post_init__(self) -> None:
        at_least("repeats", self.repeats, 1)
        at_least("seed", self.seed, 0)
        if self.sigmas is not None and self.std is not None:
            raise InputError("sigmas= and std= are two ways to give one standard deviation: give one of them")
        for name, size in (("sigmas", self.sigmas), ("std", self.std)):
            if size is not None and not 0 < size < np.inf:
                raise InputError(f"{name}={size!r}: a number above 0")

    def specs(self, model: Runner, prompts: Prompt) -> list[list[HookSpec]]:
        """The interventions that add the noise: for each prompt, one spec a repeat.

        Args:
            model: for tokens, and for the values whose standard deviation counts.
        """
        axes = HookPoint.parse(self.hook).axes or ()
        if axes[:2] != ("batch", "seq") or len(axes) != 3:
            raise InputError(f"noise is added at a hook point [batch, seq, width]; {self.hook} is [{', '.join(axes)}]")
        ids = prompt_ids(model, prompts)
        places = [place for (place,) in find_places(model, prompts, ids, {"noise": self.positions})]
        spec = HookSpec().capture(self.hook)
        values = [model.forward(row, spec)[self.hook][0, list(at)] for row, at in zip(ids, places, strict=True)]
        std = self.std if self.std is not None else (self.sigmas or SIGMAS) * _deviation(values)
        return [
            [self._spec(noise, at) for noise in std * self._drawn(number, (len(at), value.shape[-1]))]
            for number, (value, at) in enumerate(zip(values, places, strict=True))
        ]

    def _drawn(self, number: int, shape: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """[repeats, tokens, width] of one prompt, of standard deviation 1."""
        return np.random.default_rng([self.seed, number]).standard_normal((self.repeats, *shape))

    def _spec(self, noise: np.ndarray[tuple[int, ...], np.dtype[np.float64]], at: tuple[int, ...]) -> HookSpec:
        add = Intervention.Add(noise.astype(np.float32)[None], positions=list(at))
        return HookSpec().intervene(self.hook, add)

    def _facts(self) -> Iterator[str]:
        yield f"at {spelled(self.positions)}"
        size = (
            f"{self.sigmas or SIGMAS:g} standard deviations" if self.std is None else f"standard deviation {self.std:g}"
        )
        yield f"{size} at {self.hook}"
        yield f"seed {self.seed}, {self.repeats} a prompt"


SIGMAS = 3.0  # if nothing is said, as in causal tracing


def _deviation(values: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.floating]]]) -> float:
    """Standard deviation of all numbers together (n - 1), float64."""
    return float(np.concatenate([value.ravel() for value in values]).astype(np.float64).std(ddof=1))
