"""Parts of a graph compute what the whole graph does; recorded values come back to the last bit, from any reader."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from safetensors import safe_open
from safetensors.numpy import load_file

from mionnx import HookSpec, Intervention, MIModel, SpecFileError
from mionnx.engine.options import Options
from mionnx.inputs.token_batch import make_token_batch
from mionnx.verify import graph_under_test
from mionnx.verify.graph_under_test import GraphUnderTest, widened
from mionnx.verify.recorded_values import FACTS, RecordedValues
from mionnx.verify.runtimes import GraphRuntime, runtime_of
from mionnx.verify.steps import Side, local_difference

NAMES = ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_mid", "blocks.3.hook_resid_post", "hook_logits"]
CPU = GraphRuntime("ort-cpu", Options(level="none"))


def graph_of(model: MIModel, spec: HookSpec | None = None, names: Sequence[str] = NAMES) -> GraphUnderTest:
    calls = [make_token_batch(np.array([ids]), None, None, model.hooked) for ids in ([3, 4, 5], [6, 7])]
    return GraphUnderTest(model.hooked, spec or HookSpec(), names, calls)


def values_of(graph: GraphUnderTest, folder: Path) -> RecordedValues:
    recording = RecordedValues(folder / "values")
    with CPU.passes(graph, graph.names) as run:
        for prompt, call in enumerate(graph.calls):
            run(call, lambda name, value, prompt=prompt: recording.add(prompt, name, value))
    return recording


@pytest.mark.parametrize("spec", [None, HookSpec().intervene("blocks.1.hook_attn_out", Intervention.Scale(0.5))])
def test_the_whole_graph_gives_what_forward_gives(shipped: MIModel, tmp_path: Path, spec: HookSpec | None) -> None:
    graph = graph_of(shipped, spec)
    recording = values_of(graph, tmp_path)
    for prompt, call in enumerate(graph.calls):
        cache = shipped.forward(call.input_ids, HookSpec().extend(spec or HookSpec()).capture(NAMES[1]))
        assert np.abs(recording.get(prompt, "hook_logits") - cache.output()).max() < 5e-5
        assert np.abs(recording.get(prompt, NAMES[1]) - cache[NAMES[1]]).max() < 5e-6


def test_steps_one_after_the_other_are_the_whole_graph(shipped: MIModel, tmp_path: Path) -> None:
    """Each step runs on the recorded values before it, and has the bits that were recorded at its end."""
    graph = graph_of(shipped)
    recording = values_of(graph, tmp_path)
    for at in range(1, len(NAMES)):
        step = local_difference(Side(graph, CPU), recording, NAMES[:at], NAMES[at], "float32")
        assert step.relative < 1e-6
        assert step.count == sum(recording.get(prompt, NAMES[at]).size for prompt in range(2))
        assert graph.dataflow.needed(NAMES[:at], [NAMES[at]])[0] == NAMES[at - 1]
    steps = [graph.nodes_of(NAMES[:at], [NAMES[at]]) for at in range(len(NAMES))]
    assert all(steps)
    assert {node for step in steps for node in step} == {*graph.nodes_of((), NAMES[-1:])}


def test_a_step_from_two_values_reads_both(shipped: MIModel, tmp_path: Path) -> None:
    names = ["blocks.1.hook_resid_pre", "blocks.1.hook_attn_out", "blocks.1.hook_resid_mid", "hook_logits"]
    graph = graph_of(shipped, names=names)
    recording = values_of(graph, tmp_path)
    assert {*graph.dataflow.needed(names[:2], names[2:3])} == {*names[:2]}
    assert local_difference(Side(graph, CPU), recording, names[:2], names[2], "float32").max_abs == 0
    sums = [recording.get(prompt, names[0]) + recording.get(prompt, names[1]) for prompt in range(2)]
    assert all((recording.get(prompt, names[2]) == sums[prompt]).all() for prompt in range(2))


def test_a_wrong_value_at_the_start_of_a_step_is_seen_at_its_end(shipped: MIModel, tmp_path: Path) -> None:
    graph = graph_of(shipped)
    recording, wrong = values_of(graph, tmp_path), RecordedValues(tmp_path / "wrong")
    for prompt in range(2):
        for name in NAMES:
            value = np.array(recording.get(prompt, name))
            wrong.add(prompt, name, value + np.float32(0.1) * (name == NAMES[1] and prompt == 1))
    step = local_difference(Side(graph, CPU), wrong, NAMES[:2], NAMES[2], "float32")
    assert step.max_abs > 0.05


def test_groups_hold_every_name_once_within_their_size(shipped: MIModel, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(shipped)
    hidden = shipped.W_E.shape[-1]
    monkeypatch.setattr(graph_under_test, "GROUP", 2 * 4 * 3 * hidden)  # two residual streams of the longer prompt
    groups = [*graph.groups(NAMES)]
    assert [name for group in groups for name in group] == NAMES
    assert [len(group) for group in groups] == [2, 1, 1]
    assert [*graph.groups([])] == []


def test_a_longer_call_is_the_prompt_and_what_was_chosen(shipped: MIModel) -> None:
    graph = graph_of(shipped)
    longer = graph.longer(graph.calls[0], np.array([[8, 9]]))
    assert longer.input_ids.tolist() == [[3, 4, 5, 8, 9]]
    assert longer.prompt_lengths.tolist() == [3]


def test_hashes_tell_specs_apart_and_not_hook_points(shipped: MIModel) -> None:
    steered = HookSpec().intervene("hook_embed", Intervention.Scale(2.0))
    graph, fewer = graph_of(shipped), graph_of(shipped)
    fewer.names = NAMES[-1:]
    assert graph.graph_hash() == fewer.graph_hash() != graph_of(shipped, steered).graph_hash()


def test_borders_of_bfloat16_are_float32_and_the_numbers_inside_stay() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        g (bfloat16[n] x, float[n] z) => (bfloat16[n] y, float[n] w) { y = Add(x, x) w = Neg(z) }"""
    )
    made = widened(onnx.ModelProto.FromString(proto.SerializeToString()))
    onnx.checker.check_model(made, full_check=True)
    assert {value.type.tensor_type.elem_type for value in (*made.graph.input, *made.graph.output)} == {1}
    x = np.array([1.00390625, -3.0], np.float32)  # the first lies between two numbers of bfloat16
    y, w = ReferenceEvaluator(made).run(["y", "w"], {"x": x, "z": x})
    narrow = x.astype(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)).astype(np.float32)
    assert y.tolist() == (2 * narrow).tolist()
    assert w.tolist() == (-x).tolist()
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[n] x) => (float[n] y) { y = Neg(x) }'
    same = onnx.parser.parse_model(text)
    assert widened(onnx.ModelProto.FromString(same.SerializeToString())) == same


