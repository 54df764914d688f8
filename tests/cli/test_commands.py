"""The command line, run as a user runs it, on the models that ship."""

import json
import shutil

import numpy as np
import onnx
import pytest
from command_line import LLAMA, PROMPT, RWKV, in_a_process, mionnx, succeeded
from safetensors.numpy import load_file, save_file

from mionnx import (
    AttentionPatterns,
    Attribution,
    Circuit,
    HeadScores,
    HookCache,
    HookSpec,
    Intervention,
    LensResult,
)
from mionnx.analysis.gradients.attribute_patch import AttributedSweep
from mionnx.analysis.sweep.result import SweepResult


def test_a_process_exits_by_what_happened():
    found = in_a_process("run", LLAMA, PROMPT, "--json")
    assert found.returncode == 0, found.stderr
    assert found.stdout == succeeded("run", LLAMA, PROMPT, "--json")
    assert json.loads(found.stdout)["top"][0][0] == "Paris"
    failed = in_a_process("run", "models/none", PROMPT)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: models/none ") or failed.stderr.startswith("error: 'models/none' ")
    assert "Traceback" not in failed.stderr
    assert failed.stderr == mionnx("run", "models/none", PROMPT).stderr


@pytest.mark.slow
def test_the_demo_shows_real_effects(tmp_path):
    output = succeeded("demo", "--pages", tmp_path / "pages")
    titles = ("Attention patterns", "Logit lens", "knockout", "patching", "Head ablation", "Induction heads")
    titles = (
        *titles,
        "Direct logit attribution",
        "Gradients",
        "Steering",
        "RWKV state knockout",
        "Agreement of runtimes",
    )
    for number, title in enumerate(titles, 1):
        assert f"{number}. " in output
        assert title in output
    assert "'Paris'" in output
    assert "'Berlin'" in output
    assert "P('Mary') falls from" in output
    assert "the answer flips" in output.lower()
    made = {path.name for path in (tmp_path / "pages").iterdir()}
    pages = ("attention", "lens", "patching", "ablation", "heads", "attribution", "directions", "dose", "verify")
    pages = (*pages, "attribution_patching", "circuit")
    assert {f"{page}.{ending}" for page in pages for ending in ("html", "png")} <= made


@pytest.mark.slow
def test_a_recurrent_model_runs_the_examples_that_it_has_hooks_for():
    output = succeeded("demo", RWKV)
    assert "1. Logit lens" in output
    assert "2. Activation patching" in output
    assert "4. RWKV state knockout" in output
    assert "Attention" not in output


@pytest.mark.slow
def test_state_interventions():
    plain = json.loads(succeeded("run", RWKV, PROMPT, "--json"))
    assert plain["top"][0][0] == "Paris"
    treated = json.loads(succeeded("run", RWKV, PROMPT, "--state-knockout", "positions=3", "--json"))
    assert treated["kl_divergence"] > 1
    steered = succeeded("run", RWKV, PROMPT, "--state-steering", "0.5@positions=3;layers=3;heads=0", "--json")
    assert 0 < json.loads(steered)["kl_divergence"] < treated["kl_divergence"]
    captured = succeeded("run", RWKV, PROMPT, "--capture", "blocks.3.rwkv.hook_effective_attn", "--json")
    assert json.loads(captured)["captures"] == {"blocks.3.rwkv.hook_effective_attn": [1, 2, 5, 5]}
    assert "blocks.{i}.rwkv.hook_state" in succeeded("hooks", RWKV)


def test_hooks_lists_every_hook_point():
    assert "blocks.{i}.attn.hook_pattern" in succeeded("hooks", LLAMA)
    assert "blocks.3.hook_resid_post" in succeeded("hooks", LLAMA, "--layer", 3)
    found = json.loads(succeeded("hooks", LLAMA, "--json"))
    assert found["blocks.0.attn.hook_v"] == ["batch", 4, "seq", 16]


def test_run_shows_baseline_and_treated(tmp_path):
    plain = json.loads(succeeded("run", LLAMA, PROMPT, "--json"))
    assert plain["top"][0][0] == "Paris"
    assert "kl_divergence" not in plain
    treated = json.loads(succeeded("run", LLAMA, PROMPT, "--zero", "blocks.0.hook_mlp_out", "--json", "--k", 3))
    assert treated["baseline"] == plain["top"][:3]
    assert treated["kl_divergence"] > 0.01
    table = succeeded("run", LLAMA, PROMPT, "--scale", "blocks.0.hook_attn_out=0.5@positions=-1")
    assert "KL(baseline || treated) = " in table


