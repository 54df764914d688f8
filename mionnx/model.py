"""`MIModel`: a table of contents of all verbs of a model.

A verb is a function `verb(model, ...)` in a room, and one line here makes it a method.
"""

from mionnx.analysis.attention import attention_patterns
from mionnx.analysis.attention import head_scores as heads
from mionnx.analysis.attribution import attribute as attribution
from mionnx.analysis.attribution import logit_diff, residual_stack
from mionnx.analysis.circuits import circuit as circuits
from mionnx.analysis.circuits import edge_attribution as edges
from mionnx.analysis.features import active_features
from mionnx.analysis.features import max_activations as maxima
from mionnx.analysis.gradients import attribute_patch as attributing
from mionnx.analysis.gradients import gradients as differentiating
from mionnx.analysis.gradients import saliency
from mionnx.analysis.harvest import harvest as harvesting
from mionnx.analysis.jacobian_lens import fit_lens as fitting
from mionnx.analysis.jacobian_lens import ridge_lens as ridge
from mionnx.analysis.lens import logit_lens as lens
from mionnx.analysis.lens import patchscope as scopes
from mionnx.analysis.lens import token_vectors
from mionnx.analysis.numerics import doctor as diagnosing
from mionnx.analysis.numerics import forecast as forecasting
from mionnx.analysis.numerics import narrow_model
from mionnx.analysis.numerics import range as ranging
from mionnx.analysis.python_hooks import hooked_calls, larql, transformer_lens
from mionnx.analysis.quantisation import quantise_model
from mionnx.analysis.similarity import attribute_similarity as pairs
from mionnx.analysis.statistics import statistics as dataset
from mionnx.analysis.steering import calibration
from mionnx.analysis.steering import contrast as contrasting
from mionnx.analysis.steering import dose_response as dosing
from mionnx.analysis.steering import interchange as interchanging
from mionnx.analysis.sweep import ablation, patching
from mionnx.analysis.tracing import trace as tracing
from mionnx.analysis.weights import weights as named
from mionnx.compile import compile_model, monitors
from mionnx.machine.dialects import Translated
from mionnx.machine.once import once_property
from mionnx.run import answers, embedding, generation, notebook, predictions, spans
from mionnx.run.runner import Runner
from mionnx.verify import bisect as bisection
from mionnx.verify import verify as comparing

# Attributes that `dir(model)` leaves out: other rooms read them.
INSIDE = {
    *("binder", "hooked", "idle", "opened", "options", "parts", "source", "unknown_words", "variants"),
    "decomposition_hooks",
}


