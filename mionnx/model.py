"""`MIModel`: a hooked model with everything that can be done to it."""

from functools import cached_property

from mionnx.analysis.attention import attention_patterns
from mionnx.analysis.attention import head_scores as heads
from mionnx.analysis.attribution.attribution_verbs import AttributionVerbs
from mionnx.analysis.features.verbs import Features
from mionnx.analysis.lens.lens_verbs import LensVerbs
from mionnx.analysis.python_hooks import hooked_calls, residual, transformer_lens
from mionnx.analysis.steering.verbs import Steering
from mionnx.analysis.sweep import ablating, patching
from mionnx.compile import compile_model
from mionnx.run.runner import Runner
from mionnx.verify import verbs as comparing


class MIModel(LensVerbs, AttributionVerbs, Steering, Features, Runner):
    """A language model whose activations can be read and changed.

    Each verb is a function of a model, in the module that it is taken from here; `Runner` has `forward` and `generate`.

    Example:
        model = MIModel.from_pretrained("models/world-llama")
        cache = model.forward("The capital of France is", HookSpec().capture("blocks.*.attn.hook_pattern"))
        cache["pattern", 2].shape  # (1, n_heads, seq, seq)
    """

    # causal analysis, cell by cell
    patch_sweep = patching.patch_sweep
    path_patch = patching.path_patch
    ablation_sweep = ablating.ablation_sweep
    # attention heads
    attention = attention_patterns.attention
    head_scores = heads.head_scores
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

    # deployment, reproducibility
    compile = compile_model.compile_model
    verify = comparing.verify
    bisect = comparing.bisect
