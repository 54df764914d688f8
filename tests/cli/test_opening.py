"""How commands open models, what they say, and what they refuse: part 3 of the findings, "The command line"."""

import json
import re

import numpy as np
import onnx
import pytest
from command_line import LLAMA, PROMPT, mionnx, succeeded

from mionnx import HookSpec, Intervention, MIModel
from mionnx.cli.main import COMMANDS, load, wrapped

ALL = {name: load(name) for name in COMMANDS}
ONE = {name: command for name, command in ALL.items() if not hasattr(command, "commands")} | {
    f"cache {name}": command for name, command in ALL["cache"].commands.items()
}
WITHOUT_A_MODEL = {"probe", *(name for name in ONE if name.startswith("cache "))}
RUNS = ("run", "generate", "sweep", "attribute-patch", "circuit", "lens", "attention", "attribute", "heads", "steer")


def options(name: str) -> set[str]:
    return {option for parameter in ONE[name].params for option in parameter.opts}


def told(run) -> str:
    return " ".join(run.stderr.split())


@pytest.mark.parametrize("name", sorted(ONE))
def test_every_command_has_json_an_example_and_says_which_model(name):
    assert "--json" in options(name)
    assert "Example" in ONE[name].help
    if name not in WITHOUT_A_MODEL:
        assert {"--revision", "--subfolder"} <= options(name)
    if name in RUNS:
        assert {"--dtype", "--accuracy-level", "--threads", "--provider"} <= options(name)


def test_the_cache_has_an_example():
    assert "Example: mionnx cache ls" in ALL["cache"].help


@pytest.mark.parametrize("name", sorted(ONE))
def test_output_is_a_folder_and_save_a_file(name):
    helps = {option: parameter.help for parameter in ONE[name].params for option in parameter.opts}
    assert "-o" not in options(name) or "--folder" in options(name)
    assert helps.get("--save", "Write").startswith("Write")


def test_threads_and_dtype_reach_the_model(monkeypatch):
    seen = []
    real = MIModel.from_pretrained.__func__
    monkeypatch.setattr(MIModel, "from_pretrained", classmethod(lambda c, *a, **k: seen.append(k) or real(c, *a, **k)))
    succeeded("run", LLAMA, PROMPT, "--threads", 1, "--dtype", "float32")
    assert (seen[0]["threads"], seen[0]["dtype"]) == (1, "float32")
    assert "hooked model in float32 already" in told(mionnx("run", LLAMA, PROMPT, "--dtype", "float16"))


def test_json_of_check_and_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    assert json.loads(succeeded("check", LLAMA, "--json"))["files"] == ["model.safetensors"]
    assert json.loads(succeeded("cache", "verify", "--json")) == []
    assert json.loads(succeeded("cache", "prune", "--json"))["removed"] == 0
    assert json.loads(succeeded("cache", "clear", "--json")) == {"removed": 0, "stay": {}, "unfinished": 0}


class TestRanges:
    """Part 2, 18: --layers 16-29."""

    def test_of_layers_and_heads(self):
        some, each = (succeeded("lens", LLAMA, PROMPT, "--layers", layers, "--json") for layers in ("1-3", "1,2,3"))
        assert some == each
        listed = json.loads(succeeded("hooks", LLAMA, "--layers", "1-2", "--json"))
        assert {name.split(".")[1] for name in listed} == {"1", "2"}

    def test_of_an_interventions_limits(self):
        some, each = (
            succeeded("run", LLAMA, PROMPT, "--zero", f"blocks.1.attn.hook_z@heads={heads}", "--json")
            for heads in ("0-2", "0,1,2")
        )
        assert some == each

    @pytest.mark.parametrize("wrong", ["3-1", "1-", "-", "0-99999999999", "1-2-3"])
    def test_what_is_none_is_refused(self, wrong):
        assert "numbers with commas between, as 0,1 or 2-5" in told(mionnx("lens", LLAMA, PROMPT, "--layers", wrong))


