"""Words of LARQL: one prompt's residual stream after a layer, captured, ablated, steered and patched.

their word              ours
capture_residuals       forward(prompt, HookSpec().capture("blocks.*.hook_resid_post", positions=-1), logits=False)
forward_with_capture    the same without positions=
forward_ablate          .intervene("blocks.1.hook_resid_post", Intervention.Zero(positions=...)) besides
forward_steer           .intervene("blocks.1.hook_resid_post", Intervention.Add(strength * vector, positions=-1))
patch_activations       .intervene("blocks.1.hook_resid_post", Intervention.Replace(donor, positions=...))
generate_with_hooks     generate(prompt, hooks, max_new_tokens=...)

A layer or position that does not exist, or a change that nothing captured could show, is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import HookError, InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.tokens import decode
from mionnx.machine.arrays import to_array
from mionnx.machine.brief import spelled
from mionnx.machine.ranges import listed
from mionnx.machine.typed import typed
from mionnx.run.generation import generate
from mionnx.run.prompt import one_prompt
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

Streams = dict[int, NDArray[Any]]
Layers = int | Iterable[int]
Steer = tuple[int, ArrayLike, float]  # layer, vector [hidden], strength


@typed()
def capture_residuals(model: Runner, prompt: Prompt, layers: Layers) -> Streams:
    """The last token's residual stream after layers: layer -> [hidden].

    Raises:
        HookError: a layer that the model does not have.
        InputError: several prompts.

    Example:
        model.capture_residuals("The capital of France is", [0, 3])[3].shape  # (hidden,)
    """
    return _last_residuals(model, prompt, HookSpec(), layers)


@typed()
def forward_with_capture(model: Runner, prompt: Prompt, layers: Layers) -> Streams:
    """All tokens' residual stream after layers: layer -> [seq, hidden].

    Example:
        model.forward_with_capture("The capital of France is", 3)[3].shape  # (seq, hidden)
    """
    return _residuals(model, prompt, HookSpec(), layers, None)


@typed()
def forward_ablate(
    model: Runner,
    prompt: Prompt,
    ablate_layers: Layers,
    capture_layers: Layers,
    *,
    positions: int | Sequence[int] | None = None,
) -> Streams:
    """`capture_residuals` with the residual stream set to zero after some layers.

    Args:
        ablate_layers: layers after which the stream is zero.
        capture_layers: layers after which it is returned.
        positions: where it is zero; at every token if left out.

    Raises:
        InterventionError: an ablation behind all captured layers.

    Example:
        model.forward_ablate("The capital of France is", 1, [3])
    """
    return _last_residuals(model, prompt, _ablation(model, ablate_layers, positions), capture_layers)


@typed()
def forward_steer(model: Runner, prompt: Prompt, steers: Sequence[Steer], capture_layers: Layers) -> Streams:
    """`capture_residuals` with vectors added to the last token's residual stream.

    Args:
        steers: (layer, vector [hidden], strength): strength times the vector is added after the layer.
        capture_layers: layers after which the stream is returned.

    Raises:
        InterventionError: a vector of another shape, or a layer behind all captured ones.

    Example:
        model.forward_steer("The capital of France is", [(1, vector, 2.0)], [3])  # vector: [hidden]
    """
    return _last_residuals(model, prompt, _steering(model, steers, [-1]), capture_layers)


@typed()
def patch_activations(
    model: Runner, donor: Prompt, recipient: Prompt, coordinates: Sequence[tuple[int, int]], capture_layers: Layers
) -> Streams:
    """`capture_residuals` of a recipient, with residual streams taken from a donor.

    Args:
        donor, recipient: one text each; their lengths may differ.
        coordinates: (layer, position): the donor's stream after this layer and position replaces the recipient's.
            Negative positions are counted from the end of each text.
        capture_layers: layers after which the stream is returned.

    Raises:
        InterventionError: a position that one of the texts does not have, or a layer behind all captured ones.

    Example:
        model.patch_activations("The capital of Italy is", "The capital of France is", [(1, 3)], [3])
    """
    _check_entries("coordinates", coordinates, "(layer, position)")
    streams = forward_with_capture(model, donor, [layer for layer, _ in coordinates])
    spec = HookSpec()
    for layer, position in coordinates:
        length = len(streams[layer])
        if not -length <= position < length:
            raise InterventionError(f"position {position}: the donor has the positions 0 to {length - 1}")
        spec.intervene(HookPoint.ResidPost(layer), Intervention.Replace(streams[layer][position], positions=position))
    return _last_residuals(model, recipient, spec, capture_layers)


@typed()
def generate_with_hooks(
    model: Runner,
    prompt: Prompt,
    max_new_tokens: int,
    ablate_layers: Layers | None = None,
    steers: Sequence[Steer] | None = None,
) -> tuple[str, list[int]]:
    """Continue a prompt greedily, with ablations and steering in force at every step.

    Args:
        ablate_layers: after these, the residual stream of every token is zero.
        steers: as for `forward_steer`: added at the last token of the prompt, and at every new one.

    Returns:
        the continuation, as text and as ids.

    Example:
        text, ids = model.generate_with_hooks("The capital of France is", 3, ablate_layers=1)
    """
    spec = _ablation(model, ablate_layers) if ablate_layers is not None else HookSpec()
    # With one new token no position is generated, and an intervention there would be refused as one without effect.
    positions: list[int | str] = [-1] if max_new_tokens == 1 else [-1, "generated"]
    spec.extend(_steering(model, steers or (), positions))
    result = generate(model, one_prompt(model, prompt), spec, max_new_tokens=max_new_tokens)
    ids = result.new_ids[0].tolist()
    return decode(model.tokenizer, ids), ids


def _ablation(model: Runner, layers: Layers, positions: int | Sequence[int] | None = None) -> HookSpec:
    return HookSpec().intervene([*_points(model, layers).values()], Intervention.Zero(positions=positions))


def _check_entries(name: str, entries: Sequence[Any], form: str) -> None:
    for entry in entries:
        if not isinstance(entry, tuple | list) or len(entry) != form.count(",") + 1:
            raise InterventionError(f"{name}= are {form} each, and {spelled(entry)} is among them")


def _steering(model: Runner, steers: Sequence[Steer], positions: Sequence[int | str]) -> HookSpec:
    _check_entries("steers", steers, "(layer, vector, strength)")
    spec = HookSpec()
    for layer, vector, strength in steers:
        try:
            numbers = to_array(vector)
        except ValueError as error:
            raise InterventionError(f"a steering vector must be numbers: {error}") from error
        if numbers.shape != (model.hidden_size,):
            raise InterventionError(f"a steering vector is [hidden={model.hidden_size}], got {list(numbers.shape)}")
        for point in _points(model, layer).values():
            for position in positions:
                spec.intervene(point, Intervention.Add(numbers * strength, positions=position))
    return spec


def _last_residuals(model: Runner, prompt: Prompt, spec: HookSpec, layers: Layers) -> Streams:
    return {layer: stream[0] for layer, stream in _residuals(model, prompt, spec, layers, -1).items()}


def _residuals(model: Runner, prompt: Prompt, spec: HookSpec, layers: Layers, positions: int | None) -> Streams:
    points = _points(model, layers)
    spec = spec.capture([*points.values()], positions=positions)
    cache = model.forward(one_prompt(model, prompt), spec, logits=False)
    return {layer: cache[point][0] for layer, point in points.items()}


def _points(model: Runner, layers: Layers) -> dict[int, HookPoint]:
    entries = [layers] if isinstance(layers, int | np.integer) else listed("layers", layers)
    if not entries:
        raise HookError("no layers are given")
    for layer in entries:
        if not isinstance(layer, int | np.integer) or not 0 <= layer < model.num_layers:
            raise HookError(f"layer {layer!r}: the model has the layers 0 to {model.num_layers - 1}")
    return {int(layer): HookPoint.ResidPost(layer) for layer in entries}
