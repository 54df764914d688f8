"""`Directions`: one steering vector a layer, its origin, and the specs that add or remove it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.steering import control_vector
from mionnx.analysis.steering.control_vector import VECTOR_HOOK
from mionnx.analysis.steering.direction_methods import Separation
from mionnx.errors import HookError, InputError, InterventionError, SpecFileError, nearest
from mionnx.graph.hook_points import HookPoint, layer_of, short_names
from mionnx.machine.arrays import to_array
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.tensor_file import read_tensors, whose, write_tensors
from mionnx.machine.typed import typed
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.limits import Positions
from mionnx.view import Columns, HeatMap, Lines, Series, Shown, Table, View, readable

FORMAT = "1"


@typed(InputError, leave=["hook"])
@dataclass(frozen=True, eq=False, repr=False)
class Direction(Brief):
    """A vector at one hook point.

    Attributes:
        vector: [width], float32; strength 1 adds it as it is.
    """

    hook: str
    vector: NDArray[np.float32]

    def __post_init__(self) -> None:
        # One spelling of the name, however the hook point was written.
        object.__setattr__(self, "hook", str(HookPoint.parse(self.hook)))
        vector = _vectors(self.vector)
        if vector.ndim != 1 or not np.linalg.norm(vector):
            raise InterventionError(f"a direction at {self.hook} is [width] and not zero, got {list(vector.shape)}")
        object.__setattr__(self, "vector", vector)

    @property
    def norm(self) -> float:
        return float(np.linalg.norm(self.vector))

    # A float64 strength would make the product float64.
    def intervention(self, strength: float = 1.0, positions: Positions | None = None) -> Intervention:
        """Add `strength` times the vector; at every token if no positions are given."""
        return Intervention.Add(self.vector * np.float32(strength), positions=positions)

    def spec(self, strength: float = 1.0, positions: Positions | None = None) -> HookSpec:
        """The same as a spec."""
        return HookSpec().intervene(self.hook, self.intervention(strength, positions))


@typed(InputError)
class Directions(Shown):
    """One steering vector a layer, all at the same kind of hook point.

    Attributes:
        hook: the short name of the hook point: "resid_post".
        layers: ascending.
        vectors: [layers, width], float32, in units of the activations.
        method: "mean_difference", "pca", "gguf", or another name for how they were computed.
        pairs: of how many pairs of prompts; 0 if that is not known.
        separation: how well they tell these pairs apart; None if that is not known.
    """

    def __init__(
        self,
        vectors: ArrayLike,
        layers: Sequence[int],
        hook: str | HookPoint = VECTOR_HOOK,
        method: str = "given",
        pairs: int = 0,
        separation: Separation | None = None,
    ) -> None:
        """Directions that are known already; `MIModel.contrast` makes them from prompts.

        Raises:
            InterventionError: vectors that are not [layers, width], NaN, a zero vector, layers that repeat.
        """
        self.hook = template_of(hook)[0]
        self.vectors, self.layers = _vectors(vectors), tuple(int(layer) for layer in layers)
        self.method, self.pairs, self.separation = method, int(pairs), separation
        if self.vectors.ndim != 2 or len(self.vectors) != len(self.layers) or not self.layers:
            raise InterventionError(
                f"directions {list(self.vectors.shape)} for {len(self.layers)} layers; expected [layers, width]"
            )
        if sorted({*self.layers}) != [*self.layers] or self.layers[0] < 0:
            raise InterventionError(f"the layers of directions ascend from 0, got {list(self.layers)}")
        if not self.norms.all():
            raise InterventionError(f"the direction of layer {self.layers[int(self.norms.argmin())]} is zero")

    @property
    def norms(self) -> NDArray[np.float32]:
        """[layers]: the vectors' lengths."""
        return np.linalg.norm(self.vectors, axis=1)

    @property
    def best_layer(self) -> int:
        """The layer whose direction explains most of the pairs' differences; of one pair, the middle layer."""
        # One pair differs in nothing but its own direction, in every layer: that tells no layer from another.
        if self.separation is None or self.pairs < 2:
            return self.layers[len(self.layers) // 2]
        return self.layers[int(self.separation.explained.argmax())]

    def cosines(self) -> NDArray[np.float64]:
        """[layers, layers]: the cosine between each two layers' directions."""
        vectors = self.vectors.astype(np.float64)
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(unit @ unit.T)

    def convergence(self) -> NDArray[np.float64]:
        """[layers - 1]: the cosine between each layer's direction and the next one's."""
        return np.diag(self.cosines(), 1).copy()

    def point(self, layer: int) -> str:
        """The hook point of a layer's direction."""
        if layer not in self.layers:
            raise HookError(f"no direction for layer {layer!r}; there are some for {', '.join(map(str, self.layers))}")
        return template_of(self.hook)[1].format(i=layer)

    def __getitem__(self, layer: int) -> Direction:
        return Direction(self.point(layer), self.vectors[self.layers.index(layer)])

    def only(self, layers: Sequence[int]) -> Directions:
        """The directions of some of the layers."""
        # `point` raises for a layer without a direction.
        at = [self.layers.index(layer) for layer in layers if self.point(layer)]
        separation = None
        if self.separation is not None:
            separation = Separation(*(values[at] for values in vars(self.separation).values()))
        return Directions(self.vectors[at], layers, self.hook, self.method, self.pairs, separation)

    def intervention(self, layer: int, strength: float = 1.0, positions: Positions | None = None) -> Intervention:
        """Add `strength` times a layer's direction."""
        return self[layer].intervention(strength, positions)

    def spec(
        self, layers: int | Sequence[int] | None = None, strength: float = 1.0, positions: Positions | None = None
    ) -> HookSpec:
        """Steer: add `strength` times its direction in one layer, in some, or in all.

        Example:
            model.generate("The capital of France is", directions.spec(2, strength=1.5, positions=-1))
        """
        spec = HookSpec()
        for layer in self._chosen(layers):
            spec.extend(self[layer].spec(strength, positions))
        return spec

    def ablation_spec(
        self, layer: int | None = None, layers: int | Sequence[int] | None = None, positions: Positions | None = None
    ) -> HookSpec:
        """Remove directions (`ProjectOut`) from the stream after each layer.

        Args:
            layer: whose direction is removed everywhere; if left out, each layer's own.
            layers: where; all that there are directions for if left out. With `layer`, any of the model's.
            positions: of the tokens; all if left out.

        Raises:
            HookError: no direction for a layer.

        Example:
            model.forward("The capital of France is", directions.ablation_spec())
        """
        spec, template = HookSpec(), template_of(self.hook)[1]
        for where in self._chosen(layers):
            vector = self[where if layer is None else layer].vector
            spec.intervene(template.format(i=where), Intervention.ProjectOut(vector, positions=positions))
        return spec

    def _chosen(self, layers: int | Sequence[int] | None) -> list[int]:
        numbers = self.layers if layers is None else layers
        chosen = [numbers] if isinstance(numbers, int | np.integer) else [*numbers]
        if not chosen:
            raise InterventionError("steering in no layers would do nothing")
        return chosen

    def save(self, path: str | Path) -> Path:
        """Write .safetensors to load again, .gguf for llama.cpp, or .html, .png, .json to look at.

        Raises:
            SpecFileError: another ending, or a file that cannot be written.
        """
        if Path(path).suffix.lower() == ".gguf":
            return self.to_gguf(path)
        if Path(path).suffix.lower() != ".safetensors":
            return super().save(path)
        tensors = {f"direction.{layer}": vector for layer, vector in zip(self.layers, self.vectors, strict=True)}
        if self.separation is not None:
            tensors |= {name: np.asarray(value) for name, value in vars(self.separation).items()}
        declaration = json.dumps({"hook": self.hook, "method": self.method, "pairs": self.pairs})
        write_tensors(path, tensors, {"mionnx_directions": FORMAT, "declaration": declaration})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Directions:
        """Read a .safetensors file that `save` wrote.

        Raises:
            SpecFileError: the file is missing, damaged, or another one.
        """
        metadata, tensors = read_tensors(path, f"{path} holds no directions")
        if "mionnx_directions" not in metadata:
            raise SpecFileError(f"{path} holds no directions: {whose(metadata)}")
        if metadata["mionnx_directions"] != FORMAT:
            raise SpecFileError(f"{path} holds no directions of version {FORMAT}")
        try:
            declaration = json.loads(metadata["declaration"])
            # What is left in `tensors` are the directions.
            measures = {name: tensors.pop(name) for name in ("auc", "held_out", "explained") if name in tensors}
            vectors = {int(name.removeprefix("direction.")): vector for name, vector in tensors.items()}
            layers = sorted(vectors)
            separation = Separation(**measures) if measures else None
            return cls(np.stack([vectors[layer] for layer in layers]), layers, **declaration, separation=separation)
        except (KeyError, TypeError, ValueError) as error:
            raise SpecFileError(f"{path} is damaged: {error}") from error

    def to_gguf(self, path: str | Path, model_hint: str = "") -> Path:
        """Write a control vector file for llama.cpp; see `mionnx.analysis.steering.control_vector`.

        As in llama.cpp's own files, layer 0 is left out if there are others, with a `LayerLeftOutWarning`.

        Raises:
            SpecFileError: directions at another hook point or in layer 0 only.
        """
        if self.hook != VECTOR_HOOK:
            raise SpecFileError(
                f"a control vector is added at hook_{VECTOR_HOOK}, and these directions are at {self.hook}"
            )
        vectors = dict(zip(self.layers, self.vectors, strict=True))
        # A file of layer 0 alone would be empty: `write` refuses it.
        if self.layers[0] != 0 or len(self.layers) == 1:
            return control_vector.write(vectors, path, model_hint)
        del vectors[0]
        file = control_vector.write(vectors, path, model_hint)
        content = f"{path} holds layers {self.layers[1]} to {self.layers[-1]}"
        message = f"{content}: a control vector has no direction for layer 0"
        warnings.warn(message, control_vector.LayerLeftOutWarning, stacklevel=3)
        return file

    @classmethod
    def from_gguf(cls, path: str | Path) -> Directions:
        """Read a control vector file of llama.cpp; see `mionnx.analysis.steering.control_vector`."""
        vectors = control_vector.read(path)
        return cls(np.stack([*vectors.values()]), [*vectors], VECTOR_HOOK, "gguf")

    def to_dict(self) -> dict[str, Any]:
        """Lengths, cosines and separation; everything but the vectors themselves."""
        facts = {name: getattr(self, name) for name in ("hook", "method", "pairs", "layers", "norms")}
        separation = None if self.separation is None else vars(self.separation)
        return {**facts, "cosines": self.cosines(), "separation": separation}

    def view(self) -> View:
        """Length and separation of each layer's direction, and the cosines between them."""
        layers, numbers, about = [*map(str, self.layers)], np.array(self.layers), f"Method: {self.method}"
        lines = [Lines(numbers, [Series("length", self.norms)], "layer", "length", 0, legend=False)]
        if self.separation is not None:
            about += (
                f", from {self.pairs} pairs of prompts. Explained: the share of the pairs' squared differences along "
                "the direction. Held out: the share of pairs told apart by the direction of the other pairs."
            )
            series, unit = [Series("explained", self.separation.explained)], "share of the pairs' difference"
            lines.append(Lines(numbers, series, "layer", unit, 0, 1, legend=False))
        cells = HeatMap({"layer": layers, "of layer": layers}, {"cosine": self.cosines()}, {"cosine": 1.0})
        cells.heading = "Cosine between the directions of each two layers"
        return View(f"Directions at {self.hook}", [self.table(), [*lines, cells]], meaning=about)

    def table(self, k: int | None = None) -> Table:
        """Table for a terminal: length, cosine with the next and separation by layer."""
        columns = self._columns()
        names = (name.replace("_", " ") for name in columns)
        table = Table(*names, title=f"Directions at {self.hook}", on_page={"heading": "Layers"})
        for layer, *numbers in [*zip(*columns.values(), strict=True)][:k]:
            table.add_row(str(layer), *map(readable, numbers))
        return table

    def _columns(self) -> Columns:
        cosines = [*self.convergence(), np.nan]  # the last layer has no next one
        columns: dict[str, Any] = {"layer": [*self.layers], "length": self.norms, "cosine with the next": cosines}
        return columns if self.separation is None else {**columns, **vars(self.separation)}

    def _facts(self) -> Iterator[str]:
        yield from (self.hook, f"layers {self.layers[0]} to {self.layers[-1]}", f"width {self.vectors.shape[1]}")
        yield from (self.method, count(self.pairs, "pair"))

    def _lines(self) -> Iterator[str]:
        yield f"lengths {spelled(self.norms.tolist())}"
        if self.separation is not None:
            yield f"explained {spelled(self.separation.explained.tolist())}; best layer {self.best_layer}"


def _vectors(vectors: ArrayLike) -> NDArray[np.float32]:
    try:
        array = np.array(to_array(vectors), np.float32)  # a copy: the caller's array may change
    except (TypeError, ValueError) as error:
        raise InterventionError(f"a direction must be numbers: {error}") from error
    if not np.isfinite(array).all():
        raise InterventionError("a direction has NaN or infinity")
    return array


def template_of(hook: str | HookPoint) -> tuple[str, str]:
    """The short name and template of a kind of hook point, by either of them: one vector a token in every layer."""
    name, kinds = str(hook), _kinds()
    if (layer := layer_of(name)) is not None:
        raise HookError(f"{name} is in one layer, and a kind of hook point is asked for: layers=[{layer}] says where")
    if name not in kinds:
        raise HookError(f"no hook point {name!r} has one vector a token in every layer{nearest(name, kinds)}")
    return kinds[name]


@cache
def _kinds() -> dict[str, tuple[str, str]]:
    """Each name of such a kind of hook point -> its short name and its template."""
    kinds: dict[str, tuple[str, str]] = {}
    for short, templates in short_names().items():
        for template in templates:
            axes = HookPoint.parse(template.format(i=0)).axes or ()
            if "{i}" in template and axes[:2] == ("batch", "seq") and len(axes) == 3:
                names = (short, f"hook_{short}", template.removeprefix("blocks.{i}."), template)
                kinds |= dict.fromkeys(names, (short, template))
    return kinds
