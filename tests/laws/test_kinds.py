"""Every kind of intervention: the nodes that it adds equal its numpy reference.

A kind is tested because it is in `KINDS`; one without a reference cannot be made.
"""

from inspect import signature

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mionnx import HookPoint, Intervention, InterventionError
from mionnx.bind.splice_check import SpliceSite, check_fragment
from mionnx.graph.edited_graph import edit as editable
from mionnx.graph.edited_graph import serialise
from mionnx.graph.fragment import Fragment
from mionnx.graph.report import Report
from mionnx.rewrite.intervene import intervene
from mionnx.rewrite.plan import Edit
from mionnx.spec.kinds import KINDS
from mionnx.spec.kinds.kind import Kind, ValueShape, lowest

POINTS = {"stream": HookPoint.ResidPost(0), "scores": HookPoint.AttnScores(0)}
SIZES = {"batch": 2, "seq": 3, "seq_q": 3, "hidden": 5, "n_heads": 2, "seq_k": 4}
quick = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FRAGMENT = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["": 23]>
    fragment (float[batch, seq, 5] x) => (float[batch, seq, 5] y) { h = Relu(x) y = Sub(h, x) }"""
)


def kind_at(kind: Kind, point: HookPoint) -> Kind:
    """The kind as it is at a hook point; the test is skipped where it makes no sense."""
    try:
        return kind.at(point, point.axes, recurrent=False)
    except InterventionError:
        pytest.skip(f"no {kind} at {point}")


def activation(rng: np.random.Generator, point: HookPoint, dtype: type) -> np.ndarray:
    """Random numbers; some scores are masked, as a causal mask leaves them."""
    x = rng.normal(size=[SIZES[axis] for axis in point.axes]).astype(dtype)
    if point.variant == "AttnScores":
        x[rng.random(x.shape) < 0.3] = lowest(dtype)
    return x


def value(rng: np.random.Generator, kind: Kind, name: str, x: np.ndarray) -> np.ndarray:
    """A value of the kind's shape: all of the activation's, or broadcast along some axes."""
    form, infinity = kind.shape_of(name), kind.infinities.get(name)
    if form is ValueShape.DIRECTIONS:
        return np.linalg.qr(rng.normal(size=(x.shape[-1], 2)))[0].T.astype(x.dtype)
    shape = x.shape if form is ValueShape.EXACT else [size if rng.random() < 0.5 else 1 for size in x.shape]
    if form is ValueShape.COORDINATES:
        shape = [*shape[:-1], 2]
    numbers = rng.normal(size=shape)
    if form is ValueShape.ATTENTION_MASK:
        numbers[:] = 0
    if infinity is not None:
        numbers[rng.random(shape) < 0.3] = infinity
    return numbers.astype(x.dtype)


def changed_by_nodes(kind: Kind, point: HookPoint, x: np.ndarray, values: list[np.ndarray]) -> np.ndarray:
    """Add the kind's nodes to a graph of two nodes, and run it."""
    dtype = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    ends = [onnx.helper.make_tensor_value_info(name, dtype, [None] * x.ndim) for name in ("x", "y")]
    nodes = [
        onnx.helper.make_node("Identity", ["x"], [point.name]),
        onnx.helper.make_node("Identity", [point.name], ["y"]),
    ]
    inside = [onnx.helper.make_tensor_value_info(point.name, dtype, list(point.axes))]
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "tiny", ends[:1], ends[1:], value_info=inside),
        opset_imports=[onnx.helper.make_opsetid("", 23)],
        ir_version=10,
    )
    fit = None
    if kind.has_fragment:
        fit = check_fragment(Fragment.of(FRAGMENT), 23, [SpliceSite(point.name, point.axes, ("batch", "seq", 5))])
    edit = Edit(point.name, kind, 0, point.axes, fit=fit)
    graph = editable(proto)
    intervene(graph, [edit], Report())
    session = onnxruntime.InferenceSession(serialise(graph.cleanup().toposort(), proto))
    return session.run(["y"], {"x": x, **dict(zip(edit.value_inputs, values, strict=True))})[0]


@pytest.mark.parametrize("where", POINTS)
@pytest.mark.parametrize("name", KINDS)
@quick
@given(seed=st.integers(0, 999), dtype=st.sampled_from([np.float32, np.float16]))
def test_nodes_equal_the_reference(name: str, where: str, seed: int, dtype: type) -> None:
    point, rng = POINTS[where], np.random.default_rng(seed)
    if KINDS[name].has_fragment and (where == "scores" or dtype is np.float16):
        return
    kind = kind_at(KINDS[name], point)
    x = activation(rng, point, dtype)
    values = [value(rng, kind, each, x) for each in kind.values]
    expected = kind.reference(x, *([Fragment.of(FRAGMENT)] if kind.has_fragment else values))
    found = changed_by_nodes(kind, point, x, values)
    assert found.dtype == expected.dtype == dtype
    assert found.shape == expected.shape == x.shape
    np.testing.assert_allclose(
        found, expected, rtol=1e-5 if dtype is np.float32 else 1e-2, atol=1e-6 if dtype is np.float32 else 1e-2
    )


def test_a_kind_without_a_reference_cannot_be_made() -> None:
    class Silent(Kind):
        name = "silent"

        @classmethod
        def make(cls):
            return cls().change([], None, None, None)

        def nodes(self, op, x):
            return op.Identity(x)

    with pytest.raises(TypeError, match="reference"):
        Silent()


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_a_key(name: str) -> None:
    """Kinds are part of plans, which are keys of graphs: in a process by hash, on disk by `repr`."""
    kind, again = KINDS[name], type(KINDS[name])()
    assert kind == again
    assert hash(kind) == hash(again)
    assert repr(kind) == repr(again)
    assert "0x" not in repr(kind)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_has_a_constructor_with_the_limits(name: str) -> None:
    constructor = getattr(Intervention, KINDS[name].title)
    assert KINDS[name].title in dir(Intervention)
    limits = ["positions", "heads", "rows", *([] if name in ("knockout", "window") else ["experts"])]
    limits += [] if name in ("knockout", "window", "low_rank", "project_out") else ["neurons"]
    assert [*signature(constructor).parameters][-len(limits) :] == limits
    assert constructor.__doc__ == KINDS[name].make.__doc__
    assert signature(constructor).return_annotation == "Intervention"


@pytest.mark.parametrize("name", KINDS)
def test_a_keyword_that_is_no_limit_is_refused_by_the_kinds_name(name: str) -> None:
    kind, constructor = KINDS[name], getattr(Intervention, KINDS[name].title)
    needed = [one for one in signature(constructor).parameters.values() if one.default is one.empty]
    with pytest.raises(
        TypeError, match=rf"Intervention\.{kind.title}\(\) got an unexpected keyword argument 'position'"
    ):
        constructor(*[0.0] * len(needed), position=1)
