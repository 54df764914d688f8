"""GGUF files that cannot be opened: each is refused with what is wrong, and without believing a number in it."""

import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from families import make_model
from gguf import GGUFReader, GGUFValueType
from gguf_files import write_gguf, write_small
from repository import REPOSITORY

from exporters.gguf import export
from exporters.gguf.architectures import ARCHITECTURES
from exporters.gguf.assemble import write_checkpoint
from exporters.gguf.header import read_header
from mionnx import MIModel
from mionnx.errors import ExportError
from mionnx.machine.progress import silent

ARRAY, STRING = 9, 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A file that opens."""
    return write_gguf(make_model("llama"), tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def opened(path: Path, content: bytes | None = None) -> None:
    if content is not None:
        path.write_bytes(content)
    write_checkpoint(read_header(path), path.parent / "out", "float32", silent)


def test_the_header_is_what_gguf_reads(whole, tmp_path):
    (tmp_path / "m.gguf").write_bytes(whole)
    found, reader = read_header(tmp_path / "m.gguf"), GGUFReader(tmp_path / "m.gguf")
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata.keys() == fields.keys()
    for name, field in fields.items():
        expected = field.contents()
        is_numbers = field.types[0] == GGUFValueType.ARRAY and field.types[1] != GGUFValueType.STRING
        assert (found.metadata[name].tolist() if is_numbers else found.metadata[name]) == expected
    assert [*found.tensors] == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = found.tensors[tensor.name]
        assert (info.kind, info.offset, info.length) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))


def test_a_file_cut_anywhere_is_refused(whole, tmp_path):
    path = tmp_path / "m.gguf"
    ends = [0, 3, 4, 7, 12, 23, *np.linspace(24, len(whole) - 1, 60).astype(int).tolist()]
    for end in ends:
        path.write_bytes(whole[:end])
        with pytest.raises(ExportError, match=r"m\.gguf is (truncated|no intact GGUF file)"):
            read_header(path)
    opened(path, whole)


def test_bytes_that_are_changed_give_an_error_or_another_file(whole, tmp_path):
    """Whatever a header says, no other error than ours comes of it."""
    rng, path = np.random.default_rng(0), tmp_path / "m.gguf"
    refused = 0
    for _ in range(150):
        changed = bytearray(whole)
        changed[int(rng.integers(0, 5000))] = int(rng.integers(0, 256))
        path.write_bytes(changed)
        try:
            read_header(path)
        except ExportError:
            refused += 1
    assert refused > 15


def header(count: int = 0, keys: int = 1, body: bytes = b"", version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, count, keys) + body


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04" + bytes(60), r"is no GGUF file: it begins with b'PK"),
        (b"tjgg" + bytes(60), "is ggjt, older than GGUF"),
        (header(version=1), "is GGUF version 1; versions 2 and 3 are read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (header(keys=2**63), "is truncated or damaged"),
        (header(count=2**63, keys=0), "is truncated or damaged"),
        (header(body=struct.pack("<Q", 2**62)), "4,611,686,018,427,387,904 bytes are announced"),
        (header(body=key("a", ARRAY, struct.pack("<IQ", 4, 2**61))), "9,223,372,036,854,775,808 bytes are announced"),
        (header(body=key("a", ARRAY, struct.pack("<IQ", STRING, 2**61))), "is truncated or damaged"),
        (header(body=key("a", ARRAY, struct.pack("<IQ", ARRAY, 1))), "damaged: a value of type 9"),
        (header(body=key("a", 77, b"")), "damaged: a value of type 77"),
        (header(keys=2, body=2 * key("a", 4, bytes(4))), "metadata key 'a' stands in it twice"),
        (header(body=key("general.alignment", 4, bytes(4))), "its alignment is 0"),
        (header(1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)), "a tensor of 9 axes"),
        (header(1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 2**60, 0, 0)), "tensor a ends at byte"),
        (header(1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 4, 999, 0)), "has type 999"),
        (
            header(1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 33, 2, 0)),
            r"\[33\], no whole blocks of Q4_0",
        ),
        (header(body=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(40)), "is no intact GGUF file"),
    ],
)
def test_a_damaged_header_is_refused_and_nothing_is_made_by_its_numbers(content, said, tmp_path):
    tracemalloc.start()
    with pytest.raises(ExportError, match=said):
        opened(tmp_path / "m.gguf", content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"general.architecture": "clip"}, r"a projector of images \(mmproj\)"),
        ({"general.type": "mmproj"}, r"a projector of images \(mmproj\)"),
        ({"general.type": "adapter"}, "an adapter"),
        ({"general.architecture": "controlvector"}, "a control vector: open it with mionnx"),
        (
            {"general.architecture": "bloom"},
            r"the architecture 'bloom'; known are falcon-h1, gemma, gemma2, .*, starcoder2",
        ),
        ({"general.architecture": "quen3"}, "did you mean 'qwen3'"),
        ({"general.architecture": "bert", "bert.attention.causal": False}, r"an embedding model \(bert\)"),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": 3}, r"an embedding model \(qwen3\)"),
        ({"split.count": 3, "split.no": 0}, "is one of 3 parts of a split model: join them with llama-gguf-split"),
        ({}, "a vocabulary and no weights"),
    ],
)
def test_what_is_no_whole_language_model_is_refused_by_name(keys, said, tmp_path):
    weights = {"a": np.zeros(2, np.float32)} if keys else {}
    path = write_small(tmp_path / "model-00001-of-00003.gguf", {**keys}, weights)
    with pytest.raises(ExportError, match=said):
        export(path, tmp_path / "out")
    with pytest.raises(ExportError, match=said):
        MIModel.from_pretrained(path)


def test_an_unknown_architecture_is_refused_before_torch_is_imported(tmp_path):
    path = write_small(tmp_path / "m.gguf", {"general.architecture": "bloom"}, {"a": np.zeros(2, np.float32)})
    code = (
        "import sys; from pathlib import Path; from exporters.gguf import export\n"
        f"try: export(Path({str(path)!r}), Path({str(tmp_path / 'out')!r}))\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert ran.stdout.split() == ["ExportError", "False", "False"], ran.stderr


def test_the_known_architectures_are_named(tmp_path):
    path = write_small(tmp_path / "m.gguf", {"general.architecture": "bloom"}, {"a": np.zeros(2, np.float32)})
    with pytest.raises(ExportError) as refused:
        export(path, tmp_path / "out")
    assert all(name in str(refused.value) for name in ARCHITECTURES)
    assert {"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"} <= ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"llama.block_count": 2**31}, "states 2147483648 layers, and holds tensors of 2"),
        ({"llama.block_count": None}, r"has to state llama\.block_count, a size; it states none"),
        ({"llama.block_count": "two"}, r"has to state llama\.block_count, a number; it states 'two'"),
        (
            {"llama.attention.key_length": 2**31, "llama.attention.value_length": 2**31},
            "its metadata mean 8589934592 on axis 1",
        ),
        ({"llama.embedding_length": 48}, r"token_embd\.weight is \[101, 64\], its metadata mean 48 on axis 1"),
        ({"llama.feed_forward_length": 7}, r"ffn_down\.weight is \[64, 96\], its metadata mean 7 on axis 1"),
        ({"llama.attention.head_count": 0}, "a size; it states 0"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv differs between layers, \[1, 2\]"),
        ({"llama.attention.value_length": 8}, "keys and values of different lengths"),
        ({"llama.expert_count": 8}, r"states llama\.expert_count = 8, which is not supported"),
        ({"llama.attention.clamp_kqv": 8.0}, r"states llama\.attention\.clamp_kqv"),
        ({"llama.rope.scaling.type": "mystery", "llama.rope.scaling.factor": 2.0}, "scales its rotation by 'mystery'"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(extra, said, tmp_path):
    path = write_gguf(make_model("llama"), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ExportError, match=said):
        export(path, tmp_path / "out")


def test_tensors_without_a_place_or_missing_are_refused(tmp_path):
    extra = {"blk.0.mystery.weight": np.zeros(4, np.float32)}
    with pytest.raises(ExportError, match=r"1 tensors have no place in llama: blk\.0\.mystery\.weight"):
        opened(write_gguf(make_model("llama"), tmp_path / "m.gguf", factors=extra))
    short = {"rope_freqs.weight": np.ones(3, np.float32)}
    with pytest.raises(ExportError, match=r"rope_freqs\.weight is 3 long, half of 16 is needed"):
        opened(write_gguf(make_model("llama"), tmp_path / "short.gguf", factors=short))


def test_a_pipe_and_a_folder_are_refused(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name in ("pipe.gguf", "folder.gguf"):
        with pytest.raises(ExportError, match="no file: refused"):
            read_header(tmp_path / name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rope.dimension_count", value) for value in (8, 1, 10**9)),
        *(("rope.freq_base", value) for value in (float("-inf"), float("inf"), float("nan"), 0.0, -1.0, True)),
        *(("rope.scaling.factor", value) for value in (-1.0, float("nan"), float("inf"), 1e30)),
        *(("attention.layer_norm_rms_epsilon", value) for value in (float("inf"), 1e30, -1e-6, 2.0, 0.0)),
        *(("context_length", value) for value in (2**32 - 1,)),
        *(("expert_count", value) for value in ([1, 2], [4])),
        *(("pooling_type", value) for value in ([1, 2],)),
    ],
)
def test_facts_that_no_model_has_are_refused_with_their_key(key, value, tmp_path):
    """FINDINGS, part 4, 5, 10 and 11."""
    write_gguf(make_model("llama"), tmp_path / "m.gguf", extra={f"llama.{key}": value})
    with pytest.raises(ExportError, match=rf"m\.gguf.*({key}|is damaged|factor of)"):
        opened(tmp_path / "m.gguf")


def test_yarn_with_a_factor_below_zero_is_refused(tmp_path):
    extra = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -2.0}
    write_gguf(make_model("llama"), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ExportError, match="a factor of -2, which no model has"):
        opened(tmp_path / "m.gguf")


def test_a_split_count_that_is_an_array_is_refused(tmp_path):
    write_gguf(make_model("llama"), tmp_path / "m.gguf", extra={"split.count": [1, 2]})
    with pytest.raises(ExportError, match=r"m\.gguf is damaged: ValueError"):
        opened(tmp_path / "m.gguf")


def test_tensors_that_lie_on_each_other_are_refused(whole, tmp_path):
    (tmp_path / "m.gguf").write_bytes(whole)
    second = [*read_header(tmp_path / "m.gguf").tensors.values()][1]
    at = whole.index(second.name.encode()) + len(second.name) + 4 + 8 * len(second.shape) + 4
    assert struct.unpack_from("<Q", whole, at) != (0,)
    with pytest.raises(ExportError, match=r"is damaged: its tensors .* lie on each other"):
        opened(tmp_path / "m.gguf", whole[:at] + struct.pack("<Q", 0) + whole[at + 8 :])


def test_a_tensor_of_no_numbers_is_refused(tmp_path):
    write_small(tmp_path / "m.gguf", {}, {"a": np.zeros((0, 32), np.float32), "b": np.zeros(4, np.float32)})
    with pytest.raises(ExportError, match=r"tensor a is \[0, 32\], no numbers"):
        read_header(tmp_path / "m.gguf")
