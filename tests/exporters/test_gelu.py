"""GELU written out becomes the operator, numbers kept; what is not GELU, or is read inside, stays as it is."""

import io
import warnings
from collections import Counter
from contextlib import redirect_stdout
from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from transformers.activations import (
    AccurateGELUActivation,
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    QuickGELUActivation,
)

from exporters.transformers.simplify import GELU, simplify

EXACT = torch.linspace(-12, 12, 6 * 16).reshape(2, 3, 16)
FORMS = {
    "new": (NewGELUActivation(), "tanh"),
    "accurate": (AccurateGELUActivation(), "tanh"),
    "fast": (FastGELUActivation(), "tanh"),
    "tanh": (GELUTanh(), "tanh"),
    "tanh in Python": (GELUTanh(use_gelu_tanh_python=True), "tanh"),
    "erf": (GELUActivation(), "none"),
    "erf in Python": (GELUActivation(use_gelu_python=True), "none"),
}
# 0.5 x (1 + tanh(SCALE (x + CUBIC x^3))), with the inner sum to be read as an output or not
WRITTEN_OUT = """
<ir_version: 10, opset_import: ["" : 23]>
form (float[n] x) => (float[n] y{outputs})
<float half = {{0.5}}, float three = {{3.0}}, float cubic = {{{cubic}}}, float scale = {{{scale}}}, float one = {{1.0}}>
{{
    halved = Mul (x, half)
    cube = Pow (x, three)
    small = Mul (cube, cubic)
    sum = Add (x, small)
    scaled = Mul (sum, scale)
    turned = Tanh (scaled)
    lifted = Add (turned, one)
    y = Mul (halved, lifted)
}}
"""


@cache
def exported(name: str, dtype: torch.dtype = torch.float32) -> ir.Model:
    """An activation as the exporter has it."""
    module = (FORMS[name][0] if name in FORMS else QuickGELUActivation()).eval()
    dynamic = (dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC),)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        example = (EXACT.to(dtype),)
        program = torch.onnx.export(
            module, example, dynamo=True, dynamic_shapes=dynamic, opset_version=23, optimize=False, verbose=False
        )
    simplify(program.model, set())
    return program.model


def kinds(model: ir.Model) -> Counter:
    return Counter(node.op_type for node in model.graph)


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def written_out(cubic: str = "0.044715", scale: str = "0.7978845608", outputs: str = "") -> ir.Model:
    return ir.from_onnx_text(WRITTEN_OUT.format(cubic=cubic, scale=scale, outputs=outputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_every_gelu_of_transformers_is_one_operator_and_keeps_its_numbers(name):
    model = exported(name)
    assert kinds(model) == {"Gelu": 1}
    assert model.graph[0].attributes["approximate"].as_string() == FORMS[name][1]
    with torch.no_grad():
        expected = FORMS[name][0](EXACT).numpy()
    assert np.abs(run(model, EXACT.numpy()) - expected).max() < 2e-6  # of values up to 12


def test_an_activation_that_is_no_gelu_stays():
    assert kinds(exported("quick")) == {"Mul": 2, "Sigmoid": 1}


def test_half_precision_keeps_the_steps_and_their_roundings():
    assert kinds(exported("new", torch.float16))["Gelu"] == 0
    assert kinds(exported("new", torch.float16))["Tanh"] == 1


def test_the_written_out_form_and_the_operator_agree():
    before, after = written_out(), written_out()
    assert GELU.apply_to_model(after) == 1
    assert kinds(after) == {"Gelu": 1}
    x = np.linspace(-12, 12, 4099, dtype=np.float32)
    assert np.abs(run(before, x) - run(after, x)).max() < 2e-6
    assert after.graph.outputs[0].name == "y"


@pytest.mark.parametrize(("cubic", "scale"), [("0.0447", "0.7978845608"), ("0.044715", "0.8")])
def test_other_constants_are_another_function(cubic, scale):
    model = written_out(cubic, scale)
    assert GELU.apply_to_model(model) == 0
    assert kinds(model)["Tanh"] == 1


@pytest.mark.parametrize("inner", ["cube", "sum", "turned", "lifted", "halved"])
def test_a_step_that_is_read_stays(inner):
    model = written_out(outputs=f", float[n] {inner}")
    assert GELU.apply_to_model(model) == 0
    assert inner in {value.name for value in model.graph.outputs}
    assert kinds(model)["Tanh"] == 1


def test_gpt2_has_the_operator_between_its_hook_points(models):
    """The neurons before and after the activation keep their hook points, and nothing lies between."""
    nodes = models("gpt2").hooked.proto.graph.node
    for layer in range(2):
        name = f"blocks.{layer}.mlp.hook_act"
        (node,) = [node for node in nodes if name in node.output]
        assert (node.op_type, list(node.input)) == ("Gelu", [f"blocks.{layer}.mlp.hook_up"])
