"""The verbs of sweeps: `patch_sweep`, `ablation_sweep`, `path_patch`."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.donors import (
    Ids,
    mean_donors,
    resampled,
    zero_donors,
)
from mionnx.analysis.sweep.grid import Grid, make_grid
from mionnx.analysis.sweep.layer_graphs import Pieces
from mionnx.analysis.sweep.metric import Measure, Tokens, Wanted
from mionnx.analysis.sweep.patched_runs import Shortcuts
from mionnx.analysis.sweep.path import reached
from mionnx.analysis.sweep.receivers import Receiver, Receivers, make_receivers
from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.sweep import Prompt, Setting, Sweep
from mionnx.errors import InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import make_token_batch
from mionnx.machine.disk_cache import SWEEPS
from mionnx.machine.files import make_folder
from mionnx.machine.progress import Progress, bars
from mionnx.run.find_model import cache_folder
from mionnx.run.runner import Prompt as Given
from mionnx.run.runner import Runner

DIRECTIONS = ("denoising", "noising")
KINDS = ("zero", "mean", "resample")
Before = Callable[[Sweep], None]


class Sweeps(Runner):
    """Causal tracing: what each place of the model does to the answer, exactly, many places at once."""

    def patch_sweep(
        self,
        clean: Given,
        corrupted: Given,
        hook: str | HookPoint = "hook_resid_pre",
        over: str | Iterable[str] = ("layer", "position"),
        metric: Measure = "logit_diff",
        *,
        answer: Tokens = None,
        versus: Tokens = None,
        direction: str = "denoising",
        layers: Iterable[int] | None = None,
        at: int = -1,
        resume: str | Path | bool = False,
        before: Before | None = None,
        progress: Progress | None = None,
        shortcuts: Shortcuts | None = None,
    ) -> SweepResult:
        """Activation patching at every place: the values of one run put into another, one place a cell.

        Equal to one forward pass a cell.

        Args:
            clean, corrupted: prompts, one or as many of each; the two of a pair have the same number of tokens.
            hook: the short name of a hook point ("z", "hook_resid_mid"), in all layers; its name with `{i}` for the
                layer; or a `HookPoint`, name or glob ("blocks.[12].attn.hook_z"), in the layers that these mean.
            over: the axes of the result: "layer", "position", "head", "source" (keys, of patterns and scores). What is
                not among them is patched as a whole: over layer and head, a head at all positions.
            metric: "logit_diff" (of answer and versus), "probability", "log_probability", "rank" (0 is the likeliest)
                of the answer, "kl" from the clean run in nats, or a function: logits [rows, vocab] -> [rows], which may
                take the index of the pair as a second argument.
            answer, versus: tokens, as ids or texts, one for all pairs or one a pair. If left out, the likeliest next
                token of the clean prompt, and of the corrupted one.
            direction: "denoising" puts clean values into the corrupted run, "noising" corrupted ones into the clean
                run.
            layers: of those that the hook means; all of them if left out.
            at: the position whose logits are read; cells behind it have no effect.
            resume: a file that keeps what is done, and from which a sweep that was interrupted goes on; True for one in
                the store, which goes when the sweep is done or fails. A metric that is a function is recognised by its
                code and what that reads; see `mionnx.analysis.sweep.fingerprint`.
            before: is given the sweep before it starts: its `estimate()` says what it will take.
            progress: told of what is done; bars on the terminal if left out.
            shortcuts: see `mionnx.analysis.sweep.patched_runs`; all of them if left out.

        Raises:
            HookError: no such hook point.
            InputError: prompts, axes, tokens or a metric that do not fit.
        """
        cells = (hook, over, layers)
        sweep = self._pairs(Wanted(metric, answer, versus), clean, corrupted, cells, direction, at, shortcuts, None)
        return _run(sweep, progress, resume, before)

    def path_patch(
        self,
        clean: Given,
        corrupted: Given,
        receivers: str | HookPoint | Iterable[Receiver],
        sender: str | HookPoint = "hook_z",
        over: str | Iterable[str] = ("layer", "head"),
        metric: Measure = "logit_diff",
        *,
        answer: Tokens = None,
        versus: Tokens = None,
        direction: str = "denoising",
        layers: Iterable[int] | None = None,
        at: int = -1,
        resume: str | Path | bool = False,
        before: Before | None = None,
        progress: Progress | None = None,
    ) -> SweepResult:
        """Path patching: what each sender's patch does by way of chosen receivers only.

        A receiver reads the stream with the sender's change, everything else reads it without; what receivers make of
        it goes on as usual. With `receivers="all"`, the result is that of `patch_sweep`.

        Args:
            clean, corrupted, over, metric, answer, versus, direction, layers, at, resume, before, progress: see
                `patch_sweep`.
            receivers: the inputs `hook_q`, `hook_k`, `hook_v` or `mlp.hook_pre` of a layer, or `hook_final_norm`, globs
                allowed; with heads as pairs `("blocks.3.attn.hook_q", [0, 5])`; or "all". Named twice, a hook point
                receives with the heads of both.
            sender: the hook point that is patched, cell by cell.

        Raises:
            HookError: no such hook point, or one that receives nothing; a recurrent model.
            InputError: prompts, axes, tokens, heads or a metric that do not fit; receivers that all come before the
                senders.
        """
        chosen = make_receivers(self.hooked, receivers)
        sweep = self._pairs(
            Wanted(metric, answer, versus), clean, corrupted, (sender, over, layers), direction, at, None, chosen
        )
        return _run(sweep, progress, resume, before)

    def _pairs(
        self,
        wanted: Wanted,
        clean: Given,
        corrupted: Given,
        cells: tuple[str | HookPoint, str | Iterable[str], Iterable[int] | None],
        direction: str,
        at: int,
        shortcuts: Shortcuts | None,
        receivers: Receivers | None,
    ) -> Sweep:
        """A sweep over pairs of prompts."""
        if direction not in DIRECTIONS:
            raise InputError(f"direction {direction!r}; {' or '.join(DIRECTIONS)}{nearest(str(direction), DIRECTIONS)}")
        good, bad = self._rows(clean), self._rows(corrupted)
        _refuse_unlike(good, bad)
        grid = self._grid(*cells, good)
        if receivers is not None:
            reached(grid, receivers)
        bases, others = (bad, good) if direction == "denoising" else (good, bad)
        ends = [_until(at, row) for row in good]
        prompts = [Prompt(one[:end], other[:end]) for one, other, end in zip(bases, others, ends, strict=True)]
        what = "Patching" if receivers is None else "Path patching"
        setting = Setting(
            grid,
            wanted,
            direction,
            None,
            "patch",
            at,
            self._labels(grid, bases),
            f"{what} {grid.template.format(i='*')} ({direction})",
            f"{self._spelled(others[0])} into {self._spelled(bases[0])}{_and_more(bases)}",
            shortcuts or Shortcuts(),
            receivers,
        )
        return Sweep(self, self._sweep_pieces, prompts, setting)

    def ablation_sweep(
        self,
        prompts: Given,
        hook: str | HookPoint = "hook_z",
        over: str | Iterable[str] = ("layer", "head"),
        metric: Measure = "kl",
        *,
        kind: str = "zero",
        reference: Given | None = None,
        seed: int | None = None,
        answer: Tokens = None,
        versus: Tokens = None,
        layers: Iterable[int] | None = None,
        at: int = -1,
        resume: str | Path | bool = False,
        before: Before | None = None,
        progress: Progress | None = None,
        shortcuts: Shortcuts | None = None,
    ) -> SweepResult:
        """Ablation at every place: the value there replaced by zeros, by its mean, or by that of another prompt.

        Args:
            prompts: one or several.
            hook, over, metric, answer, versus, layers, at, resume, before, progress, shortcuts: see `patch_sweep`; "kl"
                is from the run without ablation.
            kind: "zero"; "mean", over all tokens of the reference prompts, for each head and feature; or "resample",
                the value in a reference prompt of the same length, drawn for each prompt, not the prompt itself.
            reference: prompts for "mean" and "resample"; the prompts themselves if left out.
            seed: of the draw of "resample"; 0 if left out.

        Raises:
            HookError: no such hook point.
            InputError: prompts, axes, tokens or a metric that do not fit.
        """
        if kind not in KINDS:
            raise InputError(f"ablation {kind!r}; one of {', '.join(KINDS)}{nearest(str(kind), KINDS)}")
        if kind == "zero" and reference is not None:
            raise InputError("a zero ablation has no use for reference prompts")
        if kind != "resample" and seed is not None:
            raise InputError(f"a {kind} ablation draws nothing: seed={seed!r} would have no effect")
        rows = self._rows(prompts)
        others = rows if reference is None else self._rows(reference)
        grid, wanted = self._grid(hook, over, layers, rows), Wanted(metric, answer, versus)
        ends = [_until(at, row) for row in rows]
        title = f"{kind.capitalize()} ablation of {grid.template.format(i='*')}"
        about, labels = f"{self._spelled(rows[0])}{_and_more(rows)}", self._labels(grid, rows)
        setting = Setting(
            grid, wanted, "ablation", zero_donors, kind, at, labels, title, about, shortcuts or Shortcuts()
        )
        found = [Prompt(row[:end]) for row, end in zip(rows, ends, strict=True)]
        if kind == "mean":
            donors, mark = mean_donors(self._sweep_pieces, grid, others)
            setting = replace(setting, donors=donors, kind=f"mean {mark}")
        if kind == "resample":
            drawn = resampled(rows, others, seed or 0)
            found = [Prompt(row[:end], other[:end]) for row, other, end in zip(rows, drawn, ends, strict=True)]
            setting = replace(setting, donors=None, kind=f"resample {seed or 0}")
        return _run(Sweep(self, self._sweep_pieces, found, setting), progress, resume, before)

    @property
    def _sweep_pieces(self) -> Pieces:
        """The pieces of the model; opened once."""
        pieces = self.__dict__.get("_pieces")
        if pieces is None:
            pieces = self.__dict__["_pieces"] = Pieces(self.hooked, self.options)
        return pieces

    def _rows(self, prompts: Given) -> list[Ids]:
        """Prompts as ids, [seq] each, without padding."""
        call = make_token_batch(self._ids(prompts), None, None, self.hooked.metadata.sizes)
        return [ids[real] for ids, real in zip(call.input_ids, call.real, strict=True)]

    def _grid(
        self, hook: str | HookPoint, over: str | Iterable[str], layers: Iterable[int] | None, rows: Sequence[Ids]
    ) -> Grid:
        lengths = {len(row) for row in rows}
        return make_grid(self.hooked, hook, over, layers, lengths.pop() if len(lengths) == 1 else None)

    def _labels(self, grid: Grid, rows: Sequence[Ids]) -> dict[str, list[str]]:
        """What the entries of the axes are called; positions by their tokens if all prompts have the same there."""
        columns = list(zip(*rows, strict=False))
        tokens = [self._piece(int(ids[0])) if len({*map(int, ids)}) == 1 else f"[{i}]" for i, ids in enumerate(columns)]
        if len(rows) == 1:
            tokens = [self._piece(int(token)) for token in rows[0]]
        heads = dict(zip(grid.over, grid.sizes, strict=True)).get("head", 0)
        found = {"layer": [str(layer) for layer in grid.layers], "head": [str(head) for head in range(heads)]}
        return {name: (found | {"position": tokens, "source": tokens})[name] for name in grid.over}

    def _piece(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False) if self.has_tokenizer else str(token)

    def _spelled(self, ids: NDArray[Any]) -> str:
        words = self.tokenizer.decode(ids.tolist()) if self.has_tokenizer else " ".join(map(str, ids.tolist()))
        return repr(words if len(words) <= 60 else words[:57] + "...")


def _refuse_unlike(clean: Sequence[Ids], corrupted: Sequence[Ids]) -> None:
    """Pairs whose positions do not correspond cannot be patched."""
    if len(clean) != len(corrupted):
        raise InputError(f"{len(clean)} clean prompts and {len(corrupted)} corrupted ones: they come in pairs")
    for pair, (one, other) in enumerate(zip(clean, corrupted, strict=True)):
        if len(one) != len(other):
            raise InputError(
                f"pair {pair}: the clean prompt has {len(one)} tokens, the corrupted one {len(other)}; positions can "
                "be patched only where they correspond"
            )


def _and_more(rows: Sequence[Ids]) -> str:
    return f" and {len(rows) - 1} more" if len(rows) > 1 else ""


def _until(at: int, row: Ids) -> int:
    """How many tokens there are up to the position that is read, itself included."""
    if not isinstance(at, int | np.integer) or not -len(row) <= at < len(row):
        raise InputError(f"at={at!r}: the prompt has {len(row)} tokens (0 to {len(row) - 1})")
    return int(at) % len(row) + 1


def _run(sweep: Sweep, progress: Progress | None, resume: str | Path | bool, before: Before | None) -> SweepResult:
    sweep.file = path = _file(sweep, resume)
    if before is not None:
        before(sweep)
    try:
        with bars() if progress is None else nullcontext(progress) as told:
            result = sweep.run(told)
    except Exception:  # an interruption is none
        _forget(path if resume is True else None)
        raise
    _forget(path if resume is True else None)
    return result


def _forget(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)


def _file(sweep: Sweep, resume: str | Path | bool) -> Path | None:
    """Where what is done is kept."""
    if not isinstance(resume, bool):
        return Path(resume)
    if not resume:
        return None
    make_folder(cache_folder() / SWEEPS)
    return cache_folder() / SWEEPS / f"{sweep.key[:32]}.safetensors"
