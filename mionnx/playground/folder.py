"""`playground`: a static folder with page, engine, runtime, model and tokenizer, which any file server serves.

Its `manifest.json` says what page and engine have to know of the model and the files.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from mionnx.analysis.jacobian_lens.jacobian_lens import JacobianLens
from mionnx.compile.in_dtype import in_dtype
from mionnx.errors import InputError, ModelError, SpecFileError, nearest
from mionnx.graph.folder_file import files_beside
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import GRAPH, KEPT, HookedModel
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.graph.metadata import NORMED_STREAM
from mionnx.graph.output_head import LOGITS
from mionnx.machine.leftovers import new_folder, remove_leftovers
from mionnx.machine.progress import shown
from mionnx.machine.typed import typed
from mionnx.model import MIModel
from mionnx.playground.examples import read_examples
from mionnx.playground.graph import COMPUTED, LENS_FILE, PlaygroundGraph, build_graph
from mionnx.playground.npm_files import vendor
from mionnx.playground.reading import chat_of, reading_of, special_tokens
from mionnx.run.source_path import shipped_models
from mionnx.spec.attention_knockout import KnockoutSpec, create_knockout_mask
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

HERE = Path(__file__).parent
ENGINE, PAGE, WORKER = HERE / "engine", HERE / "page", HERE / "sw.js"
MANIFEST_FILE, EXAMPLES, SPEC = "manifest.json", "examples.json", "spec.safetensors"
OWN_LENS = "lens.safetensors"  # a lens in a model's own folder
FLOATS_GRAPH = "model-floats.onnx"  # the graph that unpacks weights in blocks
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
RUNTIME = "vendor/onnxruntime-web/ort-wasm-simd-threaded.wasm.gz"
PART = 24 * 2**20  # bytes of a file: some hosts take 25 MB, GitHub 100
LARGEST_WEIGHTS = 2**31  # bytes of weights that a page can hold beside itself in 4 GiB of WASM
LENGTH, CHECKED_LOGITS = 6, 32  # tokens of the prompt that a browser computes too; logits that are compared
CHECKED_TOLERANCES = {"float32": 1e-3, "float16": 2e-2}  # of the largest of them
FORMAT = 1  # of the manifest


def lessons(model: MIModel) -> Path | None:
    """The prepared examples of a shipped model that has some."""
    path = HERE / "examples" / f"{_shipped(model)}.json"
    return path if path.exists() else None


def _shipped(model: MIModel) -> str | None:
    here = model.hooked.folder.resolve()
    return next((name for name, folder in shipped_models().items() if folder.resolve() == here), None)


@typed()
def playground(
    model: MIModel,
    folder: str | Path,
    *,
    hooks: HookSpec | None = None,
    title: str | None = None,
    examples: str | Path | None = None,
    points: str | Sequence[str] = (),
    dtype: str | None = None,
    texts: str | Sequence[str] | None = None,
    bound: float | None = None,
    lens: JacobianLens | str | Path | None = None,
) -> Path:
    """Write a static folder in which a browser runs the model, looks inside, and changes it.

    A decoder continues texts there; a masked language model fills masks, a classifier tells labels, a tagger tags, an
    embedding model how alike texts are. Any file server serves it, GitHub Pages too; it calls no other. The first time
    onnxruntime-web and a tokenizer library are downloaded from npm's registry into the store, checked against pinned
    hashes.

    Args:
        model: with a tokenizer.json, activations in float32 or float16, any head but spans or none; weights of 4 or 8
            bits make the folder small.
        folder: path of a folder that does not exist yet.
        hooks: interventions that the page lists from the start, each of which can be switched off.
        title: of the page; the model's name if left out.
        examples: a JSON file of prepared examples; see `mionnx.playground.examples`. A shipped model's own if left out.
        points: names or globs of hook points to be changed besides the usual ones.
        dtype: "float16" for a model of float32 in half the bytes: it is narrowed with an exact remedy for what
            overflows. If left out, the model's own.
        texts, bound: of a dtype, as for `narrow`.
        lens: a Jacobian, ridge or tuned lens, or its file, by which the page reads layers too. If left out,
            `lens.safetensors` in the model's folder, where there is one.

    Returns:
        the folder.

    Raises:
        ModelError: the folder exists, or a model that a page cannot run.
        HookError, InterventionError: what a page cannot change.
        InputError: examples that do not fit the model, or the lens of another one.
        RuntimeMissingError: npm or the network is missing, the first time.

    Example:
        playground(MIModel.from_pretrained("models/world-llama"), "site", title="Capitals")
    """
    target, spec = Path(folder), hooks or HookSpec()
    if dtype not in (None, *COMPUTED):
        raise InputError(f"dtype={dtype!r}: a playground computes in {' or '.join(COMPUTED)}{nearest(dtype, COMPUTED)}")
    if target.exists():
        raise ModelError(f"{target} exists already")
    if spec.captures or spec.gradients or spec.metric is not None:
        warnings.warn("captures, gradients and metrics of a spec are no part of a playground", stacklevel=2)
    chosen = [points] if isinstance(points, str) else points
    maps = _lens_of(model, lens)
    graph = build_graph(model.hooked, spec, chosen, maps)
    _refuse_files(model, graph, dtype)  # before anything is downloaded or measured
    shown = read_examples(lessons(model) if examples is None else examples, model, graph)
    shipped = _shipped(model)
    opened_as = model.source if shipped is None else (shipped, None)
    remove_leftovers(target.parent, holding=(MANIFEST_FILE,))
    with in_dtype(model, dtype, texts, bound, target) as written, new_folder(target, ModelError) as partial:
        graph = graph if written is model else build_graph(written.hooked, spec, chosen, maps)
        _write(partial, written, graph, spec, title or model.hooked.name, shown, opened_as, maps)
    return target


def _lens_of(model: MIModel, lens: JacobianLens | str | Path | None) -> JacobianLens | None:
    """The lens that is asked for, or the one in the model's folder."""
    own = model.hooked.folder / OWN_LENS
    if lens is None and own.exists():
        files_beside(model.hooked.folder, [OWN_LENS])  # refuses a link that leads out of the folder
        lens = own
    read = JacobianLens.load(lens) if isinstance(lens, str | Path) else lens
    if read is not None:
        read.check(model)
    return read


