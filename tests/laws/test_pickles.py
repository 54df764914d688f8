"""What was pickled or copied is as it was: models as their recipe, results by their values."""

import copy
import multiprocessing
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from alike import alike
from repository import REPOSITORY
from saelens_fixture import random_weights
from transcoder_files import boards, scored, traced

import mionnx
from mionnx import (
    SAE,
    AblationResult,
    Fragment,
    HookPoint,
    HookSpec,
    Intervention,
    KnockoutSpec,
    LayerCache,
    Logits,
    MIModel,
    ModelError,
    Noise,
    Options,
    ProbeResult,
    SpecFileError,
    StateAblationResult,
    StateKnockoutSpec,
    StateSteeringSpec,
    Subspace,
    create_knockout_mask,
    probe,
)
from mionnx.analysis.features.config import Config
from mionnx.analysis.quantisation.matrix_loss import MatrixLoss
from mionnx.run.spans import TextSpan
from mionnx.verify.difference import LayerLoss

TEXT, OTHER = "The capital of France is", "The capital of Japan is"
BERT = REPOSITORY / "models" / "world-bert"
POINT = HookPoint.ResidPost(1)
SMALL = 500_000  # bytes; the weights of the models are 4 million
STREAM = HookSpec().capture("blocks.*.hook_resid_post")
KNOCKOUT = KnockoutSpec().layer(3).head(0).edge(3, 1)
FRAGMENT = """<ir_version: 10, opset_import: ["": 23]>
    fragment (float[batch, seq, 128] x) => (float[batch, seq, 128] y) { h = Relu(x) y = Sub(h, x) }"""


def is_a_stream(name: str) -> bool:
    return name.endswith("hook_resid_post")


def a_spec() -> HookSpec:
    vector = np.arange(128, dtype=np.float32)
    spec = HookSpec().capture("blocks.*.attn.hook_z", positions=[-1], heads=3).capture(POINT, before=True)
    spec.intervene(POINT, Intervention.Add(vector, positions=[0, -1]))
    return spec.intervene(HookPoint.MlpOut(2), Intervention.Scale(0.5, rows=0, positions="prompt"))


def ablated(model: MIModel) -> AblationResult:
    return AblationResult(model.forward(TEXT).output()[0, -1], model.forward(TEXT, a_spec()).output()[0, -1], a_spec())


def an_sae() -> SAE:
    return SAE(Config("standard", hook=str(POINT)), random_weights("standard", d_in=128, d_out=128))


def probed(model: MIModel) -> ProbeResult:
    texts = [f"The capital of {country} is" for country in ("France", "Spain", "Italy", "Japan", "Peru", "Kenya")]
    with TemporaryDirectory() as folder:
        return probe(model.harvest(texts, POINT, folder, positions=-1), [0, 0, 0, 1, 1, 1], folds=2)


def sparsely_probed(model: MIModel) -> mionnx.SparseProbes:
    texts = [f"The capital of {country} is" for country in ("France", "Spain", "Italy", "Japan", "Peru", "Kenya")]
    with TemporaryDirectory() as folder:
        made = model.harvest(texts, POINT, folder, positions=-1)
        return mionnx.sparse_probe(made, [0, 0, 0, 1, 1, 1], [1, 2], folds=2, controls=1)


