"""Other libraries' words and ours, as one table: the page of words and the errors that answer such a word read it.

`TABLE` has a line for each word that is written in another way here. `mionnx/analysis/python_hooks/DIALECTS.md` shows
it; an attribute (`Translated`) or a keyword (`unknown_keyword`) that another library has raises with its line.
"""

import dis
import sys
from abc import ABCMeta
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mionnx.errors import MIError, UnknownImportError, UnknownKeywordError, UnknownNameError, nearest


@dataclass(frozen=True)
class Word:
    """One line of the table.

    Attributes:
        owner: the class of ours that would have them as attributes, or "mionnx"; a verb, whose keywords they are;
            or "", where they belong to something else, and only the page tells of them.
        names: the words.
        ours: the same here.
    """

    library: str
    owner: str
    names: tuple[str, ...]
    ours: str

    @property
    def theirs(self) -> str:
        """The words as they are written there."""
        form = FORMS.get(self.owner, self.owner + "({}=)")
        return ", ".join(f"`{form.format(name)}`" for name in self.names)

    @property
    def line(self) -> str:
        """The line of the table, as an error says it."""
        return f", a word of {self.library}; here: {self.ours.replace('`', '')}"


FORMS = {
    "MIModel": "model.{}",
    "HookCache": "cache.{}",
    "HookSpec": "HookSpec.{}",
    "KVCache": "KVCache.{}",
    "mionnx": "{}",
    "": "{}",
}
TRANSFORMER_LENS, NNSIGHT, LARQL, CANDLE_MI = LIBRARIES = ("TransformerLens", "nnsight", "LARQL", "candle-mi")
NO_HOOK_STAYS = "nothing, functions are given to a call and end with it"
RUN_WITH_HOOKS = "`model.run_with_hooks(tokens, fwd_hooks=[(name, function)])`, or `generate(tokens, fwd_hooks=...)`"
LATER_LAYERS = 'give `hooks=HookSpec().intervene(f"blocks.{k}.hook_resid_pre", Intervention.Replace(stream))`'
BY_NAME = '`cache["blocks.5.attn.hook_z"]` or `cache["z", 5]`: values have names, `model.hook_points()`, and no modules'
WEIGHT_WORDS = "not by name yet: `W_E`, `W_U`, `b_U`, `W_O`, and the checkpoint's own .safetensors"
BATCH_AXIS = '`cache["z", 5][0]`: the batch axis is always there'
MAPPED_HEAD = f"a function at `blocks.{{i}}.attn.hook_z`: {RUN_WITH_HOOKS}"
MODEL = "`MIModel.from_pretrained(source)`"
DIALECT_ROWS: dict[str, list[tuple[str, str, str]]] = {
    TRANSFORMER_LENS: [
        ("MIModel", "W_Q W_K W_V b_Q b_K b_V b_O W_in W_gate W_out b_in b_out W_pos W_E_pos QK OV", WEIGHT_WORDS),
        ("MIModel", "all_composition_scores accumulated_bias tl_parameters get_params", WEIGHT_WORDS),
        ("MIModel", "blocks embed unembed ln_final mod_dict", BY_NAME),
        ("MIModel", "add_hook add_perma_hook hooks check_hooks_to_add", RUN_WITH_HOOKS),
        ("MIModel", "reset_hooks remove_all_hook_fns clear_contexts", NO_HOOK_STAYS),
        (
            "MIModel",
            "add_caching_hooks get_caching_hooks cache_all cache_some",
            "`model.run_with_cache(tokens, names)`",
        ),
        ("MIModel", "loss_fn", '`model(tokens, return_type="loss")`'),
        ("MIModel", "tokens_to_residual_directions", "`model.unembedding_for(token)`, or `model.W_U[:, ids].T`"),
        ("MIModel", "to_single_str_token", "`model.to_string(token)`"),
        ("MIModel", "get_token_position", "`model.tokenize(text).positions_of(part)`"),
        ("MIModel", "generate_stream", "`model.generate(tokens, streamer=function)`"),
        ("MIModel", "hf_generate", "`model.generate(tokens)`"),
        ("MIModel", "to cuda cpu mps", '`MIModel.from_pretrained(source, provider="cuda")`'),
        (
            "MIModel",
            "train parameters named_parameters state_dict load_state_dict",
            "no torch module: a graph that runs",
        ),
        ("MIModel", "boot_transformers from_pretrained_no_processing", MODEL),
        (
            "MIModel",
            "enable_compatibility_mode process_weights",
            "nothing, weights are the checkpoint's, none are folded or centred",
        ),
        (
            "MIModel",
            "set_use_attn_result set_use_split_qkv_input set_use_attn_in set_use_hook_mlp_in",
            "nothing, `hook_result` is computed where it is captured, and `model.path_patch` edits single inputs",
        ),
        ("MIModel", "attn_head_labels all_head_labels", "the labels that `model.stack_head_results(cache)` returns"),
        ("HookCache", "decompose_resid", "`model.decompose_resid(cache)`, captured with `model.decomposition_hooks()`"),
        ("HookCache", "accumulated_resid", "`model.accumulated_resid(cache)`"),
        ("HookCache", "stack_head_results", "`model.stack_head_results(cache)`"),
        ("HookCache", "logit_attrs", "`model.logit_attrs(stack, cache, tokens)`"),
        ("HookCache", "apply_ln_to_stack", "`model.apply_ln_to_stack(stack, cache)`"),
        ("HookCache", "logit_lens", "`model.logit_lens(prompt)`"),
        (
            "HookCache",
            "get_full_resid_decomposition stack_neuron_results get_neuron_results",
            '`model.decompose_resid(cache)`, `model.stack_head_results(cache)`; neurons: `cache["act", 5]`',
        ),
        ("HookCache", "stack_activation", '`cache.stack("z")`'),
        ("HookCache", "compute_head_results", '`HookSpec().capture("blocks.*.attn.hook_result")`'),
        ("HookCache", "remove_batch_dim apply_slice_to_batch_dim", BATCH_AXIS),
        ("HookCache", "toggle_autodiff", "`model.gradients(tokens, points, metric)`"),
        ("HookCache", "cache_dict", "`dict(cache)`"),
        ("HookCache", "to", "nothing, captures are numpy arrays"),
        ("HookCache", "compute_ssm_effective_attention", '`cache["effective_attn", 5]`, captured'),
        ("HookCache", "compute_ssm_state", '`cache["state", 5]` or `cache["states", 5]`, captured'),
        ("run_with_cache", "pos_slice", "`forward(tokens, HookSpec().capture(name, positions=...))`"),
        ("run_with_cache", "incl_bwd", "`model.gradients(tokens, points, metric)`, or `run_with_hooks(bwd_hooks=)`"),
        ("run_with_cache", "device cache_device", "nothing, captures are numpy arrays"),
        ("run_with_cache", "remove_batch_dim", BATCH_AXIS),
        ("run_with_cache", "return_cache_object", "`dict(cache)`"),
        ("run_with_cache", "start_at_layer", LATER_LAYERS),
        ("run_with_cache", "reset_hooks_end clear_contexts", NO_HOOK_STAYS),
        ("run_with_cache", "prepend_bos padding_side", "give ids: `model.to_tokens(text, prepend_bos=True)`"),
        ("run_with_hooks", "stop_at_layer", "`return_type=None`: the model runs to the last hooked value"),
        ("run_with_hooks", "start_at_layer", LATER_LAYERS),
        ("run_with_hooks", "reset_hooks_end clear_contexts", NO_HOOK_STAYS),
        ("run_with_hooks", "remove_batch_dim", "nothing, functions get the batch axis"),
        ("run_with_hooks", "prepend_bos padding_side", "give ids: `model.to_tokens(text, prepend_bos=True)`"),
        ("forward", "prepend_bos padding_side", "give ids: `model.to_tokens(text, prepend_bos=True)`"),
        ("forward", "stop_at_layer", "`logits=False`: the model runs to the last capture"),
        ("forward", "start_at_layer", LATER_LAYERS),
        ("forward", "past_kv_cache past_key_values", "`cache=`, the `kv_cache` of a pass with `use_cache=True`"),
        ("forward", "loss_per_token", '`model(tokens, return_type="loss per token")`'),
        ("to_tokens", "padding_side truncate", "give the texts to the model: they are padded, and never cut"),
        ("to_tokens", "move_to_device", "nothing, ids are a numpy array"),
        ("to_str_tokens", "prepend_bos padding_side", "`model.to_str_tokens(model.to_tokens(text, prepend_bos=True))`"),
        ("generate", "stop_at_eos", "`eos_token_id=[]` for no end"),
        ("generate", "freq_penalty", "`repetition_penalty=`"),
        ("generate", "use_past_kv_cache", "nothing, the cache is always used"),
        ("generate", "prepend_bos padding_side", "give ids: `model.to_tokens(text, prepend_bos=True)`"),
        ("generate", "return_type", "`.texts`, `.new_texts`, `.ids`, `.new_ids` of the result"),
        ("generate", "return_cache", "`.cache` of the result"),
        ("generate", "return_input_tokens", "`.ids` of the result"),
        ("generate", "names_filter", "`hooks=HookSpec().capture(names)`, and `.steps` of the result"),
        ("generate", "verbose", "`streamer=`"),
        ("generate", "stopping_criteria", "`stop_strings=`, `eos_token_id=`"),
        ("mionnx", "HookedTransformer TransformerBridge HookedRootModule HookedEncoder", MODEL),
        ("mionnx", "ActivationCache", "`HookCache`"),
        ("mionnx", "TransformerLensKeyValueCache", "`KVCache`"),
        ("mionnx", "HookedTransformerConfig TransformerBridgeConfig", "`model.cfg`"),
        ("mionnx", "FactoredMatrix", "numpy: keep the two factors, `np.linalg.svd(a @ b)`"),
        ("mionnx", "SVDInterpreter", "`np.linalg.svd`, and `model.project_through_unembed(vector)`"),
        ("mionnx", "patching", "`model.patch_sweep(clean, corrupted, hook, over)`"),
        ("mionnx", "head_detector", "`model.head_scores()`"),
        ("mionnx", "utils utilities", "`HookPoint.AttnPattern(5)` for `get_act_name`; numpy for the rest"),
        ("", "activation.clone()", "`activation.copy()`: hooks get numpy arrays"),
        ("", "tensor.norm()", "`np.linalg.norm(array)`"),
        ("", "tensor.detach() tensor.cpu() tensor.to(device)", "nothing, arrays are on the CPU, without a tape"),
        ("", "tensor.unsqueeze(0)", "`array[None]`"),
        ("", "hook_attn_scores", "`hook_scores`"),
        ("", "mlp.hook_pre mlp.hook_post", "`mlp.hook_gate`, `mlp.hook_up` and `mlp.hook_act`: the neurons"),
        ("", "model.cfg.device", "`model.device()`"),
    ],
    NNSIGHT: [
        (
            "MIModel",
            "trace",
            "`model.forward(tokens, HookSpec().capture(...).intervene(...))`, or `model.run_with_hooks(tokens, [...])`",
        ),
        ("MIModel", "session interleave", "calls, one after the other: nothing is deferred"),
        ("", "tracer.invoke", "a list of prompts in one call; `rows=` limits an intervention to some"),
        (
            "MIModel",
            "edit",
            "a `HookSpec` given to each call as `hooks=`, or written out: `model.compile(spec, folder)`",
        ),
        ("MIModel", "clear_edits", NO_HOOK_STAYS),
        ("MIModel", "scan", "`model.estimate(spec, seq=10)`, and `HookPoint.axes`"),
        ("MIModel", "skip", "`Intervention.Replace(value)` at the module's output, or `Intervention.Zero()`"),
        ("MIModel", "source", "the graph itself, `model.onnx` in Netron: values are called as their hook points"),
        ("MIModel", "output input inputs", '`cache["attn_out", 5]`: a module\'s output is a hook point'),
        ("MIModel", "transformer lm_head model layers h modules named_modules", BY_NAME),
        ("MIModel", "iter all", "`model.generate(tokens, hooks, max_new_tokens=5).steps[i]`, or `fwd_hooks=`"),
        ("forward", "remote", "nothing, models run where the call is"),
        ("generate", "remote", "nothing, models run where the call is"),
        ("mionnx", "NNsight LanguageModel TransformersModel Envoy", MODEL),
        ("", "tracer.result", "what `model.generate` returns"),
        ("", "tracer.iter[:5]", "`model.generate(...).steps[:5]`"),
        ("", "value.save()", "nothing, what a spec captures is in the `HookCache`"),
        ("", "module.output[:] module.output[0]", '`Intervention` at its hook point; `cache["attn_out", 5]`'),
        ("", "value.backward() value.grad", '`model.gradients(tokens, points, metric)`; `cache.grad["z", 5]`'),
    ],
    LARQL: [
        ("mionnx", "RecordHook", '`HookSpec().capture("blocks.*.hook_resid_post")`, `model.capture_residuals`'),
        ("mionnx", "SteerHook", "`Intervention.Add(vector * alpha, positions=-1)`, `model.forward_steer`"),
        ("mionnx", "ZeroAblateHook", "`Intervention.Zero(positions=...)`, `model.forward_ablate`"),
        ("mionnx", "CompositeHook", "one `HookSpec` with several interventions, or `spec.extend(other)`"),
        ("mionnx", "NoopHook", "`HookSpec()`, or none"),
        ("mionnx", "LayerHook", "a function of (activation, hook): " + RUN_WITH_HOOKS),
        (
            "mionnx",
            "trace_forward_full_hooked",
            "`model.forward(tokens, spec)`, or `model.run_with_hooks(tokens, [...])`",
        ),
        ("mionnx", "generate_cached_hooked", "`model.generate(tokens, spec, window=..., streamer=function)`"),
        ("mionnx", "capture_donor_state patch_and_trace", "`model.patch_activations(donor, recipient, at, layers)`"),
        ("mionnx", "logit_lens_topk", "`model.logit_lens(residual, k=5)`"),
        ("mionnx", "embedding_row embedding_row_scaled", "`model.embedding_for(token, scaled=...)`"),
        ("mionnx", "unembedding_row", "`model.unembedding_for(token)`"),
        ("mionnx", "insert_q4k_layer_tensors", '`MIModel.from_pretrained(source, dtype="int4")`, and GGUF files'),
        ("mionnx", "run_layer_with_mapped_pre_o_head", MAPPED_HEAD),
        ("mionnx", "predict_kquant_hidden_with_mapped_pre_o_head predict_kquant_hidden_hooked", MAPPED_HEAD),
        ("mionnx", "WalkModel", MODEL),
        ("mionnx", "KvCache", "`KVCache`"),
        ("KVCache", "with_layers with_window", "`model.forward(tokens, use_cache=True).kv_cache`: a pass makes one"),
        ("MIModel", "infer", "`model.generate(tokens, max_new_tokens=1)`"),
        (
            "MIModel",
            "walk describe",
            "no index of facts here: `model.embedding_neighbors(vector)`, `model.features(...)`",
        ),
        ("generate_with_hooks", "window", "`model.generate(tokens, spec, window=...)`"),
        ("", "on_pre_layer", '`(f"blocks.{layer}.hook_resid_pre", function)` in `fwd_hooks=`'),
        ("", "on_attention_weights", '`(f"blocks.{layer}.attn.hook_pattern", function)` in `fwd_hooks=`'),
        ("", "on_post_attention", '`(f"blocks.{layer}.hook_resid_mid", function)` in `fwd_hooks=`'),
        ("", "on_ffn_activation", '`(f"blocks.{layer}.mlp.hook_act", function)` in `fwd_hooks=`'),
        ("", "on_post_layer", '`(f"blocks.{layer}.hook_resid_post", function)` in `fwd_hooks=`'),
        ("", "on_token", "`streamer=`, a function of (id, text)"),
    ],
    CANDLE_MI: [
        ("HookSpec", "new", "`HookSpec()`"),
        ("mionnx", "auto_config GenericTransformer GenericRwkv TransformerConfig", MODEL),
        ("mionnx", "CrossLayerTranscoder", "`SAE.load(folder)`, for SAEs and transcoders of one layer"),
        ("mionnx", "MemorySnapshot", "`model.estimate(spec)`"),
        (
            "mionnx",
            "SteeringSpec SteeringResult",
            "`Intervention.Add(vector)`, `model.contrast`, `model.dose_response`",
        ),
        ("mionnx", "DoseResponseCurve DoseResponsePoint", "`DoseResponse`"),
        ("mionnx", "AttentionCache", "`model.attention(prompt)`"),
        ("mionnx", "FullActivationCache", "`HookCache`"),
        (
            "mionnx",
            "PositionConversion EncodingWithOffsets TokenWithOffset",
            "`model.tokenize(text)`: `.positions_of(part)`",
        ),
        ("mionnx", "MITokenizer", "`model.tokenizer`, `model.tokenize(text)`"),
        ("mionnx", "create_causal_mask create_generation_mask", "nothing, the graph makes its own"),
        ("mionnx", "AttentionEdge HeadSpec LayerSpec", "`KnockoutSpec().layer(3).head(0).edge(query, key)`"),
        ("mionnx", "LogitLensAnalysis LogitLensResult TokenPrediction", "`LensResult`"),
        ("mionnx", "GenerationResult", "`Generation`"),
        ("mionnx", "StateSteeringResult", "`StateAblationResult`"),
        ("", "Intervention::Zero", "`Intervention.Zero()`"),
        ("", "HookPoint::AttnPattern(5)", "`HookPoint.AttnPattern(5)`"),
        ("", "KnockoutSpec::new() StateKnockoutSpec::new()", "`KnockoutSpec()`, `StateKnockoutSpec()`"),
    ],
}
TABLE = tuple(
    Word(library, owner, tuple(names.split()), ours)
    for library, rows in DIALECT_ROWS.items()
    for owner, names, ours in rows
)
_LINES = {(word.owner, name): word.line for word in reversed(TABLE) for name in word.names}


