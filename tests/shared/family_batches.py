"""Batches for every family, mionnx on them, and every intervention that a hook point allows."""

from collections.abc import Collection, Iterator
from itertools import product

import numpy as np
from families import VOCAB, WINDOW
from oracle import Edits, Inputs, Outcome, run
from transformers import PreTrainedModel

from mionnx import HookPoint, HookSpec, Intervention, MIModel
from mionnx.graph.axes import has_sequence

SEQ = WINDOW + 6
MASKED = np.finfo(np.float32).min / 2


def batch(kind: str) -> Inputs:
    """A batch of 2 or 3 rows, longer than the sliding window; "left" and "right" have padding, "past" a past."""
    rows = 3 if kind in ("left", "right") else 2
    ids = np.random.default_rng(len(kind)).integers(3, VOCAB, (rows, SEQ))
    mask = np.ones_like(ids)
    if kind == "left":
        mask[0, :4] = mask[1, :1] = 0
    if kind == "right":
        mask[0, -4:] = mask[1, -1:] = 0
    if kind == "left past":
        mask[0, :3] = 0
    return Inputs(ids, mask, past=WINDOW + 1 if "past" in kind else 0)


KINDS = ("plain", "left", "right", "past", "left past")


def forward(model: MIModel, inputs: Inputs, spec: HookSpec) -> Outcome:
    """mionnx on the same inputs."""
    past = None
    if inputs.past:
        first = slice(None, inputs.past)
        begun = model.forward(inputs.ids[:, first], attention_mask=inputs.mask[:, first], use_cache=True)
        past = begun.kv_cache or begun.state
    rest = slice(inputs.past, None)
    cache = model.forward(inputs.ids[:, rest], spec, attention_mask=inputs.mask, cache=past, use_cache=True)
    return Outcome(cache.output(), dict(cache), list((cache.kv_cache or cache.state).layers))


def difference(point: HookPoint, one: np.ndarray, other: np.ndarray, inputs: Inputs) -> float:
    """The largest difference at tokens that are no padding, and at keys that are not masked."""
    if has_sequence(point.axes):  # a state has no tokens
        axis = point.axes.index("seq_q" if "seq_q" in point.axes else "seq")
        one, other = (np.moveaxis(array, axis, 1)[inputs.real] for array in (one, other))
    seen = (one > MASKED) | (other > MASKED)
    return float(np.abs(one[seen] - other[seen]).max())


def differences(model: MIModel, reference: PreTrainedModel, inputs: Inputs, edits: Edits = ()) -> dict[str, float]:
    """The largest difference from transformers in eager mode at each hook point, all of them."""
    spec = HookSpec().capture(lambda name: not HookPoint.parse(name).derived)
    for point, edit in edits:
        spec.intervene(point, edit)
    expected, found = run(reference, inputs, edits), forward(model, inputs, spec)
    assert {*found.values} == {*expected.values}
    return {
        name: difference(HookPoint.parse(name), value, expected.values[name], inputs)
        for name, value in found.values.items()
    }


def edits_apart(
    model: MIModel, reference: PreTrainedModel, inputs: Inputs, layers: Collection[int]
) -> dict[str, float]:
    """How far the logits of an edit at each hook point of some layers are from transformers', of their largest or 1."""
    plain, apart = run(reference, inputs), dict[str, float]()
    for point in [point for point in model.hook_points() if not point.derived and point.layer in layers]:
        edit = next(interventions(point, plain.values[str(point)].shape, whole=False))
        expected = run(reference, inputs, [(point, edit)]).logits[inputs.real]
        found = forward(model, inputs, HookSpec().intervene(point, edit)).logits[inputs.real]
        apart[str(point)] = float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))
    return apart


def interventions(point: HookPoint, shape: tuple[int, ...], whole: bool = True) -> Iterator[Intervention]:
    """Every kind that a hook point allows, plain and limited in every way that it allows.

    If not `whole`, every kind plain, and every limit with some of the kinds.
    """
    for place, kinds in enumerate(limited(point, shape)):
        yield from kinds if whole or not place else kinds[place % 3 :: 3]


def limited(point: HookPoint, shape: tuple[int, ...]) -> Iterator[list[Intervention]]:
    """Every kind, first without a limit, then with one limit after the other."""
    rng = np.random.default_rng(shape[-1])
    has_heads = any(axis in ("n_heads", "n_kv_heads") for axis in point.axes)
    limits: list[dict] = [{}, {"positions": [-1, -3]}, {"rows": [1]}]
    if not has_sequence(point.axes):
        limits.pop(1)
    if has_heads:  # falcon has a single one for all keys
        axis = next(i for i, axis in enumerate(point.axes) if axis in ("n_heads", "n_kv_heads"))
        limits += [{"heads": [0]}, {"heads": [min(1, shape[axis] - 1)], "rows": [0]}]
        limits[-1] |= {"positions": [-2]} if has_sequence(point.axes) else {}
    if point.variant == "MlpExpertIndices":  # numbers of experts can only be replaced
        for limit in [*limits, {"experts": [1]}]:
            yield [Intervention.Replace(rng.integers(0, 2, shape), **limit)]
        return
    if {"n_experts", "n_chosen"} & {*point.axes}:
        limits += [{"experts": [1]}, {"experts": [0, 2], "positions": [-2], "rows": [0]}]
    for limit in limits:
        made = [
            Intervention.Add(rng.normal(0, 0.1, shape[-1:]), **limit),
            Intervention.Scale(1.25, **limit),
            Intervention.Replace(rng.normal(0, 0.3, shape).astype(np.float32), **limit),
            Intervention.Zero(**limit),
        ]
        if point.variant == "MlpRouterLogits" and "experts" not in limit:
            made.pop()  # equal logits: which experts are chosen then is nobody's business
        if point.axes[-1] != "seq_k" and shape[-1] > 1:
            made.append(Intervention.ProjectOut(rng.normal(0, 1, (2, shape[-1])), **limit))
            read, write = rng.normal(0, 0.1, (2, 2, shape[-1]))
            made.append(Intervention.LowRank(read, write, rng.normal(0, 0.3, 2), **limit))
        if point.variant == "AttnScores":
            mask = np.zeros(shape, np.float32)
            past = shape[-1] - shape[-2]
            for query, back in product(range(shape[-2]), range(1, 5)):  # some of them read, whatever the padding
                if query + past >= back:
                    mask[..., query, query + past - back] = -np.inf
            made.append(Intervention.Knockout(mask, **limit))
        yield made
