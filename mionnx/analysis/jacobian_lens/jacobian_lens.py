"""`JacobianLens`: one linear map a layer, from its residual stream to the last one's.

Gurnee et al. 2026: J_l is the mean derivative of the last stream by that of layer l, and the head reads J_l h.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.jacobian_lens.decomposition import Occupancy, SparseDecomposition, decompose, occupancy
from mionnx.analysis.jacobian_lens.lens_file import read_lens
from mionnx.errors import InputError, SpecFileError
from mionnx.graph import matrices as graph_matrices
from mionnx.machine.brief import Brief, count
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least
from mionnx.machine.stored import ENDING, Stored
from mionnx.machine.tensor_file import told_of
from mionnx.machine.torch_file import write_torch
from mionnx.machine.typed import typed
from mionnx.run.prompt import streams_of, token_of
from mionnx.run.runner import Runner

Matrices = dict[int, NDArray[np.float32]]
STREAMS = ("resid_post", "resid_pre")
FITTED_ON = "weights_sha256"  # of the metadata: the model that a lens was fitted on
COUNTED = ("n_prompts",)  # facts that differ between parts of one fit


@typed(InputError)
class JacobianLens(Brief, Stored):
    """A linear map a layer, from its residual stream to the last one's: J h, and + b where the lens has biases.

    A Jacobian lens has the matrices of layers 0 to L - 2 and reads `resid_post`; a tuned lens has biases, and reads
    `resid_pre`, the stream before a layer.

    Attributes:
        matrices: layer -> J, float32 [d_model, d_model].
        biases: layer -> b, float32 [d_model]; empty if there are none.
        reads: the stream that it reads: "resid_post" or "resid_pre".
        n_prompts: how many prompts it was fitted on.
        metadata: provenance: numbers, texts, lists and dictionaries.
        cosines: layer -> cosine of the two halves of a fit, float64: how well the prompts determine J.

    Raises:
        InputError: no layers, other shapes, NaN.

    Example:
        lens = model.fit_lens(texts)
        model.logit_lens("The capital of France is", lens=lens)
    """

    def __init__(
        self,
        matrices: Mapping[int, ArrayLike],
        *,
        biases: Mapping[int, ArrayLike] | None = None,
        reads: str = "resid_post",
        n_prompts: int = 0,
        metadata: Mapping[str, Any] | None = None,
        cosines: Mapping[int, float] | None = None,
    ) -> None:
        self.matrices = _layers("matrices", matrices)
        self.biases = _layers("biases", biases or {})
        if not self.matrices:
            raise InputError("a lens has a matrix for one layer at least")
        width = len(next(iter(self.matrices.values())))
        for name, arrays, shape in (("matrix", self.matrices, (width, width)), ("bias", self.biases, (width,))):
            for layer, array in arrays.items():
                if array.shape != shape:
                    raise InputError(f"the {name} of layer {layer} is {list(array.shape)}, and not {list(shape)}")
        if self.biases and self.biases.keys() != self.matrices.keys():
            raise InputError(f"layers {[*self.matrices]} have matrices, and {[*self.biases]} biases")
        if reads not in STREAMS:
            raise InputError(f"reads={reads!r}; one of {', '.join(STREAMS)}")
        at_least("n_prompts", n_prompts, 0)
        self.reads, self.n_prompts, self.metadata = reads, n_prompts, dict(metadata or {})
        self.cosines = {int(layer): float(one) for layer, one in (cosines or {}).items()}

    def _contents(self) -> dict[str, Any]:
        names = ("matrices", "biases", "reads", "n_prompts", "metadata", "cosines")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a lens: of `save`, of TransformerLens or jlens (`.pt`), a J++ lens, or a tuned lens' folder.

        Nothing in a `.pt` file is executed: it is read without torch, and what is no array or number is refused.

        Raises:
            SpecFileError: the file is missing, damaged, of another kind, or names what is no part of a lens.
            InputError: matrices of other shapes, or with NaN.

        Example:
            lens = JacobianLens.load("gemma-2-2b_jacobian_lens.pt")
        """
        if Path(path).suffix.lower() == ENDING:
            return super().load(path)
        with told_of(path):
            return cls(**read_lens(Path(path)))

    def save(self, path: str | Path, dtype: str = "float32") -> Path:
        """Write the lens: `.safetensors` with all that it has, or `.pt`, which TransformerLens reads.

        Args:
            dtype: of the matrices of a `.pt` file: "float32", or "float16" as published lenses have it.

        Raises:
            SpecFileError: another ending, biases or another stream in a `.pt` file, or a file that cannot be written.
        """
        if Path(path).suffix.lower() != ".pt":
            return super().save(path)
        if self.biases or self.reads != "resid_post":
            raise SpecFileError(
                f"{path}: a .pt file holds no biases and no other stream than resid_post: {ENDING} does"
            )
        if dtype not in ("float32", "float16"):
            raise SpecFileError(f"dtype={dtype!r}; float32 or float16")
        with np.errstate(over="ignore"):  # refused below
            narrow = {layer: one.astype(dtype) for layer, one in self.matrices.items()}
        if not all(np.isfinite(one).all() for one in narrow.values()):
            raise SpecFileError(f"{path}: numbers above the range of {dtype}")
        contents = {"J": narrow, "n_prompts": self.n_prompts, "source_layers": self.layers, "d_model": self.d_model}
        return write_torch(path, {**contents, "metadata": self.metadata})

    @property
    def title(self) -> str:
        """The name of the estimator, for pictures and pages."""
        return str(self.metadata.get("estimator", "jacobian_lens")).replace("_", " ")

    @property
    def layers(self) -> list[int]:
        """The layers that have a matrix, ascending."""
        return [*self.matrices]

    @property
    def d_model(self) -> int:
        """Width of the streams."""
        return len(next(iter(self.matrices.values())))

    def merged(self, other: JacobianLens) -> JacobianLens:
        """The lens of both parts of a dataset: means weighted by their prompts.

        Raises:
            InputError: other layers or provenance, or a lens of no prompts.
        """
        ours, theirs = (
            {key: one for key, one in lens.metadata.items() if key not in COUNTED} for lens in (self, other)
        )
        if ours != theirs:
            keys = sorted({key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)})
            raise InputError(f"lenses of other provenance are not merged: they differ in {', '.join(keys)}")
        if (self.layers, self.d_model, self.reads) != (other.layers, other.d_model, other.reads) or self.biases:
            raise InputError(f"{self!r} and {other!r} have other layers, widths or biases: not merged")
        if not self.n_prompts or not other.n_prompts:
            raise InputError("a lens that does not say how many prompts it was fitted on is not merged")
        total = self.n_prompts + other.n_prompts
        mean = {
            layer: (self.n_prompts * one.astype(np.float64) + other.n_prompts * other.matrices[layer]) / total
            for layer, one in self.matrices.items()
        }
        metadata = self.metadata | ({"n_prompts": total} if "n_prompts" in self.metadata else {})
        return JacobianLens(mean, reads=self.reads, n_prompts=total, metadata=metadata)

    def check(self, model: Runner) -> None:
        """Refuse a lens of another model, by its width, its layers and, where it says so, the hash of its weights.

        Raises:
            InputError: the lens belongs to another model.
        """
        last = model.num_layers - 1
        if self.d_model != model.hidden_size:
            raise InputError(
                f"the lens is one of width {self.d_model}, and {model.hooked.name} has {model.hidden_size}"
            )
        most = last - 1 if self.reads == "resid_post" else last
        target = self.metadata.get("target_layer", last)
        if self.layers[-1] > most or target != last:
            raise InputError(
                f"the lens maps layers {self.layers[0]} to {self.layers[-1]} to layer {target}, and "
                f"{model.hooked.name} has layers 0 to {last}: it belongs to another model"
            )
        if self.metadata.get(FITTED_ON, model.hooked.weights_sha256) != model.hooked.weights_sha256:
            raise InputError(
                f"the lens was fitted on other weights than those of {model.hooked.name}: on "
                f"{self.metadata.get('model', 'another model')}"
            )

    def transport(self, activations: ArrayLike, layer: int) -> NDArray[np.float32]:
        """J h + b, float32 [..., d_model]: activations of a layer as streams of the last one.

        Args:
            activations: [..., d_model].
            layer: the layer that they are of.

        Raises:
            InputError: a layer without a matrix, another width, NaN.
        """
        rows = streams_of(activations, self.d_model, "activations").astype(np.float32)
        mapped = rows @ self._of(layer).T
        return mapped + self.biases[layer] if self.biases else mapped

    def token_vectors(self, model: Runner, token_ids: Sequence[int | str], layer: int) -> NDArray[np.float32]:
        """The directions of tokens in a layer's stream, J^T W_U[:, token]: float32 [tokens, d_model].

        `Subspace` makes interventions of them: steering, ablation, swaps.

        Raises:
            InputError: a lens of another model, no such token or layer.

        Example:
            pair = Subspace(lens.token_vectors(model, ["France", "Japan"], 2)).swap()
        """
        self.check(model)
        columns = unembedding_rows(model, token_ids)
        return columns @ self._of(layer)

    def dictionary(self, model: Runner, layer: int) -> NDArray[np.float32]:
        """The directions of all tokens, float32 [vocab, d_model]: as large as the model's embedding."""
        self.check(model)
        weight = graph_matrices.unembedding(model.hooked)
        return np.ascontiguousarray(weight.T, np.float32) @ self._of(layer)

    def decompose(self, model: Runner, activation: ArrayLike, layer: int, k: int = 25) -> SparseDecomposition:
        """Write an activation as a sum of few tokens' directions with coefficients of 0 or above.

        Args:
            activation: [d_model], of the layer's stream.
            k: most directions; see `decomposition.decompose`, which says how they are chosen.

        Raises:
            InputError: NaN, another width, k outside the vocabulary.

        Example:
            stream = model.forward(text, HookSpec().capture("blocks.2.hook_resid_post"))["resid_post", 2][0, -1]
            parts = lens.decompose(model, stream, 2, k=5)
            [model.to_string(token) for token in parts.support]
        """
        return decompose(activation, self.dictionary(model, layer), k)

    def occupancy(
        self,
        model: Runner,
        activation: ArrayLike,
        layer: int,
        max_atoms: int = 25,
        dictionaries: int = 32,
        seed: int = 0,
    ) -> Occupancy:
        """Estimate of how many tokens' directions an activation holds, beyond what random directions capture.

        Args:
            activation: [d_model], of the layer's stream.
            max_atoms: most directions.
            dictionaries: number of random dictionaries of equal size that it is compared with.
            seed: a number that determines these.

        Raises:
            InputError: NaN, zero, another width, more directions than tokens.
        """
        return occupancy(activation, self.dictionary(model, layer), max_atoms, dictionaries, seed)

    def _of(self, layer: int) -> NDArray[np.float32]:
        if layer not in self.matrices:
            raise InputError(f"the lens has no matrix for layer {layer}; it has layers {self.layers}")
        return self.matrices[layer]

    def _facts(self) -> Iterator[str]:
        yield from (count(len(self.matrices), "layer"), f"d_model {self.d_model}", count(self.n_prompts, "prompt"))
        yield f"reads {self.reads}"
        if "estimator" in self.metadata:
            yield str(self.metadata["estimator"])

    def _lines(self) -> Iterator[str]:
        for layer, cosine in self.cosines.items():
            yield f"layer {layer}: cosine of the two halves {decimal(cosine, 4)}"


def unembedding_rows(model: Runner, tokens: Sequence[int | str]) -> NDArray[np.float32]:
    """Columns of the unembedding as rows, [tokens, hidden]."""
    if not len(tokens):
        raise InputError("no tokens: directions of nothing")
    ids = [token_of(model, token) for token in tokens]
    weight = graph_matrices.unembedding(model.hooked)
    return np.stack([np.asarray(weight[:, token], np.float32) for token in ids])


def _layers(name: str, arrays: Mapping[int, ArrayLike]) -> Matrices:
    """Arrays by layer, ascending, finite float32."""
    checked: Matrices = {}
    for layer, array in arrays.items():
        if not isinstance(layer, int | np.integer) or isinstance(layer, bool) or layer < 0:
            raise InputError(f"{name} of layer {layer!r:.40}: layers are numbers from 0")
        try:
            numbers = np.array(array, np.float32)  # a copy: a file may be mapped
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{name} of layer {layer} are no numbers: {error}") from error
        if not np.isfinite(numbers).all():
            raise InputError(f"{name} of layer {layer} have NaN or infinity")
        checked[int(layer)] = numbers
    return dict(sorted(checked.items()))
