"""`SAE`: a sparse autoencoder or transcoder, its files, and the specs that put it into a model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.config import Config, Weights, check, from_saelens
from mionnx.analysis.features.network import autoencoder
from mionnx.analysis.features.npz import read_npz
from mionnx.analysis.steering.directions import Direction
from mionnx.compile.monitors import Monitor
from mionnx.errors import HookError, InputError, InterventionError, ModelError, nearest
from mionnx.graph.folder_file import read_json
from mionnx.graph.fragment import Fragment
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.arrays import to_array
from mionnx.machine.tensor_file import read_tensors
from mionnx.machine.typed import typed
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.limits import Positions
from mionnx.spec.linear_readout import LinearReadout

ERROR = ("kept", "dropped")
SAE_CONFIG, SAE_WEIGHTS, PARAMS = "cfg.json", "sae_weights.safetensors", "params.npz"
FOLDED = ("scaling_factor", "finetuning_scaling_factor")


@typed(InputError)
class SAE:
    """A sparse autoencoder or transcoder, read from SAELens' or Gemma Scope's files.

    Attributes:
        weights: "W_enc" [d_in, d_sae], "W_dec" [d_sae, d_out], "b_dec" [d_out] and the biases [d_sae] of its kind,
            float32.
    """

    def __init__(self, config: Config, weights: Weights, where: str = "SAE") -> None:
        """Check a configuration against its weights."""
        try:
            arrays = {name: np.asarray(to_array(weight), np.float32) for name, weight in weights.items()}
        except ValueError as error:
            raise ModelError(f"{where}: weights must be arrays of numbers: {error}") from error
        check(config, arrays, where)
        self.config, self.weights = config, arrays
        self._fragment = cache(self._build)  # a method, which a pickle can name

    @classmethod
    def load(cls, path: str | Path, hook: str | HookPoint = "", hook_out: str | HookPoint = "") -> "SAE":
        """Read an SAE.

        Args:
            path: a folder with SAELens' `cfg.json` and `sae_weights.safetensors`, or with Gemma Scope's `params.npz`,
                or the `.npz` file itself.
            hook: the hook point that it reads, where the file does not say or says another name.
            hook_out: the hook point whose value a transcoder gives.

        Raises:
            ModelError: nothing there, a damaged file, or an architecture that is not known here.
            InputError: a `hook_out` for an SAE that is no transcoder.

        Example:
            sae = SAE.load("gemma-scope/layer_20", hook="blocks.20.hook_resid_post")
        """
        config, weights = _read(Path(path), str(hook), str(hook_out))
        return cls(config, weights, str(path)).at(hook, hook_out)

    def at(self, hook: str | HookPoint = "", hook_out: str | HookPoint = "") -> "SAE":
        """The same at other hook points; those that are left out stay."""
        config = self.config
        if hook_out and not config.transcoder:
            raise InputError(f"hook_out={hook_out!r}: only a transcoder gives another value than it reads")
        hook, hook_out = str(hook) or config.hook, str(hook_out) or config.hook_out
        return SAE(replace(config, hook=hook, hook_out=hook_out), self.weights)

    @property
    def d_in(self) -> int:
        """Width of what it reads."""
        return self.weights["W_enc"].shape[0]

    @property
    def d_sae(self) -> int:
        return self.weights["W_enc"].shape[1]

    @property
    def hook(self) -> str:
        """The hook point whose value it replaces: its own, or a transcoder's output."""
        point = self.config.hook_out if self.config.transcoder else self.config.hook
        if not point:
            name = "hook_out" if self.config.transcoder else "hook"
            raise HookError(f"the SAE's file does not say where it belongs: SAE.load(path, {name}='blocks.3....')")
        return point

    @property
    def acts(self) -> str:
        """The hook point of its features, [batch, seq, d_sae]."""
        return f"{self.hook}.hook_sae_acts"

    def fragment(self, error: str = "kept") -> Fragment:
        """The ONNX fragment to splice in; see `mionnx.analysis.features.network`."""
        if error not in ERROR:
            raise InputError(f"error={error!r}; one of {', '.join(ERROR)}{nearest(str(error), ERROR)}")
        return self._fragment(error)

    def _build(self, error: str) -> Fragment:
        return autoencoder(self.config, self.weights, error == "kept")

    def splice(self, error: str = "kept", positions: Positions | None = None) -> Intervention:
        """The SAE as an intervention at `hook`.

        Args:
            error: "kept": what the SAE does not reconstruct is added back, so that only changes to features change
                anything; or "dropped": the reconstruction takes the value's place.
            positions: of the tokens; all if left out.
        """
        reads = self.config.hook or None
        if self.config.transcoder and reads is None:
            raise HookError("the transcoder's file does not say what it reads: SAE.load(path, hook='blocks.3....')")
        return Intervention.Splice(
            self.fragment(error), reads=reads if self.config.transcoder else None, positions=positions
        )

    def spec(
        self,
        error: str = "kept",
        *,
        fix: Mapping[int, float] | None = None,
        scale: Mapping[int, float] | None = None,
        clamp: Mapping[int, tuple[float, float]] | None = None,
        positions: Positions | None = None,
    ) -> HookSpec:
        """A spec that splices in the SAE and changes features.

        Args:
            error: see `splice`.
            scale: feature -> factor; 0 ablates it.
            fix: feature -> its activation, whatever it was.
            clamp: feature -> its lowest and its highest activation.
            positions: of the tokens at which features are changed, all if left out; the SAE itself stands at all of
                them (`splice` limits it).

        Raises:
            InterventionError: a feature that does not exist or is both fixed and scaled, or no finite number; positions
                without features to change.

        Example:
            model.generate("The capital of France is", sae.spec(scale={7: 0.0}, fix={12: 3.5}))
        """
        fixed, factors, limits = dict(fix or {}), dict(scale or {}), dict(clamp or {})
        for feature in [*fixed, *factors, *limits]:
            self.number_of(feature)
        if positions is not None and not (fixed or factors or limits):
            raise InterventionError(
                "positions= says where features are changed, and none is: sae.splice(error, positions=...) limits the "
                "SAE itself"
            )
        if both := [feature for feature in fixed if feature in factors or feature in limits]:
            raise InterventionError(f"feature {both[0]} is fixed, and cannot be scaled or clamped besides")
        spec = HookSpec().intervene(self.hook, self.splice(error))
        if fixed or factors:
            # A fixed feature: its own activation times 0, plus the fixed one.
            scales = self._row({**dict.fromkeys(fixed, 0.0), **factors}, 1.0)
            spec.intervene(self.acts, Intervention.Scale(scales, positions=positions))
        if fixed:
            spec.intervene(self.acts, Intervention.Add(self._row(fixed, 0.0), positions=positions))
        # After factors and fixed values, so that limits hold for what they leave.
        if limits:
            spec.intervene(self.acts, self._clamp(limits, positions))
        return spec

    def _clamp(self, limits: Mapping[int, tuple[float, float]], positions: Positions | None) -> Intervention:
        for feature, (low, high) in limits.items():
            if not low <= high:
                raise InterventionError(f"feature {feature} cannot be clamped to between {low} and {high}")
        lowest = self._row({feature: pair[0] for feature, pair in limits.items()}, -np.inf)
        highest = self._row({feature: pair[1] for feature, pair in limits.items()}, np.inf)
        return Intervention.Clamp(lowest, highest, positions=positions)

    def _row(self, numbers: Mapping[int, float], otherwise: float) -> NDArray[np.float32]:
        """[d_sae], a number for each feature."""
        row = np.full(self.d_sae, otherwise, np.float32)
        for feature, value in numbers.items():
            if not np.isfinite(value):
                raise InterventionError(f"feature {feature}: {value} is no finite number")
            row[feature] = value
        return row

    def number_of(self, feature: Any) -> int:
        """A feature's number."""
        integer = isinstance(feature, int | np.integer) and not isinstance(feature, bool)
        if not integer or not 0 <= feature < self.d_sae:
            raise InterventionError(f"feature {feature!r} of {self.d_sae} (0 to {self.d_sae - 1})")
        return int(feature)

    def direction(self, feature: int) -> Direction:
        """A feature's row of the decoder, as a direction to steer with.

        It is what the feature writes at activation 1; with activations in units of the decoder's rows
        (`by_decoder_norm`), the row at length 1. What is scaled for each token by the normalisation of what goes in, or
        goes to all heads (`hook_z`), is no one vector, and refused.
        """
        row, own = self.weights["W_dec"][self.number_of(feature)], self.config
        if own.by_head or (own.normalisation != "none" and not own.transcoder):
            why = "to several heads" if own.by_head else f"in units of each token's {own.normalisation}"
            raise InterventionError(
                f"feature {feature} writes {why}, which is no direction: use spec(scale=) or (fix=)"
            )
        # A row of length 1, as activations are in units of the rows' lengths.
        return Direction(self.hook, row / np.linalg.norm(row) if own.by_decoder_norm else row)

    def monitor(self, features: Sequence[int]) -> Monitor:
        """Activations of some features, as a monitor of a compiled graph.

        Raises:
            InterventionError: a feature that does not exist.
            InputError: an SAE whose features depend on the token's norm, are gated, or read several heads.

        Example:
            model.compile(spec, "steered", monitors={"latents": sae.monitor([7, 12])})
        """
        config, chosen = self.config, [self.number_of(feature) for feature in features]
        if config.activation == "gated" or config.normalisation != "none" or config.by_head:
            raise InputError(f"{self!r}: its features cannot be computed one by one; capture {self.acts} instead")
        if not chosen:
            raise InputError("a monitor of no features: give some")
        # of a top-k SAE all features are computed: which ones are kept hangs on all
        rows = [*range(self.d_sae)] if config.activation == "topk" else chosen
        weights = self.weights["W_enc"][:, rows].T.astype(np.float64)
        bias = self.weights["b_enc"][rows].astype(np.float64)
        if config.subtracts_bias:
            bias = bias - weights @ self.weights["b_dec"]
        threshold = self.weights["threshold"][chosen] if config.activation == "jumprelu" else None
        numbers = ", ".join(map(str, chosen))
        if config.activation == "topk" and config.by_decoder_norm:  # what is ranked, and read
            norms = np.linalg.norm(self.weights["W_dec"].astype(np.float64), axis=1)
            weights, bias = weights * norms[:, None], bias * norms
        largest = min(config.k, self.d_sae) if config.activation == "topk" else 0
        return Monitor(
            config.hook or self.hook,
            LinearReadout(weights, bias),
            "relu",
            threshold,
            largest,
            meaning=f"SAE features {numbers}",
            chosen=np.array(chosen) if largest else None,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SAE, (self.config, self.weights)  # the fragments made of them are left behind

    def __repr__(self) -> str:
        kind = f"{self.config.activation}{' transcoder' if self.config.transcoder else ''}"
        return f"SAE({kind}, {self.d_in} to {self.d_sae} features, {self.config.hook or 'no hook'})"


def _read(path: Path, hook: str, hook_out: str) -> tuple[Config, Weights]:
    """Configuration and weights; Gemma Scope's files leave to `hook_out` what is a transcoder."""
    try:
        folder = path if path.is_dir() else path.parent
        path.exists()
    except OSError as error:  # a name that no file can have
        raise ModelError(f"{path}: {error.strerror}") from error
    if path.suffix == ".npz" or (path.is_dir() and (path / PARAMS).is_file()):
        return _gemma_scope(path / PARAMS if path.is_dir() else path, hook, hook_out)
    if not (folder / SAE_CONFIG).is_file() or not (folder / SAE_WEIGHTS).is_file():
        raise ModelError(f"{path} has neither {SAE_CONFIG} with {SAE_WEIGHTS} nor {PARAMS}")
    cfg = read_json(folder / SAE_CONFIG)
    if not isinstance(cfg, dict) or not isinstance(cfg.get("metadata", {}), dict):
        raise ModelError(f"{folder / SAE_CONFIG} is no configuration of an SAE")
    file = folder / SAE_WEIGHTS
    tensors = read_tensors(file, f"{file} is damaged", ModelError)[1]
    weights = _unscaled({name: _floats(array, f"{file}: {name}") for name, array in tensors.items()}, folder)
    try:
        return from_saelens(cfg, {*weights}), weights
    except ModelError as error:
        raise ModelError(f"{folder / SAE_CONFIG}: {error}") from error


def _floats(array: NDArray[Any], what: str) -> NDArray[np.float32]:
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise ModelError(f"{what} has numbers of the dtype {array.dtype}; weights are floating-point")
    return np.ascontiguousarray(array.astype(np.float32))


def _unscaled(weights: Weights, folder: Path) -> Weights:
    """Weights without the scaling factor of old SAELens versions, which is 1 unless fine-tuned."""
    for name in FOLDED:
        if name in weights and not np.allclose(weights[name], 1):
            raise ModelError(f"{folder}: {name} is not 1: fold it into the decoder with SAELens first")
    return {name: array for name, array in weights.items() if name not in FOLDED}


def _gemma_scope(path: Path, hook: str, hook_out: str) -> tuple[Config, Weights]:
    """JumpReLU, b_dec not subtracted (Lieberum et al. 2024, "Gemma Scope")."""
    weights: Weights = {}
    for member, array in read_npz(path):
        # Gemma Scope writes `w_enc`, SAELens `W_enc`.
        name = f"W_{member[2:]}" if member.startswith("w_") else member
        if name in weights:
            raise ModelError(f"{path} has two members for {name}: refused")
        weights[name] = _floats(array, f"{path}: {member}")
    # Which of the two it is, the file does not say: a place for the output makes it a transcoder.
    return Config("jumprelu", transcoder=bool(hook_out), hook=hook, hook_out=hook_out), weights