def test_run_saves_what_it_captured(tmp_path):
    out = tmp_path / "out.safetensors"
    succeeded("run", LLAMA, PROMPT, "--capture", "blocks.*.attn.hook_pattern", "--save", out)
    found = load_file(out)
    assert set(found) == {"logits", *(f"blocks.{i}.attn.hook_pattern" for i in range(4))}
    assert np.abs(found["blocks.2.attn.hook_pattern"].sum(-1) - 1).max() < 1e-6
    np.testing.assert_array_equal(HookCache.load(out)["pattern", -1], found["blocks.3.attn.hook_pattern"])


SAVED = {
    "sweep": (SweepResult, [PROMPT, "--ablate", "zero", "--over", "layer"]),
    "attribute-patch": (AttributedSweep, [PROMPT, "The capital of Japan is", "--confirm", "2"]),
    "circuit": (Circuit, [PROMPT, "The capital of Japan is", "--edges", "0,40"]),
    "lens": (LensResult, [PROMPT, "--k", "2"]),
    "attention": (AttentionPatterns, [PROMPT, "--layer", "1"]),
    "attribute": (Attribution, [PROMPT]),
    "heads": (HeadScores, ["--batch", "2", "--period", "5"]),
}


@pytest.mark.parametrize("command", SAVED)
@pytest.mark.slow_beyond(3)
def test_analyses_save_what_python_loads(tmp_path, command):
    kind, arguments = SAVED[command]
    file = tmp_path / "result.safetensors"
    printed = succeeded(command, LLAMA, *arguments, "--json", "--save", file)
    assert json.loads(kind.load(file).to_json()) == json.loads(printed)
    refused = mionnx(command, LLAMA, *arguments, "--save", tmp_path / "result.npz")
    assert refused.returncode == 2
    said = "".join(character for character in refused.stderr if character.isalnum() or character == ".")
    assert "shouldendin.safetensors" in said  # a frame breaks lines anywhere


def test_every_kind_of_intervention_runs(tmp_path):
    save_file({"key": np.ones(128, np.float32)}, tmp_path / "dir.safetensors")
    HookSpec().intervene("hook_embed", Intervention.Scale(0.9)).save(tmp_path / "spec.safetensors")
    output = succeeded(
        "run", LLAMA, PROMPT, "--json",
        "--add", f"blocks.2.hook_resid_post={tmp_path}/dir.safetensors:key*1.5@positions=0,-1",
        "--project-out", f"blocks.1.hook_resid_post={tmp_path}/dir.safetensors:key",
        "--replace", f"blocks.1.hook_mlp_out={tmp_path}/dir.safetensors:key@positions=1",
        "--knockout", "blocks.2.attn.hook_scores=-1>0,3>*@heads=1",
        "--hooks", tmp_path / "spec.safetensors",
    )  # fmt: skip
    assert json.loads(output)["kl_divergence"] > 0


