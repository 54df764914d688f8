"""`MIModel`: a hooked model with everything that can be done to it."""

from functools import cached_property
from pathlib import Path

from mionnx.analysis.attention.attention_verbs import AttentionVerbs
from mionnx.analysis.attention.head_scores import Heads
from mionnx.analysis.attribution.attribution_verbs import AttributionVerbs
from mionnx.analysis.features.verbs import Features
from mionnx.analysis.lens.lens_verbs import LensVerbs
from mionnx.analysis.python_hooks import hooked_calls, residual, transformer_lens
from mionnx.analysis.steering.verbs import Steering
from mionnx.analysis.sweep.verbs import Sweeps
from mionnx.compile.package import Knobs, Packaging, compile_spec
from mionnx.machine.progress import bars
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify import Verifies


class MIModel(Heads, Sweeps, LensVerbs, AttributionVerbs, AttentionVerbs, Steering, Features, Verifies, Runner):
    """A language model whose activations can be read and changed.

    Each verb is a function of a model, in the module that it is taken from here; `Runner` has `forward` and `generate`.

    Example:
        model = MIModel.from_pretrained("models/world-llama")
        cache = model.forward("The capital of France is", HookSpec().capture("blocks.*.attn.hook_pattern"))
        cache["pattern", 2].shape  # (1, n_heads, seq, seq)
    """

    # Python functions at hook points
    __call__ = hooked_calls.call
    run_with_hooks = hooked_calls.run_with_hooks
    run_with_cache = hooked_calls.run_with_cache
    # one prompt's residual stream
    capture_residuals = residual.capture_residuals
    forward_with_capture = residual.forward_with_capture
    forward_ablate = residual.forward_ablate
    forward_steer = residual.forward_steer
    patch_activations = residual.patch_activations
    generate_with_hooks = residual.generate_with_hooks
    # TransformerLens's names for sizes, hook points, matrices and tokens
    cfg = cached_property(transformer_lens.cfg)
    hook_dict = cached_property(transformer_lens.hook_dict)
    W_E = cached_property(transformer_lens.W_E)
    W_U = cached_property(transformer_lens.W_U)
    b_U = cached_property(transformer_lens.b_U)  # noqa: N815
    W_O = cached_property(transformer_lens.W_O)
    to_tokens = transformer_lens.to_tokens
    to_str_tokens = transformer_lens.to_str_tokens
    to_string = transformer_lens.to_string
    to_single_token = transformer_lens.to_single_token

    def compile(
        self,
        hooks: HookSpec,
        folder: str | Path,
        *,
        knobs: Knobs | None = None,
        captures: bool = True,
        last_logits: bool = False,
        weights: str | None = None,
        target: str = "generic",
        layout: str = "plain",
    ) -> Path:
        """Write a folder with one plain ONNX model in which a spec's interventions are baked in.

        See `mionnx.compile.package`.

        A call of the compiled graph that token 0 stands in is the prompt's: negative positions count from its end, and
        "generated" means the tokens of later calls.

        Args:
            hooks: the spec. Values must be the same for all tokens they apply to.
            folder: made new.
            knobs: name of an input -> the hook points whose interventions it turns (None: all that can be): it
                multiplies what is added or projected out, by default 1, or is the factor of a scale.
            captures: keep the spec's captures as outputs.
            last_logits: logits of the last position only.
            weights, target, layout: see `mionnx.compile.package.Packaging`.

        Returns:
            the folder.

        Raises:
            HookError, InterventionError: a spec that does not fit the model, or that only a single call can have.
            ModelError: the folder exists or cannot be written.
            RuntimeMissingError: the target's provider is not installed.
        """
        packaging = Packaging(weights, target, layout)
        with bars() as progress:
            return compile_spec(
                self.hooked,
                hooks,
                folder,
                knobs=knobs,
                captures=captures,
                last_logits=last_logits,
                packaging=packaging,
                progress=progress,
            )
