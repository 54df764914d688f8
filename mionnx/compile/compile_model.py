"""`MIModel.compile`: a model with a spec's interventions baked in, written to a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mionnx.bind.metric_inputs import with_ids
from mionnx.compile.package import Knobs, Packaging, compile_spec
from mionnx.engine.options import Options
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.progress import shown
from mionnx.machine.typed import typed
from mionnx.spec.hook_spec import HookSpec


class RunningModel(Protocol):
    """A model with a tokenizer; its class, `run.Runner`, stands on this floor too."""

    hooked: HookedModel
    options: Options

    def token_id(self, text: str) -> int:
        """The id of a text that is one token."""

    def check_token(self, token: int) -> int:
        """Refuse an id outside the vocabulary."""


@typed()
def compile_model(
    model: RunningModel,
    hooks: HookSpec,
    folder: str | Path,
    *,
    knobs: Knobs | None = None,
    captures: bool = True,
    last_logits: bool = False,
    weights: str | None = None,
    target: str = "generic",
    layout: str = "plain",
    fused: str = "none",
    accuracy_level: int | None = None,
    plain: bool = False,
) -> Path:
    """Write a folder with one plain ONNX model in which a spec's interventions are baked in.

    `mionnx.compile.package` describes the folder. A call of the compiled graph that starts at token 0 is the prompt:
    negative positions count from its end, and "generated" means the tokens of later calls.

    Args:
        hooks: the spec. Values must be the same for all tokens they apply to. Its metric and gradients are outputs of
            the graph, `mionnx.metric` [batch] and `{hook point}.gradient`; its tokens and arrays must be the same for
            all rows.
        folder: path of a folder that does not exist yet.
        knobs: name of a graph input -> the hook points whose interventions it scales (None: all that have a strength).
            A glob means those that it matches. The input multiplies what is added or projected out, by default by 1,
            or is the factor of a scale.
        captures: keep the spec's captures as outputs.
        last_logits: return the logits of the last position only.
        weights, target, layout, fused, accuracy_level: see `mionnx.compile.package.Packaging`; a level that the model
            was opened with is that of the file.
        plain: compile the model itself, of an empty spec, which is refused otherwise.

    Returns:
        the folder.

    Raises:
        HookError, InterventionError, GradientError: a spec that does not fit the model, or that only a single call can
            have.
        InputError: an empty spec without `plain`, or a level for a model without weights in blocks.
        ModelError: the folder exists or cannot be written.
        RuntimeMissingError: the target's provider is not installed.

    Example:
        spec = HookSpec().intervene("blocks.1.attn.hook_z", Intervention.Zero(heads=[3]))
        folder = model.compile(spec, "without-head-3")
    """
    level = model.options.accuracy_level if accuracy_level is None else accuracy_level
    packaging = Packaging(weights, target, layout, fused, level)
    if hooks.metric is not None:
        hooks = replace(hooks, metric=with_ids(hooks.metric, model.token_id, model.check_token))
    with shown() as progress:
        return compile_spec(
            model.hooked,
            hooks,
            folder,
            knobs=knobs,
            captures=captures,
            last_logits=last_logits,
            plain=plain,
            packaging=packaging,
            progress=progress,
        )
