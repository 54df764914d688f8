"""The verbs that take the residual stream apart, with TransformerLens' names and meanings."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.attribution import decompose
from mionnx.analysis.attribution.decompose import Labelled, PosSlice
from mionnx.analysis.attribution.linear_norm import Frozen, freeze
from mionnx.analysis.attribution.norm_graphs import (
    Norms,
    Part,
    final_norm,
    input_norm,
)
from mionnx.analysis.lens.unembedding import Unembedding
from mionnx.bind.logit_selection import Logits
from mionnx.errors import InputError
from mionnx.run.hook_cache import HookCache
from mionnx.run.prompt import one_text, streams_of, token_of
from mionnx.run.runner import Prompt, Runner
from mionnx.spec.hook_spec import HookSpec

Source = HookCache | Prompt
TokenLike = int | str | Sequence[int] | NDArray[np.integer[Any]]


class StackVerbs(Runner):
    """Parts of the residual stream, and what they contribute to logits.

    `source` is a prompt (a text, ids, several of them) or what `forward` gave with `decomposition_hooks()`. Positions
    are those of the arrays, padding included; `pos_slice` is an integer (which drops the axis), a slice or a list.
    """

    def decomposition_hooks(self, layer: int | None = None, heads: bool = True) -> HookSpec:
        """The captures that the verbs below need, for one `forward` that serves all of them.

        Args:
            layer: up to the inputs of this layer's attention and MLP; the whole stream if left out.
            heads: each head's share too, [batch, seq, n_heads, hidden] a layer.
        """
        end = decompose.layer_of(self.hooked, layer)
        named = decompose.additions(self.hooked, end, "all", end < self.num_layers, True)
        named += decompose.accumulations(self.hooked, end, False, False)
        middles = decompose.middles(self.hooked, end)
        shares = decompose.heads(self.hooked, end) if heads and end and not self.hooked.metadata.recurrent else []
        spec = HookSpec()
        for name in dict.fromkeys([*(name for _, name in named), *middles, *shares]):
            spec.capture(name)
        return spec

    def decompose_resid(
        self,
        source: Source,
        layer: int | None = None,
        *,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: PosSlice = None,
        incl_embeds: bool = True,
    ) -> Labelled:
        """What was added to the stream up to the input of a layer; with mode "all" it adds up to that input.

        Args:
            source: prompts or a cache, see the class.
            layer: whose input; None or -1 for what the final norm reads.
            mlp_input: the input of the layer's MLP rather than of its attention.
            mode: "all", "mlp" or "attn": which outputs.
            apply_ln: through the norm before the layer, see `apply_ln_to_stack`.
            pos_slice: at these positions.
            incl_embeds: with the embeddings.

        Returns:
            [component, batch, pos, hidden] and the labels: "embed", "pos_embed", "0_attn_out", "0_mlp_out", ...

        Raises:
            InputError: no such layer, mode or position.
            HookError: a cache that lacks captures.
        """
        end = decompose.layer_of(self.hooked, layer)
        named = decompose.additions(self.hooked, end, mode, mlp_input, incl_embeds)
        cache = self._sourced(source, [name for _, name in named], end, mlp_input, apply_ln)
        stack, labels = decompose.stacked(cache, named, pos_slice)
        return self._normed(stack, cache, end, mlp_input, pos_slice, apply_ln), labels

    def accumulated_resid(
        self,
        source: Source,
        layer: int | None = None,
        *,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: PosSlice = None,
        mlp_input: bool = False,
    ) -> Labelled:
        """The residual stream on its way to the input of a layer.

        Args:
            source, layer, mlp_input, pos_slice: as `decompose_resid` takes them.
            incl_mid: the stream between attention and MLP of each layer before it, too.
            apply_ln: at the end of the stream, each through the final norm with a scale of its own (the logit lens);
                before, with the layer's actual scale, as `apply_ln_to_stack`.

        Returns:
            [point, batch, pos, hidden] and the labels: "0_pre", "0_mid", ..., "final_post".

        Raises:
            InputError, HookError: as `decompose_resid`; `incl_mid` where blocks are parallel and have no such point.
        """
        end = decompose.layer_of(self.hooked, layer)
        named = decompose.accumulations(self.hooked, end, incl_mid, mlp_input)
        cache = self._sourced(source, [name for _, name in named], end, mlp_input, apply_ln)
        stack, labels = decompose.stacked(cache, named, pos_slice)
        if apply_ln and end == self.num_layers:
            part = final_norm(self.hooked)
            rows = self._norms([part]).run(part, np.ascontiguousarray(stack.reshape(-1, self.hidden_size)))
            return rows.reshape(stack.shape), labels
        return self._normed(stack, cache, end, mlp_input, pos_slice, apply_ln), labels

    def stack_head_results(
        self,
        source: Source,
        layer: int | None = None,
        *,
        incl_remainder: bool = False,
        pos_slice: PosSlice = None,
        apply_ln: bool = False,
    ) -> Labelled:
        """Each head's share of the stream, z W_O, of the layers before one.

        Families that norm an attention's output (Gemma 2) do so after the shares are added up: `attribute` takes them
        through that norm, this does not.

        Args:
            source, layer, pos_slice, apply_ln: as `decompose_resid` takes them.
            incl_remainder: with a last component, all the rest of the stream.

        Returns:
            [layer x head, batch, pos, hidden] and the labels "L0H0", "L0H1", ..., "remainder".

        Raises:
            InputError, HookError: as `decompose_resid`; a recurrent model has no such shares.
        """
        end = decompose.layer_of(self.hooked, layer)
        names = decompose.heads(self.hooked, end)
        rest = decompose.input_of(self.hooked, end, False)
        cache = self._sourced(source, [*names, *([rest] if incl_remainder else [])], end, False, apply_ln)
        stack, labels = decompose.head_stack(cache, names, pos_slice)
        if incl_remainder:
            remainder = decompose.sliced(cache.require(rest), pos_slice) - stack.sum(axis=0)
            stack, labels = np.concatenate([stack, remainder[None]]), [*labels, "remainder"]
        return self._normed(stack, cache, end, False, pos_slice, apply_ln), labels

    def apply_ln_to_stack(
        self,
        stack: ArrayLike,
        source: Source,
        layer: int | None = None,
        *,
        mlp_input: bool = False,
        pos_slice: PosSlice = None,
        weighted: bool = True,
    ) -> NDArray[np.float32]:
        """What parts of the stream contribute to the output of a norm, its scale held at the actual stream's.

        The parts of a sum that is the stream add up to the norm's output less its bias; see
        `mionnx.analysis.attribution.linear_norm`.

        Args:
            stack: [component, batch, pos, hidden], sliced already.
            source: prompts or a cache that the stack is from.
            layer: the norm before this layer; None or -1 for the final norm.
            mlp_input: the norm before the layer's MLP rather than before its attention.
            pos_slice: the positions that the stack has.
            weighted: with the norm's weight. TransformerLens leaves it out (it folds weights into what follows, or, of
                a raw model, ignores them): False gives its numbers.

        Returns:
            the shape of the stack, float32.

        Raises:
            InputError: a stack of another shape than the stream.
            ModelError: the model has no LayerNorm or RMSNorm there.
        """
        end = decompose.layer_of(self.hooked, layer)
        frozen = self._frozen(self._sourced(source, [], end, mlp_input, True), end, mlp_input, pos_slice)
        return frozen.apply(self._fitting(stack, frozen), weighted).astype(np.float32)

    def logit_attrs(
        self,
        stack: ArrayLike,
        source: Source,
        tokens: TokenLike,
        incorrect_tokens: TokenLike | None = None,
        *,
        pos_slice: PosSlice = None,
        weighted: bool = True,
    ) -> NDArray[np.float32]:
        """What parts of the stream contribute to the logit of tokens, or to its lead over other tokens.

        Of parts that add up to the stream, the contributions add up to the logit less what the biases of the final norm
        and of the head give. Where a soft cap follows (Gemma 2), logits are those before the cap.

        Args:
            stack: [component, batch, pos, hidden], sliced already.
            source: prompts or a cache that the stack is from.
            tokens: one token by id or text, or ids [batch], [pos] where that is another length, or [batch, pos].
            incorrect_tokens: the same; contributions are then to the difference.
            pos_slice: the positions that the stack has.
            weighted: with the final norm's weight; without, the numbers of TransformerLens on a raw model.

        Returns:
            [component, batch, pos], float32.

        Raises:
            InputError: a stack of another shape, or tokens that do not fit it.
            ModelError: a final norm or a head that is not linear in a known way.
        """
        end = self.num_layers
        frozen = self._frozen(self._sourced(source, [], end, False, True), end, False, pos_slice)
        parts = self._fitting(stack, frozen)
        direction = self._directions(tokens, parts.shape[1:-1])
        if incorrect_tokens is not None:
            direction = direction - self._directions(incorrect_tokens, parts.shape[1:-1])
        return frozen.project(parts, direction, weighted).astype(np.float32)

    def get_logit_diff(
        self, prompt: Prompt, answer: int | str, versus: int | str, *, position: int = -1, hooks: HookSpec | None = None
    ) -> float:
        """The lead of a token's logit over another's at one position of one prompt.

        Raises:
            InputError: several prompts, no such position or token.
        """
        text, pair = one_text(self, prompt), [token_of(self, token) for token in (answer, versus)]
        found = self.forward(text.ids, hooks, logits=Logits(positions=text.place(position), tokens=pair))
        first, second = found.output()[0, 0].astype(np.float64)
        return float(first - second)

    def _sourced(self, source: Source, names: Sequence[str], layer: int, mlp_input: bool, apply_ln: bool) -> HookCache:
        needed = [*names, *([decompose.input_of(self.hooked, layer, mlp_input)] if apply_ln else [])]
        if isinstance(source, HookCache):
            decompose.refuse_missing(source, needed)
            return source
        spec = HookSpec()
        for name in dict.fromkeys(needed):
            spec.capture(name)
        return self.forward(source, spec, logits=False)

    def _normed(
        self, stack: NDArray[Any], cache: HookCache, layer: int, mlp_input: bool, pos_slice: PosSlice, apply_ln: bool
    ) -> NDArray[Any]:
        if not apply_ln:
            return stack
        return self._frozen(cache, layer, mlp_input, pos_slice).apply(stack).astype(np.float32)

    def _frozen(self, cache: HookCache, layer: int, mlp_input: bool, pos_slice: PosSlice) -> Frozen:
        stream = decompose.sliced(cache.require(decompose.input_of(self.hooked, layer, mlp_input)), pos_slice)
        part = final_norm(self.hooked) if layer == self.num_layers else input_norm(self.hooked, layer, mlp_input)
        return freeze(lambda rows: self._norms([part]).run(part, rows), stream, self._place(part))

    def _place(self, part: Part) -> str:
        return f"{self.hooked.metadata.family}: what lies between {part[0]} and {part[1]}"

    def _norms(self, pairs: Sequence[Part]) -> Norms:
        key = tuple(pairs)
        if key not in self._opened_norms:
            self._opened_norms[key] = Norms(self.hooked, self.options, pairs)
        return self._opened_norms[key]

    @cached_property
    def _opened_norms(self) -> dict[tuple[Part, ...], Norms]:
        return {}

    def _fitting(self, stack: ArrayLike, frozen: Frozen) -> NDArray[Any]:
        parts = streams_of(stack, self.hidden_size, "stack")
        if parts.shape[1:-1] != frozen.scale.shape[:-1]:
            raise InputError(
                f"the stack is {list(parts.shape)}; of this stream it must be [component, "
                f"{', '.join(map(str, frozen.scale.shape[:-1]))}, hidden={self.hidden_size}]"
            )
        return parts

    @cached_property
    def _unembed(self) -> Unembedding:
        return Unembedding(self.hooked, self.options)

    def _directions(self, tokens: TokenLike, places: tuple[int, ...]) -> NDArray[np.float64]:
        """[batch or 1, pos or 1, hidden] of tokens, or fewer axes where the stack has fewer."""
        if isinstance(tokens, int | str | np.integer):
            return self._unembed.directions(np.array(token_of(self, tokens)))
        ids = np.asarray(tokens)
        if ids.dtype.kind not in "iu" or ids.ndim > len(places) or ids.ndim == 0:
            raise InputError(f"tokens must be one token, or ids [batch] or [batch, pos], got {tokens!r}")
        for token in ids.ravel().tolist():
            self._known(token)
        if ids.ndim == 1 and len(places) == 2:
            ids = ids[:, None] if len(ids) == places[0] else ids[None]
        if any(size not in (1, place) for size, place in zip(ids.shape, places, strict=True)):
            raise InputError(f"tokens are {list(np.shape(tokens))}, the stack's batch and positions {list(places)}")
        return self._unembed.directions(ids)
