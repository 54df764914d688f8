"""`patch_sweep` and `path_patch`: activation patching and path patching of every cell of a grid."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mionnx.analysis.sweep.grid import make_grid
from mionnx.analysis.sweep.metric import Measure, MetricRequest, Tokens
from mionnx.analysis.sweep.pairs import Corrupted, make_pairs
from mionnx.analysis.sweep.patched_runs import Shortcuts, shortcuts_for
from mionnx.analysis.sweep.path_runs import reached_layers, refuse_crossings
from mionnx.analysis.sweep.places import Positions
from mionnx.analysis.sweep.prompts import axis_labels, common_length
from mionnx.analysis.sweep.receivers import Receiver, Receivers, make_receivers
from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.running import Before, run_sweep
from mionnx.analysis.sweep.sweep import Sweep, SweepSetting
from mionnx.errors import InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.run.segments import Segments
from mionnx.run.tokenizing import Prompt

PATCHINGS = ("denoising", "noising")


@typed(leave=["layers", "over", "answer", "versus", "positions"])
def patch_sweep(
    model: Runner,
    clean: Prompt,
    corrupted: Corrupted,
    hook: str | HookPoint = "hook_resid_pre",
    over: str | Iterable[str] = ("layer", "position"),
    metric: Measure = "logit_diff",
    *,
    answer: Tokens = None,
    versus: Tokens = None,
    patching: str = "denoising",
    layers: Iterable[int] | None = None,
    positions: Positions | None = None,
    position: int = -1,
    resume: str | Path | bool = False,
    resume_key: str | None = None,
    before: Before | None = None,
    progress: bool | None = None,
    shortcuts: Shortcuts | None = None,
) -> SweepResult:
    """Activation patching of every cell of a grid: values of one run are put into another.

    Each cell is patched by itself; the results equal one forward pass a cell.

    Args:
        clean, corrupted: prompts, one or as many of each; the two of a pair have the same number of tokens. Instead of
            a prompt, `corrupted` may be interventions on the clean one: a `HookSpec`, one a prompt, several for a
            single prompt, or `Noise`, whose repeats are averaged (of a single prompt they are the pairs).
        hook: the short name of a hook point ("z", "hook_resid_mid"), in all layers; its name with `{i}` for the
            layer; or a `HookPoint`, name or glob ("blocks.[12].attn.hook_z"), in the layers that these mean.
        over: the axes of the result: "layer", "position", "head", "source" (keys, of patterns and scores), "neuron"
            (of mlp.hook_gate, hook_up, hook_act). Axes that
            are not named are patched together: over layer and head, a head at all positions.
        metric: "logit_diff" (of answer and versus), "probability", "log_probability", "rank" (0 is the top token)
            of the answer, "kl" (KL divergence from the clean run, in nats), or a function: logits [rows, vocab] ->
            [rows], which may take the index of the pair as a second argument.
        answer, versus: tokens, as ids or texts, one for all pairs or one a pair. By default the top token of the clean
            prompt, and of the corrupted one.
        patching: "denoising" puts clean values into the corrupted run, "noising" corrupted ones into the clean run.
        layers: of those that the hook means; by default all of them.
        positions: names for the entries of the axis "position": each an index, a string of the clean prompt, which
            stands for all of its tokens together, or a list with one for each pair; so pairs of different lengths
            have an axis in common: `{"subject": ["France", "New Zealand"], "last": -1}`. By default all positions.
        position: the position whose logits are read; cells behind it have no effect.
        resume: a file that holds the computed cells, and from which an interrupted sweep continues; True for one in the
            store, which is deleted when the sweep is done or fails.
        resume_key: a name for a metric that is a function; needed to resume, since two functions cannot be compared.
            A sweep continues only a file with the same name in it: change the name when the function changes.
        before: called with the sweep before it starts; its `estimate()` tells time and memory.
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.
        shortcuts: see `mionnx.analysis.sweep.patched_runs`; by default all of them.

    Raises:
        HookError: no such hook point.
        InputError: prompts, axes, tokens or a metric that do not fit; a function to resume without a `resume_key`.

    Example:
        result = model.patch_sweep("The capital of France is", "The capital of Italy is", "hook_resid_pre")
        result.values.shape  # (n_layers, seq)
    """
    request = MetricRequest(metric, answer, versus, resume_key)
    cells = (hook, over, layers)
    sweep = make_patch_sweep(model, request, clean, corrupted, cells, patching, position, shortcuts, None, positions)
    return run_sweep(sweep, progress, resume, before)


@typed(leave=["layers", "over", "answer", "versus", "receivers", "positions"])
def path_patch(
    model: Runner,
    clean: Prompt,
    corrupted: Prompt,
    receivers: str | HookPoint | Iterable[Receiver],
    sender: str | HookPoint = "hook_z",
    over: str | Iterable[str] = ("layer", "head"),
    metric: Measure = "logit_diff",
    *,
    answer: Tokens = None,
    versus: Tokens = None,
    patching: str = "denoising",
    layers: Iterable[int] | None = None,
    positions: Positions | None = None,
    position: int = -1,
    resume: str | Path | bool = False,
    resume_key: str | None = None,
    before: Before | None = None,
    progress: bool | None = None,
) -> SweepResult:
    """Path patching: the effect of each sender's patch through chosen receivers only.

    A receiver reads the stream with the sender's change, everything else reads it without; the receivers' outputs go on
    as usual. With `receivers="all"`, the result is that of `patch_sweep`.

    Args:
        clean, corrupted, over, metric, answer, versus, direction, layers, positions, at, resume, resume_key, before,
            progress: see
            `patch_sweep`.
        receivers: the inputs `hook_q`, `hook_k`, `hook_v` or `mlp.hook_pre` of a layer, or `hook_final_norm`, globs
            allowed; with heads as pairs `("blocks.3.attn.hook_q", [0, 5])`; or "all". A hook point that is named twice
            receives with the heads of both.
        sender: the hook point that is patched, cell by cell.

    Raises:
        HookError: no such hook point, or one that receives nothing; a recurrent model.
        InputError: prompts, axes, tokens, heads or a metric that do not fit; receivers that all come before the
            senders; a model of which a layer reads more of earlier ones than the residual stream.

    Example:
        result = model.path_patch("The capital of France is", "The capital of Italy is", "blocks.3.attn.hook_q")
        result.values.shape  # (n_layers, n_heads)
    """
    chosen = make_receivers(model.hooked, receivers)
    request = MetricRequest(metric, answer, versus, resume_key)
    cells = (sender, over, layers)
    sweep = make_patch_sweep(model, request, clean, corrupted, cells, patching, position, None, chosen, positions)
    return run_sweep(sweep, progress, resume, before)


def make_patch_sweep(
    model: Runner,
    request: MetricRequest,
    clean: Prompt,
    corrupted: Corrupted,
    cells: tuple[str | HookPoint, str | Iterable[str], Iterable[int] | None],
    patching: str,
    position: int,
    shortcuts: Shortcuts | None = None,
    receivers: Receivers | None = None,
    positions: Positions | None = None,
) -> Sweep:
    """Make a sweep over pairs of prompts; see `patch_sweep`.

    Args:
        cells: the hook point, the axes, the layers.
    """
    if patching not in PATCHINGS:
        raise InputError(f"patching={patching!r}; {' or '.join(PATCHINGS)}{nearest(str(patching), PATCHINGS)}")
    found = make_pairs(model, clean, corrupted, patching == "denoising", position, positions)
    if receivers is not None and found.pairs[0].corruption is not None:
        raise InputError("path patching takes a corrupted text; patch_sweep takes a spec as well")
    grid = make_grid(model.hooked, *cells, common_length(found.bases), found.pairs[0].places)
    if receivers is not None:
        refuse_crossings(model.opened(Segments.of_sweep))
        reached_layers(grid, receivers)
    verb = "Patching" if receivers is None else "Path patching"
    setting = SweepSetting(
        grid,
        request.for_repeats(found.repeats),
        patching,
        None,
        "patch",
        axis_labels(model, grid, found.bases, positions),
        f"{verb} {grid.template.format(i='*')} ({patching})",
        found.about,
        shortcuts_for(model.hooked, shortcuts),
        receivers,
        found.repeats,
    )
    return Sweep(model, model.opened(Segments.of_sweep), found.pairs, setting)
