"""Every verb keeps its law in every family: small random models, each verb beside passes of declared specs.

    python benchmarks/verbs_of_families.py [FAMILY ...] [--rows FILE] [--save]

patch, ablate: cells of sweeps over the stream, heads, patterns, values and MLPs beside one pass with that edit. paths:
path patching with all receivers beside plain patching. edges: a circuit of no edge is the corrupted run, one of all the
clean run, one without a single edge is path patching of it. attribute: what parts of the model add to a logit sums to
it. gradients: derivatives along a random direction at hook points of each kind beside differences of two passes. trace:
effects of the strongest sources of an attribution graph, of random transcoders, beside interventions with patterns and
MLPs held (norms are live there: a correlation). ragged: rows of a list of unequal texts beside each alone. pieces: a
text in two pieces, edits at their border. steer: a steered generation beside one pass over its text. compiled: the file
of a spec in ONNX Runtime. A cell is the largest difference, in logits, or why the verb is refused; a star marks one
above 5e-5 (gradients 0.02 of the largest, trace a correlation under 0.95). About an hour; `--rows` keeps what was
measured in a file of JSON lines. Of named families the saved table keeps the others' rows.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from family_models import for_each  # what stands in tests/shared is found by it
from rescaled_families import AS_ENCODER, made, table
from tables import earlier, present
from transcoder_files import effects_by_gradients, write_set

from mionnx import HookError, HookPoint, HookSpec, Intervention, MIError, MIModel, TranscoderSet

SEQ, VOCAB, LARGEST, CELLS = 9, 80, 5e-5, 3
SWEPT = {  # hook -> axes
    "hook_resid_pre": ("layer", "position"),
    "attn.hook_z": ("layer", "head"),
    "attn.hook_v": ("layer", "position"),
    "attn.hook_pattern": ("layer", "head"),
    "ssm.hook_z": ("layer", "position"),
    "mlp.hook_act": ("layer", "position"),
    "hook_mlp_out": ("layer",),
}
SENDERS = ("hook_resid_pre", "attn.hook_z", "hook_mlp_out")


@dataclass
class Case:
    """A model, two texts, and what of the output is measured."""

    model: MIModel
    encoder: bool
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    answer: int = 5
    versus: int = 9
    at: int | None = -1

    def __post_init__(self) -> None:
        self.clean, self.corrupted = self.random.integers(5, VOCAB, (2, SEQ))
        if self.encoder:
            self.at = 4
        shape = self.model.forward([self.clean]).output().shape
        if len(shape) == 2:
            self.at = None
        self.answer, self.versus = (0, 1) if shape[-1] <= self.versus else (self.answer, self.versus)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of an analysis."""
        place = {} if self.at in (-1, None) else {"position": self.at}
        return {"answer": self.answer, "versus": self.versus, **place}

    def number(self, ids: Any, spec: HookSpec | None = None) -> float:
        """The difference of two logits."""
        logits = self.model.forward([ids], spec).output()[0]
        logits = logits if self.at is None else logits[self.at]
        return float(logits[self.answer] - logits[self.versus])

    def points(self, hook: str) -> list[HookPoint]:
        """A hook point in each layer that has it."""
        return [one for one in self.model.hook_points() if str(one).endswith(f".{hook}") and not one.derived]


def cells_of(
    case: Case, hook: str, axes: tuple[str, ...]
) -> Iterator[tuple[HookPoint, tuple[int, ...], dict[str, Any]]]:
    """Some cells of a sweep: hook point, index, and what an edit selects."""
    points = case.points(hook)
    for _ in range(CELLS):
        row = int(case.random.integers(len(points)))
        if "position" in axes:
            column = int(case.random.integers(SEQ))
            yield points[row], (row, column), {"positions": [column]}
        elif "head" in axes:
            dims = case.model.hooked.axes(points[row])
            heads = [int(dim) for dim in dims if isinstance(dim, int)]
            column = int(case.random.integers(heads[0]))
            yield points[row], (row, column), {"heads": [column]}
        else:
            yield points[row], (row,), {}


def patch(case: Case) -> float:
    """Cells of patching sweeps."""
    worst = 0.0
    for hook, axes in SWEPT.items():
        if not case.points(hook):
            continue
        found = case.model.patch_sweep(case.clean, case.corrupted, hook, axes, **case.given)
        layers = [*dict.fromkeys(one.layer for one in case.points(hook))]
        for point, index, chosen in cells_of(case, hook, axes):
            value = case.model.forward([case.clean], HookSpec().capture(point))[point]
            spec = HookSpec().intervene(point, edit_of(value, point, chosen, case))
            told = found.values[(layers.index(point.layer), *index[1:])]
            worst = max(worst, abs(float(told) - case.number(case.corrupted, spec)))
    return worst


