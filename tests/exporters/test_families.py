"""Every hook point of every family against transformers in eager mode: captured, and intervened on in every way."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from families import VOCAB
from family_batches import KINDS, batch, difference, forward, interventions
from onnx.reference import ReferenceEvaluator
from oracle import run
from scipy.special import softmax
from transformers import AutoModelForCausalLM

from mionnx import HookPoint, HookSpec, MIModel

TOLERANCE = 5e-5


@pytest.mark.parametrize("kind", KINDS)
def test_every_capture_equals_the_eager_tap(family, kind, models, references):
    inputs = batch(kind)
    expected = run(references(family), inputs)
    found = forward(models(family), inputs, HookSpec().capture(lambda name: not name.endswith("hook_result")))
    assert list(found.values) == [str(point) for point in models(family).hook_points() if not point.derived]
    assert set(found.values) == set(expected.values)
    off = {
        name: difference(HookPoint.parse(name), found.values[name], expected.values[name], inputs)
        for name in found.values
    }
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}
    for layer in range(models(family).num_layers):
        for ours, theirs in zip(found.cache[layer], expected.cache[layer], strict=True):
            real = inputs.mask.astype(bool)
            assert np.abs(ours - theirs).transpose(0, 2, 1, 3)[real].max() < TOLERANCE


@pytest.mark.parametrize("kind", ["plain", "left"])
def test_the_oracle_itself_equals_plain_transformers(family, kind, references, checkpoint):
    inputs = batch(kind)
    tapped = run(references(family), inputs)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint(family), attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        output = plain.eval()(
            input_ids=torch.from_numpy(inputs.ids),
            attention_mask=torch.from_numpy(inputs.mask),
            position_ids=torch.from_numpy(inputs.positions),
            output_hidden_states=True,
            output_attentions=True,
        )
    assert np.abs(output.logits.numpy() - tapped.logits)[inputs.real].max() < 1e-5
    for layer in range(len(output.attentions)):
        resid = tapped.values[str(HookPoint.ResidPre(layer))]
        assert np.abs(output.hidden_states[layer].numpy() - resid)[inputs.real].max() < 1e-5
        pattern = tapped.values[str(HookPoint.AttnPattern(layer))]
        off = np.abs(output.attentions[layer].numpy() - pattern).transpose(0, 2, 1, 3)[inputs.real]
        assert off.max() < 1e-5


@pytest.mark.parametrize("kind", ["left", "past"])
@pytest.mark.slow
def test_every_intervention_equals_the_same_edit_in_torch(family, kind, models, references):
    """On two families with every limit of every kind; rewriting does not know what family it works on."""
    whole = family in ("llama", "gpt2")
    model, reference, inputs = models(family), references(family), batch(kind)
    plain = run(reference, inputs)
    last, off = model.num_layers - 1, {}
    for point in [point for point in model.hook_points() if not point.derived and point.layer in (None, last)]:
        for number, edit in enumerate(interventions(point, plain.values[str(point)].shape, whole)):
            expected = run(reference, inputs, [(point, edit)])
            found = forward(model, inputs, HookSpec().intervene(point, edit).capture(point))
            at = difference(point, found.values[str(point)], expected.values[str(point)], inputs)
            scale = max(1.0, float(np.abs(expected.logits[inputs.real]).max()))
            end = np.abs(found.logits - expected.logits)[inputs.real].max() / scale
            off[f"{point} {edit.kind} {number}"] = max(at, float(end))
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


def test_one_intervention_of_each_kind_in_the_first_layer(family, models, references):
    """Layer 0 too, several hook points in one spec: the residual stream feeds everything after it.

    Not whole replacements: one behind the other, the first would do nothing, and be refused.
    """
    model, reference, inputs = models(family), references(family), batch("left past")
    plain = run(reference, inputs)
    points = [point for point in model.hook_points() if point.layer == 0 and not point.derived]
    for kind in ("add", "scale", "project_out"):
        edits = [
            (point, next(one for one in interventions(point, plain.values[str(point)].shape) if one.kind == kind))
            for point in points
            if point.short not in ("scores", "pattern", "expert_indices")
        ]
        spec = HookSpec()
        for point, edit in edits:
            spec.intervene(point, edit)
        off = np.abs(forward(model, inputs, spec).logits - run(reference, inputs, edits).logits)[inputs.real]
        assert off.max() < TOLERANCE


ALL = {
    "resid_pre",
    "q",
    "k",
    "rot_q",
    "rot_k",
    "v",
    "scores",
    "pattern",
    "z",
    "result",
    "attn_out",
    "resid_mid",
    "pre",
    "gate",
    "up",
    "act",
    "post",
    "mlp_out",
    "resid_post",
}
ROTARY, EXPERTS = {"rot_q", "rot_k"}, {"gate", "up", "act"}
OF_EXPERTS = {"router_logits", *(f"expert_{name}" for name in ("indices", "weights", "gate", "up", "act", "out"))}
ABSENT = {
    "gpt2": ROTARY | {"gate"},
    "opt": ROTARY | {"gate"},
    "gpt_neox": {"gate", "resid_mid"},
    "cohere": {"resid_mid"},
    "mixtral": EXPERTS,
}


def test_a_family_has_the_hook_points_that_it_should(family, models):
    points = models(family).hook_points()
    outside = [point.variant for point in points if point.layer is None]
    learned = ["PosEmbed"] if family in ("gpt2", "opt") else []
    assert outside == ["Embed", *learned, "FinalNorm", "Logits"]
    wanted = ALL - ABSENT.get(family, set()) | (OF_EXPERTS if family == "mixtral" else set())
    for layer in range(models(family).num_layers):
        assert {point.short for point in points if point.layer == layer} == wanted


def test_the_stream_adds_up(family, models):
    cache = models(family).forward(batch("plain").ids, HookSpec().capture("*"))
    for layer in range(models(family).num_layers):
        before, after = cache["resid_pre", layer], cache["resid_post", layer]
        assert np.abs(before + cache["attn_out", layer] + cache["mlp_out", layer] - after).max() < 1e-5
        if ("resid_mid", layer) in cache:
            assert np.abs(before + cache["attn_out", layer] - cache["resid_mid", layer]).max() < 1e-6
        assert np.abs(cache["pattern", layer].sum(-1) - 1).max() < 1e-5


def test_the_shares_of_the_heads_sum_to_the_projection(family, models, references):
    model = models(family)
    cache = model.forward(batch("plain").ids, HookSpec().capture("*.hook_result").capture("*.hook_z"))
    for layer, attention in enumerate(model.hooked.metadata.attention):
        projection = references(family).get_submodule(attention.output_projection.removesuffix(".weight"))
        z = torch.from_numpy(cache["z", layer]).flatten(2)
        with torch.no_grad():
            whole = projection(z) - (0 if projection.bias is None else projection.bias)
        assert np.abs(cache["result", layer].sum(2) - whole.numpy()).max() < 1e-5


def test_the_last_residual_projects_to_the_logits(family, models):
    model = models(family)
    last = HookPoint.ResidPost(model.num_layers - 1)
    cache = model.forward(batch("plain").ids, HookSpec().capture(last))
    assert np.abs(model.project_to_vocab(cache[last]) - cache.output()).max() < 1e-5
    one = model.project_to_vocab(cache[last][0, -1])
    assert one.shape == (VOCAB,)


def test_the_graph_is_plain_onnx(family, hooked, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(hooked(family), folder)  # the checker refuses weight files that have another hard link
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 23)]
    assert not any(node.domain or node.metadata_props or node.doc_string for node in proto.graph.node)
    assert all(
        entry.key.startswith("mionnx.") and json.loads(entry.value) is not None for entry in proto.metadata_props
    )
    data = (folder / "model.onnx").read_bytes()
    assert b"/work" not in data
    assert b"site-packages" not in data
    assert str(Path.home()).encode() not in data
    assert len(data) < 200_000


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.slow
def test_the_reference_evaluator_agrees(family, hooked, models: Callable[[str], MIModel], tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(hooked(family), folder)
    ids = batch("plain").ids
    mask = np.ones_like(ids)
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
    model = models(family)
    for i in range(model.num_layers):
        for part in ("key", "value"):
            empty = np.zeros((len(ids), model.num_kv_heads, 0, model.head_dim), np.float32)
            feeds[f"past_key_values.{i}.{part}"] = empty
    found = ReferenceEvaluator(str(folder / "model.onnx")).run(["logits"], feeds)[0]
    assert np.abs(found - model.forward(ids).output()).max() < TOLERANCE


def test_the_lens_ends_in_the_logits_and_contributions_add_up(models, references, family):
    """What lies behind the last layer, and what is added to the stream, is found in every family."""
    model, ids = models(family), batch("plain").ids[0]
    logits = model.forward(ids).output()[0].astype(np.float64)
    lens = model.logit_lens(ids, k=3)
    chances = softmax(logits, axis=-1)
    assert np.abs(np.take_along_axis(chances, lens.top_ids[-1], -1) - lens.top_probs[-1]).max() < TOLERANCE
    assert np.array_equal(lens.answers, logits.argmax(-1))
    found = model.attribute(ids, 5, 11)
    if found.capped:
        cap = references(family).config.final_logit_softcapping
        either = np.array([model.attribute(ids, token).total for token in (5, 11)])
        assert np.abs(cap * np.tanh(either / cap) - logits[-1, [5, 11]]).max() < 1e-4
    else:
        assert found.total == pytest.approx(logits[-1, 5] - logits[-1, 11], abs=1e-4)
