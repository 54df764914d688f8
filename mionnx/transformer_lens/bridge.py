"""`bridge`: a TransformerBridge of TransformerLens on a hooked model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf, configure_tokenizer
from transformer_lens.model_bridge.sources._hf_format import determine_architecture_from_hf_config
from transformer_lens.model_bridge.sources.transformers_driver import TransformersDriver
from transformer_lens.utilities import get_attention_mask
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mionnx.analysis.weights.weights import Weights
from mionnx.analysis.weights.weights import weights as weights_of
from mionnx.bind.gradients import differentiable
from mionnx.bind.hook_index import index_hooks
from mionnx.errors import HookError, InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.output_head import LOGITS as OUTPUT
from mionnx.inputs.kv_cache import KVCache
from mionnx.model import MIModel
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.transformer_lens.coordinates import Coordinates, bases_of
from mionnx.transformer_lens.lens_pass import LensPass, check_mask, warn
from mionnx.transformer_lens.lens_points import LENS_LOGITS, LensPoint, lens_points
from mionnx.transformer_lens.parameters import make_room, serve_module, set_weights
from mionnx.transformer_lens.patched_cells import PatchedCells
from mionnx.transformer_lens.token_values import positions
from mionnx.transformer_lens.weight_gradients import PlacedWeight, WeightViews
from mionnx.transformer_lens.whole_cache import WholeCache

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class NoTorch(TransformersDriver):
    """A driver whose module has weights and no pass."""

    _supported_features = frozenset(
        {"gradients", "parameters", "state_dict", "weight_access", "intervention_callbacks"}
    )

    def forward(self, *args: Any, **options: Any) -> Any:
        """Refuse: the bridge runs the engine."""
        raise HookError("this bridge runs on the engine, and no pass of it in torch")


class OnnxBridge(TransformerBridge):
    """TransformerLens' bridge whose passes run on the engine.

    Everything that TransformerLens does with a bridge, it does with this one; `forward` is other.

    Attributes:
        engine: the model that runs.
        coordinates: what its values are shown in: those of the weights, or of folded ones.
        weight_bytes: bytes of weights that are views of the weight file, and of copies.
        placed: its weights, and the modules that have them. weight_views: the same in torch's graph.
    """

    engine: MIModel
    coordinates: Coordinates
    weight_bytes: dict[str, int]
    placed: list[PlacedWeight]
    weight_views: WeightViews
    _weights_processed: bool

    def attach(self, engine: MIModel) -> OnnxBridge:
        """Take a model as the engine, and its weights."""
        weights = weights_of(engine)
        self.__dict__.update(
            engine=engine, _leading={}, _points=(None, {}), _warned=set[str](), _capturing={}, _wanted=((), {})
        )
        self.__dict__.update(_cells=PatchedCells(self), _whole=WholeCache(self))
        eps = float(getattr(self.cfg, "eps", 1e-5))
        cap = max(0.0, float(getattr(self.cfg, "output_logits_soft_cap", None) or 0.0))
        factor = float(getattr(self.original_model.config, "logit_scale", None) or 1.0)
        self.__dict__.update(coordinates=Coordinates(weights, weights, eps, weights, cap=cap, factor=factor))
        self._show(weights)
        serve_module(self)
        return self

    def _show(self, weights: Weights) -> None:
        counts, placed = set_weights(self, weights, self.engine.num_layers)
        self.__dict__.update(weight_bytes=counts, placed=placed, weight_views=WeightViews(self))
        self._register_all_aliases_recursive()  # else "b_out" is what the module began with
        self.__dict__.update(_versions=[(one, one._version) for one in self.original_model.parameters()])

    def lens_points(self) -> dict[int, LensPoint]:
        """Hook points by the identity of TransformerLens' object, in execution order."""
        registry = self._hook_registry
        stamp = (id(registry), len(registry), *map(id, registry.values()))
        if self._points[0] != stamp:
            graph, model = self.coordinates.raw.graph, self.engine.hooked
            posts = [layer for layer in range(self.engine.num_layers) if graph.has_norm("ln1_post", layer)]
            hooks = {point.name for point in model.hook_points()}
            parts = {name: getattr(self.blocks[0], name, None) for name in ("attn", "mlp")}
            adding = [name for name, part in parts.items() if _adds_stream(getattr(part, "original_component", None))]
            bare = [layer for layer in posts if not graph.has_norm("ln1", layer)]
            weight = graph.norm("q_norm", 0).weight if graph.has_norm("q_norm", 0) else None
            headed = weight is not None and weight.shape[-1] == self.cfg.d_head
            rows = lens_points(hooks, self.engine.num_layers, registry, posts, bare, headed, adding)
            if self.coordinates.cap or self.coordinates.factor != 1:
                rows[-1] = rows[-1]._replace(kind="uncapped")
            self.__dict__.update(_points=(stamp, {id(registry[row.name]): row for row in rows}))
        return self._points[1]

    @property
    def shares_embedding(self) -> bool:
        """Whether the embedding is the unembedding too, one weight; folded ones are two."""
        return bool(self.original_model.config.tie_word_embeddings) and not self._weights_processed

    def leading(self, source: str) -> list[str]:
        """Hook points of the graph that a value depends on, for gradients."""
        if source not in self._leading:
            of = OUTPUT if source == LENS_LOGITS.source else source
            self._leading[source] = differentiable(index_hooks(HookSpec(), self.engine.hooked), of)
        return self._leading[source]

    def capturing(self, sources: Sequence[str]) -> HookSpec:
        """A spec that captures these and does nothing else; each is made once."""
        if (key := tuple(sources)) not in self._capturing:
            self._capturing[key] = HookSpec().capture(key) if key else HookSpec()
        return self._capturing[key]

    def warn_once(self, names: set[str]) -> None:
        """Say which hook points the graph lacks, each once."""
        if new := names - self._warned:
            self._warned.update(new)
            warn(new)

    def forward(
        self,
        input: Any = None,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Any = None,
        labels: Any = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        **options: Any,
    ) -> Any:
        """Run the model; arguments and results are TransformerBridge's.

        Raises:
            HookError: hooks that the graph cannot serve.
            InputError: arguments without a meaning here.
        """
        self._refuse_options(options)
        spec, prompt = HookSpec(), options.get("input_ids") if input is None else input
        attention_mask = options.get("one_zero_attention_mask") if attention_mask is None else attention_mask
        if start_at_layer is not None:
            stream, first = self._start(prompt, start_at_layer)
            spec.intervene(HookPoint.ResidPre(first), Intervention.Replace(stream.numpy()))
            tokens = torch.zeros(stream.shape[:2], dtype=torch.int64)
        else:
            tokens, attention_mask = self._tokens(prompt, prepend_bos, padding_side, attention_mask)
        count = self.engine.num_layers
        stop = None if stop_at_layer is None else stop_at_layer + count if stop_at_layer < 0 else stop_at_layer
        if stop is not None and not 0 <= stop <= count:
            raise InputError(f"stop_at_layer={stop_at_layer}: the model has the layers 0 to {count - 1}")
        use_cache = use_cache or bool(options.get("use_past_kv_cache")) or past_key_values is not None
        use_cache = use_cache or return_type == "logits_and_cache"
        ids = tokens.cpu().numpy()
        mask = check_mask(attention_mask, ids)
        begin = past_key_values.get_layer(0)[0].shape[2] if isinstance(past_key_values, KVCache) else 0
        meant = positions(ids, mask)[:, -ids.shape[1] :] + (begin if mask is None else 0)
        places = options.get("position_ids")
        if places is not None and not (np.asarray(places) == meant).all():
            raise InputError("position_ids: positions follow from attention_mask here, and these are others")
        passing = LensPass(self, ids, mask, spec)
        wants = return_type is not None
        output, past = passing.run(stop, wants, past_key_values, use_cache and stop is None)
        if stop is not None:
            return output
        if getattr(self, "_capture_hf_cache", False):
            self.__dict__.update(_last_hf_cache=past)
        if return_type == "logits_and_cache":
            return output, past
        return self._finalize_return(
            return_type, output, tokens, attention_mask=attention_mask, labels=labels, loss_per_token=loss_per_token,
            inputs_embeds_was_used=start_at_layer is not None,
        )  # fmt: skip

    def run_with_hooks(self, input: Any, fwd_hooks: Any = (), *args: Any, **options: Any) -> Any:
        """Run the model with hooks; the loops of `patching` run as sweeps, with the same numbers."""
        if not args and not options and (logits := self._cells.logits(input, fwd_hooks)) is not None:
            return logits
        return super().run_with_hooks(input, fwd_hooks, *args, **options)

    def run_with_cache(
        self, input: Any, return_cache_object: bool = True, remove_batch_dim: bool = False, **options: Any
    ) -> Any:
        """Run the model and cache values: TransformerLens' own, and faster where every name is asked for."""
        options.setdefault("output_attentions", None)  # TransformerLens asks for them, and its patterns are hooks here
        serves = self._whole.serves(options)
        if serves and (names := self._whole.names) is not None:
            return self._whole.run(names, input, return_cache_object, remove_batch_dim, options)
        output, cache = super().run_with_cache(input, return_cache_object, remove_batch_dim, **options)
        if serves:
            self._whole.learn(cache.cache_dict if return_cache_object else cache)
        return output, cache

    def _refuse_options(self, options: dict[str, Any]) -> None:
        for parameter, version in self._versions:
            if parameter._version != version:
                raise InputError(
                    "a weight of the bridge was written to; the graph has its own, and nothing would change"
                )
        if options.get("output_attentions"):
            raise InputError("output_attentions: patterns are values of hook points, blocks.0.attn.hook_pattern")
        meant = ("output_attentions", "input_ids", "position_ids", "use_past_kv_cache", "one_zero_attention_mask")
        if unknown := [name for name, value in options.items() if name not in meant and value is not None]:
            raise InputError(f"{', '.join(unknown)}: no arguments of a pass on the engine")

    def _start(self, stream: Any, layer: int) -> tuple[torch.Tensor, int]:
        if not (isinstance(stream, torch.Tensor) and stream.is_floating_point()):
            raise ValueError(
                f"start_at_layer requires a residual-stream tensor [batch, pos, d_model]; got {type(stream).__name__}"
            )
        count = self.engine.num_layers
        if not -count <= layer < count:
            raise ValueError(f"start_at_layer={layer} out of range [0, {count}).")
        return (stream if stream.ndim == 3 else stream[None]).detach(), layer % count

    def _tokens(self, prompt: Any, prepend_bos: Any, side: Any, mask: Any) -> tuple[torch.Tensor, Any]:
        """Ids [batch, seq], and the mask that padding on the left needs."""
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], str)):
            several = isinstance(prompt, list) and len(prompt) > 1
            tokens = self.to_tokens(prompt, prepend_bos=prepend_bos, padding_side=side)
            where = side or getattr(self.tokenizer, "padding_side", "right")
            if several and mask is None and where == "left" and self.tokenizer.pad_token_id is not None:
                prepend = getattr(self.cfg, "default_prepend_bos", True)
                mask = get_attention_mask(self.tokenizer, tokens, prepend_bos=prepend, padding_side=where)
            return tokens, mask
        tokens = torch.as_tensor(np.asarray(prompt) if isinstance(prompt, list) else prompt)
        if tokens.is_floating_point():
            raise InputError("embeddings as input: start_at_layer=0 reads the stream before the first layer")
        return (tokens[None] if tokens.ndim == 1 else tokens), mask

    def process_weights(
        self,
        verbose: bool = False,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Show folded weights, and values as a model of them has; the graph stays as it is.

        Raises:
            HookError: `refactor_factored_attn_matrices` of heads whose basis is fixed: rotary positions, grouped keys.
        """
        if self._weights_processed:
            logging.warning("process_weights was already applied to this bridge. Skipping.")
            return
        raw = self.coordinates.raw
        if fold_ln and not raw.graph.has_norm("ln1", 0):
            raise HookError("fold_ln: layers read the stream without a norm here; process_weights(fold_ln=False)")
        folded, bases = raw, {}
        foldings: dict[str, Any] = {"norms": fold_ln}
        if fold_ln:
            folded = folded.fold_layer_norm()
        for wished, name, key in (
            (center_writing_weights, "center_writing_weights", "stream"),
            (center_unembed, "center_unembed", "logits"),
        ):
            try:
                folded = getattr(folded, name)() if wished else folded
                foldings[key] = wished
            except HookError as error:  # TransformerLens leaves them out too
                logging.warning("%s: %s", name, error)
        biased = folded  # a norm's bias has gone into those of values
        folds = fold_value_biases or refactor_factored_attn_matrices
        if folds and any(bool(bias.any()) for bias in biased.b_V):
            folded, foldings["values"] = folded.fold_value_biases(), True
        if refactor_factored_attn_matrices:
            before, folded = folded, folded.refactor_factored_attn_matrices()
            bases = bases_of(before, folded, self.engine.num_layers)
        self._weights_processed = True
        # A factor of logits is folded into the unembedding.
        coordinates = replace(self.coordinates, weights=folded, biased=biased, **foldings, bases=bases, factor=1.0)
        self.__dict__.update(coordinates=coordinates, _points=(None, {}))
        self._show(folded)

    def hf_generate(self, *args: Any, **options: Any) -> Any:
        """Refuse: transformers would generate in torch."""
        raise HookError("hf_generate runs transformers' own loop on the module in torch: generate() runs on the engine")

    def train(self, mode: bool = True) -> OnnxBridge:
        """The bridge itself; refuses the mode of training, in which torch drops values at random."""
        if mode and "engine" in self.__dict__:
            raise InputError("train(): a graph has no dropout, and its passes are those of eval()")
        super().train(False)
        return self

    def _apply(self, *args: Any, **options: Any) -> Any:
        """Refuse `half`, `double` and their like: the graph keeps its dtype."""
        raise InputError("the bridge's weights show the graph's own: open the model in another dtype, dtype='float16'")

    def to(self, *args: Any, **options: Any) -> OnnxBridge:
        """The bridge itself: its weights and its passes are where the model was opened."""
        places = [str(one) for one in (*args, *options.values()) if one is not None]
        if left := [
            one for one in places if one.split(":")[0] != "cpu" and one not in ("torch.float32", "False", "True")
        ]:
            raise InputError(f"to({', '.join(left)}): open the model there, MIModel.from_pretrained(provider=...)")
        return self


def _adds_stream(module: Any) -> bool:
    """Whether a module of transformers adds the stream to what it gives."""
    return module is not None and "residual" in inspect.signature(module.forward).parameters


def bridge(model: MIModel, tokenizer: Any = None) -> OnnxBridge:
    """A TransformerLens bridge on a model: `run_with_cache`, `run_with_hooks`, `patching`, `ActivationCache`.

    No pass of it runs in torch, backward passes included; its weights are views of the weight file where that holds
    float32. Values and meanings are TransformerLens' own: [batch, seq, head, head_dim] for queries, a hook at
    `hook_resid_mid` changes what the MLP reads and not the stream behind it.

    Args:
        model: an opened decoder, of any dtype; one of blocks of 4 bits too.
        tokenizer: one of transformers; by default that beside the model, and none where it has none.

    Raises:
        InputError: a model that is no decoder, or of an architecture that TransformerLens does not know.

    Example:
        lens = bridge(MIModel.from_pretrained("models/world-gpt2"))
        logits, cache = lens.run_with_cache("The capital of France is")
    """
    folder = model.hooked.folder
    if model.hooked.metadata.bidirectional or not model.hooked.metadata.attends:
        raise InputError(f"{model.hooked.name}: a bridge is of a decoder with attention")
    try:
        config = AutoConfig.from_pretrained(folder)
        architecture = determine_architecture_from_hf_config(config)
        described = build_bridge_config_from_hf(config, architecture, model.hooked.name, torch.float32)
        adapter = ArchitectureAdapterFactory.select_architecture_adapter(described)
    except ValueError as error:
        why = str(error).partition(". ")[0]  # advice on other versions follows
        raise InputError(f"TransformerLens has no bridge for {model.hooked.name}: {why}") from error
    with init_empty_weights(include_buffers=False):
        shell = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    make_room(shell)
    adapter.cfg.device = "cpu"
    adapter.prepare_model(shell)
    if tokenizer is None and any((folder / name).exists() for name in TOKENIZERS):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer is not None:
        tokenizer = configure_tokenizer(tokenizer, adapter.cfg)
    return OnnxBridge(shell, adapter, tokenizer, driver=NoTorch(shell, adapter, tokenizer)).attach(model)
