"""Files of sparse autoencoders that strangers made: one sentence with the file, in time and memory of its size."""

import io
import json
import resource
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from saelens_fixture import random_weights
from safetensors.numpy import save_file

from mionnx import SAE, ModelError

HOOK = "blocks.1.hook_resid_post"
Members = dict[str, bytes]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def header(shape: str, descr: str = "<f4") -> bytes:
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (117 - len(head)) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


@pytest.fixture
def members() -> Members:
    weights = {name.replace("W_", "w_"): array for name, array in random_weights("jumprelu").items()}
    return {f"{name}.npy": npy(array) for name, array in weights.items()}


def packed(path: Path, members: Members, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_members_of_any_form_are_read(members, tmp_path):
    expected = random_weights("jumprelu")
    members["w_dec.npy"] = npy(np.asfortranarray(expected["W_dec"]))
    members["b_enc.npy"] = npy(expected["b_enc"].astype(">f8"))
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA):
        sae = SAE.load(packed(tmp_path / "params.npz", members, compression), hook=HOOK)
        assert {name: np.array_equal(array, expected[name]) for name, array in sae.weights.items()} == dict.fromkeys(
            expected, True
        )


REFUSED: dict[str, tuple[Callable[[Members], object], str]] = {
    "two members for one weight": (lambda held: held.update({"W_enc.npy": held["w_enc.npy"]}), "two members for W_enc"),
    "complex": (lambda held: held.update({"b_enc.npy": npy(np.zeros(96, complex))}), "dtype complex128"),
    "dates": (lambda held: held.update({"b_enc.npy": npy(np.zeros(96, "M8[s]"))}), "dtype datetime64"),
    "objects": (lambda held: held.update({"b_enc.npy": npy(np.array([{}] * 96))}), "dtype object"),
    "integers": (lambda held: held.update({"b_enc.npy": npy(np.zeros(96, np.int64))}), "dtype int64"),
    "no array": (lambda held: held.update({"notes.txt": b"text"}), "notes.txt' is no array"),
    "no magic": (lambda held: held.update({"b_enc.npy": b"text"}), "damaged"),
    "another version": (lambda held: held.update({"b_enc.npy": b"\x93NUMPY\x03\x00" + bytes(90)}), "version"),
    "2^40 numbers": (lambda held: held.update({"b_enc.npy": header("(1099511627776,)")}), "takes 4,398,046,511,104"),
    "negative": (lambda held: held.update({"b_enc.npy": header("(-1, -1)") + bytes(4)}), r"\[-1, -1\]"),
    "deep header": (lambda held: held.update({"b_enc.npy": header("(" * 60)}), "damaged"),
    "more than it says": (lambda held: held.update({"b_enc.npy": held["b_enc.npy"] + b"more"}), "and has"),
    "many": (lambda held: held.update({f"{i}.npy": b"" for i in range(101)}), "members"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_members_that_are_no_weights_are_refused(name, members, tmp_path):
    """Findings 8, 10 and 11."""
    change, words = REFUSED[name]
    change(members)
    with pytest.raises(ModelError, match=rf"params\.npz.*{words}"):
        SAE.load(packed(tmp_path / "params.npz", members), hook=HOOK)


def damaged(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "npy":
        path.write_bytes(npy(np.zeros(3)))
    elif kind == "deflate":
        data[60:90] = b"\xff" * 30
        path.write_bytes(data)
    else:  # flags, or the method, in the local header and in the directory
        value = {"encrypted": b"\x01\x00", "method": b"\x63\x00"}[kind]
        for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            at = data.find(mark) + place + (2 if kind == "method" else 0)
            data[at : at + 2] = value
        path.write_bytes(data)


@pytest.mark.parametrize("kind", ["npy", "deflate", "encrypted", "method"])
def test_archives_that_zipfile_throws_at_are_refused(kind, members, tmp_path):
    """Finding 10: zlib.error, RuntimeError, NotImplementedError, TypeError."""
    path = packed(tmp_path / "params.npz", members, zipfile.ZIP_DEFLATED)
    damaged(path, kind)
    with pytest.raises(ModelError, match=r"params\.npz"):
        SAE.load(path, hook=HOOK)


def test_a_file_of_few_bytes_takes_no_gigabytes(tmp_path):
    """Finding 8: 5 MB of zeros, unpacked to 5 GiB, took 10 GiB."""
    path = tmp_path / "params.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("W_enc.npy", "w", force_zip64=True) as file,
    ):
        file.write(header(f"({2**26},)"))
        for _ in range(2**8):
            file.write(bytes(2**20))
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match="bytes in a file of"):
        SAE.load(path, hook=HOOK)
    assert time.process_time() - begun < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


CONFIGS = {
    "k true": ({"architecture": "topk", "k": True}, "k=True"),
    "k a text": ({"architecture": "topk", "k": "7"}, "k='7'"),
    "kwargs a list": ({"architecture": "standard", "activation_fn_kwargs": [7]}, "activation_fn_kwargs"),
    "kwargs a text": ({"architecture": "standard", "activation_fn_kwargs": "k"}, "activation_fn_kwargs"),
    "architecture a list": ({"architecture": ["x"] * 9999}, "architecture"),
    "normalisation a table": ({"architecture": "standard", "normalize_activations": {"a": 1}}, "normalize_activations"),
    "metadata a list": ({"metadata": [1]}, "no configuration"),
}


def saelens(path: Path, config: dict, kind: str = "standard") -> Path:
    path.mkdir()
    (path / "cfg.json").write_text(json.dumps({"hook_name": HOOK, **config}))
    save_file(random_weights(kind), path / "sae_weights.safetensors")
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_that_are_none_are_refused(name, tmp_path):
    """Finding 10: a raw ParseError, AttributeError and ValueError."""
    config, words = CONFIGS[name]
    with pytest.raises(ModelError, match=rf"cfg\.json.*{words}") as refused:
        SAE.load(saelens(tmp_path / "sae", config))
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("version", ["²", "9" * 10_000, "x.y", "", None, 6])
def test_a_version_that_is_none_is_an_old_one(version, tmp_path):
    assert SAE.load(saelens(tmp_path / "sae", {"architecture": "standard", "sae_lens_version": version})).hook == HOOK


def test_weights_of_integers_are_refused(tmp_path):
    folder = saelens(tmp_path / "sae", {"architecture": "standard"})
    weights = random_weights("standard")
    save_file({**weights, "b_dec": weights["b_dec"].astype(np.int32)}, folder / "sae_weights.safetensors")
    with pytest.raises(ModelError, match="b_dec has numbers of the dtype int32"):
        SAE.load(folder)


def test_a_refusal_does_not_quote_a_whole_file(tmp_path):
    """zipfile's message holds the name that a damaged length makes of the weights: 183,230 characters of one mutant."""
    np.savez(tmp_path / "params.npz", W_dec=np.zeros((100, 200), np.float32))
    data = bytearray((tmp_path / "params.npz").read_bytes())
    data[26:28] = struct.pack("<H", 60_000)  # the length of the first member's name
    (tmp_path / "params.npz").write_bytes(data)
    with pytest.raises(ModelError, match="characters in all") as refusal:
        SAE.load(tmp_path / "params.npz", hook=HOOK)
    assert len(str(refusal.value)) < 10_000
