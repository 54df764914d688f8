"""Activations of a dataset on disk: right, in order, and whole whatever happens to the process or the disk."""

import filecmp
import json
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from repository import REPOSITORY
from saelens_fixture import random_weights
from typer.testing import CliRunner

from mionnx import (
    SAE,
    Activations,
    HookError,
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    MIModel,
    SpecFileError,
    TokenizerError,
)
from mionnx.analysis.features.config import Config
from mionnx.analysis.harvest.activations import TokenArray, shuffled
from mionnx.analysis.harvest.harvest import HARVEST_LOCK, DamagedShardWarning
from mionnx.analysis.harvest.manifest import read_manifest
from mionnx.cli.main import app
from mionnx.machine.progress import reported_to

STREAM = "blocks.2.hook_resid_post"
HOOKS = ["hook_embed", STREAM, "blocks.1.attn.hook_k"]
TEXTS = [
    f"The capital of {place} is" if n % 3 else f"When Mary and {place} went to the store , Mary gave a drink to"
    for n, place in enumerate(["France", "Japan", "Spain", "Kenya", "Egypt", "Italy", "Chile", "China", "Peru"])
]
FOLDER = REPOSITORY / "models" / "world-llama"


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained(FOLDER)


def files(folder: Path) -> list[str]:
    """The files of a finished harvest."""
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != HARVEST_LOCK
    )


def same(one: Path, other: Path) -> bool:
    """Whether two folders have the same files, byte for byte."""
    return files(one) == files(other) and not any(filecmp.cmpfiles(one, other, files(one), shallow=False)[1:])


@pytest.mark.parametrize("packed", [False, True])
def test_the_values_are_those_of_transformers(model: MIModel, tmp_path: Path, packed: bool) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="eager", dtype=torch.float32).eval()
    options = {"context": 8, "packed": True} if packed else {}
    made = model.harvest(TEXTS, HOOKS, tmp_path / "made", **options)
    rows = [model.tokenize(text).ids for text in TEXTS]
    whole = np.concatenate(rows)
    expected_rows = [whole[at : at + 8] for at in range(0, len(whole), 8)] if packed else rows
    np.testing.assert_array_equal(made.token_ids, whole)
    np.testing.assert_array_equal(made.text_index, np.concatenate([[n] * len(row) for n, row in enumerate(rows)]))
    np.testing.assert_array_equal(made.positions, np.concatenate([np.arange(len(row)) for row in rows]))
    at = 0
    for row in expected_rows:
        with torch.no_grad():
            states = reference(torch.from_numpy(row[None]), output_hidden_states=True, use_cache=False).hidden_states
        for hook, layer in (("hook_embed", 0), (STREAM, 3)):
            found = made[hook][at : at + len(row)]
            assert np.abs(found - states[layer][0].numpy()).max() < 5e-5 * max(1, np.abs(found).max())
        at += len(row)
    assert at == made.tokens == len(made.token_ids)
    assert made["blocks.1.attn.hook_k"].shape == (at, model.num_kv_heads, model.head_dim)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (-1, [13, 4, 4]),
        ([0, -1], [0, 13, 0, 4, 0, 4]),
        ("of", None),
        (lambda ids: ids == ids[0], [0, 0, 0]),
    ],
)
def test_positions_are_chosen(model: MIModel, tmp_path: Path, positions, expected) -> None:
    texts = TEXTS[:3] if expected else TEXTS[1:3]
    made = model.harvest(texts, STREAM, tmp_path / "made", positions=positions)
    assert np.asarray(made.positions).tolist() == (expected or [2, 2])
    for text in range(len(texts)):
        whole = model.forward(texts[text], HookSpec().capture(STREAM))[STREAM][0]
        mask = np.asarray(made.text_index) == text
        np.testing.assert_allclose(made[STREAM][mask], whole[np.asarray(made.positions)[mask]], atol=2e-5)


def test_a_separator_stands_before_each_text_of_packed_windows(model: MIModel, tmp_path: Path) -> None:
    token = model.token_id("France")
    made = model.harvest(TEXTS, STREAM, tmp_path / "made", context=8, packed=True, separator="France")
    at = np.flatnonzero(np.asarray(made.positions) == -1)
    assert (made.token_ids[at] == token).all()
    assert made.text_index[at].tolist() == [*range(len(TEXTS))]


