"""onnxruntime-gpu's wheel with the machine code of one kind of GPU: 53 MB in place of 256.

`.nv_fatbin` of the CUDA provider holds every kernel once for each architecture, as images with a header of their own
(0xBA55ED50, then for each image kind, sizes and architecture). The driver takes the image of its own architecture by
these headers. Images of other architectures are overwritten with zeros, which a wheel packs into nothing: no offset
changes, and no header does. Packed by LZMA, which pip reads as well as deflate, the rest takes half.
"""

import base64
import hashlib
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

LIBRARY = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
LARGE = 2**20
MAGIC = 0xBA55ED50
OUTER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all images
INNER = struct.Struct("<HHIQIIHHI")  # kind, -, bytes of this header, bytes of the image, .., architecture


def images(data: bytes | bytearray) -> Iterator[tuple[int, int, int]]:
    """(offset, bytes, architecture) of every image of machine code or PTX."""
    position = data.find(struct.pack("<I", MAGIC))
    while position >= 0:
        _, version, header, size = OUTER.unpack_from(data, position)
        if version == 1 and header == OUTER.size and position + header + size <= len(data):
            yield from _images(data, position + header, position + header + size)
            position += header + size - 1
        position = data.find(struct.pack("<I", MAGIC), position + 1)


def _images(data: bytes | bytearray, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    while position < end:
        kind, _, header, size, *_, architecture = INNER.unpack_from(data, position)
        if kind not in (1, 2) or not 32 <= header <= 256:
            raise SystemExit(f"an unknown image header at {position:#x}: use gather.py --whole")
        yield position + header, size, architecture
        position += header + size


def slim(wheel: Path, target: Path, architecture: int) -> dict[int, int]:
    """Write a wheel that keeps one architecture.

    Args:
        wheel: onnxruntime-gpu's.
        target: the new wheel.
        architecture: 90 is H100 and H200, 80 A100.

    Returns:
        architecture -> bytes of its images.

    Raises:
        SystemExit: the wheel has no code for the architecture.
    """
    sizes: dict[int, int] = {}
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
        data = bytearray(source.read(LIBRARY))
        for offset, size, of in [*images(data)]:
            sizes[of] = sizes.get(of, 0) + size
            if of != architecture:
                data[offset : offset + size] = bytes(size)
        if architecture not in sizes:
            raise SystemExit(f"{wheel.name} has code for {sorted(sizes)}, not for {architecture}")
        for entry in source.infolist():
            content = bytes(data) if entry.filename == LIBRARY else source.read(entry.filename)
            if entry.filename.endswith(".dist-info/RECORD"):
                content = _recorded(content.decode(), data).encode()
            made.writestr(entry, content, zipfile.ZIP_LZMA if entry.file_size > LARGE else zipfile.ZIP_DEFLATED)
    return sizes


def _recorded(record: str, data: bytes | bytearray) -> str:
    """The list of files with the new hash of the library."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    line = f"{LIBRARY},sha256={digest},{len(data)}"
    return "".join(f"{line}\n" if one.startswith(f"{LIBRARY},") else one for one in record.splitlines(keepends=True))
