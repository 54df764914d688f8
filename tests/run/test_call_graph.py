"""An adopted file's fused operators stand where a spec touches nothing, and only for calls that they are right for."""

from collections import Counter

import fused_llama
import numpy as np
import onnx
import onnxruntime
import pytest

from exporters.adopt import adopt
from mionnx import HookSpec, Intervention, Logits, MIModel, Options
from mionnx.engine import onnx_runtime
from mionnx.machine.brief import WIDTH
from mionnx.rewrite.plan import ALL, NONE, PADDED, STOCK, Plan
from mionnx.run.call_graph import with_fused

IDS = np.random.default_rng(0).integers(3, fused_llama.VOCAB, (2, 9))
ROUNDING = 2e-5
FUSED = {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 4, "GroupQueryAttention": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    adopt(fused_llama.write(folder / "stock"), folder / "hooked")
    return folder


@pytest.fixture
def model(folder):
    return MIModel.from_pretrained(folder / "hooked")


@pytest.fixture(scope="module")
def plain(folder):
    """The same with standard nodes alone."""
    return MIModel.from_pretrained(folder / "hooked", fused=False)


def stock(folder, ids, mask=None, past=None):
    """Logits, keys and values of the file as it came, in ONNX Runtime as it opens files by itself."""
    session = onnxruntime.InferenceSession(folder / "stock" / "model.onnx", providers=["CPUExecutionProvider"])
    empty = np.zeros((len(ids), fused_llama.KV_HEADS, 0, fused_llama.WIDTH), np.float32)
    names = [entry.name for entry in session.get_inputs()][2:]
    feeds = dict(zip(names, past or [empty] * len(names), strict=True))
    total = feeds[names[0]].shape[2] + ids.shape[1]
    mask = np.ones((len(ids), total), np.int64) if mask is None else mask
    return session.run(None, {"input_ids": ids, "attention_mask": mask, **feeds})


def operators(model):
    """The operators of the graph that was used last, those of the file."""
    proto = onnx.load_from_string([*model.compiled.values()][-1].model)
    return Counter(node.op_type for node in proto.graph.node if node.op_type in FUSED)


def used(model):
    """The fused operators that the graph used last was asked to have."""
    return [*model.compiled][-1].fused


def test_an_empty_spec_is_the_file_itself_bit_by_bit(model, folder):
    expected = stock(folder, IDS)
    found = model.forward(IDS, use_cache=True)
    assert operators(model) == FUSED
    np.testing.assert_array_equal(found.output(), expected[0])
    for layer, pair in enumerate(found.kv_cache.layers):
        for value, other in zip(pair, expected[1 + 2 * layer : 3 + 2 * layer], strict=True):
            np.testing.assert_array_equal(value, other)
    for rows in (1, 2):  # one token after a past
        found = model.forward(IDS[:rows, :5], use_cache=True)
        later = model.forward(IDS[:rows, 5:6], cache=found.kv_cache)
        past = [np.asarray(value) for pair in found.kv_cache.layers for value in pair]
        np.testing.assert_array_equal(later.output(), stock(folder, IDS[:rows, 5:6], past=past)[0])
        assert used(model) == STOCK


def test_the_graph_of_an_empty_spec_has_the_nodes_of_the_file(model, folder):
    model.forward(IDS)
    (graph,) = model.compiled.values()
    proto, own = onnx.load_from_string(graph.model), onnx.load(folder / "stock" / "model.onnx")
    assert [(node.op_type, node.name) for node in proto.graph.node] == [
        (node.op_type, node.name) for node in own.graph.node
    ]
    assert all(entry.key != "mionnx.stock" for entry in proto.metadata_props)
    assert graph.options.fast  # as ONNX Runtime opens a file by itself
    model.forward(IDS, logits=Logits(positions=-1))
    assert used(model) == STOCK
    model.forward(IDS, logits=False, hooks=HookSpec().capture("hook_embed"))
    assert used(model) == ALL


def test_the_standard_nodes_differ_in_the_last_bits_alone(model, plain):
    one, other = model.forward(IDS).output(), plain.forward(IDS).output()
    assert 0 < np.abs(one - other).max() < ROUNDING
    assert used(plain) == NONE


def test_only_what_a_spec_touches_is_unfused(model, plain):
    cases = {
        "blocks.1.attn.hook_pattern": {**FUSED, "GroupQueryAttention": 1},
        "blocks.0.attn.hook_z": {**FUSED, "GroupQueryAttention": 1},
        "blocks.0.hook_mlp_out": FUSED,
        "blocks.1.hook_resid_mid": FUSED,
    }
    for hook, left in cases.items():
        spec = HookSpec().capture(hook)
        found, expected = model.forward(IDS, spec), plain.forward(IDS, spec)
        assert operators(model) == left, hook
        np.testing.assert_allclose(found[hook], expected[hook], atol=ROUNDING)
        np.testing.assert_allclose(found.output(), expected.output(), atol=ROUNDING)


def test_interventions_at_every_hook_point_take_the_same_effect(model, plain):
    base = plain.forward(IDS).output()
    for point in [point for point in model.hook_points() if not point.derived]:
        spec = HookSpec().intervene(point, Intervention.Scale(-0.5))
        found, expected = model.forward(IDS, spec).output(), plain.forward(IDS, spec).output()
        np.testing.assert_allclose(found, expected, atol=ROUNDING, err_msg=str(point))
        assert np.abs(expected - base).max() > 100 * ROUNDING, point
    assert operators(model).total() >= 6  # the last points lie behind most of them


def test_the_other_layer_stays_fused_under_an_intervention(model):
    model.forward(IDS, HookSpec().intervene("blocks.1.attn.hook_scores", Intervention.Scale(0.5)))
    proto = onnx.load_from_string([*model.compiled.values()][-1].model)
    (fused,) = [node for node in proto.graph.node if node.op_type == "GroupQueryAttention"]
    assert "past_key_values.0.key" in fused.input
    assert [node.op_type for node in proto.graph.node].count("Softmax") == 1
    assert model.report(HookSpec()).restored == 0
    assert next(iter(model.compiled.values())).report.restored == 6


@pytest.mark.parametrize(
    ("ids", "mask", "past", "fused"),
    [
        ([[5, 6, 7, 8], [9, 10]], None, 0, PADDED),  # left padding
        (IDS, np.tile([1] * 7 + [0] * 2, (2, 1)), 0, PADDED),  # right padding
        (IDS[:, :3], None, 4, PADDED),  # several rows of several tokens after a past
        (IDS[:1, :3], None, 4, STOCK),
        (IDS[:, :1], None, 4, STOCK),
    ],
)
def test_calls_that_fused_attention_is_wrong_for(ids, mask, past, fused, model, plain):
    rows = len(ids)
    caches = [one.forward(IDS[:rows, :past], use_cache=True).kv_cache if past else None for one in (model, plain)]
    found = model.forward(ids, attention_mask=mask, cache=caches[0])
    expected = plain.forward(ids, attention_mask=mask, cache=caches[1])
    assert used(model) == fused
    assert operators(model)["GroupQueryAttention"] == (2 if fused == STOCK else 0)
    spec = HookSpec().capture("hook_embed")  # the same without the file's own graph
    assert with_fused(model.binder.bind(spec).plan, model.hooked, Options()).fused == ALL
    assert operators(model)["SkipSimplifiedLayerNormalization"] == 4
    real = np.ones(found.output().shape[:2], bool) if mask is None else mask.astype(bool)
    if mask is None and past == 0:
        real = np.array([[1, 1, 1, 1], [0, 0, 1, 1]], bool)
    assert np.abs(found.output() - expected.output())[real].max() < ROUNDING


def test_generation_runs_the_fused_operators(model, plain):
    found, expected = (one.generate(IDS[:, :4], max_new_tokens=6, eos_token_id=[]) for one in (model, plain))
    assert [row.tolist() for row in found.ids] == [row.tolist() for row in expected.ids]
    assert used(model) == STOCK
    assert operators(model) == FUSED
    padded = [[5, 6, 7, 8], [9, 10]]
    found, expected = (one.generate(padded, max_new_tokens=6, eos_token_id=[]) for one in (model, plain))
    assert [row.tolist() for row in found.ids] == [row.tolist() for row in expected.ids]
    assert used(model) == PADDED


def test_warm_opens_the_graph_that_a_call_will_use(model):
    spec = HookSpec().capture("blocks.0.hook_mlp_out")
    model.warm(spec)
    opened = [*model.compiled]
    model.forward(IDS, spec)
    assert [*model.compiled] == opened
    assert opened[0].fused == ALL


@pytest.mark.parametrize("spec", [HookSpec(), HookSpec().capture("blocks.0.hook_mlp_out")])
def test_a_compiled_graph_and_its_report_are_those_of_forward(model, spec):
    """They were of standard nodes alone, which `forward` does not run."""
    graph, report = model.compile_graph(spec), model.report(spec)
    model.forward(IDS, spec)
    assert [*model.compiled.values()] == [graph]
    assert graph.report is report


def test_without_fused_operators_a_capture_changes_no_bit(plain):
    base = plain.forward(IDS).output()
    for point in plain.hook_points():
        np.testing.assert_array_equal(plain.forward(IDS, HookSpec().capture(point)).output(), base, str(point))


def test_other_engines_and_models_have_none(model, models):
    hooked = model.hooked
    assert with_fused(Plan(), hooked, Options(engine="reference")).fused == NONE
    assert with_fused(Plan(starts=("blocks.0.hook_mlp_out",)), hooked, Options()).fused == NONE
    assert with_fused(Plan(), models("llama").hooked, Options()).fused == NONE


def test_on_another_provider_they_stand_if_it_has_kernels_for_all(model, monkeypatch):
    asked, missing = [], []

    def lacking(operators, provider, dtype):
        asked.append(({name for _, name in operators}, provider, dtype))
        return missing

    monkeypatch.setattr(onnx_runtime, "without_kernel", lacking)
    plan, cuda = Plan(), Options("cuda")
    assert with_fused(plan, model.hooked, cuda).fused == STOCK
    missing.append(("com.microsoft", "GroupQueryAttention"))
    assert with_fused(plan, model.hooked, cuda).fused == NONE
    names = {"GroupQueryAttention", "SkipSimplifiedLayerNormalization"}
    assert asked == [(names, "CUDAExecutionProvider", "float32")] * 2


def test_a_graph_and_a_hooked_model_print_in_a_line(model):
    graph = model.compile_graph(HookSpec().capture("blocks.*.hook_resid_post"))
    assert f"{model.num_layers} captures, 0 interventions" in repr(graph)
    assert str(model.hooked.folder) in repr(model.hooked)
    assert max(len(repr(one)) for one in (graph, model.hooked)) <= WIDTH
