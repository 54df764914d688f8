"""`Runner`: a hooked model that runs. `mionnx.MIModel` adds the analyses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike
from tokenizers import Tokenizer

from mionnx.bind.bound_spec import Binder, BoundSpec
from mionnx.bind.estimate import Estimate
from mionnx.bind.logit_selection import Logits
from mionnx.engine.engines import ready_engine
from mionnx.engine.options import ONNX_RUNTIME, Options
from mionnx.errors import InputError, TokenizerError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.past import choose_past
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.inputs.tokens import Tokens, load_tokenizer, token_id, tokenize
from mionnx.inputs.world_tokenizer import WorldTokenizer
from mionnx.machine import memory
from mionnx.machine.once import Once, once_property
from mionnx.machine.progress import bars
from mionnx.rewrite import Plan, Report
from mionnx.rewrite.plan import Outputs
from mionnx.run import find_model
from mionnx.run.graph_pool import GraphPool, OpenGraph
from mionnx.run.hook_cache import HookCache, collect
from mionnx.spec.hook_spec import HookSpec

SMALL = 2**20  # bytes of captures for which nobody needs to ask how much memory is left
Prompt = str | Sequence[str] | Tokens | Sequence[Tokens] | ArrayLike
T = TypeVar("T")


class Runner:
    """A language model whose activations can be read and changed.

    Attributes:
        hooked: the hooked model: its folder, graph and metadata.
        options: how sessions are opened.
        variants: the open graphs; specs that differ in values only share one.
        binder: binds specs to this model.
    """

    def __init__(self, hooked: HookedModel, options: Options | None = None) -> None:
        self.hooked = hooked
        self.options = options or Options()
        self.variants = GraphPool(hooked, self.options)
        self.binder = Binder(hooked)
        self._opened: Once[Any, Any] = Once()

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: str = "float32",
        provider: str = "cpu",
        threads: int = 0,
        fast: bool = False,
        prepack: bool | None = None,
        base: str = "auto",
        provider_options: Mapping[str, str | int] | None = None,
        cuda_graphs: bool = False,
        engine: str = ONNX_RUNTIME,
    ) -> Self:
        """Open a model.

        Args:
            source: a hooked model's folder, a Hugging Face checkpoint's folder, or a Hub id. A checkpoint is exported
                on first use into the store (`MIONNX_CACHE`, else the user's cache directory), and reused after.
            dtype: what a checkpoint is exported as: "float32", "float16", "bfloat16" or "auto". A hooked model has its
                own already.
            provider: "cpu", "cuda", or any execution provider's name.
            threads: threads inside one operator; 0 lets the engine choose.
            fast: allow fusions that change the last bits of the logits when something inside them is captured.
            prepack, base, provider_options, cuda_graphs: see `mionnx.Options`.
            engine: "onnxruntime", "openvino", "onnxruntime-web" or "reference" (onnx's own evaluator).

        Raises:
            ModelError: no model there, or a damaged one.
            ExportError: a checkpoint that cannot be exported.
            InputError: an unknown engine, or a setting that it does not have.
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
        )
        ready_engine(options)  # refused before a checkpoint is exported
        with bars() as progress:
            folder = find_model.find_model(source, dtype, progress)
        return cls(HookedModel.open(folder), options)

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return self.hooked.metadata.sizes.num_layers

    @property
    def num_heads(self) -> int:
        """Query heads a layer."""
        return self.hooked.metadata.sizes.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads a layer."""
        return self.hooked.metadata.sizes.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hooked.metadata.sizes.head_dim

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.hooked.metadata.sizes.hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.hooked.metadata.sizes.vocab_size

    def hook_points(self) -> list[HookPoint]:
        """All hook points of this model, in execution order."""
        return self.hooked.hook_points()

    @once_property
    def tokenizer(self) -> Tokenizer | WorldTokenizer:
        """The tokenizer: a `tokenizers.Tokenizer`, or a `WorldTokenizer` for an RWKV World model.

        Raises:
            TokenizerError: the model has none.
        """
        return load_tokenizer(self.hooked.folder)

    def tokenize(self, text: str) -> Tokens:
        """Tokenise a text: ids, offsets, and `positions_of` for a substring's tokens.

        Example:
            model.tokenize("The capital of France is").positions_of("France")  # [3]
        """
        return tokenize(self.tokenizer, text)

    def token_id(self, text: str) -> int:
        """The id of a text that is one token.

        Raises:
            InputError: it is none, or several, or the tokenizer makes another text of it, as of an unknown word.
        """
        return token_id(self.tokenizer, text)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model's folder has a tokenizer."""
        try:
            return self.tokenizer is not None
        except TokenizerError:
            return False

    def compile_graph(self, hooks: HookSpec | None = None, outputs: Outputs | None = None) -> OpenGraph:
        """The open graph of a spec; rewritten and opened on first use.

        Args:
            hooks: the spec.
            outputs: the model's own outputs to compute; all if left out.

        Raises:
            HookError, InterventionError: the spec does not fit the model.
        """
        return self.variants.get(self.binder.bind(hooks or HookSpec(), outputs).plan)

    def opened(self, kind: Callable[[HookedModel, Options], T]) -> T:
        """Return the one instance of a class that opens parts of this model; made on first use.

        Args:
            kind: a class that is made from a hooked model and options.

        Example:
            lens = model.opened(Lens)
        """
        return self._opened.get(kind, lambda: kind(self.hooked, self.options))

    @property
    def compiled(self) -> Mapping[Plan, OpenGraph]:
        """Open graphs, the least recently used first; chains of cut graphs are left out."""
        found = [*self.variants.open.items()]
        return {plan: one for plan, one in found if isinstance(plan, Plan) and isinstance(one, OpenGraph)}

    def warm(self, hooks: HookSpec, logits: bool | Logits = True) -> None:
        """Open the graph of a spec now, so that the first `forward` does not wait for it.

        Example:
            model.warm(HookSpec().capture("blocks.*.attn.hook_pattern"))
        """
        part = logits if isinstance(logits, Logits) else Logits()
        self.compile_graph(hooks, part.outputs(bool(logits)) if logits else Outputs(logits=False, carried=False))

    def prepare(self) -> bool:
        """Make the prepacked base of this model: graphs open quickly and share its weights.

        It is made once, takes about twice the size of the weights in the store, and serves every later process on this
        machine; see `mionnx.run.prepacked`.

        Returns:
            whether there is one: not if the store cannot hold it, or the provider is not the CPU.
        """
        return self.variants.prepare()

    def forward(
        self,
        tokens: Prompt,
        hooks: HookSpec | None = None,
        *,
        attention_mask: ArrayLike | None = None,
        cache: Past | None = None,
        initial_state: RWKVState | None = None,
        use_cache: bool = False,
        prompt_length: int | Sequence[int] | None = None,
        logits: bool | Logits = True,
    ) -> HookCache:
        """Run the model once: capture activations, and change them on the way.

        Args:
            tokens: a text, ids [seq] or [batch, seq], `Tokens`, or a list of these; lists of unequal length are padded
                on the left.
            hooks: captures and interventions; none if left out.
            attention_mask: [batch, seq], 1 for tokens and 0 for padding on either side, where ids are padded already.
            cache: keys and values of the tokens before these (`HookCache.kv_cache` of an earlier call); of an RWKV
                model, the same as `initial_state`.
            initial_state: of an RWKV model, the state to begin with (`HookCache.state` of an earlier call).
            prompt_length: number of tokens of each row's text, past included, that are its prompt; those after it are
                the phase "generated", and negative positions count from there. All of it if it is left out.
            use_cache: return the keys and values after this call, as `HookCache.kv_cache`. An RWKV model's state is
                always there, as `HookCache.state`, except without logits.
            logits: all of them, a part (`Logits(positions=-1)`, `Logits(tokens=[..])`, `Logits(top_k=10)`), or none:
                the graph then ends at the last capture, and what comes after it is not computed.

        Returns:
            the logits [batch, seq, vocab] and the captures.

        Raises:
            InputError, TokenizerError: tokens, mask or cache that the model cannot run on.
            HookError, InterventionError: the spec would not take effect as asked.

        Example:
            spec = HookSpec().capture("*.hook_resid_post").intervene("blocks.1.hook_mlp_out", Intervention.Zero())
            cache = model.forward("The capital of France is", spec)
            cache.output().shape, cache["resid_post", 2].shape  # (1, seq, vocab), (1, seq, hidden)
        """
        spec, part = hooks or HookSpec(), logits if isinstance(logits, Logits) else Logits()
        past = choose_past(self.hooked, cache, initial_state)
        if not (logits or use_cache or spec.captures):
            raise InputError("logits=False and no captures: nothing would be computed")
        carried = use_cache or bool(logits)
        outputs = part.outputs(carried) if logits else Outputs(logits=False, carried=carried)
        bound = self.binder.bind(spec, outputs, logits=part)
        batch = make_token_batch(self._ids(tokens), attention_mask, past, self.hooked.metadata.sizes, prompt_length)
        inputs = bound.inputs(batch, past)
        _refuse_too_large(bound, batch)
        graph = self.variants.get(bound.plan, batch.batch * batch.seq)
        return collect(bound, batch, graph.run(bound.outputs(use_cache), inputs), use_cache)

    def _ids(self, tokens: Prompt) -> Any:
        if isinstance(tokens, str):
            return self.tokenize(tokens)
        if isinstance(tokens, Sequence) and tokens and all(isinstance(entry, str) for entry in tokens):
            return [self.tokenize(str(text)) for text in tokens]
        return tokens

    def _known(self, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise InputError(f"token {token}; the vocabulary is 0 to {self.vocab_size - 1}")
        return int(token)

    def report(self, hooks: HookSpec) -> Report:
        """The nodes, inputs and outputs that a spec's rewrite adds and removes.

        Example:
            print(model.report(HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero())))
        """
        return self.compile_graph(hooks).report

    def estimate(self, hooks: HookSpec, batch: int, seq: int, past: int = 0) -> Estimate:
        """Estimate the bytes of a spec's captures before anything runs.

        Args:
            hooks: the spec.
            batch, seq: of the call.
            past: tokens in the cache.

        Example:
            model.estimate(HookSpec().capture("*"), batch=1, seq=128).total
        """
        return self.binder.bind(hooks).estimate(batch, seq, past + seq)

    def __repr__(self) -> str:
        sizes = self.hooked.metadata.sizes
        return (
            f"{type(self).__name__}({self.hooked.metadata.family}, {sizes.num_layers} layers, {sizes.num_heads} heads, "
            f"hidden {sizes.hidden_size}, vocabulary {sizes.vocab_size}, {self.options.provider})"
        )


def _refuse_too_large(bound: BoundSpec, batch: TokenBatch) -> None:
    peak = bound.estimate(batch.batch, batch.seq, batch.total).peak if bound.captures else 0
    if peak > SMALL and peak > (free := memory.available()):
        raise InputError(
            f"the captures of this spec need {memory.format_bytes(peak)}, and "
            f"{memory.format_bytes(free)} of memory are free: capture fewer layers, or run the text in pieces"
        )
