"""RWKV-4 beside transformers in eager mode: hook points, edits, states and tokens, whatever stands beside the text."""

import shutil

import numpy as np
import pytest
import torch
from family_batches import KINDS, batch, difference, forward, interventions
from onnxruntime import InferenceSession
from rwkv4_eager import UNSEEN, make_rwkv4, run
from safetensors.torch import load_file

from exporters import rwkv
from mionnx import HookPoint, HookSpec, Intervention, MIModel, StateKnockoutSpec, StateSteeringSpec
from mionnx.run.exporting import exporter_for

TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rwkv4")


@pytest.fixture(scope="module")
def pair(folder):
    reference = make_rwkv4(folder / "checkpoint")
    rwkv.export(folder / "checkpoint", folder / "hooked")
    return MIModel.from_pretrained(folder / "hooked", threads=1), reference


@pytest.mark.parametrize("kind", KINDS)
def test_every_capture_equals_eager_torch(pair, kind):
    model, reference = pair
    inputs = batch(kind)
    expected = run(reference, inputs).values
    found = forward(model, inputs, HookSpec().capture(lambda name: not HookPoint.parse(name).derived)).values
    assert {*found} == {*expected}
    off = {name: difference(HookPoint.parse(name), found[name], expected[name], inputs) for name in found}
    assert {name: value for name, value in off.items() if not value < TOLERANCE} == {}


def test_logits_equal_transformers_without_taps(pair):
    model, reference = pair
    ids = batch("plain").ids
    with torch.no_grad():
        logits = reference(input_ids=torch.from_numpy(ids)).logits.numpy()
    assert np.abs(model.forward(ids).output() - logits).max() < TOLERANCE


@pytest.mark.parametrize(
    ("layer", "step"), [(1, 99), *(pytest.param(i, 1, marks=pytest.mark.slow) for i in (None, 0, 1, 2))]
)
def test_interventions_equal_eager_torch(pair, layer, step):
    """Every kind with every limit, or one at each hook point."""
    model, reference = pair
    inputs, off = batch("left past"), {}
    plain = run(reference, inputs)
    points = [point for point in model.hook_points() if not point.derived and point.layer == layer]
    for point in [point for point in points if not point.name.endswith(UNSEEN)]:
        changed = 0.0
        for number, edit in enumerate([*interventions(point, plain.values[str(point)].shape, whole=False)][::step]):
            expected = run(reference, inputs, [(point, edit)]).logits
            changed = max(changed, float(np.abs(expected - plain.logits).max()))
            found = forward(model, inputs, HookSpec().intervene(point, edit)).logits
            scale = max(1.0, float(np.abs(expected[inputs.real]).max()))
            off[f"{point} {number}"] = float(np.abs(found - expected)[inputs.real].max()) / scale
        assert changed > 1e-3, point
    assert {name: value for name, value in off.items() if not value < TOLERANCE} == {}


def test_tokens_are_those_of_transformers(pair):
    model, reference = pair
    ids = batch("plain").ids[:1]
    expected = reference.generate(torch.from_numpy(ids), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert model.generate(ids[0], max_new_tokens=12, eos_token_id=[]).ids[0].tolist() == expected[0].tolist()


def test_states_of_transformers_continue_a_text(pair):
    """Five tensors of transformers are the parts of `RWKVState`, so that a state made there goes on here."""
    model, reference = pair
    ids = torch.from_numpy(batch("plain").ids[:1])
    with torch.no_grad():
        begun = reference(input_ids=ids[:, :9], use_cache=True).state
        made = model.forward(ids[:, :9].numpy()).state
        ffn, att, *sums = ([part[..., i].numpy() for i in range(model.num_layers)] for part in begun)
        for i in range(model.num_layers):
            made.set_layer(i, np.stack([one[i] for one in sums], 1)[:, None], att[i], ffn[i])
        expected = reference(input_ids=ids).logits[:, 9:].numpy()
    found = model.forward(ids[:, 9:].numpy(), initial_state=made).output()
    assert np.abs(found - expected).max() < TOLERANCE


def test_a_checkpoint_of_pickled_tensors_opens(pair, folder, tmp_path):
    """As the Hub's RWKV-4 are stored."""
    model, pickled = pair[0], tmp_path / "checkpoint"
    pickled.mkdir()
    shutil.copy(folder / "checkpoint" / "config.json", pickled)
    torch.save(load_file(folder / "checkpoint" / "model.safetensors"), pickled / "pytorch_model.bin")
    before = {*pickled.iterdir()}
    assert exporter_for(pickled).__name__ == "exporters.rwkv"
    rwkv.export(pickled, tmp_path / "hooked")
    assert {*pickled.iterdir()} == before
    found = MIModel.from_pretrained(tmp_path / "hooked").forward([5, 6, 7]).output()
    assert np.abs(found - model.forward([5, 6, 7]).output()).max() < TOLERANCE


def test_a_compiled_model_takes_states_and_changes_them(pair, tmp_path):
    """Plain ONNX in two calls gives what the model gives in one, a token's writes knocked out and one scaled."""
    model, _ = pair
    ids = batch("plain").ids[:1]
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(3))
    spec.set_state_steering(StateSteeringSpec(2.0).position(5)).intervene(HookPoint.RwkvV(1), Intervention.Scale(0.5))
    session = InferenceSession(model.compile(spec, tmp_path / "out") / "model.onnx")
    names, logits = [output.name for output in session.get_outputs()], []
    states = {
        entry.name: np.zeros([1 if isinstance(dim, str) else dim for dim in entry.shape], np.float32)
        for entry in session.get_inputs()
        if entry.name.startswith("past_state")
    }
    for start, stop in ((0, 8), (8, ids.shape[1])):
        given = {"input_ids": ids[:, start:stop], "mionnx.token_positions": np.arange(start, stop)[None]}
        found = dict(zip(names, session.run(None, given | states), strict=True))
        logits.append(found["logits"])
        states = {name: found[name.replace("past", "present", 1)] for name in states}
    expected = model.forward(ids, spec).output()
    assert np.abs(np.concatenate(logits, 1) - expected).max() < TOLERANCE
    assert np.abs(expected - model.forward(ids).output()).max() > 1e-3


def test_a_narrow_model_keeps_its_recurrence_in_float32(pair, tmp_path):
    """Exponentials of keys and decays near 0 are beyond float16, whatever the dtype of the model."""
    model, ids = pair[0], batch("plain").ids
    model.narrow(tmp_path / "narrow", dtype="float16")
    narrow = MIModel.from_pretrained(tmp_path / "narrow", threads=1)
    found, logits = narrow.forward(ids, HookSpec().capture(HookPoint.RwkvState(1))), model.forward(ids).output()
    assert found[HookPoint.RwkvState(1)].dtype == np.float32
    assert 1e-5 < np.abs(found.output() - logits).max() < 0.02
