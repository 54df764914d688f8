"""Rules of differentiation: each operator alone in float64, against central differences of onnx's own evaluator."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from mionnx.errors import GradientError
from mionnx.graph.blocks import numbers_of
from mionnx.quantise.blocks import quantise_blocks
from mionnx.rewrite.gradient import differentiate
from mionnx.rewrite.gradient.rules import RULES, SUBGRAPH_RULES
from mionnx.rewrite.plan import gradient_name

X = {"x": (2, 3, 4)}
XZ = {"x": (2, 3, 4), "z": (3, 1)}
UNKNOWN = {"x": "a,b,c", "z": "d,e"}

OF_ONE = ("Abs", "Cos", "Elu", "Exp", "Identity", "LeakyRelu", "Neg", "Relu", "Sigmoid", "Sin", "Softplus", "Tanh")
SUMS = ("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSumExp")
EXTREMES = ("ReduceMax", "ReduceMin")
# name -> (nodes, inputs and their shapes, constants)
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], str]] = {
    **{name: (f"y = {name}(x)", X, "") for name in OF_ONE},
    **{name: (f"p = Exp(x) y = {name}(p)", X, "") for name in ("Log", "Sqrt", "Reciprocal")},
    **{name: (f"y = {name}(x, z)", XZ, "") for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum")},
    "Swish": ("y = Swish<alpha=1.5>(x)", X, ""),
    "Erf": ("y = Erf(x)", X, ""),
    "Gelu": ("y = Gelu(x)", X, ""),
    "Gelu tanh": ('y = Gelu<approximate="tanh">(x)', X, ""),
    "Cast": ("w = Cast<to=11>(x) y = Mul(w, w)", X, ""),
    "CastLike": ("w = CastLike(x, x) y = Mul(w, w)", X, ""),
    "Clip": ("y = Clip(x, l, h)", X, "double l = {-0.5}, double h = {0.5}"),
    "Pow square": ("y = Pow(x, p)", X, "double p = {2.0}"),
    "Pow": ("a = Exp(x) y = Pow(a, p)", X, "double p = {2.5}"),
    "Where": ("c = Less(x, z) y = Where(c, x, z)", XZ, ""),
    "Softmax": ("y = Softmax<axis=1>(x)", X, ""),
    "LogSoftmax": ("y = LogSoftmax<axis=-1>(x)", X, ""),
    "MatMul": ("y = MatMul(x, w)", {"x": (2, 3, 4), "w": (4, 5)}, ""),
    "MatMul broadcast": ("y = MatMul(x, w)", {"x": (2, 1, 3, 4), "w": (5, 4, 2)}, ""),
    "MatMul turned": ("v = Transpose<perm=[0,2,1]>(w) y = MatMul(x, v)", {"x": (2, 3, 4), "w": (2, 5, 4)}, ""),
    **{
        f"Gemm {a}{b}": (
            f"y = Gemm<alpha=2.0, beta=3.0, transA={a}, transB={b}>(x, w, c)",
            {"x": (4, 3) if a else (3, 4), "w": (5, 4) if b else (4, 5), "c": (5,)},
            "",
        )
        for a in (0, 1)
        for b in (0, 1)
    },
    "LayerNormalization": ("y = LayerNormalization<axis=-1>(x, s)", X, "double[4] s = {1.0, 2.0, 0.5, 1.5}"),
    "RMSNormalization": ("y = RMSNormalization<axis=-1>(x, s)", X, "double[4] s = {1.0, 2.0, 0.5, 1.5}"),
    "RMSNormalization 2": (
        "y = RMSNormalization<axis=1>(x, s)",
        {"x": (2, 2, 2)},
        "double[2,2] s = {1.0, 2.0, 0.5, 1.5}",
    ),
    "RotaryEmbedding": (
        "y = RotaryEmbedding(x, c, s)",
        {"x": (1, 2, 2, 4)},
        "double[1,2,2] c = {0.5,0.1,0.9,0.3}, double[1,2,2] s = {0.2,0.4,0.6,0.8}",
    ),
    "Reshape": ("y = Reshape(x, s)", X, "int64[2] s = {6, 4}"),
    "Flatten": ("y = Flatten<axis=2>(x)", X, ""),
    "Transpose": ("y = Transpose<perm=[2,0,1]>(x)", X, ""),
    "Transpose all": ("y = Transpose(x)", X, ""),
    "Unsqueeze": ("y = Unsqueeze(x, s)", X, "int64[2] s = {0, 2}"),
    "Squeeze": ("y = Squeeze(x, s)", {"x": (2, 1, 3)}, "int64[1] s = {1}"),
    "Squeeze all": ("y = Squeeze(x)", {"x": (2, 1, 3)}, ""),
    "Expand": ("y = Expand(x, s)", {"x": (3, 1)}, "int64[3] s = {2, 3, 4}"),
    "Tile": ("y = Tile(x, s)", {"x": (3, 2)}, "int64[2] s = {2, 3}"),
    "Concat": ("y = Concat<axis=1>(x, z)", {"x": (2, 3), "z": (2, 2)}, ""),
    "Concat of one": ("y = Concat<axis=-1>(k, x)", {"x": (1, 3)}, "double[1,2] k = {1.0, 2.0}"),
    "Split": ("a, b = Split<axis=2, num_outputs=2>(x) y = Mul(a, a)", X, ""),
    "Slice": ("y = Slice(x, s, e, a)", X, "int64[2] s = {-2, 1}, int64[2] e = {9000, 3}, int64[2] a = {1, 2}"),
    "Slice plain": ("y = Slice(x, s, e)", X, "int64[2] s = {0, 1}, int64[2] e = {1, 3}"),
    "Slice by steps": (
        "y = Slice(x, s, e, a, t)",
        X,
        "int64[1] s = {3}, int64[1] e = {-9000}, int64[1] a = {2}, int64[1] t = {-2}",
    ),
    "Gather": ("y = Gather<axis=0>(x, i)", X, "int64[3] i = {1, 0, -1}"),
    "Gather inner": ("y = Gather<axis=1>(x, i)", X, "int64[2,2] i = {1, 0, 1, 2}"),
    "Gather scalar": ("y = Gather<axis=1>(x, i)", X, "int64 i = {1}"),
    "GatherElements": ("y = GatherElements<axis=1>(x, i)", {"x": (2, 3)}, "int64[2,4] i = {1,0,1,2,0,0,2,2}"),
    "GatherND": ("y = GatherND(x, i)", X, "int64[2,2] i = {1, 0, 1, 2}"),
    "GatherND batched": ("y = GatherND<batch_dims=1>(x, i)", X, "int64[2,3,1] i = {1,0,1,2,2,0}"),
    "ScatterND": ("y = ScatterND(x, i, u)", {"x": (3, 4), "u": (2, 4)}, "int64[2,1] i = {2, 0}"),
    "ScatterND add": ('y = ScatterND<reduction="add">(x, i, u)', {"x": (3, 4), "u": (2, 4)}, "int64[2,1] i = {2, 2}"),
    "ScatterElements": (
        "y = ScatterElements<axis=1>(x, i, u)",
        {"x": (2, 4), "u": (2, 2)},
        "int64[2,2] i = {2, 0, 1, 3}",
    ),
    "Pad": ("y = Pad(x, p)", X, "int64[6] p = {0, 1, 2, 1, 0, 1}"),
    "TopK": ("y, i = TopK<axis=-1>(x, k)", X, "int64[1] k = {2}"),
    "Trilu": ("y = Trilu<upper=0>(x)", X, ""),
    **{
        f"{name} {how}": (f"y = {name}<keepdims={keep}>(x, a)", X, axes)
        for name in (*EXTREMES, *SUMS)
        for how, keep, axes in (("", 0, "int64[2] a = {0, 2}"), ("kept", 1, "int64[1] a = {-1}"))
    },
    **{f"{name} nothing": (f"y = {name}<noop_with_empty_axes=1>(x)", X, "") for name in (*EXTREMES, "ReduceSum")},
    "ReduceSum all": ("y = ReduceSum<keepdims=0>(x)", X, ""),
    "CumSum": ("y = CumSum(x, a)", X, "int64 a = {1}"),
    "CumSum exclusive": ("y = CumSum<exclusive=1, reverse=1>(x, a)", X, "int64 a = {1}"),
    "shared": ("a = Mul(x, x) b = Exp(a) c = Mul(a, b) y = Add(c, x)", X, ""),
}
NOT_FLOAT64 = ("Erf", "Gelu", "RotaryEmbedding")  # the evaluator computes these in float32


def model_of(nodes: str, inputs: dict[str, tuple[int, ...]], constants: str, dims: dict[str, str]) -> onnx.ModelProto:
    """A model that makes y; the axes of inputs are numbers, or names where they are to be unknown."""
    declared = ", ".join(
        f"double[{dims[name] if name in dims else ','.join(map(str, shape))}] {name}" for name, shape in inputs.items()
    )
    held = f"<{constants}>" if constants else ""
    text = f'<ir_version: 10, opset_import: ["" : 24]> g ({declared}) => (double y) {held} {{ {nodes} }}'
    model = parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model)


class Native:
    """ONNX Runtime, called as the evaluator is: the evaluator has no Scan that goes backwards."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.session = onnxruntime.InferenceSession(model.SerializeToString())

    def run(self, names: list[str], given: dict[str, np.ndarray]) -> list[np.ndarray]:
        return self.session.run(names, given)