@pytest.mark.slow
def test_a_glob_and_a_list_are_their_hook_points(tmp_path):
    each = [part for layer in range(4) for part in ("--zero", f"blocks.{layer}.attn.hook_z@heads=3")]
    loop = succeeded("run", LLAMA, PROMPT, "--json", *each)
    assert json.loads(loop)["kl_divergence"] > 0
    assert succeeded("run", LLAMA, PROMPT, "--json", "--zero", "blocks.*.attn.hook_z@heads=3") == loop
    listed = "blocks.[01].attn.hook_z,blocks.2.attn.hook_z,blocks.3.attn.hook_z@heads=3"
    assert succeeded("run", LLAMA, PROMPT, "--json", "--zero", listed) == loop
    plain, less = (
        succeeded("generate", LLAMA, PROMPT, "--json", "--max-new-tokens", 3, "--scale", f"blocks.*.hook_mlp_out={by}")
        for by in (1, 0.1)
    )
    assert plain != less
    HookSpec().intervene("blocks.*.attn.hook_z", Intervention.Zero(heads=3)).save(tmp_path / "spec.safetensors")
    assert succeeded("run", LLAMA, PROMPT, "--json", "--hooks", tmp_path / "spec.safetensors") == loop
    command = ["compile", LLAMA, "-o", tmp_path / "out", "--scale", "blocks.*.hook_mlp_out=0.5"]
    made = json.loads(succeeded(*command, "--knobs", "half=blocks.[0-2].*", "--json"))
    assert made["interventions"] == 4
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- `half`: strength at blocks.0.hook_mlp_out, blocks.1.hook_mlp_out, blocks.2.hook_mlp_out; " in card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", LLAMA, PROMPT, "--zero", "blocks.*.hook_mlp_ot"], "did you mean 'blocks.3.hook_mlp_out'"),
        (["run", LLAMA, PROMPT, "--zero", "blocks.*.attn.*"], "intervene at blocks.0.attn.hook_z instead"),
        (["generate", LLAMA, PROMPT, "--knockout", "blocks.2.*=-1>0"], "'blocks.2.*' means that hook point too"),
        (["run", "models/none", PROMPT], "error: 'models/none' is neither a folder here nor"),
        (["run", LLAMA, PROMPT, "--capture", "blocks.1.hook_resid_pots"], "blocks.1.hook_resid_post"),
        (["run", LLAMA, PROMPT, "--zero", "blocks.1.hook_mlp_out=3"], "--zero takes"),
        (["run", LLAMA, PROMPT, "--provider", "cuda"], "CPUExecutionProvider"),
        (["hooks", LLAMA, "--layer", "9"], "no layer 9"),
        (["run", LLAMA, " "], "empty"),
        (["run", LLAMA, PROMPT, "--state-knockout", "positions=3"], "no recurrent state"),
        (["run", RWKV, PROMPT, "--state-knockout", "positions=5"], "position 5"),
    ],
)
def test_errors_are_one_message(arguments, message):
    run = mionnx(*arguments)
    assert run.returncode == 1
    assert message in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_export_makes_what_hooks_reads(tmp_path):
    checkpoint = shutil.copytree(LLAMA, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.onnx"))
    assert "llama, 4 layers" in succeeded("export", checkpoint, "-o", tmp_path / "hooked", "--copy")
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "hooked").iterdir())
    onnx.checker.check_model(tmp_path / "hooked" / "model.onnx", full_check=True)  # refuses files with several names
    shipped, fresh = (json.loads(succeeded("hooks", folder, "--json")) for folder in (LLAMA, tmp_path / "hooked"))
    assert fresh == shipped
    again = mionnx("export", checkpoint, "-o", tmp_path / "hooked")
    assert again.returncode == 1
    assert "exists already" in again.stderr


def test_generate_streams_and_compares():
    plain = succeeded("generate", LLAMA, PROMPT, "--max-new-tokens", 4)
    assert plain.startswith(f"{PROMPT} Paris")
    compared = succeeded(
        "generate", LLAMA, PROMPT, "--max-new-tokens", 4, "--zero", "blocks.1.hook_attn_out@positions=-1", "--compare"
    )
    first, second = compared.strip().splitlines()
    assert first == f"baseline: {plain.strip()}"
    assert second.startswith(f"steered: {PROMPT} ")
    assert second.removeprefix("steered") != first.removeprefix("baseline")