def recorded(folder: Path) -> tuple[RecordedValues, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    arrays = {
        "0.hook_embed": rng.normal(size=(1, 3, 4)).astype(np.float32),
        "0.hook_logits": rng.normal(size=(1, 3, 5)).astype(np.float16),
        "1.hook_embed": np.empty((1, 0, 4), np.float32),
        "1.hook_logits": np.array([[[True, False]]]),
    }
    values = RecordedValues(folder / "values")
    for name, array in arrays.items():
        prompt, _, hook = name.partition(".")
        values.add(int(prompt), hook, array)
    return values, arrays


def test_a_recorded_run_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    values, arrays = recorded(tmp_path)
    facts = {name: {"of": name} for name in FACTS}
    values.keep(tmp_path / "run.safetensors", facts)
    again = RecordedValues.open(tmp_path / "run.safetensors")
    assert again.facts == facts
    plain = load_file(tmp_path / "run.safetensors")
    assert plain.keys() == arrays.keys()
    for name, array in arrays.items():
        prompt, _, hook = name.partition(".")
        for found in (values.get(int(prompt), hook), again.get(int(prompt), hook), plain[name]):
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    with pytest.raises(KeyError):
        again.get(2, "hook_embed")
    with safe_open(tmp_path / "run.safetensors", framework="np") as file:
        assert json.loads(file.metadata()["facts"]) == facts


def test_a_recorded_run_that_lacks_a_fact_is_refused(tmp_path: Path) -> None:
    values, _ = recorded(tmp_path)
    facts: dict[str, Any] = {name: 1 for name in FACTS if name != "greedy"}
    values.keep(tmp_path / "run.safetensors", facts)
    with pytest.raises(SpecFileError, match="damaged: it does not say its greedy"):
        RecordedValues.open(tmp_path / "run.safetensors")
    with pytest.raises(SpecFileError, match="is no recorded run"):
        RecordedValues.open(tmp_path)


@pytest.mark.parametrize(
    ("title", "settings"),
    [
        ("ort-cpu", ("cpu", 0, "all", "onnxruntime")),
        ("ort-cpu:none:threads=3", ("cpu", 3, "none", "onnxruntime")),
        ("CPUExecutionProvider:basic", ("CPUExecutionProvider", 0, "basic", "onnxruntime")),
        ("openvino:threads=1", ("cpu", 1, "all", "openvino")),
        ("reference", ("cpu", 0, "all", "reference")),
    ],
)
def test_a_title_says_the_settings(title: str, settings: tuple[str, int, str, str]) -> None:
    runtime = runtime_of(title)
    assert isinstance(runtime, GraphRuntime)
    options = runtime.options
    assert runtime.title == title
    assert (options.provider, options.threads, options.level, options.engine) == settings