RESULTS: dict[str, Callable[[MIModel], Any]] = {
    "AblationResult": ablated,
    "AttentionPatterns": lambda model: model.attention(TEXT),
    "FactoredMatrix": lambda model: model.weights.OV(1),
    "Saliency": lambda model: model.gradient_times_input(TEXT, answer="Paris"),
    "AttributedSweep": lambda model: model.attribute_patch(TEXT, OTHER, confirm=2),
    "AttentionScore": scored,
    "AttributionGraph": traced,
    "FeatureDashboards": boards,
    "Attribution": lambda model: model.attribute(TEXT, "Paris"),
    "Attributions": lambda model: model.attribute([TEXT, OTHER], "Paris"),
    "LogitDiffs": lambda model: model.get_logit_diff([TEXT, OTHER], "Paris", "Berlin"),
    "Bisection": lambda model: model.bisect(TEXT, ("ort-cpu", "ort-cpu:none")),
    "ChatTokens": lambda model: model.tokenize_chat(
        [{"role": "user", "content": TEXT}], chat_template="{{ messages[0].content }}"
    ),
    "Direction": lambda model: model.contrast([TEXT], [OTHER])[1],
    "Directions": lambda model: model.contrast([TEXT], [OTHER]),
    "Circuit": lambda model: model.circuit(TEXT, OTHER, [0, 30], steps=1),
    "EdgeAttribution": lambda model: model.edge_attribution(TEXT, OTHER),
    "DoseResponse": lambda model: model.dose_response([TEXT], model.contrast([TEXT], [OTHER])[1], [0, 1.0]),
    "Estimate": lambda model: model.estimate(a_spec(), 1, 5),
    "Fragment": lambda model: Fragment.of(onnx.parser.parse_model(FRAGMENT)),
    "Generation": lambda model: model.generate([TEXT, OTHER], STREAM, max_new_tokens=3, output_logits=True),
    "HeadScores": lambda model: model.head_scores(batch=2, period=6),
    "HookCache": lambda model: model.forward(TEXT, a_spec(), use_cache=True, logits=Logits(k=3)),
    "HookPoint": lambda model: HookPoint.AttnZ(3),
    "HookSpec": lambda model: a_spec(),
    "Intervention": lambda model: Intervention.Knockout(create_knockout_mask(KNOCKOUT, 8, 5)),
    "KVCache": lambda model: model.generate(TEXT, max_new_tokens=3).cache,
    "LayerCache": lambda model: LayerCache([{"state": np.eye(3)[None, None]}, {}], np.ones((1, 4), np.int64)),
    "KnockoutSpec": lambda model: KNOCKOUT,
    "Subspace": lambda model: Subspace(np.eye(2, 128)),
    "Patchscope": lambda model: model.patchscope(TEXT, 3, target=OTHER, placeholder=3),
    "JacobianLens": lambda model: mionnx.JacobianLens({0: np.eye(8)}, n_prompts=3, metadata={"corpus": "a"}),
    "SubspaceEffect": lambda model: model.subspace_interchange(
        TEXT, OTHER, Subspace(np.eye(2, 128)), POINT, placebos=2
    ),
    "SparseProbes": sparsely_probed,
    "LensResult": lambda model: model.logit_lens(TEXT, k=3, token_ids=["Tokyo"]),
    "Logits": lambda model: Logits(positions=-1),
    "ModelSizes": lambda model: model.cfg,
    "Noise": lambda model: Noise("France", seed=1, repeats=3),
    "Options": lambda model: Options("cuda", threads=2, provider_options={"device_id": 0}),
    "ProbeResult": probed,
    "Report": lambda model: model.report(a_spec()),
    "SAE": lambda model: an_sae(),
    "SteeringCalibration": lambda model: model.calibrate(model.contrast([TEXT], [OTHER]), [TEXT]),
    "Statistics": lambda model: model.statistics([TEXT, OTHER], POINT, by="token"),
    "SweepResult": lambda model: model.patch_sweep(TEXT, OTHER),
    "TokenChange": lambda model: ablated(model).top_changed_tokens(1)[0],
    "Tokens": lambda model: model.tokenize(TEXT),
    "MatrixLosses": lambda model: mionnx.MatrixLosses([MatrixLoss("W", 1, (2, 3), 4, 9, 0.1, 0.2, 1e-5, 0.5)]),
    "ModelLosses": lambda model: mionnx.ModelLosses("a", "b", [], [LayerLoss(1, 0.5, 0.75, 0.25)], {"top_1": 1.0}),
    "Verification": lambda model: model.verify(TEXT, ("ort-cpu", "ort-cpu:none"), greedy=2),
    "ablation sweep": lambda model: model.ablation_sweep(TEXT),
    "path patching": lambda model: model.path_patch(TEXT, OTHER, "all"),
    "Diagnosis": lambda model: model.doctor(TEXT),
    "Forecast": lambda model: model.forecast(TEXT),
    "RangeReport": lambda model: model.check_range(TEXT),
    "Knob": lambda model: mionnx.Knob(low=0.0, high=2.0, unit="norms", meaning="towards the sea"),
    "Monitor": lambda model: an_sae().monitor([1]),
    "Predictions": lambda model: MIModel.from_pretrained(BERT).fill_mask("The capital of <mask> is Paris .", k=2),
    "Spans": lambda model: mionnx.Spans.of(["Ann lives"], [TextSpan(0, "PER", "Ann", 0, 3, (1, 1), 0.75)]),
    "TokenPairs": lambda model: mionnx.TokenPairs("late interaction", ("a", "b"), ("a",), ("b",), np.ones((1, 1)), 1.0),
    "predicate": lambda model: HookSpec().capture(is_a_stream),
    "predicate of an intervention": lambda model: HookSpec().intervene(is_a_stream, Intervention.Add(1.0)),
    "stack": lambda model: model.decompose_resid(model.run_with_cache(TEXT)[1]),
}
RECURRENT: dict[str, Callable[[MIModel], Any]] = {
    "HookCache": lambda model: model.forward(TEXT, HookSpec().capture("*")),
    "RWKVState": lambda model: model.forward(TEXT).state,
    "StateAblationResult": lambda model: StateAblationResult(
        model.forward(TEXT).output()[0, -1], model.forward(OTHER).output()[0, -1]
    ),
    "StateKnockoutSpec": lambda model: StateKnockoutSpec().position(0).layer(1).erase(),
    "StateSteeringSpec": lambda model: StateSteeringSpec(2.0).position(0),
    "Generation": lambda model: model.generate(TEXT, max_new_tokens=2),
}
# No results: what is not told by values, or belongs to its call.
OTHERS = {
    "MIModel",
    "Activations",
    "Comparison",
    "Hook",
    "TextStreamer",
    "Compiled",
    "FeatureActivations",
    "TranscoderSet",
    "create_knockout_mask",
    "probe",
    "sparse_probe",
    "sample_token",
    "statistics_of",
}


