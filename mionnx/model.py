"""`MIModel`: a hooked model that runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer

from mionnx import bind, memory, past, session, store
from mionnx.cache import HookCache
from mionnx.call import Call, Past, make_call
from mionnx.errors import InputError
from mionnx.gates import gates_of
from mionnx.hooked_model import DTYPES, GRAPH, HookedModel
from mionnx.hookpoint import HookPoint
from mionnx.progress import bars
from mionnx.rewrite import Plan, Report, rewrite
from mionnx.rewrite.run import tail
from mionnx.rwkv_state import RWKVState
from mionnx.spec import HookSpec
from mionnx.tokens import Tokens, load_tokenizer, tokenize
from mionnx.world_tokenizer import WorldTokenizer

Prompt = str | Sequence[str] | Tokens | Sequence[Tokens] | ArrayLike


@dataclass(frozen=True)
class Compiled:
    """One graph of a model, open: the untouched one, or a rewritten one.

    Attributes:
        plan: what was asked of it.
        session: ONNX Runtime's session.
        report: which nodes were added where.
        model: the rewritten model's bytes, weights not included; None for the untouched graph, which is on disk.
    """

    plan: Plan
    session: Any
    report: Report
    model: bytes | None


@dataclass(frozen=True)
class Estimate:
    """What a spec's captures will cost, in bytes.

    Attributes:
        captures: name of the capture -> bytes.
    """

    captures: dict[str, int]

    @property
    def total(self) -> int:
        """All captures together."""
        return sum(self.captures.values())

    @property
    def peak(self) -> int:
        """What is held at once while they are computed: a value gathered token by token is held twice at the end."""
        gathered = [size for name, size in self.captures.items() if HookPoint.parse(name).on_request]
        return self.total + max(gathered, default=0)


class MIModel:
    """A language model whose activations can be read and changed.

    Example:
        model = MIModel.from_pretrained("models/world-llama")
        cache = model.forward("The capital of France is", HookSpec().capture("blocks.*.attn.hook_pattern"))
        cache["pattern", 2].shape  # (1, n_heads, seq, seq)

    Attributes:
        hooked: the hooked model: its folder, graph and metadata.
        options: how sessions are opened.
        compiled: plan -> open graph, in order of last use; specs that differ in values only share one.
    """

    def __init__(self, hooked: HookedModel, options: session.Options | None = None) -> None:
        self.hooked = hooked
        self.options = options or session.Options()
        self.options.provider_name()
        self.compiled: dict[Plan, Compiled] = {}

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, dtype: str = "float32", provider: str = "cpu", threads: int = 0, fast: bool = False
    ) -> "MIModel":
        """Open a model.

        Args:
            source: a hooked model's folder, a Hugging Face checkpoint's folder, or a Hub id. A checkpoint is exported
                on first use into the store (`MIONNX_CACHE`, else the user's cache directory), and reused after.
            dtype: what a checkpoint is exported as: "float32", "float16", "bfloat16" or "auto". A hooked model has its
                own already.
            provider: "cpu", "cuda", or any execution provider's name.
            threads: threads inside one operator; 0 lets ONNX Runtime choose.
            fast: allow fusions that change the last bits of the logits when something inside them is captured.

        Raises:
            ModelError: no model there, or a damaged one.
            ExportError: a checkpoint that cannot be exported.
            RuntimeMissingError: the provider is not installed.
        """
        with bars() as progress:
            folder = store.find_model(source, dtype, progress)
        return cls(HookedModel.open(folder), session.Options(provider, threads, fast))

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

    @cached_property
    def tokenizer(self) -> Tokenizer | WorldTokenizer:
        """The model's tokenizer, of the `tokenizers` library; of an RWKV World model, mionnx' own with its methods.

        Raises:
            TokenizerError: the model has none.
        """
        return load_tokenizer(self.hooked.folder)

    def tokenize(self, text: str) -> Tokens:
        """Tokenise a text: ids, the place of each token in it, and `positions_of` for a substring's tokens."""
        return tokenize(self.tokenizer, text)

    def token_id(self, text: str) -> int:
        """The id of a text that is one token.

        Raises:
            InputError: it is none, or several.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise InputError(f"{text!r} is {len(ids)} tokens, not one")
        return ids[0]

    def compile_graph(self, hooks: HookSpec | None = None) -> Compiled:
        """The open graph for a spec's structure; rewritten and opened if there is none yet.

        Raises:
            HookError, InterventionError: the spec does not fit the model.
        """
        plan = bind.plan_of(hooks or HookSpec(), self.hooked)
        compiled = self.compiled.pop(plan, None) or self._open(plan)
        self.compiled[plan] = compiled  # last in the order of the dictionary: the one used most recently
        while len(self.compiled) > self.options.max_graphs:
            del self.compiled[next(iter(self.compiled))]
        return compiled

    def _open(self, plan: Plan) -> Compiled:
        folder = self.hooked.folder
        if plan.empty:
            return Compiled(plan, session.open_session(folder / GRAPH, folder, self.options), Report(), None)
        model, report = rewrite(self.hooked.proto, plan, self.hooked.metadata)
        return Compiled(plan, session.open_session(model, folder, self.options), report, model)

    def forward(
        self,
        tokens: Prompt,
        hooks: HookSpec | None = None,
        *,
        attention_mask: ArrayLike | None = None,
        cache: Past | None = None,
        initial_state: RWKVState | None = None,
        use_cache: bool = False,
    ) -> HookCache:
        """Run the model once.

        Args:
            tokens: a text, ids [seq] or [batch, seq], `Tokens`, or a list of these; lists of unequal length are padded
                on the left.
            hooks: what to capture and where to intervene; nothing if it is left out.
            attention_mask: [batch, seq], 1 for tokens and 0 for padding on either side, where ids are padded already.
            cache: keys and values of the tokens before these (`HookCache.kv_cache` of an earlier call); of an RWKV
                model, the same as `initial_state`.
            initial_state: of an RWKV model, the state to begin with (`HookCache.state` of an earlier call).
            use_cache: return the keys and values after this call, as `HookCache.kv_cache`. An RWKV model's state is
                always there, as `HookCache.state`.

        Returns:
            the logits [batch, seq, vocab] and the captures.

        Raises:
            InputError, TokenizerError: tokens, mask or cache that the model cannot run on.
            HookError, InterventionError: the spec would not take effect as asked.
        """
        spec = hooks or HookSpec()
        compiled, before = self.compile_graph(spec), past.choose(self.hooked, cache, initial_state)
        call = make_call(self._ids(tokens), attention_mask, before, self.hooked.metadata.sizes)
        feeds = {**call.feeds(), **past.feeds(self.hooked, before, call)}
        feeds |= bind.values_of(spec, compiled.plan, call, self.hooked)
        feeds |= gates_of(spec, call, self.hooked.metadata)
        self._refuse_too_large(spec, call)
        captured = [want.output for want in compiled.plan.wants]
        found = session.run(compiled.session, ["logits", *captured, *past.outputs(self.hooked, use_cache)], feeds)
        after = past.collect(self.hooked, found, call, use_cache)
        return HookCache(found["logits"], {name: found[name] for name in captured}, *after)

    def _ids(self, tokens: Prompt) -> Any:
        if isinstance(tokens, str):
            return self.tokenize(tokens)
        if isinstance(tokens, Sequence) and tokens and all(isinstance(entry, str) for entry in tokens):
            return [self.tokenize(str(text)) for text in tokens]
        return tokens

    def _refuse_too_large(self, spec: HookSpec, call: Call) -> None:
        peak, free = self.estimate(spec, call.batch, call.seq, call.total - call.seq).peak, memory.available()
        if peak > free:
            raise InputError(
                f"the captures of this spec need {memory.spell(peak)}, and {memory.spell(free)} of memory are free: "
                "capture fewer layers, or run the text in pieces"
            )

    def report(self, hooks: HookSpec) -> Report:
        """What a spec makes of the graph: which nodes are added where."""
        return self.compile_graph(hooks).report

    def estimate(self, hooks: HookSpec, batch: int, seq: int, past: int = 0) -> Estimate:
        """What a spec's captures will cost, before anything runs.

        Args:
            hooks: the spec.
            batch, seq: of the call.
            past: tokens in the cache.
        """
        dims = bind.dimensions(batch, seq, past + seq)
        found = {}
        for want in bind.plan_of(hooks, self.hooked).wants:
            point = HookPoint.parse(want.hook)
            shape = bind.shape_of(self.hooked.axes(point), dims)
            found[want.output] = np.dtype(self.hooked.dtype(point)).itemsize * prod(shape)
        return Estimate(found)

    @cached_property
    def _head(self) -> Any:
        last = str(HookPoint.ResidPost(self.num_layers - 1))
        model = tail(self.hooked.proto, last, str(HookPoint.Logits))
        return session.open_session(model, self.hooked.folder, self.options)

    def project_to_vocab(self, residual: ArrayLike) -> NDArray[Any]:
        """The logits that a residual stream would have, were it the last (logit lens): final norm, head, soft cap.

        Args:
            residual: [..., hidden].

        Returns:
            [..., vocab]; of the last layer's `hook_resid_post`, the model's own logits.

        Raises:
            InputError: another width, or NaN.
        """
        given = np.asarray(residual)
        if given.shape[-1:] != (self.hidden_size,):
            raise InputError(f"residual is {list(given.shape)}, its last axis must be hidden={self.hidden_size}")
        if np.isnan(given).any():
            raise InputError("residual has NaN")
        rows = given.reshape(1, -1, self.hidden_size).astype(DTYPES[self.hooked.metadata.dtype])
        last = str(HookPoint.ResidPost(self.num_layers - 1))
        ids = np.zeros(rows.shape[:2], np.int64)  # some families' last nodes read the shape of the tokens
        feeds = {"input_ids": ids, "attention_mask": ids + 1, "position_ids": ids, last: rows}
        logits = session.run(self._head, [str(HookPoint.Logits)], feeds)[str(HookPoint.Logits)]
        return logits.reshape(*given.shape[:-1], self.vocab_size)

    def __repr__(self) -> str:
        sizes = self.hooked.metadata.sizes
        return (
            f"MIModel({self.hooked.metadata.family}, {sizes.num_layers} layers, {sizes.num_heads} heads, "
            f"hidden {sizes.hidden_size}, vocabulary {sizes.vocab_size}, {self.options.provider})"
        )
