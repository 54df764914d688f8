"""Opens mutants of every kind of file that mionnx reads, each in a child process with limits, and says what went wrong.

    python tests/fuzz/fuzz_files.py [FORMAT ...] [--seconds 60] [--seed 0] [--only NUMBER] [--save]

Of each mutant: `MIError` in at most `LONGEST` characters or an answer, in `SECONDS` of processor time and under `ROOM`
bytes over the file's size; nothing outside of its folder is read or written, no program and no code of the folder is
run. A finding is told with its number: the same seed and `--only NUMBER` make it again. `--save` writes counts to
benchmarks/results/robustness.md.
"""

import argparse
import os
import pickle
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "shared"), str(Path(__file__).parent)]
import gguf_mutants  # noqa: E402
import mutants  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "robustness.md"
LLAMA, FOREIGN = ROOT / "models" / "world-llama", ROOT / "tests" / "shared" / "foreign" / "optimum"
PACKED = (
    *(("gptq", "gptq"), ("gptq", "gptq_v2"), ("awq", "gemm"), ("awq", "gemv")),
    *(("compressed-tensors", "pack-quantized"), ("compressed-tensors", "int-quantized")),
)
HOOK = "blocks.1.hook_resid_post"
SECONDS, WALL = 30, 120  # of the processor, an export by torch takes some ten; on the clock, where others use it too
ROOM = 2**30
LONGEST = 10_000  # characters of a refusal
SECRET = "the secret that lies outside"
RUNS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect", "pickle.find_class")
READ = ("/proc", "/sys", "/usr", "/lib", "/etc", "/opt", "/dev/null", "/dev/urandom", "/root/.pyenv", "/work/venv")


@dataclass
class Format:
    """A kind of file: how a folder with one is made, what is changed, and how it is opened."""

    make: Callable[[Path], str]
    change: mutants.Mutate
    open: Callable[[Path], object]
    links: bool = False


@dataclass
class Found:
    """What came of the mutants of a format."""

    answers: int = 0
    refused: int = 0
    faults: list[tuple[int, str]] = field(default_factory=list)


def run_model(path: Path) -> object:
    """Open a model, and predict from a text and from ids."""
    from mionnx import MIModel

    model = MIModel.from_pretrained(path, threads=1)
    if (model.hooked.folder / "tokenizer.json").is_file():
        model.generate("The capital of France is", max_new_tokens=1)
    return model.forward([[3, 4, 5]]).output()


def adopt(path: Path) -> object:
    from exporters.adopt import adopt as adopted

    return adopted(path, path.parent / "out")


def sae(path: Path) -> object:
    from mionnx import SAE

    return SAE.load(path, hook=HOOK) if path.suffix == ".npz" else SAE.load(path)


def values(path: Path) -> object:
    """Open a file of mionnx' own: a spec, directions."""
    from mionnx import Directions, HookSpec

    return (HookSpec if "spec" in path.name else Directions).load(path)