class MIModel(Runner, Translated):
    """A language model whose activations can be read and changed.

    Each verb is a function of a model, in the module that it is taken from here; `Runner` has `forward`. A model may be
    used by several threads at once.

    Example:
        model = MIModel.from_pretrained("models/world-llama")
        cache = model.forward("The capital of France is", HookSpec().capture("blocks.*.attn.hook_pattern"))
        cache["pattern", 2].shape  # (1, n_heads, seq, seq)
    """

    _repr_html_ = notebook.model_html
    # continuing prompts
    generate = generation.generate
    # encoders: what their heads say of texts
    fill_mask = predictions.fill_mask
    classify = predictions.classify
    tag = spans.tag
    answer_span = answers.answer_span
    embed = embedding.embed
    similarity = embedding.similarity
    attribute_similarity = pairs.attribute_similarity
    # causal analysis, cell by cell
    patch_sweep = patching.patch_sweep
    path_patch = patching.path_patch
    ablation_sweep = ablation.ablation_sweep
    # gradients of a metric, in one pass
    gradients = differentiating.gradients
    attribute_patch = attributing.attribute_patch
    integrated_gradients = saliency.integrated_gradients
    gradient_times_input = saliency.gradient_times_input
    # edges between heads, MLPs, embedding and logits
    edge_attribution = edges.edge_attribution
    circuit = circuits.circuit
    # features of transcoders, and what they add to one another
    trace = tracing.trace
    # layers read as predictions, and tokens as vectors
    logit_lens = lens.logit_lens
    project_to_vocab = lens.project_to_vocab
    track_token = lens.track_token
    track_token_at = lens.track_token_at
    track_race = lens.track_race
    patchscope = scopes.patchscope
    fit_lens = fitting.fit_lens
    ridge_lens = ridge.ridge_lens
    lens_vectors = fitting.lens_vectors
    lens_transport = fitting.lens_transport
    embedding_for = token_vectors.embedding_for
    unembedding_for = token_vectors.unembedding_for
    embedding_neighbors = token_vectors.embedding_neighbors
    project_through_unembed = token_vectors.project_through_unembed
    # direct contributions to a logit, and the residual stream as a sum
    attribute = attribution.attribute
    decomposition_hooks = residual_stack.decomposition_hooks
    decompose_resid = residual_stack.decompose_resid
    accumulated_resid = residual_stack.accumulated_resid
    stack_head_results = residual_stack.stack_head_results
    apply_ln_to_stack = residual_stack.apply_ln_to_stack
    logit_attrs = residual_stack.logit_attrs
    get_logit_diff = logit_diff.get_logit_diff
    # attention heads
    attention = attention_patterns.attention
    head_scores = heads.head_scores
    # weights by name, and what they say before anything runs
    weights = once_property(named.weights)
    # steering, and features of sparse autoencoders
    contrast = contrasting.contrast
    calibrate = calibration.calibrate
    dose_response = dosing.dose_response
    subspace_interchange = interchanging.subspace_interchange
    features = active_features.features
    max_activations = maxima.max_activations
    # datasets: activations on disk, and moments without storing them
    harvest = harvesting.harvest
    statistics = dataset.statistics
    # deployment, reproducibility
    compile = compile_model.compile_model
    lens_monitor = monitors.lens_monitor
    quantise = quantise_model.quantise_model
    # numbers that a narrow dtype cannot hold: where, what that costs, and an exact cure
    check_range = ranging.check_range
    forecast = forecasting.forecast
    narrow = narrow_model.narrow_model
    doctor = diagnosing.doctor
    verify = comparing.verify
    bisect = bisection.bisect
    # words of TransformerLens: `mionnx/analysis/python_hooks/transformer_lens.py` has theirs and ours
    __call__ = hooked_calls.call
    run_with_hooks = hooked_calls.run_with_hooks
    run_with_cache = hooked_calls.run_with_cache
    cfg = once_property(transformer_lens.cfg)
    hook_dict = once_property(transformer_lens.hook_dict)
    device = transformer_lens.device
    W_E = once_property(transformer_lens.W_E)
    W_U = once_property(transformer_lens.W_U)
    b_U = once_property(transformer_lens.b_U)  # noqa: N815
    W_pos = once_property(named.weight("W_pos"))
    W_E_pos = once_property(named.weight("W_E_pos"))
    W_Q = once_property(named.weight("W_Q"))
    W_K = once_property(named.weight("W_K"))
    W_V = once_property(named.weight("W_V"))
    W_O = once_property(named.weight("W_O"))
    b_Q = once_property(named.weight("b_Q"))  # noqa: N815
    b_K = once_property(named.weight("b_K"))  # noqa: N815
    b_V = once_property(named.weight("b_V"))  # noqa: N815
    b_O = once_property(named.weight("b_O"))  # noqa: N815
    W_in = once_property(named.weight("W_in"))
    W_gate = once_property(named.weight("W_gate"))
    W_out = once_property(named.weight("W_out"))
    b_in = once_property(named.weight("b_in"))
    b_out = once_property(named.weight("b_out"))
    QK = once_property(named.all_QK)
    OV = once_property(named.all_OV)
    all_composition_scores = named.all_composition_scores
    accumulated_bias = named.accumulated_bias
    tl_parameters = named.tl_parameters
    to_tokens = transformer_lens.to_tokens
    to_str_tokens = transformer_lens.to_str_tokens
    to_string = transformer_lens.to_string
    to_single_token = transformer_lens.to_single_token
    # words of LARQL: `larql.py` beside it
    capture_residuals = larql.capture_residuals
    forward_with_capture = larql.forward_with_capture
    forward_ablate = larql.forward_ablate
    forward_steer = larql.forward_steer
    patch_activations = larql.patch_activations
    generate_with_hooks = larql.generate_with_hooks

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in INSIDE]
