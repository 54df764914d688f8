"""The one graph of a playground, in ONNX Runtime: left alone it is the model, and a slot is what its kinds are."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from families import CONFIGS
from rescaled import TEXTS, loud_model

from mionnx import HookPoint, HookSpec, Intervention, MIModel
from mionnx.playground.graph import PlaygroundGraph, build_graph

IDS = np.array([[3, 9, 4, 17, 30]])
STREAM, ATTENTION = "blocks.2.hook_resid_post", "blocks.1.attn.hook_z"


def logits(model: MIModel, graph: PlaygroundGraph, changes: dict[str, np.ndarray]) -> np.ndarray:
    """Of every position; slots that are not among the changes are neutral."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.hooked.folder))
    session = onnxruntime.InferenceSession(graph.model, options)
    feeds: dict[str, Any] = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.arange(5)[None]}
    past = model.hooked.metadata.past_shapes(1, 0)
    feeds |= {name: np.zeros(shape, np.float32) for name, shape in past.items()}
    for site in graph.sites.values():
        names = [name for _, inputs in site.slots for name in inputs]
        feeds |= {name: np.full((1,) * len(site.axes), ".scale." in name, np.float32) for name in names}
    first = (model.num_layers - 1) * IDS.shape[1]
    rows = {"mionnx.rows": first + np.arange(5), "mionnx.rows.whole": np.arange(5)}
    feeds |= {**rows, "mionnx.rows.k": np.array([1]), "mionnx.rows.tracked": np.array([0]), **changes}
    known = {entry.name for entry in session.get_inputs()}
    return session.run(["logits"], {name: value for name, value in feeds.items() if name in known})[0]


@pytest.mark.parametrize("family", [family for family in CONFIGS if not family.startswith("rwkv")])
def test_left_alone_it_is_the_model_and_slots_change_it(models, family: str):
    """Slots of the middle layer's attention output: x * 0.5 + 1 at two positions."""
    model = models(family)
    graph = build_graph(model.hooked, HookSpec())
    expected = model.forward(IDS).output()
    assert np.abs(logits(model, graph, {}) - expected).max() <= 1e-5 * np.abs(expected).max()
    hook = str(HookPoint.AttnOut(model.num_layers // 2))
    here = np.isin(np.arange(5), [1, 4])[None, :, None]
    ((_, (scale, add)),) = graph.sites[hook].slots
    changes = {scale: np.where(here, 0.5, 1).astype(np.float32), add: np.where(here, 1, 0).astype(np.float32)}
    spec = HookSpec().intervene(hook, Intervention.Scale(0.5, positions=[1, 4]))
    expected = model.forward(IDS, spec.intervene(hook, Intervention.Add(1.0, positions=[1, 4]))).output()
    assert np.abs(logits(model, graph, changes) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def cured(tmp_path_factory: pytest.TempPathFactory) -> MIModel:
    """A model whose stream is past float16 from layer 2 on, narrowed."""
    loud = loud_model(tmp_path_factory.mktemp("loud") / "m")
    return MIModel.from_pretrained(loud.narrow(tmp_path_factory.mktemp("cured") / "m", texts=TEXTS), threads=1)


def test_in_float16_it_is_fed_float32_and_slots_are_of_true_values(cured: MIModel):
    graph = build_graph(cured.hooked, HookSpec())
    proto = onnx.load_model_from_string(graph.model)
    kinds = {one.name: one.type.tensor_type.elem_type for one in (*proto.graph.input, *proto.graph.output)}
    assert onnx.TensorProto.FLOAT16 not in kinds.values()
    assert graph.sites[STREAM].limit is None  # it holds what float16 does not
    assert graph.sites[ATTENTION].limit == 65504
    expected = cured.forward(IDS).output().astype(np.float32)
    assert np.abs(logits(cured, graph, {}) - expected).max() < 0.02
    for hook, change in ((STREAM, 9e4), (ATTENTION, 1.0)):
        ((_, (scale, add)),) = graph.sites[hook].slots
        ones = np.ones((1,) * len(graph.sites[hook].axes), np.float32)
        spec = HookSpec().intervene(hook, Intervention.Scale(0.5)).intervene(hook, Intervention.Add(change))
        expected = cured.forward(IDS, spec).output().astype(np.float32)
        assert np.abs(logits(cured, graph, {scale: 0.5 * ones, add: change * ones}) - expected).max() < 0.02
        assert np.abs(expected - cured.forward(IDS).output()).max() > 0.1
