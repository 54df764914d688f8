"""What mionnx writes is read back as it was, or refused: one flipped byte, in every kind of file."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repository import REPOSITORY
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mionnx import (
    Attribution,
    Directions,
    HookSpec,
    InputError,
    Intervention,
    KVCache,
    MIError,
    MIModel,
    RWKVState,
    SpecFileError,
)
from mionnx.analysis.sweep.sweep import ProgressFile
from mionnx.cli.files import load_tensor
from mionnx.machine.tensor_file import CHECKSUM, to_bytes
from mionnx.verify.recorded_values import FACTS, RecordedValues

RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Written:
    """A file, and what reading gives: anything that `==` compares."""

    path: Path
    read: Callable[[Path], Any]


def bits(value: Any) -> Any:
    """A value in which arrays are their bytes, with dtype and shape."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    return [bits(entry) for entry in value] if isinstance(value, list | tuple) else value


def directions(path: Path) -> Any:
    found = Directions.from_gguf(path) if path.suffix == ".gguf" else Directions.load(path)
    shown = found.to_dict()
    if found.separation is not None:
        shown["separation"] = vars(found.separation)
    return bits([found.vectors, shown])


def recorded(path: Path) -> Any:
    found = RecordedValues.open(path)
    return bits([found.facts, found.get(0, "hook_embed")])


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Written]:
    """One file of each kind, written by the package itself."""
    folder = tmp_path_factory.mktemp("files")
    llama = MIModel.from_pretrained(REPOSITORY / "models" / "world-llama", prepack=False)
    rwkv = MIModel.from_pretrained(REPOSITORY / "models" / "world-rwkv7", prepack=False)
    spec = HookSpec().capture("blocks.*.hook_z").intervene("hook_embed", Intervention.Add(np.arange(9.0), positions=-1))
    spec.save(folder / "spec.safetensors")
    llama.forward([3, 4], use_cache=True).kv_cache.save(folder / "cache.safetensors")
    rwkv.forward([3, 4]).state.save(folder / "state.safetensors")
    vectors = RNG.normal(size=(2, 8)).astype(np.float32)
    known = Directions(vectors, [1, 2], "resid_post", "mean", 3)
    known.save(folder / "directions.safetensors")
    known.save(folder / "directions.gguf")
    progress = ProgressFile((2, 3), "key", folder / "sweep.safetensors")
    progress.store(0, np.arange(2), np.array([0.25, 1.5]))
    progress.write()
    values = RecordedValues(folder / "values")
    values.add(0, "hook_embed", vectors)
    values.keep(folder / "run.safetensors", dict.fromkeys(FACTS, "told"))
    (folder / "captures.safetensors").write_bytes(to_bytes({"logits": vectors}))
    llama.attribute([3, 4], 5).save(folder / "result.safetensors")
    reads: dict[str, Callable[[Path], Any]] = {
        "spec.safetensors": lambda path: HookSpec.load(path).to_bytes(),
        "cache.safetensors": lambda path: bits(vars(KVCache.load(path))),
        "state.safetensors": lambda path: bits(vars(RWKVState.load(path))),
        "directions.safetensors": directions,
        "directions.gguf": directions,
        "sweep.safetensors": lambda path: bits(ProgressFile((2, 3), "key", path).values),
        "run.safetensors": recorded,
        "result.safetensors": lambda path: bits(vars(Attribution.load(path))),
        "captures.safetensors": lambda path: bits(load_tensor(path, "logits")),
    }
    return {name: Written(folder / name, read) for name, read in reads.items()}


KINDS = ("spec", "cache", "state", "directions", "sweep", "run", "result", "captures")
NAMES = [f"{kind}.safetensors" for kind in KINDS] + ["directions.gguf"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_harmless(files, name, at, by):
    """Read anew after one byte became another: an error of mionnx, or the same to the last bit."""
    one = files[name]
    data = bytearray(one.path.read_bytes())
    data[int(at * len(data))] ^= by
    damaged = one.path.with_name(f"damaged.{one.path.name}")
    damaged.write_bytes(data)
    try:
        found = one.read(damaged)
    except MIError as error:
        found = error
    assert str(damaged) in str(found) if isinstance(found, MIError) else found == one.read(one.path)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_value_is_refused_by_name(files, name):
    """The last bytes of each file are values: changed, they are damage, and the file is named."""
    one = files[name]
    data = bytearray(one.path.read_bytes())
    data[-40] ^= 1
    damaged = one.path.with_name(f"damaged.{one.path.name}")
    damaged.write_bytes(data)
    with pytest.raises(MIError, match=r"damaged\.\w+\.\w+ is damaged: it does not have the (checksum|hash)"):
        one.read(damaged)


def test_a_damaged_resume_file_says_what_to_do(files, tmp_path):
    one = files["sweep.safetensors"]
    data = bytearray(one.path.read_bytes())
    data[-2] ^= 1
    (tmp_path / "sweep").write_bytes(data)
    with pytest.raises(InputError, match=r"sweep is damaged.*delete it, and the sweep begins anew"):
        one.read(tmp_path / "sweep")
    save_file({"values": np.zeros((2, 3))}, tmp_path / "old", metadata={"mionnx_sweep": "key"})
    with pytest.raises(InputError, match=r"old is damaged: it has no checksum.*delete it, and the sweep begins anew"):
        one.read(tmp_path / "old")


@pytest.mark.parametrize("kind", ["spec", "cache", "state", "directions", "sweep", "result"])
def test_a_file_of_mionnx_without_its_checksum_is_refused(files, tmp_path, kind):
    one = files[name := f"{kind}.safetensors"]
    with safe_open(one.path, framework="np") as file:
        metadata = {key: text for key, text in file.metadata().items() if key != CHECKSUM}
    save_file(load_file(one.path), tmp_path / name, metadata=metadata)
    with pytest.raises(MIError, match=f"{name} is damaged: it has no checksum"):
        one.read(tmp_path / name)


def test_a_control_vector_of_others_is_read(files, tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_int32("controlvector.layer_count", 1)
    writer.add_tensor("direction.1", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert Directions.from_gguf(tmp_path / "other.gguf").vectors.tolist() == [[1.0] * 8]


def test_a_cut_file_is_refused(files, tmp_path):
    for name in NAMES:
        one = files[name]
        for share in (0, 0.3, 0.99):
            shutil.copy(one.path, tmp_path / name)
            with (tmp_path / name).open("rb+") as file:
                file.truncate(int(share * one.path.stat().st_size))
            with pytest.raises((SpecFileError, InputError), match=name):
                one.read(tmp_path / name)
