"""Compiled models in the clients that people deploy with: tokens, knob, monitor, and time a token.

Each model is steered by an `Add` at its middle layer, with the strength as a knob and a probe as a monitor, and
compiled for each client, which runs it in a process of its own on one thread (`tests/shared/clients`): 28 greedy tokens
at three doses, compared with `generate`; then the time of a token of decoding, processor time, beside the client's own
file: for onnxruntime-genai that of its model builder, quantised anew to as many bits, the head too (but without offsets
of blocks, which the model's own may have), for the others a plain model by `mionnx export --layout`, without
interventions. The two run by turns; a ratio above 1 means that the compiled one is slower. A second table has what one
linear probe costs in plain onnxruntime, beside the same graph once more, which says what such a ratio is worth.
`--environments` keeps virtual environments and node_modules between runs: the first run installs them.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from environments import python_of
from int4_decode import STEPS, builders_file, head_bits, step
from rich.progress import track
from tables import present
from turns import alternate, ratio

from mionnx import HookPoint, HookSpec, Intervention, Knob, MIModel

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAMS = REPOSITORY / "tests" / "shared" / "clients"
MODELS = ("models/world-llama", "smollm2:float32", "smollm2:int4", "models/world-rwkv7")
CLIENTS = ("node", "genai", "transformers.js", "optimum")
LAYOUTS = {"node": "plain"}
DOSES = (0.0, 1.0, -1.0)
NEW, TIMED = 28, 64
PROBE_TURNS = 41
PROMPT = "The capital of France is"
JAVASCRIPT = "@huggingface/transformers@4.3.1"


def client_of(name: str, environments: Path) -> tuple[list[str], Path]:
    """The command of a client's program, and the folder to run it in."""
    if name == "genai":
        python = python_of(environments / "genai", ["onnxruntime-genai==0.18.0", "transformers", "onnx-ir", "onnx"])
        return [str(python), str(PROGRAMS / "genai.py")], PROGRAMS
    if name == "optimum":
        python = python_of(environments / "optimum", ["optimum-onnx==0.1.0", "onnxruntime"])
        return [str(python), str(PROGRAMS / "optimum_onnx.py")], PROGRAMS
    folder = environments / "javascript"
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        subprocess.run(["npm", "install", "--silent", "--ignore-scripts", JAVASCRIPT], cwd=folder, check=True)
    file = "transformers_js.mjs" if name == "transformers.js" else "node.mjs"
    shutil.copyfile(PROGRAMS / file, folder / file)
    return ["node", str(folder / file)], folder


def run(client: tuple[list[str], Path], folder: Path, **asked: Any) -> dict[str, Any]:
    """What a client makes of a folder: tokens, monitors, seconds."""
    question = {"pad": 0, "new": NEW, "knobs": {}, "monitors": [], "end": [], **asked}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(question, file)
        file.flush()
        command, cwd = client
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ran = subprocess.run([*command, str(folder), file.name], cwd=cwd, capture_output=True, text=True, env=bare)
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip().splitlines()[-1])
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def own_file(name: str, model: MIModel, source: str, folder: Path, environments: Path) -> Path:
    """The client's own kind of file, without interventions."""
    if name != "genai":
        return model.compile(HookSpec(), folder, layout=LAYOUTS.get(name, name), plain=True)
    floats = MIModel.from_pretrained(source)  # its folder has the names of a checkpoint
    return builders_file(folder, environments, floats.hooked.folder, head_bits(model.hooked.proto.graph)).parent