class TestErrors:
    def test_begin_with_the_sentence(self):
        run = mionnx("hooks", "models/none/of/them")
        assert re.match(r"error: models/none/of/them is no folder with a model", run.stderr)
        assert run.stderr.count("\n") == 1  # a pipe's lines are not wrapped

    def test_lines_end_between_words_or_behind_separators(self):
        path = "/a-long/folder/of-many/parts/with-a-name/that-goes-on"
        rest = f"error: {path} is no folder"
        for line in (lines := wrapped(rest, 30)):
            assert len(line) <= 30
            assert rest.startswith(line)
            rest = rest[len(line) :]
            assert not rest or line.endswith("/") or rest.startswith(" ")
            rest = rest.removeprefix(" ")
        assert not rest
        assert len(lines) > 2
        assert wrapped("one\ntwo", 30) == ["one", "two"]

    def test_another_librarys_word(self):
        run = mionnx("patch")
        assert run.returncode == 2
        assert "Did you mean 'sweep'?" in told(run)
        assert "Did you mean 'compile'" in told(mionnx("compil"))

    def test_a_layer_that_there_is_not(self):
        run = mionnx("run", LLAMA, PROMPT, "--zero", "blocks.9.hook_attn_out")
        assert "no hook point 'blocks.9.hook_attn_out'; layers are 0 to 3" in told(run)
        near = mionnx("run", LLAMA, PROMPT, "--zero", "blocks.1.hook_atn_out")
        assert "did you mean 'blocks.1.hook_attn_out'" in told(near)

    def test_what_was_not_captured(self, shipped):
        cache = shipped.forward(PROMPT, HookSpec().capture("blocks.2.attn.hook_pattern"))
        with pytest.raises(Exception, match=r"was not captured; captured: blocks.2.attn.hook_pattern"):
            cache.require("blocks.2.attn.hook_scores")


class TestCompile:
    def test_without_interventions_it_is_refused_unless_plain(self, tmp_path, shipped):
        """Part 3, 12."""
        run = mionnx("compile", LLAMA, "-o", tmp_path / "out")
        assert run.returncode == 1
        assert "nothing would be baked in" in told(run)
        assert "--plain" in told(run)
        assert not (tmp_path / "out").exists()
        succeeded("compile", LLAMA, "-o", tmp_path / "out", "--plain")
        assert (tmp_path / "out" / "model.onnx").exists()
        both = mionnx("compile", LLAMA, "-o", tmp_path / "two", "--plain", "--zero", "hook_embed")
        assert "leave one of the two out" in told(both)

    def test_a_knockout_of_positions_that_every_text_has(self, tmp_path, shipped):
        """Part 3, 13."""
        where = "blocks.2.attn.hook_scores"
        succeeded("compile", LLAMA, "-o", tmp_path / "out", "--knockout", f"{where}=4>3,3>*")
        spec = HookSpec.load(tmp_path / "out" / "spec.safetensors")
        mask = np.zeros((5, 5))
        mask[4, 3] = mask[3, :3] = -np.inf
        found = np.squeeze(spec.interventions[0][1].value, 0)
        assert np.array_equal(np.broadcast_to(mask, (shipped.num_heads, 5, 5)), found)
        for edge in ("-1>3", "*>1"):
            run = mionnx("compile", LLAMA, "-o", tmp_path / "no", "--knockout", f"{where}={edge}")
            assert f"edge {edge} is another one in each text" in told(run)
        shown = {one.name: one.help for one in ALL["compile"].params}
        assert "they are refused" in shown["knockout"]

    def test_blocks_are_compiled_at_level_4_unless_asked(self, tmp_path):
        """Part 3, 2."""
        succeeded("quantise", LLAMA, "-o", tmp_path / "int4")
        levels = {}
        for name, asked in {"none": [], "exact": ["--accuracy-level", 0]}.items():
            folder = tmp_path / name
            succeeded("compile", tmp_path / "int4", "-o", folder, "--zero", "blocks.1.hook_mlp_out", *asked)
            nodes = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
            products = [node for node in nodes if node.op_type == "MatMulNBits"]
            levels[name] = {
                next((entry.i for entry in node.attribute if entry.name == "accuracy_level"), 0) for node in products
            }
            level = 0 if asked else 4
            card = (folder / "README.md").read_text()
            assert "weights in blocks of 4 bits" in card
            assert f"of com.microsoft (ONNX Runtime) at accuracy level {level}" in card
        assert levels == {"none": {4}, "exact": {0}}
        refused = mionnx("compile", LLAMA, "-o", tmp_path / "no", "--plain", "--accuracy-level", 4)
        assert "has no products with weights in blocks" in told(refused)

    def test_the_default_of_the_weights_is_shown(self):
        shown = {one.name: one.help for one in ALL["compile"].params}
        assert "By default alongside" in shown["weights"]

    def test_a_level_from_opening_is_that_of_the_file(self, tmp_path, shipped):
        exact = MIModel.from_pretrained(shipped.quantise(tmp_path / "q"), accuracy_level=0)
        folder = exact.compile(HookSpec().intervene("hook_embed", Intervention.Scale(2.0)), tmp_path / "out")
        assert "at accuracy level 0" in (folder / "README.md").read_text()