def test_interventions_apply(model: MIModel, tmp_path: Path) -> None:
    spec = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero())
    made = model.harvest(TEXTS[:1], STREAM, tmp_path / "made", hooks=spec)
    np.testing.assert_allclose(made[STREAM][:], model.forward(TEXTS[0], spec.capture(STREAM))[STREAM][0], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_are_rounded_once(model: MIModel, tmp_path: Path, dtype: str) -> None:
    made = model.harvest(TEXTS, STREAM, tmp_path / "made", dtype=dtype)
    exact = model.harvest(TEXTS, STREAM, tmp_path / "exact")
    np.testing.assert_array_equal(made[STREAM][:], exact[STREAM][:].astype(made[STREAM].dtype))
    assert made[STREAM].dtype.name == dtype


@pytest.mark.parametrize("limit", [{"rows": [0]}, {"positions": [[0]] * 9}], ids=["rows", "positions of each"])
def test_an_intervention_of_some_rows_is_refused(model: MIModel, tmp_path: Path, limit) -> None:
    """Which texts share a batch depends on their lengths and on `batch_size`."""
    for edit in (Intervention.Zero(**limit), Intervention.Add(np.ones((9, 1, 128), np.float32))):
        hooks = HookSpec().intervene(STREAM, edit)
        with pytest.raises(InterventionError, match=f"at {STREAM}: rows are those of one batch"):
            model.harvest(TEXTS, [STREAM], tmp_path / "made", hooks=hooks)


@pytest.mark.parametrize("kind", [iter, np.array, set])
def test_positions_come_in_any_iterable(model: MIModel, tmp_path: Path, kind) -> None:
    made = model.harvest(TEXTS, [STREAM], tmp_path / "made", positions=kind([0, -1]))
    again = model.harvest(TEXTS, [STREAM], tmp_path / "again", positions=[0, -1])
    assert made.tokens == 2 * len(TEXTS)
    np.testing.assert_array_equal(made[STREAM][:], again[STREAM][:])


def test_positions_that_choose_nothing_are_refused(model: MIModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no token of these texts would be written: positions= chose none"):
        model.harvest(TEXTS, [STREAM], tmp_path / "made", positions=lambda ids: np.zeros(len(ids), bool))


def test_a_number_too_large_for_float16_is_refused(model: MIModel, tmp_path: Path) -> None:
    spec = HookSpec().capture(STREAM).intervene(STREAM, Intervention.Scale(1e5))
    with pytest.raises(InputError, match=f"{STREAM} has .* too large for float16: use bfloat16"):
        model.harvest(TEXTS, None, tmp_path / "made", hooks=spec, dtype="float16")


def test_what_is_no_number_before_the_cast_is_no_reason_to_refuse(model: MIModel, tmp_path: Path) -> None:
    spec = (
        HookSpec()
        .capture(STREAM)
        .intervene(STREAM, Intervention.Scale(1e30))
        .intervene(STREAM, Intervention.Scale(1e30))
    )
    made = model.harvest(TEXTS[:2], None, tmp_path / "made", hooks=spec, dtype="float16")
    assert np.isinf(made[STREAM][:]).any()


def test_other_engines_round_as_well(model: MIModel, tmp_path: Path) -> None:
    other = MIModel.from_pretrained(FOLDER, engine="reference")
    made = other.harvest(TEXTS[:1], STREAM, tmp_path / "made", dtype="bfloat16")
    exact = other.harvest(TEXTS[:1], STREAM, tmp_path / "exact")
    np.testing.assert_array_equal(made[STREAM][:], exact[STREAM][:].astype(made[STREAM].dtype))


def test_features_are_those_of_the_verb(model: MIModel, tmp_path: Path) -> None:
    sae = SAE(Config(activation="standard", hook="blocks.1.hook_resid_post"), random_weights("standard"))
    made = model.harvest(TEXTS, None, tmp_path / "made", sae=sae, k=4)
    ids, values = (made[f"blocks.1.hook_resid_post.hook_top_{name}"] for name in ("ids", "values"))
    found = model.features(TEXTS[1], sae, k=4)
    mask = np.asarray(made.text_index) == 1
    np.testing.assert_array_equal(ids[mask], found.ids)
    np.testing.assert_allclose(values[mask], found.values, atol=2e-5)
    assert ids.dtype == np.int32


class StopError(Exception):
    """An interruption."""


def test_an_interrupted_harvest_goes_on_and_gives_the_same_bytes(model: MIModel, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if done > 3:
            raise StopError

    options = {"shard_bytes": 10_000, "batch_size": 2}
    whole = model.harvest(TEXTS, HOOKS, tmp_path / "whole", **options)
    with pytest.raises(StopError), reported_to(stop):
        model.harvest(TEXTS, HOOKS, tmp_path / "made", **options)
    with pytest.raises(SpecFileError, match=r"was not finished: .* shards; harvest again"):
        Activations(tmp_path / "made")
    begun = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").glob("shard*")}
    assert 0 < len(begun) < len(whole._manifest.shards)
    model.harvest(iter(TEXTS), HOOKS, tmp_path / "made", **options)  # an iterator will do
    assert same(tmp_path / "whole", tmp_path / "made")
    assert all(path.stat().st_mtime_ns == changed for path, changed in begun.items())


def test_the_bytes_do_not_depend_on_what_the_model_ran_before(tmp_path: Path) -> None:
    fresh, used = (MIModel.from_pretrained(FOLDER) for _ in range(2))
    used.forward(np.full((4, 200), 5), HookSpec().capture(STREAM))
    assert not used.variants.options.prepack  # by the first call, which was long
    for name, model in (("fresh", fresh), ("used", used)):
        model.harvest(TEXTS * 20, HOOKS, tmp_path / name)
    assert same(tmp_path / "fresh", tmp_path / "used")


@pytest.mark.slow
def test_a_harvest_killed_eight_times_goes_on_and_gives_the_same_bytes(model: MIModel, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 120))
    code = "import sys; from mionnx import MIModel; model = MIModel.from_pretrained(sys.argv[1]); print(flush=True); "
    code += "model.harvest(*sys.argv[2:], shard_bytes=20_000, batch_size=2)"
    command = [sys.executable, "-c", code, str(FOLDER), str(tmp_path / "texts.txt"), "blocks.*.hook_resid_post"]
    begun = set()
    for after in np.random.default_rng(0).uniform(0, 0.35, 8):
        child = subprocess.Popen([*command, str(tmp_path / "made")], cwd=REPOSITORY, stdout=subprocess.PIPE)
        with child:
            child.stdout.readline()  # the model is open, the harvest begins
            time.sleep(after)
            child.send_signal(signal.SIGKILL)
        begun.add(len([*tmp_path.glob("made/shard*")]))
    assert len(begun) > 2
    assert not read_manifest(tmp_path / "made").complete
    options = {"shard_bytes": 20_000, "batch_size": 2}
    for name in ("made", "whole"):
        model.harvest(tmp_path / "texts.txt", "blocks.*.hook_resid_post", tmp_path / name, **options)
    assert same(tmp_path / "whole", tmp_path / "made")
    assert not [*(tmp_path / "made").glob(".shard*")]


def test_a_corrupt_shard_is_named_and_made_again(model: MIModel, tmp_path: Path) -> None:
    made = model.harvest(TEXTS, HOOKS, tmp_path / "made", shard_bytes=10_000)
    path = tmp_path / "made" / "shard-00001.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(SpecFileError, match=r"shard-00001.safetensors is damaged"):
        made.check()
    with pytest.warns(DamagedShardWarning, match=r"shard-00001.safetensors .* made again"):
        model.harvest(TEXTS, HOOKS, tmp_path / "made", shard_bytes=10_000)
    assert path.read_bytes() == good
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(SpecFileError, match=r"shard-00001.safetensors is no whole shard"):
        Activations(tmp_path / "made")[STREAM]
    path.unlink()
    with pytest.warns(DamagedShardWarning, match=r"shard-00001.safetensors"):
        model.harvest(TEXTS, HOOKS, tmp_path / "made", shard_bytes=10_000)
    made.check()
    assert pickle.loads(pickle.dumps(made)).tokens == made.tokens


def test_another_harvest_into_the_folder_is_refused(model: MIModel, tmp_path: Path) -> None:
    model.harvest(TEXTS, HOOKS, tmp_path)
    with pytest.raises(SpecFileError, match="made with context=None, this harvest has 4"):
        model.harvest(TEXTS, HOOKS, tmp_path, context=4)
    with pytest.raises(SpecFileError, match="shard 0 was made of other texts"):
        model.harvest([*TEXTS[1:], TEXTS[0]], HOOKS, tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(SpecFileError, match=r"holds other files \(notes.txt\)"):
        model.harvest(TEXTS, HOOKS, tmp_path / "other")
    with FileLock(tmp_path / HARVEST_LOCK), pytest.raises(SpecFileError, match="another process harvests into"):
        model.harvest(TEXTS, HOOKS, tmp_path)


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Let no file grow beyond a size, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_command_tells_what_it_made(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    command = ["harvest", str(FOLDER), str(tmp_path / "texts.txt"), "-o", str(tmp_path / "made"), "--points", STREAM]
    ran = CliRunner().invoke(app, [*command, "--positions=-1", "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert (told["tokens"], told["texts"], told["columns"]) == (9, 9, {STREAM: ["float32", [128]]})
    assert CliRunner().invoke(app, [*command, "--positions=-1"]).stdout.startswith("Activations(1 hook point")


def test_no_room_on_the_disk_is_an_error_and_nothing_is_lost(model: MIModel, tmp_path: Path) -> None:
    with small_files(20_000), pytest.raises(SpecFileError, match=r"cannot write .*shard"):
        model.harvest(TEXTS, HOOKS, tmp_path / "made")
    assert not [*(tmp_path / "made").glob("*shard*")]
    model.harvest(TEXTS, HOOKS, tmp_path / "made").check()
    (tmp_path / "file").touch()
    with pytest.raises(SpecFileError, match="cannot make the folder"):
        model.harvest(TEXTS, HOOKS, tmp_path / "file" / "made")
    with pytest.raises(SpecFileError, match="cannot write to /sys"):  # where root cannot write either
        model.harvest(TEXTS, HOOKS, "/sys")


def test_texts_come_from_files(model: MIModel, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) + "\n\n")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"story": text}) for text in TEXTS))
    parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "c.parquet")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "d"))
    expected = model.harvest(TEXTS, STREAM, tmp_path / "expected")
    for name, column in (("a.txt", None), ("b.jsonl", "story"), ("c.parquet", "text"), ("d", "text")):
        model.harvest(tmp_path / name, STREAM, tmp_path / f"from {name}", column=column)
        assert same(tmp_path / f"from {name}", expected.folder), name
    ids = pyarrow.array([model.tokenize(text).ids for text in ["of", *TEXTS]]).slice(1)
    parquet.write_table(pyarrow.table({"text": ids}), tmp_path / "ids.parquet", row_group_size=4)
    model.harvest(tmp_path / "ids.parquet", STREAM, tmp_path / "from ids")
    assert same(tmp_path / "from ids", expected.folder)
    with pytest.raises(InputError, match="line 1 has no 'text'"):
        model.harvest(tmp_path / "b.jsonl", STREAM, tmp_path / "made")
    with pytest.raises(InputError, match="has no column 'story', it has text"):
        model.harvest(tmp_path / "c.parquet", STREAM, tmp_path / "made", column="story")


