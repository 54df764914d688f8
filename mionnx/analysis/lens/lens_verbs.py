"""The verbs that read residual streams as predictions, and vectors as tokens."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.lens.lens import LensResult
from mionnx.analysis.lens.nearest_tokens import cosines, largest, products
from mionnx.analysis.lens.readout import Lens, Readout
from mionnx.engine import onnx_runtime
from mionnx.errors import HookError, InputError, nearest
from mionnx.graph import matrices
from mionnx.graph.extract import extract
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import DTYPES
from mionnx.run.prompt import (
    Text,
    is_stream,
    one_text,
    spell,
    streams_of,
    token_of,
)
from mionnx.run.runner import Prompt, Runner
from mionnx.spec.hook_spec import HookSpec

Scored = list[tuple[int, float]]  # token ids with a probability, cosine or logit each, in descending order
STREAMS = ("resid_pre", "resid_mid", "resid_post")


class LensVerbs(Runner):
    """Reading residual streams with the model's own head."""

    @overload
    def logit_lens(self, source: NDArray[np.floating[Any]], *, k: int = 10) -> list[Any]: ...  # type: ignore[overload-overlap]

    @overload
    def logit_lens(
        self,
        source: Prompt,
        hooks: HookSpec | None = None,
        *,
        k: int = 10,
        layers: Sequence[int] | None = None,
        positions: int | Sequence[int] | None = None,
        points: str | Sequence[str] = "resid_post",
        tokens: Sequence[int | str] = (),
    ) -> LensResult: ...

    def logit_lens(
        self,
        source: Any,
        hooks: HookSpec | None = None,
        *,
        k: int = 10,
        layers: Sequence[int] | None = None,
        positions: int | Sequence[int] | None = None,
        points: str | Sequence[str] = "resid_post",
        tokens: Sequence[int | str] = (),
    ) -> LensResult | list[Any]:
        """What layers would predict, were they the last: final norm, head, soft cap and softmax on their streams.

        All of it happens inside a graph that gives the k largest and what was asked of chosen tokens, piece by piece:
        [layers, seq, vocab] is never held.

        Args:
            source: a prompt (a text, `Tokens` or integer ids), or, as floats, a residual [hidden] or several
                [n, hidden], which the other arguments but `k` do not apply to.
            hooks: interventions to run the prompt with.
            k: how many of the likeliest tokens.
            layers: of these layers; of all if left out.
            positions: of these positions, negative ones from the end; of all if left out.
            points: which streams of a layer: "resid_post", "resid_pre", "resid_mid", or several of these.
            tokens: further tokens, by id or text, to follow through the layers.

        Returns:
            of a prompt a `LensResult`; of a residual [(token id, probability)], of several a list of these.

        Raises:
            InputError: several prompts, NaN, another width, or a k, position, token or layer that does not exist.
            HookError: points that the model does not have.
        """
        if is_stream(source):
            if not (hooks is layers is positions is None and points == "resid_post" and len(tokens) == 0):
                raise InputError("hooks, layers, positions, points and tokens apply to a prompt, not to a residual")
            return self._read_vectors(source, k)
        text = one_text(self, source)
        places = _places(text, positions)
        names = self._streams(layers, points)
        streams = self._captured(text, hooks, [*names, self._last], places)
        tracked = [token_of(self, token) for token in tokens]
        return self._lens_result(text, names, places, streams, tracked, k)

    def _lens_result(
        self, text: Text, names: list[str], places: list[int], streams: NDArray[Any], tracked: list[int], k: int
    ) -> LensResult:
        reference = streams[-1]

        def read(chosen: NDArray[np.int64], k: int = 1) -> Readout:
            return self._lens.read(reference, streams[:-1], chosen, k)

        nothing = np.empty((len(places), 0), np.int64)
        answers = self._lens.read(reference, streams[-1:], nothing, 1).top_ids[0, :, 0]
        followed = np.column_stack([answers, *(np.full(len(places), token) for token in tracked)])
        return LensResult(
            names,
            places,
            [text.tokens[place] for place in places],
            read(followed, k),
            answers,
            tracked,
            lambda token: spell(self, token),
            lambda token: token_of(self, token),
            read,
        )

    def _captured(self, text: Text, hooks: HookSpec | None, names: list[str], places: list[int]) -> NDArray[Any]:
        """[names, positions, hidden]."""
        spec = HookSpec().extend(hooks or HookSpec())
        if spec.captures:
            raise InputError("the hooks of a lens are interventions: what it captures are its own streams")
        for name in dict.fromkeys(names):
            spec.capture(name, positions=places)
        cache = self.forward(text.ids, spec, logits=False)
        return np.stack([cache[name][0] for name in names])

    @property
    def _last(self) -> str:
        return str(HookPoint.ResidPost(self.num_layers - 1))

    def _streams(self, layers: Sequence[int] | None, points: str | Sequence[str]) -> list[str]:
        """The names of the residual streams that are meant, in execution order."""
        wanted = [points] if isinstance(points, str) else list(points)
        for point in wanted:
            if point not in STREAMS:
                raise HookError(f"no residual stream {point!r}; one of {', '.join(STREAMS)}{nearest(point, STREAMS)}")
        chosen = range(self.num_layers) if layers is None else layers
        missing = [layer for layer in chosen if layer not in range(self.num_layers)]
        if missing:
            raise InputError(f"no layer {missing[0]!r}: the model has layers 0 to {self.num_layers - 1}")
        names = [f"blocks.{layer}.hook_{point}" for layer in sorted({*chosen}) for point in STREAMS if point in wanted]
        for name in names:
            self.hooked.axes(HookPoint.parse(name))  # refuses what the model does not have
        if not names:
            raise InputError("no layer or no point to read")
        return names

    @cached_property
    def _lens(self) -> Lens:
        return Lens(self.hooked, self.options)

    def _read_vectors(self, residual: ArrayLike, k: int) -> list[Any]:
        given = streams_of(residual, self.hidden_size)
        if given.ndim > 2:
            raise InputError(f"residual is {list(given.shape)}; it must be [hidden] or [n, hidden]")
        rows = given.reshape(-1, self.hidden_size)
        read = self._lens.read(rows, rows[None], np.empty((len(rows), 0), np.int64), k)
        found = [_scored(*pair) for pair in zip(read.top_ids[0], np.exp(read.top[0]), strict=True)]
        return found[0] if given.ndim == 1 else found

    def track_token_at(self, residual: ArrayLike, token: int | str) -> float:
        """The probability of a token, were a residual [hidden] the last layer's.

        Raises:
            InputError: another width, NaN, or no such token.
        """
        given = streams_of(residual, self.hidden_size).reshape(-1, self.hidden_size)
        if len(given) != 1:
            raise InputError(f"residual is {list(np.shape(residual))}; it must be [hidden]")
        read = self._lens.read(given, given[None], np.array([[token_of(self, token)]]), 1)
        return float(np.exp(read.log_probs[0, 0, 0]))

    def track_token(
        self, prompt: Prompt, token: int | str, *, position: int = -1, hooks: HookSpec | None = None
    ) -> NDArray[np.float32]:
        """The probability of a token after each layer, [layers], at one position of a prompt.

        Raises:
            InputError: several prompts, or no such token or position.
        """
        found = self.logit_lens(one_text(self, prompt).ids, hooks, k=1, positions=position, tokens=[token])
        return np.exp(found.readout.log_probs[:, 0, 1])

    def track_race(
        self,
        source: Prompt | Mapping[int, ArrayLike],
        k: int = 5,
        *,
        position: int = -1,
        hooks: HookSpec | None = None,
    ) -> dict[int, Scored]:
        """The likeliest tokens, layer by layer, at one position.

        Args:
            source: a prompt, or {layer: residual [hidden]}, which `position` and `hooks` do not apply to.
            k: how many tokens a layer.
            position: of the prompt, negative from its end.
            hooks: interventions to run the prompt with.

        Returns:
            {layer: [(token id, probability)]}.

        Raises:
            InputError: several prompts, NaN, another width, or a k or position that does not exist.
        """
        if isinstance(source, Mapping):
            if not source or position != -1 or hooks is not None:
                raise InputError("track_race takes a prompt, or {layer: residual} with nothing but k")
            rows = [streams_of(residual, self.hidden_size, f"layer {layer}") for layer, residual in source.items()]
            return dict(zip(source, self._read_vectors(np.stack(rows), k), strict=True))
        found = self.logit_lens(one_text(self, source).ids, hooks, k=k, positions=position)
        return {layer: found.best(layer, 0) for layer in range(self.num_layers)}

    @cached_property
    def _embedding(self) -> NDArray[Any]:
        return matrices.embedding(self.hooked)

    @cached_property
    def _unembedding(self) -> NDArray[Any]:
        return matrices.unembedding(self.hooked)

    def embedding_for(self, token: int | str, scaled: bool = True) -> NDArray[Any]:
        """A token's embedding, [hidden].

        Args:
            token: by id or text.
            scaled: with the scale that the model gives it (Gemma): its `hook_embed`; else the row of the table.
        """
        known = token_of(self, token)
        if not scaled:
            return np.array(self._embedding[known])
        spec = HookSpec().capture(HookPoint.Embed)
        return self.forward([known], spec, logits=False)[HookPoint.Embed][0, 0]

    def unembedding_for(self, token: int | str) -> NDArray[Any]:
        """A token's direction in the unembedding, [hidden].

        Its product with a final-normed stream is the logit before the head's bias, scale (Cohere) and soft cap.
        """
        return np.array(self._unembedding[:, token_of(self, token)])

    def embedding_neighbors(self, query: ArrayLike | str, k: int = 10) -> Scored:
        """The tokens whose embeddings point most nearly where a vector points.

        Args:
            query: [hidden]; or a token's text, for its own embedding.
            k: how many.

        Returns:
            [(token id, cosine)], the nearest first.

        Raises:
            InputError: another width, NaN, a zero vector, or another k than 1 to the vocabulary's size.
        """
        vector = self.embedding_for(query, scaled=False) if isinstance(query, str) else self._one_vector(query, "query")
        return largest(cosines(self._embedding, vector), k)

    def project_through_unembed(self, vec: ArrayLike, k: int = 10) -> Scored:
        """The tokens whose unembedding directions a vector has most of: the raw product, without norm, bias and cap.

        Args:
            vec: [hidden], for example a head's output.
            k: how many.

        Returns:
            [(token id, logit)], the largest first.

        Raises:
            InputError: another width, NaN, or another k than 1 to the vocabulary's size.
        """
        return largest(products(self._unembedding.T, self._one_vector(vec, "vec")), k)

    def _one_vector(self, vector: ArrayLike, what: str) -> NDArray[Any]:
        found = streams_of(vector, self.hidden_size, what)
        if found.ndim != 1:
            raise InputError(f"{what} is {list(found.shape)}; it must be [hidden={self.hidden_size}]")
        return found

    @cached_property
    def _head(self) -> Any:
        model = extract(self.hooked.proto, [self._last], [str(HookPoint.Logits)]).SerializeToString()
        return onnx_runtime.open_session(model, self.hooked.folder, self.options)

    def project_to_vocab(self, residual: ArrayLike) -> NDArray[Any]:
        """The logits that a residual stream would have, were it the last: final norm, head, soft cap.

        Args:
            residual: [..., hidden].

        Returns:
            [..., vocab], all of them at once; of the last layer's `hook_resid_post`, the model's own logits.
            `logit_lens` gives the likeliest tokens without holding all logits.

        Raises:
            InputError: another width, or NaN.
        """
        given = streams_of(residual, self.hidden_size)
        rows = given.reshape(1, -1, self.hidden_size).astype(DTYPES[self.hooked.metadata.dtype])
        ids = np.zeros(rows.shape[:2], np.int64)  # some families' last nodes read the shape of the tokens
        feeds = {"input_ids": ids, "attention_mask": ids + 1, "position_ids": ids, self._last: rows}
        logits = onnx_runtime.run(self._head, [str(HookPoint.Logits)], feeds)[str(HookPoint.Logits)]
        return logits.reshape(*given.shape[:-1], self.vocab_size)


def _places(text: Text, positions: int | Sequence[int] | None) -> list[int]:
    if positions is None:
        return list(range(len(text)))
    given: Iterable[int] = [int(positions)] if isinstance(positions, int | np.integer) else positions
    places = [text.place(position) for position in given]
    if not places:
        raise InputError("a lens of no positions would be empty")
    return places


def _scored(ids: NDArray[np.int64], values: NDArray[Any]) -> Scored:
    return list(zip(ids.tolist(), values.tolist(), strict=True))