def _refuse_files(model: MIModel, graph: PlaygroundGraph, dtype: str | None) -> None:
    folder = model.hooked.folder
    files_beside(folder, KEPT)  # refuses files that lead out of the folder
    if not (folder / TOKENIZER[0]).is_file():
        raise ModelError(f"{folder} has no tokenizer.json, which a page needs to read prompts")
    halved = dtype is not None and model.hooked.metadata.dtype == "float32" and not model.hooked.in_blocks
    size = sum(graph.weights.values()) // (2 if halved else 1)
    if size > LARGEST_WEIGHTS:
        raise ModelError(
            f"the weights are {size / 2**30:.1f} GiB, and a page holds {LARGEST_WEIGHTS // 2**30}: give them 4 bits by "
            "dtype='int4'"
        )


def _write(
    at: Path,
    model: MIModel,
    graph: PlaygroundGraph,
    spec: HookSpec,
    title: str,
    examples: dict[str, Any],
    opened_as: tuple[str, str | None] | None,
    lens: JacobianLens | None,
) -> None:
    try:
        for source, target in ((PAGE, at), (ENGINE, at / "engine")):
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    except shutil.Error as error:  # a list of (from, to, reason), one for each file
        raise OSError(error.args[0][0][2]) from error
    shutil.copyfile(WORKER, at / WORKER.name)
    with shown() as progress:
        vendored = vendor(at / "vendor", progress)
    weights = _write_model(at / "model", model, graph)
    if spec.interventions:
        spec.save(str(at / SPEC))
    (at / EXAMPLES).write_text(json.dumps(examples, ensure_ascii=False, indent=1))
    reading = reading_of(model)
    manifest = manifest_of(
        model.hooked, graph, spec, title, _reference(model, graph), opened_as, chat_of(model), reading
    )
    if graph.floats is not None:
        manifest["engine"]["floats"] = {"graph": f"model/{FLOATS_GRAPH}", "bytes": graph.floats_bytes}
    if lens is not None:
        manifest["engine"]["lens"] = {"name": lens.title, "prompts": lens.n_prompts, "layers": [*graph.mapped]}
    manifest["engine"] |= {"weights": weights, "unpacked": {f"vendor/{name}": sha for name, sha in vendored.items()}}
    written = sorted(path for path in at.rglob("*") if path.is_file() and not path.name.startswith("."))
    manifest["files"] = {path.relative_to(at).as_posix(): _file_facts(path) for path in written}
    manifest["download"] = sum(manifest["files"][name]["bytes"] for name in _downloaded(manifest))
    (at / MANIFEST_FILE).write_text(json.dumps(manifest, ensure_ascii=False, indent=1))