def test_other_formats_hold_the_same_numbers(model: MIModel, tmp_path: Path) -> None:
    parquet, datasets = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("datasets")
    options = {"context": 7, "packed": True, "shard_bytes": 15_000}
    made = model.harvest(TEXTS, HOOKS, tmp_path / "made", **options)
    model.harvest(TEXTS, HOOKS, tmp_path / "table", format="parquet", **options)
    table = parquet.read_table(tmp_path / "table").to_pydict()
    for name, array in (("token_ids", made.token_ids), ("text_index", made.text_index), *made.items()):
        np.testing.assert_array_equal(np.array(table[name]).ravel(), np.asarray(array).ravel())
    lens = model.harvest(TEXTS, HOOKS, tmp_path / "lens", format="saelens", **options)
    windows = made.tokens // 7
    assert lens._manifest.dropped_tokens == made.tokens % 7 > 0
    for hook in HOOKS:
        loaded = datasets.load_from_disk(str(tmp_path / "lens" / hook)).with_format("numpy")
        assert loaded.features[hook].shape == (7, made[hook].shape[1:] and int(np.prod(made[hook].shape[1:])))
        np.testing.assert_array_equal(np.ravel(loaded[:][hook]), np.ravel(made[hook][: windows * 7]))
        np.testing.assert_array_equal(np.ravel(loaded[:]["token_ids"]), made.token_ids[: windows * 7])
    with pytest.raises(SpecFileError, match=r"holds saelens files: read them with datasets.load_from_disk"):
        lens[STREAM]