def copy_of(source: Path, file: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        for path in source.iterdir():
            if path.is_file() and path.suffix != ".md":
                shutil.copyfile(path, folder / path.name)
        return file

    return make


def checkpoint(folder: Path) -> str:
    from families import make_model

    make_model("llama").save_pretrained(folder)
    shutil.copyfile(LLAMA / "tokenizer.json", folder / "tokenizer.json")
    return "config.json"


def make_gguf(folder: Path) -> str:
    from families import make_model
    from gguf_files import write_gguf

    write_gguf(make_model("llama"), folder / "model.gguf")
    return "model.gguf"


def make_packed(method: str, layout: str, file: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        from packed_files import Form, write_packed

        write_packed(Form(method, layout), folder)
        return file

    return make


def make_npz(folder: Path) -> str:
    import numpy as np
    from saelens_fixture import random_weights

    np.savez(folder / "params.npz", **random_weights("jumprelu"))
    return "params.npz"


def make_sae(folder: Path) -> str:
    from saelens_fixture import random_weights
    from safetensors.numpy import save_file

    save_file(random_weights("topk"), folder / "sae_weights.safetensors")
    facts = {"architecture": "topk", "k": 7, "hook_name": HOOK, "sae_lens_version": "6.1", "metadata": {"a": 1}}
    (folder / "cfg.json").write_bytes(mutants.as_json(facts))
    return "cfg.json"


def make_spec(folder: Path) -> str:
    import numpy as np

    from mionnx import HookSpec, Intervention

    spec = HookSpec().capture("blocks.*.hook_resid_post").intervene(HOOK, Intervention.Add(np.ones(64, np.float32)))
    spec.save(folder / "spec.safetensors")
    return "spec.safetensors"


def make_directions(folder: Path) -> str:
    import numpy as np

    from mionnx import Directions

    Directions(np.ones((2, 64)), [1, 2]).save(folder / "directions.safetensors")
    return "directions.safetensors"


def whole(path: Path) -> Path:
    return path.parent


FORMATS: dict[str, list[Format]] = {
    "onnx": [
        Format(copy_of(LLAMA, "model.onnx"), mutants.onnx_file, lambda path: run_model(whole(path)), links=True),
        Format(copy_of(FOREIGN, "model.onnx"), mutants.onnx_file, lambda path: adopt(whole(path)), links=True),
    ],
    "safetensors": [
        Format(make_spec, mutants.safetensors_file, values),
        Format(make_directions, mutants.safetensors_file, values),
        Format(copy_of(LLAMA, "model.safetensors"), mutants.safetensors_file, lambda path: run_model(whole(path))),
        Format(make_sae, mutants.json_file, lambda path: sae(whole(path)), links=True),
    ],
    "npz": [Format(make_npz, mutants.npz_file, sae, links=True)],
    "tokenizer.json": [
        Format(copy_of(LLAMA, "tokenizer.json"), mutants.json_file, lambda path: run_model(whole(path)), links=True)
    ],
    "config.json": [Format(checkpoint, mutants.json_file, lambda path: run_model(whole(path)), links=True)],
    "gguf": [Format(make_gguf, gguf_mutants.gguf_file, run_model)],
    "packed": [
        Format(make_packed(method, layout, file), change, lambda path: run_model(whole(path)), links=True)
        for method, layout in PACKED
        for file, change in (("model.safetensors", mutants.packed_file), ("config.json", mutants.quantization))
    ],
}


def mutant(base: Path, file: str, kind: Format, folder: Path, seed: str) -> Path:
    """Write a mutant of a folder, and give the path of its file."""
    random = Random(seed)
    shutil.copytree(base, folder)
    path = folder / file
    choice = random.random()
    if kind.links and choice < 0.1:
        mutants.linked(folder, folder.parent / "secret.txt", random)
    elif choice < 0.4:
        path.write_bytes(mutants.damaged(path.read_bytes(), random))
    else:
        path.write_bytes(kind.change(path.read_bytes(), random))
    return path


def peak() -> int:
    """The largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def watch(home: Path, faults: list[str]) -> None:
    """Note what this process reads and writes outside of a folder, and what it runs."""
    allowed = (str(home), sys.prefix, sys.base_prefix, str(ROOT), *READ)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event.startswith(RUNS):
            faults.append(f"{event} {given[:1]!r:.200}")
        elif event == "exec" and str(getattr(given[0], "co_filename", "")).startswith(str(home)):
            faults.append(f"ran {given[0].co_filename}")
        elif event == "open" and isinstance(given[0], str | bytes):
            path = os.path.realpath(os.fsdecode(given[0]))
            writes = isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            inside = path.startswith(str(home)) and not path.endswith("secret.txt")
            if not inside and ((writes and path != "/dev/null") or not path.startswith(allowed)):
                faults.append(f"{'wrote' if writes else 'read'} {path}")

    sys.addaudithook(hook)


def opened(kind: Format, path: Path, home: Path) -> tuple[str, str]:
    """Open a mutant in this process: ("answer" or "refused" or "fault", words)."""
    from mionnx import MIError

    faults: list[str] = []
    watch(home, faults)
    size = sum(one.lstat().st_size for one in path.parent.iterdir())
    before = peak()
    try:
        kind.open(path)
        outcome = "answer", ""
    except MIError as error:
        outcome = "refused", str(error)
        if len(str(error)) > LONGEST:
            faults.append(f"a refusal of {len(str(error)):,} characters: {error!s:.100}")
    except MemoryError as error:
        return "fault", f"MemoryError: {error}"
    except BaseException as error:  # PanicException among them
        place = traceback.extract_tb(error.__traceback__)[-1]
        ours = [one for one in traceback.extract_tb(error.__traceback__) if str(ROOT) in one.filename]
        near = ours[-1] if ours else place
        return "fault", f"{type(error).__name__}: {error!s:.200} at {Path(near.filename).name}:{near.lineno}"
    if peak() - before > ROOM + size:
        faults.append(f"took {(peak() - before) / 2**20:.0f} MiB")
    if SECRET in outcome[1] or any(SECRET.encode() in one.read_bytes() for one in copied(home)):
        faults.append("told what lies outside")
    return ("fault", "; ".join(faults)) if faults else outcome


def copied(home: Path) -> list[Path]:
    """The small files that were written beside a mutant."""
    found = [path for name in ("out", "cache") for path in (home / name).rglob("*")]
    return [path for path in found if path.is_file() and not path.is_symlink() and path.stat().st_size < 2**20]


def in_child(kind: Format, path: Path, home: Path) -> tuple[str, str]:
    """Open a mutant in a forked process with limits of time and memory."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 6 * ROOM,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ.update(MIONNX_CACHE=str(home / "cache"), TMPDIR=str(home))
            tempfile.tempdir = str(home)
            os.write(writes, pickle.dumps(opened(kind, path, home)))
        finally:
            os._exit(0)
    os.close(writes)
    ready = select.select([reads], [], [], WALL)[0]
    data = b""
    while ready and (part := os.read(reads, 2**16)):  # to its end: the child waits while the pipe is full
        data += part
    if not ready:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    os.close(reads)
    if data:
        return pickle.loads(data)
    if not ready or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "fault", f"more than {SECONDS} s"
    return (
        "fault",
        f"the process died: {signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else status}",
    )


def made(kind: Format, base: Path) -> str:
    """Make the folder of a format in a process of its own: torch's threads do not survive a fork."""
    base.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        name = kind.make(base)
        (base.parent / f"{base.name}.name").write_text(name)
        os._exit(0)
    os.waitpid(child, 0)
    return (base.parent / f"{base.name}.name").read_text()


def fuzz(name: str, seconds: float, seed: int, only: int | None, scratch: Path) -> Found:
    """Open mutants of a format for some time."""
    found, kinds = Found(), FORMATS[name]
    bases = [scratch / "bases" / f"{name}-{place}" for place in range(len(kinds))]
    files = [made(kind, base) for kind, base in zip(kinds, bases, strict=True)]
    for base, file, kind in zip(bases, files, kinds, strict=True):
        home = Path(tempfile.mkdtemp(dir=scratch))
        shutil.copytree(base, home / "model")
        outcome, words = in_child(kind, home / "model" / file, home)
        if outcome != "answer":  # mutants of a file that cannot be opened would show nothing
            raise RuntimeError(f"the file of {name} that is changed does not open by itself: {words}")
    begun, number = time.monotonic(), only or 0
    while time.monotonic() - begun < seconds or number == (only or 0):
        place = number % len(kinds)
        home = Path(tempfile.mkdtemp(dir=scratch))
        (home / "secret.txt").write_text(SECRET)
        path = mutant(bases[place], files[place], kinds[place], home / "model", f"{name} {seed} {number}")
        outcome, words = in_child(kinds[place], path, home)
        if outcome == "fault":
            found.faults.append((number, words))
            print(f"{name} --seed {seed} --only {number}: {words}", flush=True)
        found.answers += outcome == "answer"
        found.refused += outcome == "refused"
        shutil.rmtree(home, ignore_errors=True)
        number += 1
        if only is not None:
            print(outcome, words)
            break
    return found


def save(results: dict[str, Found], seconds: float, seed: int) -> None:
    """Write the table of counts; rows of formats that were not run stay."""
    lines = [
        "# Hostile files",
        "",
        "`python tests/fuzz/fuzz_files.py FORMAT --seconds SECONDS --seed SEED --save`: mutants of each kind of file,",
        f"each in a process of its own: `MIError` or an answer in {SECONDS} s of the processor, 1 GiB over the file",
        "size, nothing read or written outside, nothing executed.",
        "",
        "| format | seconds | seed | mutants | answers | refused by `MIError` | findings |",
        "|---|---|---|---|---|---|---|",
    ]
    before = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in before if line.startswith("| ")}
    for name, found in results.items():
        counts = (found.answers + found.refused + len(found.faults), found.answers, found.refused, len(found.faults))
        rows[name] = f"| {name} | {seconds:g} | {seed} | {' | '.join(f'{count:,}' for count in counts)} |"
    lines += [rows[name] for name in FORMATS if name in rows]
    RESULTS.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", help=f"of {', '.join(FORMATS)}; all if left out")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one mutant")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/robustness.md")
    given = parser.parse_args()
    names = given.formats or [*FORMATS]
    if {"config.json", "gguf", "packed"}.intersection(names):
        import torch  # here, so that no child waits for it
        import transformers  # noqa: F401

        torch.set_num_threads(1)
    import mionnx  # noqa: F401

    scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        results = {name: fuzz(name, given.seconds, given.seed, given.only, scratch) for name in names}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for name, found in results.items():
        kinds = Counter(words.split(":")[0] for _, words in found.faults)
        print(f"{name}: {found.answers} answers, {found.refused} refused, {len(found.faults)} findings {dict(kinds)}")
    if given.save:
        save(results, given.seconds, given.seed)
    return int(any(found.faults for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