def measured(name: str, source: str, dtype: str, repeats: int, environments: Path, scratch: Path) -> list[str]:
    """A row of the table."""
    given: dict[str, Any] = {} if dtype == "float32" else {"dtype": dtype, "accuracy_level": 4}
    model = MIModel.from_pretrained(source, threads=1, **given)
    point = HookPoint.ResidPost(model.num_layers // 2)
    direction = np.cos(np.arange(model.hooked.metadata.sizes.hidden_size)).astype(np.float32)
    ids = model.tokenize(PROMPT).ids.tolist()
    stream = model.forward([ids], HookSpec().capture(point))[point][0, -1]
    direction *= np.float32(0.7 * np.linalg.norm(stream) / np.linalg.norm(direction))

    def spec(dose: float) -> HookSpec:
        return HookSpec().intervene(point, Intervention.Add(dose * direction))

    knobs = {"strength": Knob(doses=DOSES if name == "optimum" else ())}
    required = True if name == "node" else None
    monitors = {} if name == "optimum" else {"probe": (point, direction)}
    layout = LAYOUTS.get(name, name)
    folder = scratch / "compiled"
    model.compile(spec(1.0), folder, layout=layout, knobs=knobs, required=required, monitors=monitors)
    client, end = client_of(name, environments), model.hooked.end_tokens()
    equal, answers, gap = 0, set(), None
    for dose in DOSES:
        turned = {"files": [f"model_strength_{dose:g}.onnx"]} if name == "optimum" else {"knobs": {"strength": dose}}
        found = run(client, folder, ids=[ids], end=end, monitors=[*monitors], **turned)
        expected = model.generate([ids], spec(dose), max_new_tokens=NEW, do_sample=False).new_ids[0].tolist()
        equal += found["tokens"][0][: len(expected)] == expected
        # What a dose does: to the tokens, or to what the monitor reads.
        answers.add((*found["tokens"][0], str(found["monitors"].get("probe", [])[-1:])))
        if monitors:
            text = [[*ids, *expected[:-1]]]
            values = model.forward(text, spec(dose).capture(point))[point][0, len(ids) - 1 :] @ direction
            seen = np.array(found["monitors"]["probe"])[: len(values), 0]
            gap = max(gap or 0.0, float(np.abs(seen - values).max() / np.abs(values).max()))
    own = own_file(name, model, source, scratch / "own", environments)
    turns: dict[Path, list[float]] = {folder: [], own: []}
    for _ in range(repeats):
        for each, knob in ((folder, {} if name == "optimum" else {"strength": 1.0}), (own, {})):
            # No text ends before the other: both have the same steps.
            times = run(client, each, ids=[ids], new=TIMED, least=TIMED, knobs=knob)["seconds"]
            turns[each].append(statistics.median(times[1:]) * 1e3)  # the first step reads the prompt
    ours, theirs = (statistics.median(one) for one in turns.values())
    ratio = statistics.median(a / b for a, b in zip(*turns.values(), strict=True))
    alike = "no" if monitors else "tokens alike"  # without a monitor a dose that moves no token cannot be seen
    told = [f"{equal} of {len(DOSES)}", "yes" if len(answers) == len(DOSES) else alike]
    return [*told, "-" if gap is None else f"{gap:.0e}", f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.2f}"]


def probe_rows(models: Sequence[str], repeats: int) -> list[list[str]]:
    """What a linear probe costs a token of decoding in plain onnxruntime, steered and not."""
    rows = []
    for source in track(models, "measuring probes"):
        name, _, dtype = source.partition(":")
        model = MIModel.from_pretrained(name, threads=1, **({} if dtype in ("", "float32") else {"dtype": dtype}))
        point = HookPoint.ResidPost(model.num_layers // 2)
        direction = np.cos(np.arange(model.hidden_size)).astype(np.float32)
        steered = HookSpec().intervene(point, Intervention.Add(direction))
        for title, spec in (("steered", steered), ("not changed", HookSpec())):
            with tempfile.TemporaryDirectory() as scratch:
                bare, probed = Path(scratch) / "bare", Path(scratch) / "probed"
                model.compile(spec, bare, weights="referenced", plain=spec.is_empty())
                model.compile(spec, probed, weights="referenced", monitors={"probe": (point, direction)})
                programs = {each.name: step(each / "model.onnx", 32, model.head_dim) for each in (bare, probed)}
                programs["again"] = step(bare / "model.onnx", 32, model.head_dim)
                times = alternate(programs, repeats, process_time)
            each = f"{statistics.median(times['bare']) / STEPS * 1e3:.2f}"
            both = (ratio(times[which], times["bare"]) for which in ("probed", "again"))
            rows.append([f"{Path(name).name} {dtype}".strip(), title, each, *both])
    return rows


def rows_of(models: Sequence[str], clients: Sequence[str], repeats: int, environments: Path) -> list[list[str]]:
    """A row for each client and model; where one does not run the other, why."""
    rows = []
    for model, client in track([(model, client) for model in models for client in clients], "measuring"):
        source, _, dtype = model.partition(":")
        with tempfile.TemporaryDirectory() as scratch:
            try:
                told = measured(client, source, dtype or "float32", repeats, environments, Path(scratch))
            except Exception as error:  # a client may refuse a model in any way: the table says how
                told = ["-", "-", "-", "-", "-", str(error)[:90].replace("|", " ")]
        rows.append([client, f"{Path(source).name} {dtype}".strip(), *told])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--clients", nargs="*", default=CLIENTS, choices=CLIENTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "mionnx-clients")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    rows = rows_of(asked.models, asked.clients, asked.repeats, asked.environments.resolve())
    columns = ["client", "model", "doses with equal tokens", "knob obeyed", "monitor, relative gap"]
    columns += ["ms a token", "its own file", "ratio"]
    probes = probe_rows(asked.models, PROBE_TURNS)
    of_probes = ["model", "graph", "ms a token", "with a probe, ratio", "the same graph again, ratio"]
    title = f"One thread, processor time, {asked.repeats} turns of {TIMED} tokens"
    tables = [(columns, rows), (of_probes, probes)]
    present("clients", "Compiled models in other people's clients", title, tables, asked.save)


if __name__ == "__main__":
    main()
