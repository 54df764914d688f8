"""What is saved is loaded as it was: every result, its values, text, table and page; any other file is refused."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from alike import alike
from repository import REPOSITORY
from safetensors.numpy import load_file, save_file
from transcoder_files import boards, scored, traced

from mionnx import (
    AblationResult,
    AttentionPatterns,
    Attribution,
    Directions,
    DoseResponse,
    FeatureActivations,
    Generation,
    HeadScores,
    HookCache,
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    JacobianLens,
    KnockoutSpec,
    KVCache,
    LensResult,
    Logits,
    MatrixLosses,
    MIError,
    MIModel,
    ModelLosses,
    ProbeResult,
    RWKVState,
    SparseProbes,
    SpecFileError,
    StateAblationResult,
    StateKnockoutSpec,
    Subspace,
    Verification,
    probe,
    sparse_probe,
)
from mionnx.analysis.quantisation.matrix_loss import MatrixLoss
from mionnx.analysis.similarity.token_pairs import TokenPairs
from mionnx.analysis.sweep.result import SweepResult
from mionnx.machine.stored import Stored
from mionnx.run.spans import Spans, TextSpan
from mionnx.verify.difference import HookDifference, LayerLoss
from mionnx.view import Shown, Table

TEXT, OTHER = "The capital of France is", "The capital of Japan is"
POINT = HookPoint.ResidPost(1)


def a_spec() -> HookSpec:
    spec = HookSpec().capture("blocks.*.attn.hook_z", positions=[-1], heads=3).capture(POINT, before=True)
    spec.intervene(POINT, Intervention.Add(np.arange(128, dtype=np.float32), positions=[0, -1]))
    return spec.intervene(HookPoint.MlpOut(2), Intervention.Scale(0.5, rows=0, positions="prompt"))


def ablated(model: MIModel, spec: Any) -> AblationResult:
    return AblationResult(model.forward(TEXT).output()[0, -1], model.forward(TEXT, a_spec()).output()[0, -1], spec)


def features(model: MIModel) -> FeatureActivations:
    random = np.random.default_rng(0)
    ids, values = random.integers(0, 9, (5, 2)), random.normal(size=(5, 2)).astype(np.float32)
    return FeatureActivations(str(POINT), ("a", "b", "c", "d", "e"), ids, values, np.array([3, 4]), values)


def probed(model: MIModel) -> ProbeResult:
    """Whether a text names a country of the north; a text is its own group."""
    countries = ("Norway", "Sweden", "Finland", "Denmark", "Iceland", "Spain", "Italy", "Greece", "Portugal", "Egypt")
    texts = [f"The capital of {country} is" for country in countries]
    with TemporaryDirectory() as folder:
        made = model.harvest(texts, POINT, Path(folder) / "made", positions=-1)
        return probe(made, [number < 5 for number in range(10)], folds=2)


def sparsely_probed(model: MIModel) -> SparseProbes:
    texts = [f"The capital of {country} is" for country in ("France", "Spain", "Italy", "Japan", "Peru", "Kenya")]
    with TemporaryDirectory() as folder:
        made = model.harvest(texts, POINT, Path(folder) / "made", positions=-1)
        return sparse_probe(made, [0, 0, 0, 1, 1, 1], [1, 2], folds=2, controls=1)


ROW = HookDifference("blocks.1.hook_resid_post", 1e-6, 1e-7, 20.0, 5e-8, 0.999, 1.0, 0.5, False, True)
LOGITS = {"kl_back_mean": 1e-3, "kl_back_max": 2e-3, "top_1": 1.0, "positions": 4.0}

RESULTS: dict[str, Callable[[MIModel], Stored]] = {
    "AblationResult": lambda model: ablated(model, a_spec()),
    "AblationResult of a knockout": lambda model: ablated(model, KnockoutSpec().layer(3).head(0).edge(3, 1)),
    "AblationResult alone": lambda model: ablated(model, None),
    "AttentionPatterns": lambda model: model.attention(TEXT, layers=[1, 3]),
    "AttributedSweep": lambda model: model.attribute_patch(TEXT, OTHER, confirm=2),
    "AttentionScore": scored,
    "AttributionGraph of a feature": lambda model: traced(model, toward="2_9_4"),
    "AttributionGraph": lambda model: traced(model).group("a", ["error_0_1"]),
    "Attribution": lambda model: model.attribute(TEXT, "Paris", versus="Tokyo"),
    "Attributions": lambda model: model.attribute([TEXT, OTHER], "Paris"),
    "RangeReport": lambda model: model.check_range(TEXT),
    "Forecast": lambda model: model.forecast(TEXT),
    "Diagnosis": lambda model: model.doctor(TEXT),
    "LogitDiffs": lambda model: model.get_logit_diff([TEXT, OTHER], "Paris", "Tokyo"),
    "Bisection": lambda model: model.bisect(TEXT, ("ort-cpu", "reference"), tolerance=0),
    "Bisection without a part": lambda model: replace(
        model.bisect(TEXT, ("ort-cpu", "ort-cpu:none"), tolerance=1), folder=Path("elsewhere")
    ),
    "Circuit": lambda model: model.circuit(TEXT, OTHER, [0, 30], steps=1),
    "DoseResponse": lambda model: model.dose_response([TEXT], model.contrast([TEXT], [OTHER])[1], [0, 1.0]),
    "EdgeAttribution": lambda model: model.edge_attribution(TEXT, OTHER, "z", ["hook_final_norm", "*.hook_v"]),
    "FeatureActivations": features,
    "FeatureDashboards": boards,
    "Generation": lambda model: model.generate(
        [TEXT, "Tokyo is"], HookSpec().capture(POINT), max_new_tokens=3, output_logits=True
    ),
    "HeadScores": lambda model: model.head_scores(batch=2, period=6),
    "HookCache": lambda model: model.forward(TEXT, a_spec(), use_cache=True, logits=Logits(k=3)),
    "HookCache with gradients": lambda model: model.gradients(TEXT, POINT, answer="Paris"),
    "HookCache without logits": lambda model: model.forward(TEXT, HookSpec().capture("*"), logits=False),
    "Patchscope": lambda model: model.patchscope(TEXT, 3, target=OTHER, placeholder=3, token_ids=["Paris"]),
    "SubspaceEffect": lambda model: model.subspace_interchange(
        TEXT, OTHER, Subspace(np.eye(2, 128)), POINT, placebos=2
    ),
    "DoseResponse with damage": lambda model: model.dose_response(
        [TEXT], model.contrast([TEXT], [OTHER])[1], [0, 1.0], damage_texts=[OTHER]
    ),
    "Circuit with controls": lambda model: model.circuit(TEXT, OTHER, "mib", steps=1, rank="score", controls=2),
    "LensResult of a Jacobian lens": lambda model: model.logit_lens(
        TEXT, k=3, lens=JacobianLens({1: np.eye(128)}), token_ids=["Tokyo"]
    ),
    "LensResult": lambda model: model.logit_lens(TEXT, k=3, token_ids=["Tokyo"]),
    "ProbeResult": probed,
    "SparseProbes": sparsely_probed,
    "Saliency": lambda model: model.gradient_times_input(TEXT, answer="Paris"),
    "Saliency of a path": lambda model: model.integrated_gradients(TEXT, OTHER, answer="Paris", steps=2),
    "SteeringCalibration": lambda model: model.calibrate(model.contrast([TEXT], [OTHER]), [TEXT]),
    "SweepResult": lambda model: model.patch_sweep(TEXT, OTHER),
    "SweepResult of an ablation": lambda model: model.ablation_sweep(TEXT),
    "SweepResult of paths": lambda model: model.path_patch(TEXT, OTHER, "all"),
    "ModelLosses": lambda model: ModelLosses("own", "other", [ROW], [LayerLoss(1, 0.5, 0.75, 0.25)], LOGITS),
    "MatrixLosses": lambda model: MatrixLosses([MatrixLoss("W", 1, (2, 3), 4, 9, 0.1, 0.2, 1e-5, 0.5)]),
    "Verification": lambda model: model.verify(TEXT, ("ort-cpu", "ort-cpu:none"), greedy=2),
}
RECURRENT: dict[str, Callable[[MIModel], Stored]] = {
    "HookCache": lambda model: model.forward(TEXT, HookSpec().capture("blocks.*.rwkv.hook_decay")),
    "Generation": lambda model: model.generate(TEXT, max_new_tokens=2),
    "StateAblationResult": lambda model: StateAblationResult(
        model.forward(TEXT).output()[0, -1], model.forward(OTHER).output()[0, -1], StateKnockoutSpec().position(0)
    ),
}
ENCODED: dict[str, Callable[[MIModel], Stored]] = {
    "Predictions": lambda model: model.fill_mask("The capital of <mask> is Paris .", k=3),
    "Spans": lambda model: Spans.of(["Ann lives"], [TextSpan(0, "PER", "Ann", 0, 3, (1, 1), 0.75)]),
    "TokenPairs": lambda model: TokenPairs(
        "integrated Jacobians", ("a b", "c"), ("a", "b"), ("c",), np.array([[0.5], [0.25]]), 0.75, 0.1, 0.2, 0.3, 1, 9
    ),
}
PAST = (KVCache, RWKVState)


def plain(value: Any) -> Any:
    """Attributes in which a past has its layers as lists, and a lens no functions."""
    if isinstance(value, PAST):
        layers = [[np.asarray(part) for part in layer] for layer in value.layers]
        return {"layers": layers, "attention_mask": value.attention_mask}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, Stored):
        found = {name: one for name, one in vars(value).items() if name not in ("spell", "token_id", "read")}
        return {"class": type(value), **{name: plain(one) for name, one in found.items()}}
    return value


def told(result: Any) -> list[str]:
    """Everything that a result says of itself."""
    texts = [str(result), repr(result)]
    if isinstance(result, Shown):
        texts += [result.page(), result.to_json()]
    return texts + ([str(result.table())] if hasattr(result, "table") else [])


def check(result: Stored, folder: Path) -> None:
    path = folder / "result.safetensors"
    assert result.save(path) == path
    again = type(result).load(path)
    assert alike(plain(again), plain(result))
    assert told(again) == told(result)
    assert again.save(folder / "again.safetensors").read_bytes() == path.read_bytes()
    assert sorted(one.name for one in folder.iterdir()) == ["again.safetensors", path.name]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_loaded_as_it_was(shipped: MIModel, tmp_path: Path, name: str) -> None:
    result = RESULTS[name](shipped)
    assert type(result).__name__ == name.split()[0]
    check(result, tmp_path)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_result_of_a_recurrent_model_is_too(recurrent: MIModel, tmp_path: Path, name: str) -> None:
    check(RECURRENT[name](recurrent), tmp_path)


@pytest.mark.parametrize("name", ENCODED)
def test_a_result_of_an_encoder_is_too(tmp_path: Path, name: str) -> None:
    check(ENCODED[name](MIModel.from_pretrained(REPOSITORY / "models" / "world-bert")), tmp_path)


def test_every_result_with_a_page_is_among_them() -> None:
    classes = {name.split()[0] for name in (*RESULTS, *RECURRENT, *ENCODED)}
    shown = {one.__name__ for one in Shown.__subclasses__() if one.__module__.startswith("mionnx.")}
    assert shown - classes == {"Directions"}  # which has a format of its own


@pytest.mark.parametrize(("dtype", "axes"), [(ml_dtypes.bfloat16, 2), (np.float16, 0), (np.bool_, 1), (np.int32, 3)])
def test_captures_keep_their_dtype_order_and_names(tmp_path: Path, dtype: Any, axes: int) -> None:
    value = np.ones((2,) * axes, dtype)
    cache = HookCache(None, {"b.hook": value, "a.hook": np.zeros((0, 3), dtype)}, num_layers=4)
    again = HookCache.load(cache.save(tmp_path / "c.safetensors"))
    assert list(again) == ["b.hook", "a.hook"]
    assert alike(again["b.hook"], value)
    assert {*load_file(tmp_path / "c.safetensors")} == {"a.hook", "b.hook"}


def test_a_capture_with_a_name_of_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecFileError, match="'state'"):
        HookCache(None, {"state": np.ones(2)}).save(tmp_path / "c.safetensors")


def test_a_generation_goes_on_from_its_loaded_cache(shipped: MIModel, tmp_path: Path) -> None:
    made = shipped.generate(TEXT, max_new_tokens=3)
    again = Generation.load(made.save(tmp_path / "g.safetensors"))
    token = [made.ids[0][-1:].tolist()]
    outputs = [shipped.forward(token, cache=one.cache).output() for one in (made, again)]
    np.testing.assert_array_equal(*outputs)


def test_a_loaded_lens_reads_further_tokens_with_its_model_only(
    shipped: MIModel, recurrent: MIModel, tmp_path: Path
) -> None:
    lens = shipped.logit_lens(TEXT, token_ids=["Tokyo"])
    path, tokyo = lens.save(tmp_path / "l.safetensors"), shipped.token_id("Tokyo")
    alone, opened = LensResult.load(path), LensResult.load(path, model=shipped)
    for again in (alone, opened):
        np.testing.assert_array_equal(again.probability_of(tokyo), lens.probability_of("Tokyo"))
        np.testing.assert_array_equal(again.rank_of(tokyo), lens.rank_of("Tokyo"))
    np.testing.assert_array_equal(opened.probability_of("Oslo"), lens.probability_of("Oslo"))
    for token in ("Tokyo", "Oslo", shipped.token_id("Oslo")):
        with pytest.raises(InputError, match=rf"{token!r}.*'Tokyo'.*load\(path, model=model\)"):
            alone.rank_of(token)
    with pytest.raises(InputError, match="another model than the one given: llama"):
        LensResult.load(path, model=recurrent)
    np.testing.assert_array_equal(
        LensResult.load(alone.save(tmp_path / "again.safetensors"), model=shipped).rank_of("Oslo"),
        lens.rank_of("Oslo"),
    )


@pytest.fixture(scope="module")
def files(shipped: MIModel, recurrent: MIModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file of each kind that mionnx writes as .safetensors, by what reads it."""
    folder = tmp_path_factory.mktemp("files")
    shipped.forward(TEXT, use_cache=True).kv_cache.save(folder / "KVCache.load")
    recurrent.forward(TEXT).state.save(folder / "RWKVState.load")
    a_spec().save(str(folder / "HookSpec.load"))
    shipped.verify(TEXT, ["ort-cpu"], record=folder / "verify(against=...)", greedy=0)
    shipped.patch_sweep(TEXT, OTHER, layers=[0], resume=folder / "resume=...")
    made = {"Directions.load": shipped.contrast([TEXT], [OTHER]), "HookCache.load": shipped.forward(TEXT)}
    for reader, result in {**made, "Attribution.load": shipped.attribute(TEXT, "Paris")}.items():
        result.save(folder / "x.safetensors").rename(folder / reader)
    return {path.name: path for path in folder.iterdir()}