def check(
    model: onnx.ModelProto, given: dict[str, np.ndarray], runtime: type = ReferenceEvaluator, rough: bool = False
) -> None:
    """Compare gradients of a random weighting of y with central differences."""
    step, worst = (1e-3, 1e-4) if rough else (1e-6, 1e-7)
    evaluator = runtime(model)
    (y,) = evaluator.run(["y"], given)
    weights = np.random.default_rng(1).normal(size=y.shape)
    made = differentiate(model, "y", [*given], seed="seed")
    onnx.checker.check_model(made)
    found = runtime(made).run([gradient_name(name) for name in given], {**given, "seed": weights})
    for (name, value), gradient in zip(given.items(), found, strict=True):
        expected = np.zeros_like(value)
        for place in np.ndindex(*value.shape):
            ends = []
            for sign in (1, -1):
                moved = {key: array.copy() for key, array in given.items()}
                moved[name][place] += sign * step
                ends.append((evaluator.run(["y"], moved)[0] * weights).sum())
            expected[place] = (ends[0] - ends[1]) / (2 * step)
        assert gradient.shape == value.shape
        np.testing.assert_allclose(gradient, expected, atol=worst * max(np.abs(expected).max(), 1), err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_gives_the_gradient_that_central_differences_give(name):
    nodes, inputs, constants = CASES[name]
    random = np.random.default_rng(0)
    given = {key: random.normal(size=shape) for key, shape in inputs.items()}
    check(model_of(nodes, inputs, constants, {}), given, rough=name in NOT_FLOAT64)


@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Div", "Max", "Where"])
def test_a_broadcast_of_unknown_shapes_is_summed_over_the_axes_that_the_run_finds(name):
    nodes, inputs, constants = CASES[name]
    random = np.random.default_rng(0)
    given = {key: random.normal(size=shape) for key, shape in inputs.items()}
    check(model_of(nodes, inputs, constants, UNKNOWN), given)


def test_every_rule_has_a_case():
    operators = {word for nodes, *_ in CASES.values() for word in RULES if f"{word}(" in nodes or f"{word}<" in nodes}
    assert {*RULES} == operators | {"MatMulNBits"}  # which onnx's evaluator does not have: the next test
    assert {*SUBGRAPH_RULES} == {"If", "Scan"}


@pytest.mark.parametrize(("opset", "fractions"), [(23, False), (18, False), (18, True)])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_a_product_with_blocks_goes_back_by_the_numbers_of_its_blocks(bits, symmetric, opset, fractions):
    """Rows that end inside a block, an odd number of blocks, a bias; fractions as zero points have 4 bits."""
    if fractions and (bits == 8 or symmetric):
        pytest.skip("ONNX Runtime has zero points that are fractions for 4 bits alone")
    random = np.random.default_rng(bits)
    blocks = quantise_blocks(random.normal(size=(5, 40)).astype(np.float32), bits, 16, symmetric)
    weight = numbers_of(blocks, bits, 40)
    held = {"B": blocks.packed, "s": blocks.scales, "bias": random.normal(size=5).astype(np.float32)}
    if not symmetric:
        held["z"] = blocks.zero_points
    if fractions:
        held["z"] = random.uniform(0, 15, (5, 3)).astype(np.float32)
        plain = numbers_of(replace(blocks, zero_points=None), 4, 48 - 8)
        weight = plain + np.repeat((8 - held["z"]) * blocks.scales, 16, axis=1)[:, :40]
    reads = ["x", "B", "s", "" if symmetric else "z", "", "bias"]
    given = {"K": 40, "N": 5, "bits": bits, "block_size": 16}
    node = onnx.helper.make_node("MatMulNBits", reads, ["y"], "product", domain="com.microsoft", **given)
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [2, 3, 40])],
        [onnx.helper.make_tensor_value_info("y", 1, [2, 3, 5])],
        [onnx.numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    made = differentiate(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), "y", ["x"], seed="seed")
    x, seed = (random.normal(size=(2, 3, size)).astype(np.float32) for size in (40, 5))
    (found,) = Native(made).run([gradient_name("x")], {"x": x, "seed": seed})
    np.testing.assert_allclose(found, seed.astype(np.float64) @ weight.astype(np.float64), rtol=0, atol=1e-5)


