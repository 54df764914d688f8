"""Verbs keep their laws in every family: small random models, each verb beside passes of declared specs.

    python benchmarks/verbs_of_families.py [FAMILY ...] [--rows FILE] [--models FOLDER] [--save]

- patch, ablate: cells of sweeps over the stream, heads, patterns, values and MLPs beside one pass with that edit.
- paths: path patching with all receivers beside plain patching.
- edges: circuits of no edge and of all beside the corrupted and the clean run, of all but one beside path patching.
- attribute: the sum of what parts of the model add to a logit.
- gradients: by values of a layer in the middle, along a direction, beside differences of two passes; a share.
- trace: effects of features in an attribution graph of random transcoders beside gradients by what MLPs write; a share.
- ragged: rows of a list of unequal texts beside each alone. pieces: a text in two pieces beside one.
- steer: how far the tokens of a steered generation lie below the largest logits of one pass over its text.
- compiled: the file of a spec in ONNX Runtime beside a pass.

A cell is the largest difference, in logits where it is no share, or "-" where the verb is refused: the table below says
why. A star marks one above 5e-5, of gradients above 0.02, and nan where nothing could be compared. About two hours;
`--rows` keeps what was measured as JSON lines, `--models` the models. Of named families the saved table keeps the
others' rows.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from family_models import for_each  # what stands in tests/shared is found by it
from rescaled_families import AS_ENCODER, made, table
from tables import earlier, present
from transcoder_files import effects_by_gradients, write_set

from mionnx import HookPoint, HookSpec, Intervention, MIError, MIModel, TranscoderSet

SEQ, VOCAB, LARGEST, CELLS = 9, 80, 5e-5, 3
STEPS = (2e-2, 5e-3, 1e-3)  # of differences, in sizes of a value
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


def largest(differences: list[float]) -> float:
    """The largest difference; NaN if one is, or where nothing was compared."""
    return float(np.max(differences)) if differences else float("nan")


def patch(case: Case) -> float:
    """Cells of patching sweeps."""
    off = list[float]()
    for hook, axes in SWEPT.items():
        if not case.points(hook):
            continue
        found = case.model.patch_sweep(case.clean, case.corrupted, hook, axes, **case.given)
        layers = [*dict.fromkeys(one.layer for one in case.points(hook))]
        for point, index, chosen in cells_of(case, hook, axes):
            value = case.model.forward([case.clean], HookSpec().capture(point))[point]
            spec = HookSpec().intervene(point, edit_of(value, point, chosen, case))
            told = found.values[(layers.index(point.layer), *index[1:])]
            off.append(abs(float(told) - case.number(case.corrupted, spec)))
    return largest(off)


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
    off = list[float]()
    for hook, axes in SWEPT.items():
        if not case.points(hook):
            continue
        found = case.model.ablation_sweep(case.clean, hook, axes, "logit_diff", **case.given)
        layers = [*dict.fromkeys(one.layer for one in case.points(hook))]
        for point, index, chosen in cells_of(case, hook, axes):
            spec = HookSpec().intervene(point, Intervention.Zero(**chosen))
            told = found.values[(layers.index(point.layer), *index[1:])]
            off.append(abs(float(told) - case.number(case.clean, spec)))
    return largest(off)


def paths(case: Case) -> float:
    """Path patching with all receivers."""
    off = list[float]()
    for hook in SENDERS:
        if case.points(hook):
            given = (case.clean, case.corrupted), (hook, SWEPT[hook])
            plain = case.model.patch_sweep(*given[0], *given[1], **case.given)
            path = case.model.path_patch(*given[0], "all", *given[1], **case.given)
            off.append(float(np.abs(path.values - plain.values).max()))
    return largest(off)


def edges(case: Case) -> float:
    """Circuits of no edge, of all, and of all but one."""
    model = case.model
    ranking = model.edge_attribution(case.clean, case.corrupted, **case.given)
    found = model.circuit(case.clean, case.corrupted, [0, ranking.count], scores=ranking, **case.given)
    ends = [case.number(case.corrupted), case.number(case.clean)]
    off = [float(np.abs(found.values - ends).max())]
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
        off.append(abs(float(one.values[0]) - float(value)))
    return largest(off)


def attribute(case: Case) -> float:
    """The sum of what parts add to a logit, that before a soft cap."""
    place = {} if case.at in (-1, None) else {"position": case.at}
    found = case.model.attribute(case.clean, case.answer, **place)
    logit = found.logit if found.capped else case.model.forward([case.clean]).output()[0, case.at, case.answer]
    return abs(found.total - float(logit))


def gradients(case: Case) -> float:
    """Derivatives along a direction beside differences of passes, in steps so short that no expert flips."""
    off, layer = list[float](), case.model.num_layers // 2
    points = [one for one in case.model.hook_points() if one.layer == layer and not one.derived]
    for point in [one for one in points if "scores" not in one.name and "indices" not in one.name]:
        try:
            cache = case.model.gradients(case.clean, point, "logit_diff", **case.given)
        except MIError as error:
            if "gradient" in str(error):  # choices of experts, and what the metric does not read
                continue
            raise
        grad = np.asarray(cache.grad[point], np.float64)
        value = case.model.forward([case.clean], HookSpec().capture(point))[point]
        direction, size = np.sign(grad) * case.random.random(grad.shape), float(np.abs(value).mean() or 1.0)

        def number(way: float, point: HookPoint = point, value: Any = value, direction: Any = direction) -> float:
            moved = (value + way * direction).astype(np.float32)
            return case.number(case.clean, HookSpec().intervene(point, Intervention.Replace(moved)))

        told = float((grad * direction).sum())
        seen = [(number(step * size) - number(-step * size)) / (2 * step * size) for step in STEPS]
        off.append(min(abs(told - one) / max(abs(told), abs(one), 1e-3) for one in seen))
    return largest(off)


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
    together, off = case.model.forward(texts, spec), list[float]()
    for row, text in enumerate(texts):
        alone = case.model.forward([text], spec)
        for name in ["output", *map(str, case.points("hook_resid_post"))]:
            one, both = (alone.output(), together.output()) if name == "output" else (alone[name], together[name])
            # what reads both ways is padded on the right
            start = 0 if case.model.bidirectional or one.ndim < 3 else both.shape[1] - len(text)
            part = both[row, start : start + len(text)] if one.ndim == 3 else both[row]
            off.append(float(np.abs(part - one[0]).max()))
    return largest(off)


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
    """How far the tokens of a steered generation lie below the largest logits of one pass over its text."""
    spec = middle(case)
    found = case.model.generate([case.clean, case.corrupted[:4]], spec, max_new_tokens=5, eos_token_id=[])
    off = list[float]()
    for row, ids in enumerate(found.ids):
        ids = np.asarray(ids)
        logits = case.model.forward([ids], spec).output()[0]
        new = len(found.new_ids[row])
        top = logits[len(ids) - new - 1 : -1].max(-1)
        chosen = logits[np.arange(len(ids) - new - 1, len(ids) - 1), ids[-new:]]
        off.append(float((top - chosen).max()))
    return largest(off)


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
COLUMNS = ("family", *LAWS)
REFUSED = ("refused", "why")
ROUGH = {"gradients": 0.02}  # differences of passes in float32
NOTES = (
    "gemma2, nanochat, vaultgemma: an attribution graph is of logits before the soft cap, its oracle behind it",
    "llama4_text: transformers scales queries by their column, padding counted, and so do its rows here",
)


def measure(models: Path | None, name: str, folder: Path) -> tuple[list[str], bool]:
    """A family's row, and behind it "verb: why" of each verb that is refused."""
    place = models / name if models else folder
    model = MIModel.from_pretrained(place / "hooked", threads=1) if (place / "hooked").exists() else made(name, place)
    case, cells, reasons = Case(model, name.endswith(AS_ENCODER)), [], []
    for law, function in LAWS.items():
        try:
            value = function(case)
        except MIError as error:
            cells.append("-")
            reasons.append(f"{law}: {' '.join(str(error).split())[:160]}")
            continue
        cells.append(f"{value:.0e}" + "*" * (not value <= ROUGH.get(law, LARGEST)))
    return [name, *cells, *reasons], False


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--models", type=Path, help="a folder that keeps the models")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    names = given.families or [name for name, entry in table.saved().items() if "row" in entry]
    kept = earlier("verbs_of_families", COLUMNS, names) if given.families else {}
    earlier_why = earlier("verbs_of_families", REFUSED, ()) if given.families else {}
    why = {key: row for key, row in earlier_why.items() if key.rpartition(": ")[0] not in names}
    found = for_each(names, partial(measure, given.models), given.rows, {})
    rows = kept | {name: tuple(entry["row"][: len(COLUMNS)]) for name, entry in found.items() if "row" in entry}
    for name, entry in found.items():
        for reason in entry.get("row", ())[len(COLUMNS) :]:
            verb, _, said = reason.partition(": ")
            why[f"{name}: {verb}"] = (f"{name}: {verb}", said)
        if "missing" in entry:
            why[f"{name}: all"] = (f"{name}: all", entry["missing"])
    order = sorted(rows, key=lambda name: (name.endswith(AS_ENCODER), name))
    cells = [cell for row in rows.values() for cell in row[1:]]
    stars, none = sum("*" in cell for cell in cells), cells.count("-")
    said = f"{len(cells) - stars - none} cells agree, {none} are refused by name, {stars} differ"
    tables = [(COLUMNS, [rows[name] for name in order]), (REFUSED, [why[key] for key in sorted(why)])]
    title = f"{len(rows)} families, random small models"
    present("verbs_of_families", "Verbs of families", title, tables, given.save, said, NOTES)


if __name__ == "__main__":
    main()
