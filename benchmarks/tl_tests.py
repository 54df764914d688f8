"""TransformerLens' own tests with a bridge on this engine: how many pass, by file, and what the others say.

    pip install -e ".[cpu,export,tl]" pytest
    python benchmarks/tl_tests.py [--source FOLDER] [--only WORD] [--kept FOLDER] [--save]

The tests come from the source distribution of the TransformerLens that is installed (`--source`: an unpacked one), and
run in processes of their own: all with `mionnx.transformer_lens.bridge`, and those that do not pass so with
TransformerLens' own bridge, since a test that it does not pass either says nothing. Without a network: `gpt2`,
`distilgpt2` and small names beside them mean a random GPT-2 of 12 layers, Llamas and Pythias a random Llama, with a
byte-level tokenizer trained on mionnx' READMEs. Passes of a bridge's module in torch are counted: there are to be none.
`--kept`: outcomes of each part are written there, and read back by a run that goes on where another ended.

Ten minutes; `--save` writes benchmarks/results/tl_tests.md.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import torch
from tables import present
from tl_checkpoints import arguments, checkpoint, environment, source, tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

GPT2 = (
    *("gpt2", "distilgpt2", "openai-community/gpt2", "gpt2-small", "distilbert/distilgpt2", "sshleifer/tiny-gpt2"),
    *("Intel/tiny-random-gpt2", "hyper-accel/tiny-random-gpt2", "NeelNanda/SoLU_2L512W_C4_Code", "solu-2l"),
    *("hf-internal-testing/tiny-random-gpt2", "hf-internal-testing/tiny-random-GPT2LMHeadModel"),
)
LLAMA = ("trl-internal-testing/tiny-LlamaForCausalLM-3.2", "hf-internal-testing/tiny-random-LlamaForCausalLM",
         "EleutherAI/pythia-14m", "EleutherAI/pythia-70m", "EleutherAI/pythia-70m-deduped",
         "hf-internal-testing/tiny-random-llama")  # fmt: skip
# Words in the names of the files: hooks, caches, parts of passes, analyses, patching, the driver protocol.
WORDS = re.compile(
    r"hook|cache|stop_at_layer|start_at_layer|analysis|logit_lens|head_detector|direct_logit|patching|driver_protocol|"
    r"attribution|svd_interpreter"
)
# Those of other families, of parts that no bridge of a decoder has, and of TransformerLens' own upkeep.
OTHERS = re.compile(r"bloom|bert|olmo|granite|ssm|moe|audio|symbolic|jacobian|registry|hf_cache|doctest|orchestration")
LONGEST = 3600  # seconds of a part
# A test that says so needs the network, or was not found: it says nothing of a bridge.
NO_BRIDGE = ("huggingface.co", "collection failure")
Results = dict[str, tuple[str, str]]  # test -> outcome, what it says


def checkpoints(folder: Path) -> dict[str, str]:
    """Write both models; each name that tests open -> its folder."""
    torch.manual_seed(0)
    small = {"vocab_size": 2000, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=12, n_head=12, n_embd=96, n_positions=1024, **small))
    llama = LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
                    intermediate_size=160, max_position_embeddings=2048, **small)
    )  # fmt: skip
    made = tokenizer()
    where = checkpoint(folder / "gpt2", gpt2, made), checkpoint(folder / "llama", llama, made)
    return dict.fromkeys(GPT2, where[0]) | dict.fromkeys(LLAMA, where[1])


def run(
    where: Path, files: list[str], models: dict[str, str], engine: str, folder: Path
) -> tuple[Results, dict[str, int]]:
    """Run the tests; the outcome of each, and what was counted."""
    report, counts = folder / f"{engine}.xml", folder / f"{engine}.json"
    variables = environment(models, engine, folder / "store") | {"MIONNX_TL_COUNTS": str(counts)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tl_plugin", "-p", "no:cacheprovider", "-o", "addopts=",
               "--continue-on-collection-errors",
               f"--junitxml={report}", "--tb=line", *files]  # fmt: skip
    with (folder / f"{engine}.log").open("w") as log:
        subprocess.run(command, cwd=where, env=variables, stdout=log, stderr=log, timeout=LONGEST)
    results: Results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [entry for entry in case if entry.tag in ("failure", "error", "skipped")]
        said = (bad[0].get("message") or "").strip().splitlines() if bad else []
        key = f"{case.get('classname')}::{case.get('name')}"
        results[key] = (bad[0].tag if bad else "passed", said[0][:150] if said else "")
    return results, json.loads(counts.read_text())


def part_of(file: str) -> str:
    """The part of the tests that a file belongs to; each is run by itself."""
    folders = Path(file).parent.parts[1:]
    return "-".join(folders[: 1 + (folders[0] == "unit")])


def node_of(test: str) -> str:
    """A test's id for pytest, of its names in a report."""
    module, name = test.split("::", 1)
    parts = module.split(".")
    file = next((number for number, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(["/".join(parts[: file + 1]) + ".py", *parts[file + 1 :], name])


def outcomes(
    engine: str, part: str, tests: list[str], where: Path, models: dict[str, str], folder: Path, kept: Path
) -> tuple[Results, dict[str, int]]:
    """Outcomes of files or tests of one part, run or read back, and what was counted."""
    file = kept / f"{engine}-{part}.json"
    if not file.exists():
        file.write_text(json.dumps([tests, *run(where, tests, models, engine, folder)]))
    named, found, counts = json.loads(file.read_text())
    if {*named} != {*tests}:
        raise SystemExit(f"{file} is of other tests: give another --kept")
    return {test: (said[0], said[1]) for test, said in found.items()}, counts


def both(
    where: Path, files: list[str], models: dict[str, str], folder: Path, kept: Path
) -> tuple[Results, Results, dict[str, int]]:
    """Outcomes on the engine; those of the others with TransformerLens' bridge; what was counted of the former."""
    ours, theirs, total = Results(), Results(), dict[str, int]()
    for part in dict.fromkeys(map(part_of, files)):
        own = [file for file in files if part_of(file) == part]
        found, counts = outcomes("onnx", part, own, where, models, folder, kept)
        ours |= found
        total = {name: total.get(name, 0) + count for name, count in counts.items()}
        again = [node_of(test) for test, (outcome, said) in found.items()
                 if outcome in ("failure", "error") and not any(text in said for text in NO_BRIDGE)]  # fmt: skip
        if again:
            theirs |= outcomes("torch", part, again, where, models, folder, kept)[0]
    return theirs, ours, total


def by_file(theirs: Results, ours: Results) -> list[list[str]]:
    """Rows: tests that pass on the engine, that pass with TransformerLens' bridge alone, with neither."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for test, (outcome, _) in ours.items():
        file = next(
            (part for part in test.split("::")[0].split(".")[::-1] if part.startswith("test_")), "not collected"
        )
        alone = theirs.get(test, ("",))[0] == "passed"
        counts[file][0 if outcome == "passed" else 1 if alone else 2] += 1
    rows = [[file, *map(str, numbers)] for file, numbers in sorted(counts.items())]
    return [*rows, ["all", *(str(sum(numbers[column] for numbers in counts.values())) for column in range(3))]]


def reasons(theirs: Results, ours: Results) -> list[list[str]]:
    """Rows: what the others say, and how many say so."""
    said: dict[str, list[str]] = defaultdict(list)
    for test, (outcome, _) in theirs.items():
        if outcome == "passed" and (here := ours.get(test, ("missing", "")))[0] != "passed":
            said[re.sub(r"0x[0-9a-f]+|/tmp/\S+", "...", f"{here[0]}: {here[1]}").replace("|", "/")].append(
                test.split("::")[-1]
            )
    return [
        [reason, str(len(tests)), ", ".join(tests[:3])]
        for reason, tests in sorted(said.items(), key=lambda one: -len(one[1]))
    ]


def main() -> None:
    """Run both, compare, and print."""
    options = arguments(__doc__.splitlines()[0], "files")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        where = options.source or source(folder)
        models = checkpoints(folder)
        paths = (path.relative_to(where) for path in (where / "tests").rglob("test_*.py"))
        files = sorted(str(path) for path in paths if WORDS.search(path.stem) and not OTHERS.search(str(path)))
        files = [file for file in files if options.only in file]
        (kept := options.kept or folder / "kept").mkdir(exist_ok=True)
        theirs, ours, counts = both(where, files, models, folder, kept)
        title = f"TransformerLens {version('transformer-lens')}: {len(ours)} tests of {len(files)} files"
        said = (f"{counts['bridges']} bridges on the engine, {counts['passes']} passes of theirs, "
                f"{counts['torch']} passes of their modules in torch")  # fmt: skip
        others = reasons(theirs, ours) or [["none", "0", ""]]
        tables = [
            (["file", "pass here", "with TransformerLens' bridge alone", "with neither"], by_file(theirs, ours)),
            (["what those with its bridge alone say", "tests", "such as"], others),
        ]
        present("tl_tests", "TransformerLens' own tests on this engine", title, tables, options.save, said)


if __name__ == "__main__":
    main()