def check_round_trips(result: Any) -> None:
    data = pickle.dumps(result)
    assert len(data) < SMALL
    for again in (pickle.loads(data), copy.deepcopy(result), copy.copy(result)):
        assert alike(again, result)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_pickled_and_copied_by_its_values(shipped: MIModel, name: str) -> None:
    check_round_trips(RESULTS[name](shipped))


@pytest.mark.parametrize("name", RECURRENT)
def test_a_result_of_a_recurrent_model_is_too(recurrent: MIModel, name: str) -> None:
    check_round_trips(RECURRENT[name](recurrent))


def test_every_public_type_is_among_them() -> None:
    errors = {name for name in mionnx.__all__ if name.endswith(("Error", "Warning"))}
    assert {*mionnx.__all__} <= errors | OTHERS | RESULTS.keys() | RECURRENT.keys()
    for name in sorted(errors):
        error = pickle.loads(pickle.dumps(getattr(mionnx, name)("why")))
        assert (type(error).__name__, str(error)) == (name, "why")
    check_round_trips(mionnx.Hook(POINT))


def test_features_are_pickled_by_their_values(shipped: MIModel) -> None:
    check_round_trips(shipped.features(TEXT, an_sae()))


def test_a_generation_goes_on_from_its_pickled_cache(shipped: MIModel) -> None:
    made = shipped.generate(TEXT, max_new_tokens=3)
    again = pickle.loads(pickle.dumps(made)).cache
    token = [made.ids[0][-1:].tolist()]
    np.testing.assert_array_equal(
        shipped.forward(token, cache=again).output(), shipped.forward(token, cache=made.cache).output()
    )


