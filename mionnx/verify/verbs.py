"""Verbs of a model about reproducibility: `verify` and `bisect`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mionnx.analysis.quantisation.windows import windows
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.inputs.token_rows import is_one_prompt
from mionnx.machine.progress import shown
from mionnx.machine.ranges import listed
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.run.sampling import refuse_too_long
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify.bisect import Bisection
from mionnx.verify.bisect import bisect as bisect_graph
from mionnx.verify.result import Verification
from mionnx.verify.verify import Request
from mionnx.verify.verify import verify as compare_runtimes

RUNTIMES = ("ort-cpu", "ort-cpu:none", "reference")


@typed()
def verify(
    model: Runner,
    prompts: Sequence[Prompt] | Prompt = (),
    runtimes: Sequence[str] = RUNTIMES,
    *,
    points: str | HookPoint | Sequence[str | HookPoint] | None = None,
    hooks: HookSpec | None = None,
    other: Runner | None = None,
    record: str | Path | None = None,
    against: str | Path | None = None,
    tolerance: float | None = None,
    local: bool = True,
    greedy: int = 8,
    positions: Sequence[int] | None = None,
    repeat: bool = False,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    texts: str | Sequence[str] = (),
    matrices: bool | None = None,
    experts: bool = False,
) -> Verification:
    """Run this model in several runtimes and compare them hook point by hook point.

    Memory stays below twice what one runtime takes, however many hook points are compared: values lie on disk. Only
    narrowing a fault down to its nodes holds the values of its one step.

    Args:
        prompts: texts, or ids [seq] or [batch, seq] each; each runs by itself, without padding.
        runtimes: "torch" (transformers, eager), "ort-cpu", "ort-cuda", "openvino", "onnxruntime-web", "reference"
            (onnx's own evaluator) or an ONNX Runtime provider's full name; "ort-cpu:none", ":basic", ":extended",
            ":all" set the optimisation level, ":threads=1" the threads. All are compared with the first. If left
            out, the default, or with `other` "ort-cpu" alone: it is the models that are compared then, and onnx's own
            evaluator takes minutes for a real one.
        points: globs of hook points (those that derive from others by their full names only); `hook_logits` is
            always compared. If left out, the residual streams, or what was recorded.
        hooks: interventions, in force in every runtime (torch is left out where one is a splice); its captures are
            compared too.
        other: a second model, run in each of the runtimes as well: another dtype of the same checkpoint, or the
            checkpoint of a quantised file. Its part of the result says which layer adds most to the distance of the
            two, and KL(other || this) in nats; hook points that one of the two lacks are left out, and named.
        record: write the first runtime's values to this safetensors file, for another machine.
        against: compare with such a file instead of the first runtime; prompts may be left out.
        tolerance: largest difference, as a share of the hook point's largest value, that is agreement; by default
            5e-5 in float32, 5e-3 in float16, 4e-2 in bfloat16.
        local: measure what each step between hook points adds by itself, and find the first that adds too much.
        greedy: tokens to choose greedily after each prompt, and compare.
        positions: compare (and record) these positions of each prompt only.
        repeat: say which runtimes are bit-identical when this model is run again, on one thread, and with a row in
            a batch, at all positions.
        checkpoint: where "torch" finds the weights, if the hooked model's folder has not all of them; not with
            `other`.
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.
        texts: run besides, cut into windows of 256 tokens; nothing is then continued (`greedy` is 0).
        matrices: measure each matrix of a quantised model by itself, put into its floats, over at most 256 tokens:
            `Verification.matrices`. If left out, where one of the two models is what `quantise` made of floats. All
            matrices of a stack of experts are put in together.
        experts: measure each expert's matrix by itself too: as many runs as there are, less those of experts that no
            token chose.

    Raises:
        InputError: an unknown runtime, no prompts, a tolerance that is none.
        HookError: a hook point that the model does not have.
        RuntimeMissingError: fewer runtimes can run here than a comparison needs.
        ModelError: a runtime cannot run the model.
        SpecFileError: a recorded run that cannot be written, or is damaged.

    Example:
        result = model.verify("The capital of France is", ["ort-cpu", "reference"], greedy=0)
        assert result.agrees, result.summary()
    """
    batches = [*_listed(prompts), *(windows(model, texts) if texts else ())]
    greedy = 0 if texts else greedy
    if other is not None and runtimes is RUNTIMES:
        runtimes = RUNTIMES[:1]
    request = Request(
        runtimes, points, hooks, other.hooked if other else None, _path(against), _path(record), tolerance, local,
        greedy, positions, repeat, _path(checkpoint), matrices, experts,
    )  # fmt: skip
    calls = [_call(model, prompt) for prompt in batches]
    spelled = [_shown(prompt, call) for prompt, call in zip(batches, calls, strict=True)]
    for call in calls:
        refuse_too_long("greedy", greedy, call, model.hooked.metadata)
    with shown(progress) as show:
        verification = compare_runtimes(model.hooked, calls, spelled, request, show)
    model.give_back(later=True)
    return verification


@typed()
def bisect(
    model: Runner,
    prompt: Prompt,
    runtimes: Sequence[str] = ("ort-cpu", "ort-cpu:none"),
    *,
    folder: str | Path | None = None,
    hooks: HookSpec | None = None,
    other: Runner | None = None,
    tolerance: float | None = None,
    progress: bool | None = None,
) -> Bisection:
    """Find the smallest part of the graph that two runtimes compute differently.

    Its inputs are the same in both, and its output is not.

    Args:
        prompt: a text, or ids.
        runtimes: two that run graphs (not "torch"), or one if `other` is given.
        folder: made new, if there is such a part: it as `model.onnx`, its inputs, both outputs, and a program that
            shows the difference; for a bug report.
        hooks: interventions, in force in both.
        other: a second model instead of a second runtime.
        tolerance: see `verify`; 0 finds the first node that does not give the same bits.
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.

    Raises:
        InputError: a runtime that cannot run a part of a graph, or not two sides.
        RuntimeMissingError: a runtime that is not installed.
        ModelError: the folder exists, or a runtime cannot run the model.

    Example:
        print(model.bisect("The capital of France is", ["ort-cpu", "reference"], tolerance=0))
    """
    hooked = other.hooked if other else None
    with shown(progress) as show:
        bisection = bisect_graph(
            model.hooked, _call(model, prompt), list(runtimes), _path(folder), hooks, hooked, tolerance, show
        )
    model.give_back(later=True)
    return bisection


def _listed(prompts: Any) -> list[Any]:
    if is_one_prompt(prompts):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts must be texts or ids, got {type(prompts).__name__}")
    return listed("prompts", prompts)


def _call(model: Runner, prompt: Prompt) -> TokenBatch:
    call = make_token_batch(model.ids(prompt), None, None, model.hooked.metadata.sizes)
    if not call.real.all():
        raise InputError("texts of unequal length in one prompt: give each as a prompt of its own")
    return call


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _shown(prompt: Prompt, call: TokenBatch) -> str:
    text = prompt if isinstance(prompt, str) else getattr(prompt, "text", "")
    return text or f"ids {list(call.input_ids.shape)}"