READERS = (Attribution, Directions, HookCache, HookSpec, KVCache, RWKVState)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_another_kind_is_refused_by_the_name_of_its_reader(files: dict[str, Path], reader: Any) -> None:
    own = f"{reader.__name__}.load"
    reader.load(files[own])
    for right, path in files.items():
        if right != own:
            with pytest.raises(MIError, match=rf"{re.escape(str(path))}.*{re.escape(right)}"):
                reader.load(path)


def test_other_files_are_refused(tmp_path: Path, files: dict[str, Path]) -> None:
    save_file({"values": np.ones(3)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpecFileError, match="is no saved SweepResult: it is not of a kind that mionnx writes"):
        SweepResult.load(tmp_path / "x.safetensors")
    (tmp_path / "x.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    for name in ("x.json", "missing", "pipe", "."):
        with pytest.raises(SpecFileError, match="is no saved SweepResult"):
            SweepResult.load(tmp_path / name)
    metadata = {"mionnx_result": "1", "kind": "Attribution", "contents": "{}"}
    save_file({"values": np.ones(3)}, tmp_path / "y.safetensors", metadata=metadata)
    with pytest.raises(SpecFileError, match=r"y.safetensors is damaged: it has no checksum"):
        Attribution.load(tmp_path / "y.safetensors")


@pytest.mark.parametrize("name", ["HookCache", "LensResult", "SweepResult"])
def test_a_flipped_byte_is_refused(shipped: MIModel, tmp_path: Path, name: str) -> None:
    result = RESULTS[name](shipped)
    data = result.save(tmp_path / "result.safetensors").read_bytes()
    for at in np.linspace(0, len(data) - 1, 40).astype(int):
        flipped = bytearray(data)
        flipped[at] ^= 1
        (tmp_path / "flipped.safetensors").write_bytes(flipped)
        try:
            again = type(result).load(tmp_path / "flipped.safetensors")
        except SpecFileError as error:
            words = str(error)
        else:  # white space after the header
            words = "flipped.safetensors" * (at < 8 + int.from_bytes(data[:8], "little"))
            assert alike(plain(again), plain(result))
        assert "flipped.safetensors" in words
    flipped = bytearray(data)
    flipped[-9] ^= 1
    (tmp_path / "flipped.safetensors").write_bytes(flipped)
    with pytest.raises(SpecFileError, match=r"flipped\.safetensors is damaged: it does not have the checksum"):
        type(result).load(tmp_path / "flipped.safetensors")


def test_the_ending_says_what_is_written(shipped: MIModel, tmp_path: Path) -> None:
    scores = HeadScores(("induction",), np.zeros((1, 2, 2)), 0.1, 4, 1, "model")
    for ending, begins in ((".html", b"<!doctype html"), (".png", b"\x89PNG"), (".json", b"{")):
        assert scores.save(tmp_path / f"x{ending}").read_bytes().lower().startswith(begins.lower())
    for result in (scores, AblationResult([0.0, 1.0], [1.0, 0.0])):
        with pytest.raises(SpecFileError, match=r"x\.npz.*\.safetensors"):
            result.save(tmp_path / "x.npz")


def test_what_no_file_can_hold_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    result = AblationResult([0.0, 1.0], [1.0, 0.0], spec=lambda: None)
    (tmp_path / "x.safetensors").write_text("before")
    with pytest.raises(SpecFileError, match="spec is a function, which no file can hold"):
        result.save(tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").read_text() == "before"
    with pytest.raises(SpecFileError, match="cannot write"):
        AblationResult([0.0, 1.0], [1.0, 0.0]).save(tmp_path / "missing" / "x.safetensors")


CLASSES = (AttentionPatterns, DoseResponse, FeatureActivations, Verification)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_kind_is_refused_as_another(shipped: MIModel, tmp_path: Path, kind: type[Stored]) -> None:
    path = AblationResult([0.0, 1.0], [1.0, 0.0]).save(tmp_path / "x.safetensors")
    with pytest.raises(SpecFileError, match=f"no saved {kind.__name__}: it is a saved AblationResult, which Ablation"):
        kind.load(path)


SHOWN = [
    "AttentionPatterns",
    "AttentionScore",
    "FeatureDashboards",
    "AttributedSweep",
    "Attribution",
    "Attributions",
    "Circuit",
    "DoseResponse",
]
SHOWN += ["EdgeAttribution", "FeatureActivations", "HeadScores", "LensResult", "LogitDiffs", "ProbeResult", "Saliency"]
SHOWN += ["MatrixLosses", "ModelLosses", "Patchscope", "SweepResult", "Verification"]


@pytest.mark.parametrize("name", SHOWN)
def test_a_result_has_a_frame_a_table_and_a_figure(shipped: MIModel, name: str) -> None:
    result = RESULTS[name](shipped)
    assert isinstance(result, Shown)
    frame = result.to_frame()
    assert len(frame) > 0
    assert [*frame.columns] == [*result._columns()]
    table = result.table(1)
    assert isinstance(table, Table)
    assert str(table)
    assert any(axes.images or axes.lines or axes.patches for axes in result.figure().axes)
    assert json.loads(result.to_json())


def test_a_frame_holds_the_numbers_of_its_result(shipped: MIModel) -> None:
    """One number of each result that had no frame, found by its names."""
    scores = RESULTS["HeadScores"](shipped)
    row = scores.to_frame().query("kind == 'induction' and layer == 3 and head == 1")
    assert row.score.tolist() == [scores["induction"][3, 1]]
    lens = RESULTS["LensResult"](shipped)
    frame = lens.to_frame().query("point == 'blocks.2.hook_resid_post' and position == 3")
    assert frame.answer_probability.tolist() == [lens.answer_probability[2, 3]]
    assert frame.top_token.tolist() == [lens.spell(int(lens.top_ids[2, 3, 0]))]
    dose = RESULTS["DoseResponse"](shipped)
    np.testing.assert_array_equal(dose.to_frame().kl.to_numpy().reshape(dose.kl.shape), dose.kl)
    saliency = RESULTS["Saliency"](shipped)
    assert saliency.to_frame().score.tolist() == saliency.scores().tolist()
    patterns = RESULTS["AttentionPatterns"](shipped)
    frame = patterns.to_frame().query("layer == 3 and head == 2 and query == 4 and key == 1")
    assert frame.weight.tolist() == [patterns.of(3, 2)[4, 1]]
    probes = RESULTS["ProbeResult"](shipped)
    assert probes.to_frame().accuracy.mean() == pytest.approx(next(iter(probes.accuracy.values())))
