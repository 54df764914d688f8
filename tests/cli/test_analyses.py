"""Commands of verbs on the models that ship: what they print is what the verb gives in Python."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import LLAMA, PROMPT, mionnx, succeeded
from safetensors.numpy import save_file

from mionnx import Activations, DoseResponse, HookSpec, Intervention, MIModel, ProbeResult, probe
from mionnx.cli.injection import Opening
from mionnx.graph.hooked_model import HookedModel

OTHER = "The capital of Italy is"
COST = ("cost", "seconds")
POSITIVE, NEGATIVE = "The capital of Germany is", "The capital of France is"
PAIRS = [
    {"clean": PROMPT, "corrupted": OTHER, "answer": "Paris", "versus": "Rome"},
    {"clean": "The capital of Japan is", "corrupted": "The capital of Peru is", "answer": "Tokyo", "versus": "Lima"},
]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, PAIRS)))
    return file


@pytest.fixture(scope="module")
def unpacked() -> MIModel:
    """The shipped Llama as a command that runs each graph once opens it, which tells in the last bits."""
    return Opening(str(LLAMA), {"threads": 1}).once()


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero()).save(tmp_path / "spec.safetensors")
    return tmp_path / "spec.safetensors"


def columns(*names: str) -> dict[str, list[str]]:
    return {name: [pair[name] for pair in PAIRS] for name in names}


def printed(*words: object) -> Any:
    return json.loads(succeeded(*words, "--json"))


def said(run: Any) -> str:
    return " ".join(run.stderr.replace("│", " ").split())


def same(words: list[object], result: Any) -> None:
    """The command's JSON is the result's, to the last bit: on one thread, as `shipped` is opened."""
    threads = ["--threads", 1] if words[0] != "probe" else []
    assert without_cost(printed(*words, *threads)) == without_cost(json.loads(result.to_json()))


def without_cost(values: Any) -> Any:
    """JSON without the entries of measured time and memory, at any depth."""
    if isinstance(values, dict):
        return {name: without_cost(value) for name, value in values.items() if name not in COST}
    return values


CALLS = {
    "sweep": (["--hook", "z", "--over", "layer,head", "--answer", "Paris", "--position=-1"], "patch_sweep"),
    "sweep noising": (["--patching", "noising", "--layers", "1-2", "--metric", "kl"], "patch_sweep"),
    "sweep receivers": (["--receivers", "blocks.3.attn.hook_q,blocks.3.attn.hook_k", "--sender", "z"], "path_patch"),
    "attribute-patch": (["--hook", "z", "--over", "layer", "--steps", 2, "--rules", "relp"], "attribute_patch"),
    "circuit": (["--edges", "0,40", "--steps", 2, "--rules", "frozen_norm", "--metric", "kl"], "circuit"),
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "sweep": {"hook": "z", "over": ["layer", "head"], "answer": "Paris", "position": -1},
    "sweep noising": {"patching": "noising", "layers": [1, 2], "metric": "kl"},
    "sweep receivers": {"receivers": ["blocks.3.attn.hook_q", "blocks.3.attn.hook_k"], "sender": "z"},
    "attribute-patch": {"hook": "z", "over": "layer", "steps": 2, "rules": "relp"},
    "circuit": {"edges": [0, 40], "steps": 2, "rules": "frozen_norm", "metric": "kl"},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow_beyond(3)
def test_comparisons(name: str, shipped: MIModel) -> None:
    words, verb = CALLS[name]
    result = getattr(shipped, verb)(PROMPT, OTHER, **ARGUMENTS[name])
    same([name.split()[0], LLAMA, PROMPT, OTHER, *words], result)


def test_ablation(shipped: MIModel) -> None:
    result = shipped.ablation_sweep(PROMPT, "mlp_out", "layer", "probability", kind="mean", by="token", answer="Paris")
    words = ["--ablate", "mean", "--by", "token", "--hook", "mlp_out", "--over", "layer", "--metric", "probability"]
    same(["sweep", LLAMA, PROMPT, *words, "--answer", "Paris"], result)


def test_many_pairs(pairs: Path, shipped: MIModel, unpacked: MIModel) -> None:
    both = columns("clean", "corrupted", "answer", "versus")
    same(["sweep", LLAMA, "--pairs", pairs], shipped.patch_sweep(**both))
    same(["attribute-patch", LLAMA, "--pairs", pairs], shipped.attribute_patch(**both))
    result = unpacked.attribute(both["clean"], both["answer"], both["versus"])
    same(["attribute", LLAMA, "--pairs", pairs], result)
    result = shipped.get_logit_diff(both["corrupted"], both["answer"], both["versus"], batch_size=1)
    same(["logit-diff", LLAMA, pairs, "--corrupted", "--batch-size", 1], result)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep", LLAMA], "give a clean prompt, or --pairs FILE"),
        (["sweep", LLAMA, PROMPT, OTHER, "--pairs", "pairs"], "give a clean prompt, or --pairs FILE"),
        (["sweep", LLAMA, "--pairs", "pairs", "--answer", "Paris"], "has one for each pair"),
        (
            ["sweep", LLAMA, PROMPT, OTHER, "--hook", "z", "--receivers", "all"],
            "--hook goes with patching and ablation",
        ),
        (["sweep", LLAMA, PROMPT, OTHER, "--repeats", 2], "--repeats goes with --noise, or --ablate resample"),
        (["sweep", LLAMA, PROMPT, "--ablate", "zero", "--receivers", "all"], "goes with patching"),
        (["attribute-patch", LLAMA, PROMPT], "give a corrupted prompt"),
        (
            ["attribute-patch", LLAMA, PROMPT, OTHER, "--hook", "blocks.*.attn.*", "--over", "layer,head"],
            "several kinds",
        ),
        (["circuit", LLAMA, PROMPT], "give a corrupted prompt"),
        (["circuit", LLAMA, "--pairs", "places"], "edges go from all positions to all"),
        (["logit-diff", LLAMA, "places"], "has no answer, no versus"),
        (["steer", LLAMA, "--load", "none.safetensors"], "give --prompt TEXT, or --prompts FILE"),
        (["steer", LLAMA, "--prompt", PROMPT, "--positive", POSITIVE], "give --positive and --negative"),
        (["harvest", LLAMA, "texts.txt", "-o", "out"], "give --points, or captures in a file of --hooks"),
        (["harvest", LLAMA, "texts.txt", "-o", "out", "--points", "z", "--workers", 2], "give --ray local"),
        (["quantise", LLAMA, "-o", "out", "--texts", "pairs"], "give --budget too"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[object], message: str, pairs: Path, tmp_path: Path) -> None:
    (tmp_path / "places").write_text(json.dumps(PAIRS[0] | {"positions": {"last": -1}}))
    (tmp_path / "places").write_text(json.dumps({"clean": PROMPT, "corrupted": OTHER, "positions": {"last": -1}}))
    files = {"pairs": pairs, "places": tmp_path / "places"}
    run = mionnx(*(files.get(str(word), word) for word in words))
    assert run.returncode in (1, 2)
    assert message in said(run)
    assert not (tmp_path / "out").exists()


class TestReading:
    def test_the_lens(self, unpacked: MIModel, spec: Path) -> None:
        options = {"k": 2, "layers": [0, 3], "positions": [1, -1], "points": ["resid_pre", "resid_post"]}
        result = unpacked.logit_lens(PROMPT, HookSpec.load(spec), token_ids=["Rome", "Berlin"], **options)
        words = ["--k", 2, "--layers", "0,3", "--positions=1,-1", "--points", "resid_pre,resid_post", "--hooks", spec]
        same(["lens", LLAMA, PROMPT, *words, "--token-ids", "Rome", "--token-ids", "Berlin"], result)
        plain = printed("lens", LLAMA, PROMPT, "--layers", "0,3")
        assert plain != json.loads(result.to_json())

    def test_attention(self, unpacked: MIModel, spec: Path) -> None:
        hooks = HookSpec.load(spec)
        result = unpacked.attention(PROMPT, [2, 3], 1, hooks=hooks)
        same(["attention", LLAMA, PROMPT, "--layers", "2-3", "--head", 1, "--hooks", spec], result)
        first, last = (succeeded("attention", LLAMA, PROMPT, f"--position={position}") for position in (1, -1))
        assert "position 1, 'capital'" in " ".join(first.split())
        assert "position 4, 'is'" in " ".join(last.split())

    def test_attribution(self, unpacked: MIModel, spec: Path) -> None:
        result = unpacked.attribute(PROMPT, "Paris", "Rome", position=-1)
        same(["attribute", LLAMA, PROMPT, "--answer", "Paris", "--versus", "Rome"], result)
        result = unpacked.attribute(PROMPT, position=3, hooks=HookSpec.load(spec))
        same(["attribute", LLAMA, PROMPT, "--position", 3, "--hooks", spec], result)
        few, many = (succeeded("attribute", LLAMA, PROMPT, "--k", k).count("\n") for k in (2, 9))
        assert many - few == 7

    def test_heads(self, unpacked: MIModel) -> None:
        options = {"batch": 2, "period": 5, "seed": 3, "token_ids": range(20, 60)}
        result = unpacked.head_scores(["induction", "previous_token"], **options)
        words = [
            "--kinds",
            "induction,previous_token",
            "--batch",
            2,
            "--period",
            5,
            "--seed",
            3,
            "--token-ids",
            "20-59",
        ]
        same(["heads", LLAMA, *words], result)


def test_steering(tmp_path: Path, shipped: MIModel) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n{OTHER}\n")
    directions = shipped.contrast(POSITIVE, NEGATIVE, "mlp_out")
    result = shipped.dose_response([PROMPT, OTHER], directions[1], [0, 0.5, 2], target="Berlin", positions=-1)
    words = [
        "--positive",
        POSITIVE,
        "--negative",
        NEGATIVE,
        "--hook",
        "mlp_out",
        "--strengths",
        "0,0.5,2",
        "--layer",
        1,
    ]
    words += ["--positions=-1", "--target", "Berlin", "--save", tmp_path / "dose.safetensors"]
    words += ["--save-directions", tmp_path / "directions.safetensors"]
    same(["steer", LLAMA, "--prompts", prompts, *words], result)
    assert DoseResponse.load(tmp_path / "dose.safetensors").to_json() == result.to_json()
    again = ["--load", tmp_path / "directions.safetensors", "--layer", 1, "--strengths", "0,0.5,2", "--positions=-1"]
    same(["steer", LLAMA, "--prompt", PROMPT, "--prompt", OTHER, "--target", "Berlin", *again], result)


def test_harvests_and_probes(tmp_path: Path, shipped: MIModel) -> None:
    texts, labels = tmp_path / "texts.txt", tmp_path / "labels.txt"
    frames = [f"The capital of {name} is" for name in ("France", "Germany", "Italy", "Peru", "Japan", "Kenya")]
    texts.write_text("\n".join(frames))
    labels.write_text("\n".join(["Europe"] * 3 + [""] + ["Asia", "Africa"]).replace("Africa", "Asia"))
    words = ["harvest", LLAMA, texts, "-o", tmp_path / "made", "--points", "blocks.[12].hook_resid_post,hook_embed"]
    found = printed(*words, "--positions=-1", "--dtype", "float16", "--batch-size", 2)
    points = ["blocks.[12].hook_resid_post", "hook_embed"]
    expected = shipped.harvest(texts, points, tmp_path / "own", positions=[-1], dtype="float16", batch_size=2)
    assert (found["tokens"], found["texts"]) == (expected.tokens, expected.texts)
    assert found["columns"] == {name: [dtype, [*shape]] for name, (dtype, shape) in expected.columns.items()}
    made = Activations(tmp_path / "made")
    np.testing.assert_array_equal(made["blocks.2.hook_resid_post"], expected["blocks.2.hook_resid_post"])
    result = probe(made, ["Europe"] * 3 + [None] + ["Asia"] * 2, ["hook_embed"], folds=2, penalty=2.0)
    same(["probe", tmp_path / "made", labels, "--points", "hook_embed", "--folds", 2, "--penalty", 2.0], result)


class TestDeployment:
    def test_settings_of_blocks(self, tmp_path: Path) -> None:
        words = ["--no-symmetric", "--no-embedding", "--block-size", 16, "--keep", "*o_proj*,*up_proj*", "--bits", 8]
        found = printed("quantise", LLAMA, "-o", tmp_path / "made", *words)
        settings = HookedModel.open(tmp_path / "made").metadata.quantised
        assert {name: settings[name] for name in ("bits", "block_size", "symmetric")} == {
            "bits": 8,
            "block_size": 16,
            "symmetric": False,
        }
        assert found["matrices"] == settings["matrices"]
        assert found["bytes"] < found["bytes_before"]

    def test_layouts_weights_and_knobs(self, tmp_path: Path) -> None:
        edit = ["--scale", "blocks.2.hook_attn_out=0.5", "--knobs", "one=blocks.2.hook_attn_out"]
        found = printed("compile", LLAMA, "-o", tmp_path / "made", *edit, "--layout", "triton", "--weights", "embedded")
        assert (found["weights"], found["knobs"], found["interventions"]) == ("embedded", ["one"], 1)
        assert list((tmp_path / "made").rglob("config.pbtxt"))
        refused = mionnx("compile", LLAMA, "-o", tmp_path / "no", *edit, "--layout", "tritn")
        assert "triton" in said(refused)

    def test_monitors_are_those_of_the_verb(self, tmp_path: Path) -> None:
        point, rng = "blocks.2.hook_resid_post", np.random.default_rng(0)
        weights = rng.normal(size=(2, 128)).astype(np.float32)
        save_file({"w": weights}, tmp_path / "probe.safetensors")
        model, cities = MIModel.from_pretrained(LLAMA), ["France", "Germany", "Italy", "Japan"]
        texts = [f"The capital of {city} is" for city in cities]
        fitted = probe(model.harvest(texts, point, tmp_path / "activations", positions=-1), [*"abab"], folds=2)
        fitted = fitted.save(tmp_path / "fitted.safetensors")
        options = [
            *("--monitors", f"lens={point}@top3", "--monitors", f"sea={point}@{tmp_path}/probe.safetensors:w"),
            *("--monitors", f"city={fitted}"),
        ]
        found = printed("compile", LLAMA, "-o", tmp_path / "made", *options)
        assert found["monitors"] == ["lens", "sea", "city"]
        monitors = {"lens": model.lens_monitor(2, 3), "sea": (point, weights), "city": ProbeResult.load(fitted)}
        made = model.compile(HookSpec(), tmp_path / "python", monitors=monitors)
        files = [onnx.load(folder / "model.onnx", load_external_data=False) for folder in (tmp_path / "made", made)]
        assert files[0].graph == files[1].graph
        for wrong, words in {
            "sea": "NAME=HOOK@top5",
            f"sea={point}@top500": "471",
            "sea=blocks.2.mlp.hook_act@top5": "the stream",
            f"sea={point}@{tmp_path}/probe.safetensors:v": "no tensor 'v', only w",
            f"sea={tmp_path}/none": "none",
        }.items():
            assert words in said(mionnx("compile", LLAMA, "-o", tmp_path / "no", "--monitors", wrong))
        assert not (tmp_path / "no").exists()

    def test_verify_and_bisect_exit_by_what_they_find(self, tmp_path: Path) -> None:
        (tmp_path / "prompts.json").write_text(json.dumps([OTHER]))
        words = ["--runtimes", "ort-cpu,reference", "--tolerance", 0]
        more = ["--prompt", PROMPT, "--prompts", tmp_path / "prompts.json", "--greedy", 0, "--positions=0,-1"]
        run = mionnx("verify", LLAMA, *words, *more, "--points", "blocks.1.hook_resid_*", "--json")
        assert run.returncode == 2
        found = json.loads(run.stdout)
        assert found["prompts"] == [PROMPT, OTHER]
        streams = [f"blocks.1.hook_resid_{name}" for name in ("pre", "mid", "post")]
        assert [row["name"] for row in found["besides"][0]["rows"]] == [*streams, "hook_logits"]
        bisected = mionnx("bisect", LLAMA, *words, "--prompt", PROMPT, "-o", tmp_path / "report")
        assert bisected.returncode == 2
        assert (tmp_path / "report" / "reproduce.py").is_file()
        assert mionnx("bisect", LLAMA, "--runtimes", "ort-cpu,reference", "--prompt", PROMPT).returncode == 0

    def test_a_second_model_and_interventions(self, spec: Path) -> None:
        words = ["--runtimes", "ort-cpu", "--prompt", PROMPT, "--greedy", 0, "--no-local"]
        found = printed("verify", LLAMA, *words, "--other", LLAMA, "--hooks", spec)
        (beside,) = found["besides"]
        assert all(row["identical"] for row in beside["rows"])
        assert found["agrees"]