def _file_facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _downloaded(manifest: dict[str, Any]) -> list[str]:
    """The files of a first visit, as `Core.load` of engine/core.js fetches them."""
    engine, files = manifest["engine"], manifest["files"]
    graph = engine["floats"]["graph"] if "floats" in engine else f"model/{GRAPH}"
    parts = [part for weights in engine["weights"] for part in weights["parts"]]
    spec = [SPEC] if SPEC in files else []
    return [RUNTIME, *(f"model/{name}" for name in TOKENIZER), *spec, graph, *parts]


def _write_model(at: Path, model: MIModel, graph: PlaygroundGraph) -> list[dict[str, Any]]:
    """Write graph, weights in parts, and tokenizer; the parts of each weight file."""
    at.mkdir()
    (at / GRAPH).write_bytes(graph.model)
    if graph.floats is not None:
        (at / FLOATS_GRAPH).write_bytes(graph.floats)
    for name in TOKENIZER:
        files = files_beside(model.hooked.folder, [name])
        # The tokenizer library reads both files; a config without entries changes nothing.
        (at / name).write_bytes(files[0].read_bytes() if files else b"{}")
    return [
        {"path": name, "parts": _write_parts(_weights(model, graph, name), at, f"weights-{n}")}
        for n, name in enumerate(graph.weights)
    ]


def _weights(model: MIModel, graph: PlaygroundGraph, name: str) -> Path | BytesIO:
    return BytesIO(graph.matrices) if name == LENS_FILE and graph.matrices else model.hooked.folder / name


def _write_parts(source: Path | BytesIO, at: Path, name: str) -> list[str]:
    parts: list[str] = []
    try:
        with source.open("rb") if isinstance(source, Path) else source as file:
            while data := file.read(PART):
                path = at / f"{name}.{len(parts):03}.bin"
                path.write_bytes(data)
                parts.append(f"{at.name}/{path.name}")
    except OSError as error:
        raise SpecFileError(f"cannot copy {source}: {error}") from error
    return parts