@pytest.mark.slow
def test_generate_with_a_direction_from_a_file(tmp_path):
    """The phases, a spec's own file, JSON, sampling, stopping."""
    save_file({"up": np.linspace(-9, 9, 128).astype(np.float32)}, tmp_path / "dir.safetensors")
    edit = f"blocks.2.hook_resid_post={tmp_path}/dir.safetensors:up*50@positions=generated"
    found = json.loads(succeeded("generate", LLAMA, PROMPT, "--add", edit, "--compare", "--json"))
    assert set(found) == {"baseline", "steered"}
    assert found["baseline"]["new_ids"][0] == found["steered"]["new_ids"][0]
    assert found["baseline"]["new_ids"][1:] != found["steered"]["new_ids"][1:]
    sampled = [
        succeeded("generate", RWKV, PROMPT, "--temperature", 2, "--seed", seed, "--max-new-tokens", 8)
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    stopped = json.loads(succeeded("generate", RWKV, "one two three", "--stop-strings", "five", "--json"))
    assert stopped["text"]["new_text"].split() == ["four", "five"]


def test_generate_of_a_chat(copy):
    """The prompt in the model's template, with a system's message before it if there is one."""
    template = "{% for message in messages %}{{ message.content + ' ' }}{% endfor %}"
    (copy / "chat_template.jinja").write_text(template)
    asked = ("generate", copy, "is", "--chat", "--system", "The capital of France", "--max-new-tokens", 1)
    assert succeeded(*asked) == "is\nParis\n"
    assert json.loads(succeeded(*asked, "--json"))["text"]["text"] == f"{PROMPT} Paris"


def test_generate_refuses_what_it_cannot_do():
    for arguments, named in (
        (["--compare"], "none was given"),
        (["--zero", "blocks.9.hook_mlp_out"], "blocks.9.hook_mlp_out"),
        (["--zero", "blocks.1.hook_mlp_out@positions=generating"], "generating"),
        (["--temperature", "0"], "temperature"),
        (["--chat"], "has no chat template"),
        (["--system", "Be brief."], "give --chat too"),
    ):
        run = mionnx("generate", LLAMA, PROMPT, *arguments)
        assert run.returncode == 1
        assert named in run.stderr
        assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_verify_says_where_runtimes_differ_and_exits_by_it(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n\nThe capital of Germany is\n")
    page, run = tmp_path / "verify.html", tmp_path / "run.safetensors"
    command = ["verify", LLAMA, "--prompts", prompts, "--points", "blocks.*.hook_resid_post", "--greedy", 1]
    output = succeeded(*command, "--runtimes", "ort-cpu,ort-cpu:none,CoreMLExecutionProvider", "--html", page)
    assert "CoreMLExecutionProvider" in output
    assert "skipped" in output
    assert "ort-cpu and ort-cpu:none agree at 5e-05" in output
    assert page.read_text().startswith("<!doctype html>")
    succeeded(*command, "--runtimes", "ort-cpu", "--record", run, "--repeat")
    again = json.loads(succeeded("verify", LLAMA, "--runtimes", "ort-cpu:threads=1", "--against", run, "--json"))
    assert again["agrees"]
    assert [row["name"] for row in again["besides"][0]["rows"]][-1] == "hook_logits"
    strict = mionnx(*command, "--runtimes", "ort-cpu,reference", "--tolerance", 0)
    assert strict.returncode == 2
    assert "DISAGREE" in strict.stdout
    for wrong, said in (
        (["--prompts", tmp_path / "none"], "cannot read"),
        (["--positions", "a"], "--positions"),
    ):
        refused = mionnx("verify", LLAMA, "--prompt", PROMPT, *wrong)
        assert refused.returncode == 1
        assert said in refused.stderr


def test_bisect_writes_a_report_and_exits_by_it(tmp_path):
    assert "no step differs" in succeeded("bisect", LLAMA, "--runtimes", "ort-cpu,ort-cpu:none", "--prompt", PROMPT)
    report = tmp_path / "report"
    exact = ["--prompt", PROMPT, "--tolerance", 0, "-o", report, "--json"]
    found = mionnx("bisect", LLAMA, "--runtimes", "ort-cpu,reference", *exact)
    assert found.returncode == 2, found.stderr
    assert json.loads(found.stdout)["nodes"]
    assert (report / "model.onnx").is_file()
    assert (report / "reproduce.py").is_file()


@pytest.mark.slow
def test_generate_takes_a_file_of_prompts(tmp_path):
    prompts = [PROMPT, "Paris is the capital of", "The capital of Kenya is a city . The capital of Japan is"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    asked = ["--max-new-tokens", 3, "--scale", "blocks.2.hook_mlp_out=1.5"]
    many = ["generate", LLAMA, "--prompts", tmp_path / "prompts.txt", "--batch-size", 2, *asked]
    alone = [json.loads(succeeded("generate", LLAMA, prompt, "--json", *asked))["text"] for prompt in prompts]
    assert json.loads(succeeded(*many, "--json"))["text"] == alone
    assert succeeded(*many).splitlines() == [one["text"] for one in alone]
    assert "--prompts" in mionnx("generate", LLAMA).stderr
    assert "batch_size='few'" in mionnx(*many, "--batch-size", "few").stderr