def test_a_lens_that_was_pickled_reads_further_tokens(shipped: MIModel) -> None:
    lens = shipped.logit_lens(TEXT)
    for again in (pickle.loads(pickle.dumps(lens)), copy.deepcopy(lens)):
        np.testing.assert_array_equal(again.rank_of("Tokyo"), lens.rank_of("Tokyo"))
        assert again.to_json() == lens.to_json()
        assert again.page() == lens.page()


def test_a_lens_without_its_model_says_so_when_it_needs_it(copy: Path, tmp_path: Path) -> None:
    lens = MIModel.from_pretrained(copy, threads=1).logit_lens(TEXT)
    data = pickle.dumps(lens)
    shutil.rmtree(copy)
    again = pickle.loads(data)
    np.testing.assert_array_equal(again.top_ids, lens.top_ids)
    with pytest.raises(ModelError, match="where that folder is"):
        again.rank_of("Tokyo")


@pytest.mark.parametrize("limits", [{}, {"positions": -1}])
def test_a_predicate_that_cannot_be_pickled_says_why_and_can_be_copied(limits: dict[str, Any]) -> None:
    edited = HookSpec().intervene(lambda name: name == "hook_embed", Intervention.Zero())
    with pytest.raises(SpecFileError, match=r"an intervention by the predicate <lambda> cannot be pickled"):
        pickle.dumps(edited)
    assert copy.deepcopy(edited).interventions[0][0] == edited.interventions[0][0]
    spec = HookSpec().capture(lambda name: name == "hook_embed", **limits)
    with pytest.raises(SpecFileError, match=r"predicate <lambda> cannot be pickled.*a module.*glob"):
        pickle.dumps(spec)
    assert copy.deepcopy(spec).captures == spec.captures
    assert copy.copy(spec).captures == spec.captures


class OwnModel(MIModel):
    """A user's own class of models."""


def test_a_model_is_pickled_as_its_folder_and_options(copy: Path) -> None:
    model = OwnModel.from_pretrained(copy, threads=1, prepack=False)
    expected = model.forward(TEXT).output()
    data = pickle.dumps(model)
    assert len(data) < 2_000
    again = pickle.loads(data)
    assert type(again) is OwnModel
    assert again.options == model.options
    assert again.compiled == {}  # nothing is open yet
    np.testing.assert_array_equal(again.forward(TEXT).output(), expected)
    shutil.rmtree(copy)
    with pytest.raises(ModelError, match=rf"{copy}.*pickled as its folder and options"):
        pickle.loads(data)


def test_a_copied_model_has_sessions_of_its_own(shipped: MIModel) -> None:
    expected = shipped.forward(TEXT).output()
    for again in (copy.copy(shipped), copy.deepcopy(shipped), copy.deepcopy([shipped])[0]):
        assert type(again) is MIModel
        assert again.options == shipped.options
        assert again.variants is not shipped.variants
        np.testing.assert_array_equal(again.forward(TEXT).output(), expected)


def test_a_pickled_model_opens_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is one of the process that pickled."""
    monkeypatch.chdir(REPOSITORY)
    data = pickle.dumps(MIModel.from_pretrained("models/world-llama", threads=1))
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(data).num_layers == 4


@pytest.mark.slow
def test_a_model_works_in_spawned_processes(shipped: MIModel) -> None:
    """The model and the spec go there pickled, the results come back so."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(MIModel.forward, shipped, text, a_spec()) for text in (TEXT, OTHER)]
        made = pool.submit(MIModel.generate, shipped, TEXT, max_new_tokens=3)
        lens = pool.submit(MIModel.logit_lens, shipped, TEXT)
        for run, text in zip(runs, (TEXT, OTHER), strict=True):
            assert alike(run.result(), shipped.forward(text, a_spec()))
        assert alike(made.result().new_ids, shipped.generate(TEXT, max_new_tokens=3).new_ids)
        assert lens.result().to_json() == shipped.logit_lens(TEXT).to_json()