def edit_of(value: Any, point: HookPoint, chosen: dict[str, Any], case: Case) -> Intervention:
    """Put a part of a value in."""
    axes = point.axes or ()
    if "positions" in chosen:
        value = np.take(value, chosen["positions"], axis=axes.index("seq"))
    if "heads" in chosen:
        place = next(i for i, axis in enumerate(axes) if "heads" in str(axis))
        value = np.take(value, chosen["heads"], axis=place)
    return Intervention.Replace(value, **chosen)


def ablate(case: Case) -> float:
    """Cells of ablation sweeps with zeros."""
    worst = 0.0
    for hook, axes in SWEPT.items():
        if not case.points(hook):
            continue
        found = case.model.ablation_sweep(case.clean, hook, axes, "logit_diff", **case.given)
        layers = [*dict.fromkeys(one.layer for one in case.points(hook))]
        for point, index, chosen in cells_of(case, hook, axes):
            spec = HookSpec().intervene(point, Intervention.Zero(**chosen))
            told = found.values[(layers.index(point.layer), *index[1:])]
            worst = max(worst, abs(float(told) - case.number(case.clean, spec)))
    return worst


def paths(case: Case) -> float:
    """Path patching with all receivers."""
    worst = 0.0
    for hook in SENDERS:
        if case.points(hook):
            given = (case.clean, case.corrupted), (hook, SWEPT[hook])
            plain = case.model.patch_sweep(*given[0], *given[1], **case.given)
            path = case.model.path_patch(*given[0], "all", *given[1], **case.given)
            worst = max(worst, float(np.abs(path.values - plain.values).max()))
    return worst


def edges(case: Case) -> float:
    """Circuits of no edge, of all, and of all but one."""
    model, worst = case.model, 0.0
    ranking = model.edge_attribution(case.clean, case.corrupted, **case.given)
    found = model.circuit(case.clean, case.corrupted, [0, ranking.count], scores=ranking, **case.given)
    ends = [case.number(case.corrupted), case.number(case.clean)]
    worst = float(np.abs(found.values - ends).max())
    places = np.argwhere(ranking.edges)
    for row, column in places[case.random.permutation(len(places))[:CELLS]]:
        scores = np.ones(ranking.scores.shape)
        scores[row, column] = 0
        one = model.circuit(
            case.clean, case.corrupted, ranking.count - 1, scores=replace(ranking, scores=scores), **case.given
        )
        (hook, head), (read, own) = ranking.hooks[row], ranking.receiving[column]
        if hook == "hook_embed":
            continue
        over = ("layer",) if head is None else ("layer", "head")
        layer = [HookPoint.parse(hook).layer]
        exact = model.path_patch(
            case.clean,
            case.corrupted,
            [read if own is None else (read, own)],
            hook,
            over,
            patching="noising",
            layers=layer,
            **case.given,
        )
        value = exact.values[0] if head is None else exact.values[0, head]
        worst = max(worst, abs(float(one.values[0]) - float(value)))
    return worst


def attribute(case: Case) -> float:
    """The sum of what parts add to a logit."""
    place = {} if case.at in (-1, None) else {"position": case.at}
    found = case.model.attribute(case.clean, case.answer, **place)
    logits = case.model.forward([case.clean]).output()[0, case.at]
    return abs(float(found.total) - float(logits[case.answer])) + abs(float(np.sum(found.values)) - float(found.total))


def gradients(case: Case) -> float:
    """Derivatives along a direction; in shares of the largest."""
    worst, step = 0.0, 2e-2
    layer = case.model.num_layers // 2
    points = [one for one in case.model.hook_points() if one.layer == layer and not one.derived]
    points = [one for one in points if "scores" not in one.name and "indices" not in one.name]
    for point in points:
        try:
            cache = case.model.gradients(case.clean, point, "logit_diff", **case.given)
        except MIError as error:
            if "no gradient" in str(error) or "gradient" in str(error):
                continue
            raise
        grad = np.asarray(cache.grad[point], np.float64)
        value = case.model.forward([case.clean], HookSpec().capture(point))[point]
        scale = step * float(np.abs(value).mean() or 1.0)
        direction = np.sign(grad) * case.random.random(grad.shape)
        ends = [
            case.number(
                case.clean,
                HookSpec().intervene(point, Intervention.Replace((value + way * scale * direction).astype(np.float32))),
            )
            for way in (1, -1)
        ]
        told, seen = float((grad * direction).sum()), (ends[0] - ends[1]) / (2 * scale)
        off = abs(told - seen) / max(abs(told), abs(seen), 1e-3)
        if off > 0.02:
            case.notes.append(f"{point} {told:.4g} {seen:.4g}") if hasattr(case, "notes") else None
        worst = max(worst, off)
    return worst