@given(st.data())
def test_an_array_over_shards_is_indexed_as_one_array(data) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
    parts = np.split(np.arange(sum(sizes) * 3).reshape(-1, 3), np.cumsum(sizes)[:-1])
    whole, made = np.concatenate(parts), TokenArray("x", parts)
    count = len(whole)
    number = st.integers(-count, count - 1)
    index = data.draw(
        st.one_of(
            number,
            st.slices(count),
            st.lists(number, min_size=1, max_size=6),
            st.lists(st.booleans(), min_size=count, max_size=count).map(np.array),
            st.tuples(number, st.integers(0, 2)),
            st.tuples(st.slices(count), st.slices(3)),
            st.tuples(st.lists(number, min_size=1), st.just(slice(1, 3))),
            st.just(...),
        )
    )
    np.testing.assert_array_equal(made[index], whole[index])
    np.testing.assert_array_equal(np.asarray(made), whole)
    assert (made.shape, made.ndim, len(made), made.nbytes) == (whole.shape, 2, count, whole.nbytes)


def test_what_was_harvested_is_told_by_in(model: MIModel, tmp_path: Path) -> None:
    made = model.harvest(TEXTS[:2], [STREAM], tmp_path / "made")
    assert STREAM in made
    assert HookPoint.ResidPost(2) in made
    assert "blocks.0.hook_resid_post" not in made