def manifest_of(
    model: HookedModel,
    graph: PlaygroundGraph,
    spec: HookSpec,
    title: str,
    check: dict[str, Any],
    opened_as: tuple[str, str | None] | None = None,
    chat: dict[str, str] | None = None,
    reading: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The manifest without its files.

    `check`: logits that a browser has to reach before it shows any; `reading`: how texts are read, see `reading_of`.
    """
    sizes, meta = model.metadata.sizes, model.metadata
    return {
        "format": FORMAT,
        "title": title,
        "model": {
            "name": model.name,
            "family": meta.family,
            "chat": chat,
            "source": dict(zip(("name", "dtype"), opened_as or (str(model.folder), None), strict=True)),
            "weights": meta.weight_dtype,
            "bits": list(graph.bits),
            "bytes": sum(graph.weights.values()),
            "layers": sizes.num_layers,
            "heads": sizes.num_heads,
            "kv_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "hidden": sizes.hidden_size,
            "vocabulary": sizes.vocab_size,
            "head": meta.head,
            "choices": meta.columns,
            "labels": meta.labels,
            "activation": meta.activation,
            "normed": NORMED_STREAM in meta.exporter,
            "context": model.longest_text if meta.reads_whole else model.context_length,
            "end_tokens": model.end_tokens(),
            **(reading or {}),
        },
        "hooks": {
            name: {"axes": list(site.dims), "kinds": list(site.kinds)} | ({"limit": site.limit} if site.limit else {})
            for name, site in graph.sites.items()
        },
        "hook_points": [str(point) for point in model.hook_points()],
        "patterns": list(graph.patterns),
        "spec": spec_entries(spec),
        "engine": {
            "slots": {
                name: [{"slot": slot, "inputs": list(inputs)} for slot, inputs in site.slots]
                for name, site in graph.sites.items()
            },
            "axes": {name: list(site.axes) for name, site in graph.sites.items()},
            "layers": [HookPoint.parse(name).layer for name in graph.patterns],
            # Layers with a sliding window: how many keys a query reads there.
            "windows": {
                str(HookPoint.AttnScores(n)): window
                for n in range(sizes.num_layers)
                if (window := meta.window(n)) is not None
            },
            "leads": _leads(model, graph),
            "output": LOGITS,  # whatever the main output is
            "positional": meta.positional,
            "both": meta.bidirectional,
            "types": model.has_token_types,
            # The one token that classes or an embedding are made of, and the hook points that change it from elsewhere.
            "reads": None if meta.positional else model.influence.token_read(meta.main_point),
            "spreads": [name for name in graph.sites if LOGITS in model.influence.of(name).spread],
            "past": _past(model),
            "check": check,
        },
    }


def _leads(model: HookedModel, graph: PlaygroundGraph) -> dict[str, list[str]]:
    """Hook point -> those that its value flows into with none between, and the main output."""
    sites = frozenset(graph.sites)
    reached = {name: model.influence.of(name, sites - {name}).arrives for name in graph.sites}
    return {name: sorted(points & (sites | {LOGITS})) for name, points in reached.items()}


def spec_entries(spec: HookSpec) -> list[dict[str, Any]]:
    """The interventions of a spec as the page lists them; values lie in `spec.safetensors`."""
    entries = []
    for n, (where, one) in enumerate(spec.interventions):
        stored = [f"interventions.{n}.{name}" for name in one.rules.stored_values]
        value = {"from": "spec", **({"tensor": stored[0]} if len(stored) == 1 else {"tensors": stored})}
        entries.append({**one.to_entry(str(where)), **({"value": value} if stored else {})})
    return entries


def _past(model: HookedModel) -> list[dict[str, Any]]:
    """The past's inputs, with the outputs that follow them; shapes for one text; none without a cache."""
    if not model.has_cache:
        return []
    shapes = model.metadata.past_shapes(1, 0)
    layers = model.metadata.sizes.num_layers or 0
    names = zip(KEYS_AND_VALUES.inputs(layers), KEYS_AND_VALUES.outputs(layers), strict=True)
    return [{"input": past, "output": present, "dims": list(shapes[past])} for past, present in names]


def _reference(model: MIModel, graph: PlaygroundGraph) -> dict[str, Any]:
    """The check of a runtime: a prompt, interventions, and some logits of its last position, or of the whole text.

    A runtime whose logits are further from these than the tolerance is not used.
    """
    meta, layer = model.hooked.metadata, model.num_layers // 2
    # No token that parts a pair is among them: a page takes what is behind it for the second text.
    special, candidates = special_tokens(model), np.arange(3, 3 + 28 * LENGTH, 7) % model.vocab_size
    tokens = np.array([token for token in candidates.tolist() if token not in special][:LENGTH])
    ids = np.linspace(0, meta.columns - 1, min(CHECKED_LOGITS, meta.columns)).astype(int)
    spec, entries = _changes(model, layer, graph)
    # The plain run and a changed one: a runtime may compute the slots wrongly.
    outputs = [model.forward(tokens[None], one).output()[0] for one in (None, spec)]
    logits = [(output[-1] if meta.positional else output)[ids] for output in outputs]
    largest = max(float(np.abs(one).max()) for one in logits)
    return {
        "tokens": tokens.tolist(),
        "ids": ids.tolist(),
        # Of logits near 0 the tolerance is absolute; the numbers of an embedding of length 1 are all small.
        "tolerance": CHECKED_TOLERANCES[meta.dtype] * (largest if meta.head == "embedding" else max(largest, 1.0)),
        "runs": [
            {"interventions": changes, "logits": [round(float(x), 6) for x in one]}
            for changes, one in zip(([], entries), logits, strict=True)
        ],
    }


def _changes(model: MIModel, layer: int, graph: PlaygroundGraph) -> tuple[HookSpec, list[dict[str, Any]]]:
    """A spec of several kinds, and the same as the page's entries."""
    spec, entries = HookSpec(), []
    limits: dict[str, Any] = {"positions": None, "heads": None, "rows": None}
    scores, out, stream = (
        str(point(layer)) for point in (HookPoint.AttnScores, HookPoint.AttnOut, HookPoint.ResidPost)
    )
    if scores in graph.sites:
        # An encoder's head may read the first token alone: an edge of it too, to a later one.
        edges = [[LENGTH - 1, 1], *([[0, LENGTH - 2]] if model.bidirectional else [])]
        cut = KnockoutSpec(edges=[(query, key) for query, key in edges])
        mask = create_knockout_mask(cut, model.num_heads, LENGTH, both=model.bidirectional)
        spec.intervene(scores, Intervention.Knockout(mask))
        entries.append({"hook": scores, "kind": "knockout", **limits, "value": {"edges": edges}})
    if out in graph.sites:
        spec.intervene(out, Intervention.Scale(0.5))
        entries.append({"hook": out, "kind": "scale", **limits, "value": 0.5})
    # The first token and the last: a head of whole texts may read one of them alone.
    spec.intervene(stream, Intervention.Add(0.25, positions=[-1, 0]))
    entries.append({"hook": stream, "kind": "add", **limits, "positions": [-1, 0], "value": 0.25})
    return spec, entries
