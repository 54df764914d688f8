"""Quirks: taps of single families, beside the words of `Layout`.

A row of `QUIRKS` is a family, the `Attachment` that puts its taps where that family needs them, and why it does.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from exporters.transformers.attention import Calls, replace_for
from exporters.transformers.encoder_quirks import Bottlenecks, ConvolutionHeads
from exporters.transformers.experts import in_order, mix_heads, tap_own_experts, tap_router
from exporters.transformers.recurrent_quirks import (
    LightningAttention,
    LinearUnits,
    OneHalf,
    SelectiveHeads,
    SharedBlocks,
    SideBySide,
)
from exporters.transformers.taps import ADDITIONS, Attachment
from mionnx.graph.hook_points import HookPoint


class EmbeddingsInCode(Attachment):
    """Taps on embeddings that a model's own code scales in place, and on positions out of a table of so many rows."""

    def embeddings(self) -> None:
        rows, at = self.model.config.max_position_embeddings, self.taps.at

        def answer(func: Any, args: Any, options: Any) -> Any:
            result = func(*args, **options)
            if func in (Tensor.mul_, Tensor.__imul__):
                return at(HookPoint.Embed, result)
            table = func is Tensor.__getitem__ and args[0].dim() == 2 and args[0].is_floating_point()
            return at(HookPoint.PosEmbed, result) if table and args[0].shape[0] == rows else result

        self.enter_around(self.module("transformer"), lambda _: Calls(answer))


class SeveralStreams(Attachment):
    """Taps on the active stream of several: as predicted, and before the correction."""

    def stream_before(self, i: int, block: nn.Module) -> None:
        streams: Any = self.module("altup", block)
        at, active = self.taps.at, self.model.config.altup_active_idx
        predict, correct = streams.predict, streams.correct

        def predicted(values: Tensor) -> Tensor:
            split = list(predict(values).unbind(0))
            split[active] = at(HookPoint.ResidPre(i), split[active])
            return torch.stack(split)

        replace_for(self.stack, streams, "predict", predicted)
        replace_for(
            self.stack,
            streams,
            "correct",
            lambda predictions, own: correct(predictions, at(HookPoint.ResidPost(i), own)),
        )
        mlp = self.module(self.layout.mlp, block)
        if share := getattr(mlp, "activation_sparsity", 0.0):
            self.enter_around(mlp, lambda _: quantile(share))

    def stream_after(self, i: int, block: nn.Module) -> None:
        """Nothing: a block gives several streams, the tap is in the correction."""


@contextmanager
def quantile(share: float) -> Iterator[None]:
    """Put a number in the place of a normal quantile, a function that no graph has."""
    value = NormalDist().inv_cdf(share)
    normal = SimpleNamespace(icdf=lambda like: torch.full_like(like, value))
    with ExitStack() as stack:
        replace_for(stack, torch.distributions.normal, "Normal", lambda *_: normal)
        yield


class MixedHeads(Attachment):
    """Projections of queries and of heads' outputs as products with chosen matrices."""

    def heads(self, i: int, block: nn.Module) -> None:
        mix_heads(self.stack, self.module(f"{self.layout.attention}.experts", block))
        super().heads(i, block)


class TwoLayersInBlock(Attachment):
    """Taps between the layers of a block; experts are computed beside the last MLP."""

    def stream_before(self, i: int, block: nn.Module) -> None:
        """Inside a block the stream before a layer is also that after the layer before."""
        number = i % self.layout.layers
        if number == 0:
            super().stream_before(i, block)
            return
        first_reader = self.module(f"input_layernorm.{number}", block)
        for point in (HookPoint.ResidPost(i - 1), HookPoint.ResidPre(i)):
            self.before(first_reader, partial(self.taps.at, point, stream=True))

    def stream_after(self, i: int, block: nn.Module) -> None:
        if self.is_last(i):
            super().stream_after(i, block)

    def is_last(self, i: int) -> bool:
        """Whether a layer is the last one of its block."""
        return (i + 1) % self.layout.layers == 0

    def mlp(self, i: int, block: nn.Module) -> None:
        at, norm = self.taps.at, self.module(str(self.layout.middle), block)
        self.after(norm, lambda x: at(HookPoint.MlpPre(i), self.note(i, x)))  # which the mixture reads too
        self.neurons(i, block, self.layout.mlp)
        if self.is_last(i):
            self.mixture(block)
        self.mlp_result(i, block)

    def mixture(self, block: nn.Module) -> None:
        """Compute the mixture beside the MLP of the last layer."""
        mixture: Any = self.module("mlp", block)
        tap_own_experts(self.stack, self.taps, mixture)
        tap_router(self.stack, self.taps, mixture)
        compute, read = mixture.forward, list[Tensor]()

        def postpone(x: Tensor) -> int:
            read[:] = [x]
            return 0  # which the block adds in its place

        def added(x: Tensor) -> Tensor:
            with Calls(in_order):
                return x + compute(read.pop())

        replace_for(self.stack, mixture, "forward", postpone)
        self.after(self.module(self.layout.mlp, block), added)


