"""`patch_sweep` and `path_patch`: activation patching and path patching of every cell of a grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

from mionnx.analysis.sweep.comparison import Comparison, Corrupted, Pairs, compares
from mionnx.analysis.sweep.grid import Positions
from mionnx.analysis.sweep.metric import Measure, Tokens
from mionnx.analysis.sweep.patched_runs import Shortcuts, shortcuts_for
from mionnx.analysis.sweep.path_runs import reached_layers, refuse_other_ways
from mionnx.analysis.sweep.receivers import Receiver, make_receivers
from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.sweep import Before, Sweep, SweepSetting, run_sweep
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.lacking import adds_plainly, refuse_other_than_sums
from mionnx.inputs.token_batch import Place
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.run.segments import Segments
from mionnx.run.tokenizing import Prompt


@compares
@typed(leave=["corrupted", "layers", "over", "answer", "versus", "positions"])
def patch_sweep(
    model: Runner,
    clean: Prompt | Comparison,
    corrupted: Corrupted | None = None,
    hook: str | HookPoint = "hook_resid_pre",
    over: str | Iterable[str] = ("layer", "position"),
    metric: Measure = "logit_diff",
    *,
    answer: Tokens = None,
    versus: Tokens = None,
    patching: str = "denoising",
    layers: Iterable[int] | None = None,
    positions: Positions | None = None,
    position: Place | None = None,
    resume: str | Path | bool = False,
    resume_key: str | None = None,
    before: Before | None = None,
    progress: bool | None = None,
    shortcuts: Shortcuts | None = None,
) -> SweepResult:
    """Activation patching of every cell of a grid: values of one run are put into another.

    Each cell is patched by itself; the results equal one forward pass a cell.

    Args:
        hook: the short name of a hook point ("z", "hook_resid_mid"), in all layers; its name with `{i}` for the
            layer; or a `HookPoint`, name or glob ("blocks.[12].attn.hook_z"), in the layers that these mean.
        over: the axes of the result: "layer", "position", "head", "source" (keys, of patterns and scores), "neuron"
            (of mlp.hook_gate, hook_up, hook_act). Axes that are not named are patched together: over layer and head,
            a head at all positions.
        layers: of those that the hook means; by default all of them.
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
    comparison = Comparison(cast(Prompt, clean), corrupted, metric, answer, versus, patching, position, positions)
    sweep = patching_sweep(model, comparison.on(model), hook, over, layers, shortcuts)
    return run_sweep(sweep, progress, resume, resume_key, before)


@compares
@typed(leave=["corrupted", "layers", "over", "answer", "versus", "receivers", "positions"])
def path_patch(
    model: Runner,
    clean: Prompt | Comparison,
    corrupted: Prompt | None = None,
    receivers: str | HookPoint | Iterable[Receiver] = "all",
    sender: str | HookPoint = "hook_z",
    over: str | Iterable[str] = ("layer", "head"),
    metric: Measure = "logit_diff",
    *,
    answer: Tokens = None,
    versus: Tokens = None,
    patching: str = "denoising",
    layers: Iterable[int] | None = None,
    positions: Positions | None = None,
    position: Place | None = None,
    resume: str | Path | bool = False,
    resume_key: str | None = None,
    before: Before | None = None,
    progress: bool | None = None,
) -> SweepResult:
    """Path patching: the effect of each sender's patch through chosen receivers only.

    A receiver reads the stream with the sender's change, everything else reads it without; the receivers' outputs go on
    as usual. With `receivers="all"`, the result is that of `patch_sweep`. Where a stream is normed between additions,
    as in BERT and MiniMax, the change goes through those norms, exactly.

    Args:
        over, layers, resume, resume_key, before, progress: see `patch_sweep`.
        receivers: the inputs `hook_q`, `hook_k` (of latent attention `hook_rot_k`), `hook_v`, `attn.hook_gate`,
            `ssm.hook_pre` or `mlp.hook_pre` of a layer, or `hook_final_norm` (of a stream that is normed after its last
            addition `hook_resid_post` of the last layer), globs allowed; with heads as pairs
            `("blocks.3.attn.hook_q", [0, 5])`; or "all". A hook point that is named twice receives with the heads of
            both.
        sender: the hook point that is patched, cell by cell.

    Raises:
        HookError: no such hook point, or one that receives nothing; a recurrent model.
        InputError: prompts, axes, tokens, heads or a metric that do not fit; receivers that all come before the
            senders; a model of which a layer reads more of earlier ones than the residual stream; "all" where a layer
            reads the stream by another way than all receivers (a router of attention heads).

    Example:
        result = model.path_patch("The capital of France is", "The capital of Italy is", "blocks.3.attn.hook_q")
        result.values.shape  # (n_layers, n_heads)
    """
    reading, graphs = make_receivers(model.hooked, receivers), model.opened(Segments.of_sweep)
    comparison = Comparison(cast(Prompt, clean), corrupted, metric, answer, versus, patching, position, positions)
    compared = comparison.on(model).of_texts("path patching")
    grid = compared.grid(model, sender, over, layers)
    graphs.refuse_crossings("path patching")
    if receivers == "all":
        refuse_other_ways(graphs, reading)
    if not adds_plainly(model.hooked):
        if reading.parallel:
            refuse_other_than_sums(model.hooked, "path patching of attention and MLP side by side")
        reading = replace(reading, normed=True)  # exact whatever stands between additions
    reached_layers(grid, reading)  # refuses receivers that all come before the senders
    setting = SweepSetting(grid, "Path patching", shortcuts_for(model.hooked, None), receivers=reading)
    return run_sweep(Sweep(model, compared, setting), progress, resume, resume_key, before)


def patching_sweep(
    model: Runner,
    compared: Pairs,
    hook: str | HookPoint,
    over: str | Iterable[str],
    layers: Iterable[int] | None,
    shortcuts: Shortcuts | None = None,
) -> Sweep:
    """Make a sweep over pairs of prompts; see `patch_sweep`."""
    grid = compared.grid(model, hook, over, layers)
    return Sweep(model, compared, SweepSetting(grid, "Patching", shortcuts_for(model.hooked, shortcuts)))