BRANCHES = """
    q = Greater(t, l)
    s = Mul(x, x)
    y = If (q) <
        then_branch = a () => (double[2,3] u) { v = Exp(s)  u = Mul(v, x) },
        else_branch = b () => (double[2,3] w) { w = Neg(x) }
    >
"""


@pytest.mark.parametrize("threshold", [0.0, 10.0])
def test_the_branch_that_runs_is_the_one_that_is_differentiated(threshold):
    model = model_of(BRANCHES, {"x": (2, 3)}, f"double t = {{1.0}}, double l = {{{threshold}}}", {})
    check(model, {"x": np.random.default_rng(0).normal(size=(2, 3))})


LOOP = """
    last, y = Scan <
        num_scan_inputs = 2, scan_input_axes = [1, 0], scan_output_axes = [1], scan_input_directions = [0, 1],
        body = b (double[3] state, double[3] one, double[3] other) => (double[3] next, double[3] out) {
            kept = Mul(state, g)
            add = Mul(one, other)
            next = Add(kept, add)
            out = Tanh(next)
        }
    > (z, x, w)
"""


def test_a_loop_is_differentiated_by_its_state_its_scanned_inputs_and_what_it_takes_from_outside():
    shapes = {"x": (3, 5), "z": (3,), "w": (5, 3), "g": (3,)}
    random = np.random.default_rng(0)
    given = {key: random.normal(size=shape) for key, shape in shapes.items()}
    check(model_of(LOOP, shapes, "", {}), given, Native)