class AddedCache(Attachment):
    """A cache for attention without one; its mask begins at the rows of this call."""

    def own_attention(self, i: int, attention: Any, mask: Tensor | None) -> None:
        attend = attention._attn

        def with_past(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            keys, values = self.taps.keep(key.transpose(2, 3), value, i)
            with ExitStack() as rows:
                replace_for(rows, attention, "bias", attention.bias[:, :, keys.shape[2] - query.shape[2] :])
                return attend(query, keys.transpose(2, 3), values, *args, **kwargs)

        replace_for(self.stack, attention, "_attn", with_past)
        super().own_attention(i, attention, None)


class MergedAxes(Attachment):
    """Batch and sequence axes kept apart in a block that merges them."""

    def block(self, i: int, block: nn.Module) -> None:
        super().block(i, block)
        self.enter_around(block, lambda _: Calls(keep_axes))


def keep_axes(func: Any, args: Any, options: Any) -> Any:
    """Undo a block's `x.reshape(-1, width)`: batch and sequence axes stay apart."""
    merges = func is Tensor.reshape and len(args) == 3 and args[1] == -1 and args[0].dim() == 3
    return args[0] if merges else func(*args, **options)


class ProjectedHeads(Attachment):
    """Taps on queries and keys, [batch, n_heads, seq, head_dim], as one projection or two give them."""

    def cut_heads(self, i: int, attention: Any) -> None:
        def cut(point: HookPoint, x: Tensor) -> Tensor:
            self.taps.rotated.add(i)
            heads = x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            return self.taps.at(point, heads).transpose(1, 2).flatten(2)

        def fused(x: Tensor) -> Tensor:  # parts of several cores, each of queries, values and keys
            query, value, key = x.unflatten(-1, (attention.mp_num, 3, -1)).unbind(-2)
            query, key = cut(points[0], query.flatten(2)), cut(points[1], key.flatten(2))
            return torch.stack((query.view_as(value), value, key.view_as(value)), -2).flatten(2)

        points = HookPoint.AttnQ(i), HookPoint.AttnK(i)
        if self.has("qkv_proj", attention):
            self.after(attention.qkv_proj, fused)
            return
        for point, projection in zip(points, (attention.q_proj, attention.k_proj), strict=True):
            self.after(projection, partial(cut, point))


class RotationOfClass(Attachment):
    """Taps around a rotation that is a static method of the attention."""

    def heads(self, i: int, block: nn.Module) -> None:
        super().heads(i, block)
        attention, at = self.module(f"{self.layout.attention}.self", block), self.taps.at
        rotate: Any = attention.apply_rotary_position_embeddings

        def rotated(positions: Tensor, query: Tensor, key: Tensor, *value: Tensor) -> tuple[Tensor, ...]:
            self.taps.rotated.add(i)
            query, key = at(HookPoint.AttnQ(i), query), at(HookPoint.AttnK(i), key)
            query, key, *rest = rotate(positions, query, key, *value)
            return (at(HookPoint.AttnRotQ(i), query), at(HookPoint.AttnRotK(i), key), *rest)

        replace_for(self.stack, attention, "apply_rotary_position_embeddings", rotated)


class CutProjection(Attachment):
    """Taps on queries, keys and values, [batch, n_heads, seq, head_dim], cut out of one projection; biases follow."""

    def split_heads(self, i: int, attention: Any) -> None:
        code = sys.modules[type(attention).__module__]
        # the whole table of distances, of which transformers takes as many as a text is long: the same rows are read
        replace_for(self.stack, code, "compute_attention_span", lambda _query, _key, most: most)

        def cut(_stream: Any) -> Calls:
            parts = dict[HookPoint, Tensor]()

            def answer(func: Any, args: Any, options: Any) -> Any:
                result = func(*args, **options)
                if func is Tensor.chunk and not parts and args[1:] == (3,):
                    query, key, value = result
                    parts.update({HookPoint.AttnQ(i): query, HookPoint.AttnK(i): key, HookPoint.AttnV(i): value})
                    key = parts[HookPoint.AttnK(i)] = self.taps.at(HookPoint.AttnK(i), key)
                    return query, key, value
                for point in (HookPoint.AttnQ(i), HookPoint.AttnV(i)) if func in ADDITIONS else ():
                    if args[0] is parts.get(point):
                        parts[point] = self.taps.at(point, result)
                        self.taps.read[i] = parts[HookPoint.AttnK(i)], parts[HookPoint.AttnV(i)]
                        return parts[point]
                return result

            return Calls(answer)

        self.enter_around(attention, cut)


class MlpBesideExperts(Attachment):
    """Taps on an MLP beside the experts: it reads what they read, and the block adds the two."""

    def mlp_result(self, i: int, block: nn.Module) -> None:
        if not self.has("shared_mlp", block) or self.layout.mlp == "shared_mlp":
            super().mlp_result(i, block)
            return
        experts, beside = (self.module(path, block) for path in (self.layout.mlp, "shared_mlp"))
        read, terms = list[Tensor](), list[Tensor]()

        def keep(x: Tensor) -> Tensor:
            read[:] = [x]
            return x

        def computed(x: Tensor) -> Tensor:
            terms[:] = [x]
            return x

        def answer(func: Any, args: Any, options: Any) -> Any:
            """Tap the sum of what the experts and the MLP make."""
            result = func(*args, **options)
            if func not in ADDITIONS or not any(value is term for value in args for term in terms):
                return result
            terms.clear()
            return self.taps.at_tokens(HookPoint.MlpPost(self.taps.layer), result)

        self.before(experts, keep)  # after the hook point there
        self.before(beside, lambda _: read.pop())
        self.after(experts, computed)
        self.enter_around(block, lambda _: Calls(answer))
        parts = replace(self.layout, gate=None, up=None, gate_and_up="input_linear", down="output_linear")
        Attachment(self.model, parts, self.taps, self.stack).neurons(i, beside)


class Quirk(NamedTuple):
    """A row of the table."""

    attachment: type[Attachment]
    why: str


PROJECTED = Quirk(ProjectedHeads, "rotates slices of keys, then of queries, heads last, or all of them: no cut is seen")
BESIDE = Quirk(MlpBesideExperts, "adds an MLP to its experts in the block itself, so that no module gives the sum")
QUIRKS = {
    "codegen": PROJECTED,
    "convbert": Quirk(ConvolutionHeads, "convolves in half of its heads, with kernels that each token makes"),
    "deberta": Quirk(CutProjection, "cuts queries, keys and values of all heads out of one projection"),
    "ctrl": Quirk(
        EmbeddingsInCode, "scales embeddings and looks positions up in the code of the model, not in modules"
    ),
    "falcon_h1": Quirk(SideBySide, "has attention and a mixer side by side in each layer, each behind a factor"),
    "gemma3n_text": Quirk(SeveralStreams, "predicts four streams before a layer and corrects them after it (AltUp)"),
    "gptj": PROJECTED,
    "granitemoe_swa": BESIDE,
    "granitemoehybrid": BESIDE,
    "granitemoeshared": BESIDE,
    "jetmoe": Quirk(MixedHeads, "lets each token choose the projections of its queries and of its heads' outputs"),
    "longcat_flash": Quirk(
        TwoLayersInBlock, "has two layers in a block, and experts of the first that join the second"
    ),
    "minimax": Quirk(LightningAttention, "weighs the normed stream and what joins it, and has a cache of its own"),
    "mobilebert": Quirk(Bottlenecks, "computes attention and four MLPs on a narrower stream inside of each layer"),
    "nemotron_h": Quirk(OneHalf, "has blocks of one half each: a mixer, attention, an MLP or experts"),
    "openai-gpt": Quirk(AddedCache, "knows no past: transformers computes every text from its first token on"),
    "recurrent_gemma": Quirk(
        LinearUnits, "keeps its states in its modules, and forgets them in calls of several tokens"
    ),
    "roformer": Quirk(RotationOfClass, "rotates in a static method of its attention, not in a function of its module"),
    "opt": Quirk(MergedAxes, "merges batch and sequence axes before its MLP, and the tracing has to keep them apart"),
    "zamba": Quirk(SelectiveHeads, "scans in heads, one call of a function for each; beside what Zamba2 does"),
    "zamba2": Quirk(SharedBlocks, "has attention and an MLP in front of some mixers, which add nothing to the stream"),
}


def attachment_of(config: Any) -> type[Attachment]:
    """The taps of a config's family."""
    quirk = QUIRKS.get(config.model_type)
    return quirk.attachment if quirk else Attachment
