"""`Quantisation`: bits, size of a block, symmetry, and the weights that stay in floats."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from mionnx.errors import InputError

BLOCK_BITS = (4, 8)
BLOCK_SIZES = (16, 32, 64, 128, 256)  # that ONNX Runtime's kernels take
FILE_LEVELS = (0, 4)
DEFAULT_LEVEL = 0


@dataclass(frozen=True)
class Quantisation:
    """Settings of a model's blocks."""

    bits: int = 4  # 4 or 8
    block_size: int = 32  # how many neighbouring numbers of a row share a scale: 16, 32, 64, 128 or 256
    symmetric: bool = True  # the scale alone, and 0 is a number of the block; otherwise each block has a zero point too
    # 0: products are computed in floats; 4: ONNX Runtime's kernel rounds what it reads to 8 bits, which is faster and
    # less exact.
    accuracy_level: int = DEFAULT_LEVEL
    keep: tuple[str, ...] = ()  # names or globs of weights that stay in floats
    in_8_bits: tuple[str, ...] = ()  # names or globs of weights that take 8 bits where the others take 4
    embedding: bool = True  # whether the table of the tokens is quantised too
    unembedding: bool = True  # whether that of the logits is

    def __post_init__(self) -> None:
        for name, choices in (("bits", BLOCK_BITS), ("block_size", BLOCK_SIZES), ("accuracy_level", FILE_LEVELS)):
            if getattr(self, name) not in choices:
                raise InputError(f"{name}={getattr(self, name)!r}; one of {', '.join(map(str, choices))}")
        for name in ("keep", "in_8_bits"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(pattern, str) for pattern in value):
                raise InputError(f"{name}={value!r}: names or globs of weights, as a list")
            object.__setattr__(self, name, tuple(value))
        if self.in_8_bits and self.bits == 8:
            raise InputError(f"in_8_bits={list(self.in_8_bits)} has no effect: all weights take 8 bits")

    def bits_of(self, weight: str) -> int:
        return 8 if any(fnmatchcase(weight, pattern) for pattern in self.in_8_bits) else self.bits

    def keeps(self, weight: str) -> bool:
        """Whether a weight is one of those that stay."""
        return any(fnmatchcase(weight, pattern) for pattern in self.keep)

    def to_entry(self) -> dict[str, Any]:
        """The settings as JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> "Quantisation":
        """Read back what `to_entry` gave."""
        values = {name: entry[name] for name in cls.__dataclass_fields__ if name in entry}
        return cls(**values)


# The settings of a dtype, as `from_pretrained` and `mionnx export` take it.
BLOCK_DTYPES = {"int4": Quantisation(4), "int8": Quantisation(8)}