def test_a_value_that_the_end_does_not_depend_on_is_refused():
    model = model_of("y = Neg(x) w = Neg(z)", {"x": (2,), "z": (2,)}, "", {})
    with pytest.raises(GradientError, match="y does not depend on z"):
        differentiate(model, "y", ["x", "z"])


def test_an_operator_without_a_rule_is_named_with_the_value_that_it_makes():
    model = model_of("y = Det(x)", {"x": (2, 2)}, "", {})
    with pytest.raises(GradientError, match="Det, which makes y, has no rule"):
        differentiate(model, "y", ["x"])


def test_the_model_is_left_alone_and_what_no_gradient_needs_is_dropped():
    model = model_of("a = Exp(x) y = Mul(a, z)", {"x": (2,), "z": (2,)}, "", {})
    before = model.SerializeToString()
    made = differentiate(model, "y", ["z"])
    assert model.SerializeToString() == before
    operators = [node.op_type for node in made.graph.node]
    assert operators.count("Exp") == 1
    assert operators.count("Mul") == 2


def test_a_slice_between_transpositions_goes_back_in_onnx_runtime():
    """Its optimiser moves transpositions across nodes, and reads the pads of a `Pad` as those of all axes."""
    nodes = "t = Transpose<perm=[0,2,1]>(x) s = Slice(t, b, e, a) n = Neg(s) y = Transpose<perm=[0,2,1]>(n)"
    constants = "int64[1] b = {1}, int64[1] e = {3}, int64[1] a = {1}"
    given = {"x": np.random.default_rng(0).normal(size=(2, 3, 4))}
    check(model_of(nodes, {"x": (2, 3, 4)}, constants, {}), given, Native)
