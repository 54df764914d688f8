"""Options as people type them: --version, sampling, near names, singular and plural; where messages stand."""

import json
from importlib.metadata import version

import pytest
from command_line import LLAMA, PROMPT, mionnx, succeeded

from mionnx import MIModel, RuntimeMissingError
from mionnx.cli.main import COMMANDS, load

SAMPLED = {
    "--do-sample": {},
    "--top-k 3": {"top_k": 3},
    "--top-p 0.5": {"top_p": 0.5},
    "--seed 4": {"seed": 4},
    "--temperature 0.7": {"temperature": 0.7},
}


def test_the_version():
    assert succeeded("--version").split() == ["mionnx", version("mionnx")]


def test_the_help_is_that_of_the_package():
    assert "Interpretability on ONNX graphs" in succeeded("--help")


@pytest.mark.parametrize("given", SAMPLED)
def test_a_sampling_option_implies_sampling(given, shipped):
    seed = [] if "seed" in given else ["--seed", 2]
    words = ["generate", LLAMA, "three four", *given.split(), *seed, "--max-new-tokens", 6, "--json"]
    found = json.loads(succeeded(*words))["text"]["new_ids"]
    options = {"seed": 2} | SAMPLED[given]
    assert found == shipped.generate("three four", do_sample=True, max_new_tokens=6, **options).new_ids[0].tolist()


def test_greedy_is_the_default_and_contradicts_sampling_options():
    greedy = succeeded("generate", LLAMA, PROMPT, "--max-new-tokens", 2)
    assert (
        succeeded("generate", LLAMA, PROMPT, "--max-new-tokens", 2, "--no-do-sample") == greedy == f"{PROMPT} Paris .\n"
    )
    refused = mionnx("generate", LLAMA, PROMPT, "--top-k", 3, "--no-do-sample")
    assert refused.returncode == 1
    assert "--top-k" in refused.stderr
    assert "--no-do-sample" in refused.stderr


@pytest.mark.parametrize("wrong", [["--temperature", -1], ["--top-p", 7], ["--zero", "blocks.9.hook_mlp_out"]])
def test_a_refusal_stands_alone(wrong):
    refused = mionnx("generate", LLAMA, PROMPT, *wrong)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: ")


def test_a_warning_is_a_note():
    run = mionnx("generate", LLAMA, "The capital of Mars is", "--max-new-tokens", 1)
    assert run.returncode == 0
    assert run.stderr.startswith("note: not in the vocabulary of world-llama: 'Mars'")
    assert ".py" not in run.stderr
    assert run.stdout.count("\n") == 1


NEAR = {
    "a command": (["generat"], "Did you mean 'generate'"),
    "an option": (["generate", LLAMA, PROMPT, "--max-new-token", 1], "--max-new-tokens"),
    "a provider": (["run", LLAMA, PROMPT, "--provider", "gpu"], "did you mean 'cuda'?"),
}


@pytest.mark.parametrize("typed", NEAR)
def test_near_names_are_named(typed):
    words, says = NEAR[typed]
    refused = mionnx(*words)
    assert refused.returncode != 0
    assert says in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("gpu", "did you mean 'cuda'?"),
        ("CUDA", "did you mean 'cuda'?"),
        ("cuda:1", "did you mean 'cuda', with provider_options={\"device_id\": 1}?"),
        ("CPU", "did you mean 'cpu'?"),
        ("cpuu", "did you mean 'cpu'?"),
        ("CUDAExecutionProvder", ""),
        ("CUDAExecutionProvider", "CPUExecutionProvider; what would install it"),
    ],
)
def test_providers_that_people_write(given, says):
    with pytest.raises(RuntimeMissingError, match="no ") as refused:
        MIModel.from_pretrained(LLAMA, provider=given)
    assert says in str(refused.value)


def test_options_have_one_name_on_all_commands():
    """An option in the singular and the plural is one; what gives a result gives it as JSON too."""
    options = {name: {one for entry in load(name).params for one in entry.opts} for name in COMMANDS}
    for name, has in options.items():
        for one, other in (("--layer", "--layers"), ("--head", "--heads")):
            assert (one in has) == (other in has), name
        assert "--json" in has or name in ("demo", "cache", "check"), name


def test_layers_are_given_apart_or_together():
    apart = succeeded("lens", LLAMA, PROMPT, "--layers", 0, "--layer", 2, "--json")
    assert succeeded("lens", LLAMA, PROMPT, "--layers", "0,2", "--json") == apart
    assert succeeded("hooks", LLAMA, "--layers", 2) == succeeded("hooks", LLAMA, "--layer", 2)
    refused = mionnx("attention", LLAMA, PROMPT, "--heads", "a")
    assert "--heads 'a': numbers with commas between" in refused.stderr


def test_compile_and_export_give_json(tmp_path):
    words = ["compile", LLAMA, "-o", tmp_path / "zero", "--zero", "blocks.1.hook_mlp_out", "--json"]
    found = json.loads(succeeded(*words))
    assert found["folder"] == str(tmp_path / "zero")
    assert found["interventions"] == 1


def test_a_port_without_a_server_is_refused(tmp_path):
    refused = mionnx("playground", LLAMA, "-o", tmp_path / "site", "--port", 8123)
    assert refused.returncode == 2
    assert "--serve" in refused.stderr
    assert not (tmp_path / "site").exists()