def unknown_name(owner: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error of an unknown attribute, with the line of the table or the nearest known one."""
    return UnknownNameError(f"{owner} has no {name!r}{_told(owner, name, known)}")


def unknown_keyword(verb: str, name: str, known: Iterable[str]) -> UnknownKeywordError:
    """The error of a keyword that a verb does not have; arguments as for `unknown_name`."""
    owner = "forward" if verb == "call" else verb  # model(tokens)
    return UnknownKeywordError(f"{verb}() has no keyword {name!r}{_told(owner, name, known)}")


def unknown_import(name: str, known: Iterable[str]) -> MIError:
    """The error of a name that the package `mionnx` does not have.

    `from mionnx import NAME` drops the message of an `AttributeError`, and asks in an instruction of its own.
    """
    message = f"mionnx has no {name!r}{_told('mionnx', name, known)}"
    caller = sys._getframe(2)
    imported = dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM" if caller.f_lasti >= 0 else False
    return UnknownImportError(message) if imported else UnknownNameError(message)


def _told(owner: str, name: str, known: Iterable[str]) -> str:
    line = _LINES.get((owner, name))
    return nearest(name, known) if line is None else line


class ForeignNames(ABCMeta):
    """Type of `Translated`: answers attributes of the class itself."""

    if not TYPE_CHECKING:  # type checkers are to know an unknown name themselves

        def __getattr__(cls, name: str) -> Any:
            raise _missing(cls, name)


class Translated(metaclass=ForeignNames):
    """Base of classes that answer an attribute of another library with its line of the table."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if any(name in vars(base) for base in type(self).__mro__):
                return object.__getattribute__(self, name)  # a property that raised an AttributeError: raise it again
            raise _missing(type(self), name)


def _missing(owner: type, name: str) -> AttributeError:
    if name.startswith("_"):  # asked for by protocols, many times, and never by a person
        return AttributeError(f"{owner.__name__!r} object has no attribute {name!r}")
    return unknown_name(owner.__name__, name, [member for member in dir(owner) if not member.startswith("_")])