def test_batches_have_each_token_once(model: MIModel, tmp_path: Path) -> None:
    made = model.harvest(TEXTS, HOOKS, tmp_path / "made", shard_bytes=10_000)
    whole = np.asarray(made[STREAM])
    ordered = [*made.batches(10, shuffle=False)]
    np.testing.assert_array_equal(np.concatenate([batch[STREAM] for batch in ordered]), whole)
    mixed = [*made.batches(10, seed=3, points=[STREAM], convert=lambda array: array.copy())]
    assert [len(batch[STREAM]) for batch in mixed[:-1]] == [10] * (len(mixed) - 1)
    assert set(mixed[0]) == {STREAM, "token_ids", "text_index", "positions"}
    found = {
        (text, position): vector.tobytes()
        for batch in mixed
        for text, position, vector in zip(batch["text_index"], batch["positions"], batch[STREAM], strict=True)
    }
    places = zip(np.asarray(made.text_index), np.asarray(made.positions), strict=True)
    assert found == {place: vector.tobytes() for place, vector in zip(places, whole, strict=True)}
    with pytest.raises(InputError, match="seed=1 is of a random order"):
        made.batches(4, shuffle=False, seed=1)
    with pytest.raises(HookError, match=r"was not harvested; did you mean 'blocks.2.hook_resid_post'"):
        next(made.batches(4, points=["blocks.3.hook_resid_post"]))


def test_a_random_order_is_a_permutation_of_its_seed() -> None:
    one, again, other = (np.concatenate([*shuffled(200_000, 1000, seed)]) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    np.testing.assert_array_equal(np.sort(one), np.arange(200_000))


@pytest.mark.parametrize(
    ("texts", "hooks", "options", "message"),
    [
        ([], STREAM, {}, "there are no texts"),
        (["The capital", ""], STREAM, {}, "text 1: .*empty"),
        ("nowhere.txt", STREAM, {}, "nowhere.txt is no file and no folder"),
        (3, STREAM, {}, "texts are a file, a folder or an iterable of texts, got int"),
        (TEXTS, None, {}, "list|no hook point"),
        (TEXTS, "blocks.1.attn.hook_pattern", {}, r"hook_pattern .* has no value of one size for each token"),
        (TEXTS, STREAM, {"packed": True}, "context .* must be 1 or above"),
        (TEXTS, STREAM, {"separator": "France"}, "give packed=True"),
        (TEXTS, STREAM, {"positions": 9}, "text 1: position 9 of a row of 5 tokens"),
        (TEXTS, STREAM, {"positions": "of", "packed": True, "context": 4}, "this row came as ids"),
        (TEXTS, STREAM, {"positions": lambda ids: ids}, "positions= gave int64"),
        (TEXTS, STREAM, {"format": "saelens"}, "give packed=True and context="),
        (TEXTS, STREAM, {"format": "hdf5"}, "format='hdf5'; one of safetensors, parquet, saelens"),
        (TEXTS, STREAM, {"format": "parquet", "dtype": "bfloat16"}, "has no bfloat16"),
        (TEXTS, STREAM, {"batch_size": 0}, "batch_size=0"),
        (TEXTS, STREAM, {"column": "story"}, "only tables and JSON lines have columns"),
        (TEXTS, STREAM, {"k": 4}, "give sae="),
        (TEXTS, None, {"hooks": HookSpec().capture(STREAM, positions=[0])}, "give positions= to harvest"),
        (TEXTS, None, {"hooks": HookSpec().capture(STREAM, dtype="float16")}, "give dtype= to harvest"),
        (TEXTS, STREAM, {"dtype": "int8"}, "dtype='int8'; one of float32, float16, bfloat16"),
        (TEXTS, None, {"hooks": HookSpec().gradient(STREAM).set_metric("loss")}, "captures"),
        (TEXTS, HookSpec().capture(STREAM), {}, "hooks="),
        (TEXTS, None, {}, "names no hook point"),
    ],
)
def test_bad_input_is_refused(model: MIModel, tmp_path: Path, texts, hooks, options, message) -> None:
    with pytest.raises((InputError, HookError, SpecFileError, TokenizerError), match=message) as found:
        model.harvest(texts, hooks, tmp_path / "made", **options)
    assert not [*tmp_path.rglob("shard*")], found
