"""Propagation rules: what they keep (input times share adds up to the output), and what they take for constant."""

import numpy as np
import onnx
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from mionnx import HookSpec
from mionnx.errors import GradientError
from mionnx.rewrite.gradient import differentiate
from mionnx.rewrite.gradient.rules import SETS
from mionnx.rewrite.plan import gradient_name
from mionnx.spec.metric import GRADIENT_RULES

RANDOM = np.random.default_rng(0)
WEIGHTS = {name: RANDOM.normal(size=(4, 4)) for name in ("a", "b", "c")}
SCALE = "double[4] s = {1.0, 2.0, 0.5, 1.5}"
HALF = "double h = {0.5}, double one = {1.0}, double two = {2.0}, double e = {0.00001}, double r = {0.7071067811865476}"
CURVE = "double k = {0.79788456}, double l = {0.044715}, double three = {3.0}, double h = {0.5}, double one = {1.0}"


def shares(nodes: str, constants: str, rules: str, by: tuple[str, ...] = ("x",), **given: np.ndarray):
    """The sum of y's weighting, and the cotangents of some values."""
    weights = {name: value for name, value in WEIGHTS.items() if f", {name})" in nodes}
    values = {"x": RANDOM.normal(size=(3, 4)), **given}
    inputs = ", ".join(f"double[{','.join(map(str, v.shape))}] {n}" for n, v in {**values, **weights}.items())
    text = f'<ir_version: 10, opset_import: ["" : 24]> g ({inputs}) => (double[3,4] y) <{constants}> {{ {nodes} }}'
    model = onnx.shape_inference.infer_shapes(parser.parse_model(text))
    made = differentiate(model, "y", by, seed="seed", rules=SETS[rules])
    seed = RANDOM.normal(size=(3, 4))
    names = ["y", *map(gradient_name, by)]
    y, *found = ReferenceEvaluator(made).run(names, {**values, **weights, "seed": seed})
    return float((y * seed).sum()), values, y * seed, found


MLP = """
    n = RMSNormalization<axis=-1>(x, s)
    f = MatMul(n, a) u = MatMul(n, b) q = Sigmoid(f) act = Mul(f, q)
    p = Mul(act, u) d = MatMul(p, c) y = Add(x, d)
"""


def test_relevance_is_conserved_through_a_gated_mlp():
    for rules, kept in (("relp", True), ("gradient", False), ("frozen_norm", False)):
        total, values, _, (found,) = shares(MLP, SCALE, rules)
        assert np.isclose((values["x"] * found).sum(), total, rtol=1e-4) == kept, rules


ACTIVATIONS = {
    "gelu": ("y = Gelu(x)", ""),
    "gelu tanh": ('y = Gelu<approximate="tanh">(x)', ""),
    "gelu written": ("m = Mul(x, r) t = Erf(m) w = Add(t, one) v = Mul(x, h) y = Mul(v, w)", HALF),
    "gelu tanh written": (
        "p = Pow(x, three) q = Mul(p, l) w = Add(x, q) m = Mul(w, k) t = Tanh(m) v = Add(t, one) z = Mul(x, v) "
        "y = Mul(z, h)",
        CURVE,
    ),
    "silu": ("q = Sigmoid(x) y = Mul(x, q)", ""),
    "silu, the other way": ("q = Sigmoid(x) y = Mul(q, x)", ""),
    "swish": ("y = Swish<alpha=1.7>(x)", ""),
    "squared relu": ("q = Relu(x) y = Mul(q, q)", ""),
    "squared relu by Pow": ("q = Relu(x) y = Pow(q, two)", HALF),
    "tanh": ("y = Tanh(x)", ""),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_its_input_times_a_constant(name):
    _, values, weighed, (found,) = shares(*ACTIVATIONS[name], "relp")
    np.testing.assert_allclose(values["x"] * found, weighed, rtol=1e-5, atol=1e-6)
    assert np.isfinite(shares(*ACTIVATIONS[name], "relp", x=np.zeros((3, 4)))[3][0]).all()


SQUARES = "p = Mul(x, x) m = ReduceMean<keepdims=1>(p, ax) w = Add(m, e)"
AXIS = f"{HALF}, int64[1] ax = {{-1}}"
NORMS = {
    "RMSNormalization": ("y = RMSNormalization<axis=-1>(x, s)", SCALE),
    "by a root": (f"{SQUARES} t = Sqrt(w) y = Div(x, t)", AXIS),
    "by the root's reciprocal": (f"{SQUARES} t = Sqrt(w) i = Reciprocal(t) y = Mul(x, i)", AXIS),
    "by a power": (f"{SQUARES} t = Pow(w, minus) y = Mul(x, t)", f"{AXIS}, double minus = {{-0.5}}"),
    "after an average": ("m = ReduceMean<keepdims=1>(x, ax) z = Sub(x, m) " + SQUARES.replace("m =", "o =").replace(
        "(x, x)", "(z, z)").replace("(m, e)", "(o, e)") + " t = Sqrt(w) y = Div(z, t)", AXIS),
}  # fmt: skip


@pytest.mark.parametrize("rules", ["frozen_norm", "relp"])
@pytest.mark.parametrize("name", NORMS)
def test_the_scale_of_a_norm_is_a_constant(name, rules):
    total, values, _, (found,) = shares(*NORMS[name], rules)
    assert (values["x"] * found).sum() == pytest.approx(total, rel=1e-6)
    assert (values["x"] * shares(*NORMS[name], "gradient")[3][0]).sum() != pytest.approx(total, rel=0.1)


ATTENTION = "t = Transpose<perm=[1,0]>(k) w = MatMul(q, t) p = Softmax(w) y = MatMul(p, v)"
QKV = {name: RANDOM.normal(size=(3, 4)) for name in "qkv"}


@pytest.mark.parametrize("rules", ["relp_frozen_pattern", "frozen_norm_pattern"])
def test_a_pattern_is_a_constant_and_what_makes_it_is_refused(rules):
    total, values, _, (found,) = shares(ATTENTION, "", rules, ("v",), **QKV)
    assert (values["v"] * found).sum() == pytest.approx(total)
    with pytest.raises(GradientError, match="take all by which y depends on q, and 1 more for constant"):
        shares(ATTENTION, "", rules, ("q", "k", "v"), **QKV)
    assert shares(ATTENTION, "", "relp", ("q",), **QKV)[3][0].any()


def test_a_side_of_a_product_has_half_whether_the_other_is_asked_for_or_not(shipped):
    found = []
    for hooks in (["blocks.1.mlp.hook_gate"], ["blocks.1.mlp.hook_gate", "blocks.0.hook_resid_pre"]):
        spec = HookSpec().gradient(hooks).set_metric("logit", answer="Paris", rules="relp")
        found.append(shipped.forward("The capital of France is", spec).grad["blocks.1.mlp.hook_gate"])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-7)
    plain = shipped.gradients("The capital of France is", "blocks.1.mlp.hook_gate", answer="Paris").grad
    assert np.abs(found[0] - plain["blocks.1.mlp.hook_gate"]).max() > 1e-2


def test_the_sets_of_rules_are_those_that_a_spec_may_name():
    assert {*SETS} == {*GRADIENT_RULES}