def trace(case: Case) -> float:
    """Effects of features on a difference of logits, beside gradients by what MLPs write; in shares of the largest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layers = write_set(case.model, folder, features=24, texts=[[case.clean.tolist()], [case.corrupted.tolist()]])
        graph = case.model.trace(case.clean, TranscoderSet.load(folder), answer=case.answer, versus=case.versus)
    expected = effects_by_gradients(case.model, graph, layers, case.answer, case.versus)
    few = len(graph.features)
    return float(np.abs(graph.effects[few, :few] - expected).max() / np.abs(expected).max())


def ragged(case: Case) -> float:
    """Rows of unequal texts with captures and an edit, beside each alone."""
    spec = middle(case).capture("blocks.*.hook_resid_post")
    texts = [case.clean, case.corrupted[:4], case.clean[:6]]
    together, worst = case.model.forward(texts, spec), 0.0
    for row, text in enumerate(texts):
        alone = case.model.forward([text], spec)
        for name in ["output", *map(str, case.points("hook_resid_post"))]:
            one, both = (alone.output(), together.output()) if name == "output" else (alone[name], together[name])
            # what reads both ways is padded on the right
            start = 0 if case.model.bidirectional or one.ndim < 3 else both.shape[1] - len(text)
            part = both[row, start : start + len(text)] if one.ndim == 3 else both[row]
            worst = max(worst, float(np.abs(part - one[0]).max()))
    return worst


def middle(case: Case) -> HookSpec:
    """An edit of the stream between layers."""
    layer = case.model.num_layers // 2
    vector = np.random.default_rng(3).standard_normal(case.model.hidden_size).astype(np.float32)
    return HookSpec().intervene(HookPoint.ResidPre(layer), Intervention.Add(vector))


def pieces(case: Case) -> float:
    """A text in two pieces."""
    spec = middle(case)
    whole = case.model.forward([case.clean], spec).output()
    first = case.model.forward([case.clean[:5]], spec, use_cache=True)
    carried = first.kv_cache if first.kv_cache is not None else first.state
    second = case.model.forward([case.clean[5:]], spec, cache=carried)
    return float(np.abs(np.concatenate([first.output(), second.output()], 1) - whole).max())


def steer(case: Case) -> float:
    """Logits of a steered generation."""
    spec = middle(case)
    found = case.model.generate(
        [case.clean, case.corrupted[:4]], spec, max_new_tokens=5, output_logits=True, eos_token_id=[]
    )
    worst = 0.0
    for row, ids in enumerate(found.ids):
        ids = np.asarray(ids)
        logits = case.model.forward([ids], spec).output()[0]
        new = len(found.new_ids[row])
        top = logits[len(ids) - new - 1 : -1].max(-1)
        chosen = logits[np.arange(len(ids) - new - 1, len(ids) - 1), ids[-new:]]
        worst = max(worst, float((top - chosen).max()))
    return worst


def compiled(case: Case) -> float:
    """A compiled file in ONNX Runtime."""
    spec = middle(case)
    with tempfile.TemporaryDirectory() as name:
        folder = case.model.compile(spec, Path(name) / "out")
        file = next(Path(folder).rglob("*.onnx"))
        session = onnxruntime.InferenceSession(str(file))
        inputs = {one.name: one for one in session.get_inputs()}
        ids = case.clean[None].astype(np.int64)
        feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        feeds |= {"position_ids": np.arange(SEQ)[None], "token_type_ids": np.zeros_like(ids)}
        for key, one in inputs.items():
            if key not in feeds:
                dims = [1 if i == 0 else (dim if isinstance(dim, int) else 0) for i, dim in enumerate(one.shape)]
                kind = np.float32 if "float" in one.type else np.int64
                feeds[key] = np.zeros(dims, kind)
        output = session.run([session.get_outputs()[0].name], {key: feeds[key] for key in inputs})[0]
    return float(np.abs(output - case.model.forward([case.clean], spec).output()).max())


LAWS: dict[str, Callable[[Case], float]] = {
    one.__name__: one
    for one in (patch, ablate, paths, edges, attribute, gradients, trace, ragged, pieces, steer, compiled)
}
