"""Arguments are checked against annotations: what fits is taken, what does not is refused in words."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import ArrayLike

from mionnx.errors import HookError, InputError
from mionnx.machine.typed import typed


@typed(InputError)
def verb(
    count: int = 0,
    share: float = 0.0,
    name: str = "",
    is_on: bool = False,
    path: str | Path = "",
    layers: Sequence[int] | None = None,
    named: Mapping[str, int] | None = None,
    call: Callable[..., Any] = print,
    array: ArrayLike = (),
    pairs: Iterable[tuple[int, float]] = (),
    mode: Literal["a", "b"] = "a",
) -> dict[str, Any]:
    return dict(locals())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 3), ("count", np.int64(3)), ("count", np.array(3)), ("share", 1),
        ("name", "é"), ("is_on", np.True_), ("path", Path("a")), ("path", "a"), ("layers", (0, 1)),
        ("layers", np.array([0, 1])), ("layers", None), ("named", {"a": 1}), ("call", len), ("array", object()),
        ("share", np.float32(0.5)), ("layers", range(2)),
        ("pairs", [(1, 0.5)]), ("mode", "b"),
    ],
)  # fmt: skip
def test_what_fits_is_taken(name: str, value: Any) -> None:
    assert np.array_equal(verb(**{name: value})[name], value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("count", "x", r"count must be an integer, got 'x' \(str\)"),
        ("count", True, "count must be an integer, got True"),
        ("count", 1.5, r"count must be an integer, got 1.5 \(float\)"),
        ("share", "1", "share must be a number"),
        ("share", np.zeros(2), r"share must be a number, got float64 \[2\] \(ndarray\)"),
        ("name", "\ud800", r"name must be a text, got '\\ud800' \(str\)"),
        ("name", b"", "name must be a text"),
        ("is_on", 1, "is_on must be True or False"),
        ("is_on", "yes", "is_on must be True or False"),
        ("path", "a\0b", "path must be a text or a path"),
        ("path", "a" * 300, "of 300 characters"),
        ("path", b"a", "path must be a text or a path"),
        ("layers", "01", "layers must be a list of integers"),
        ("layers", {0: 1}, "layers must be a list of integers"),
        ("layers", [0, "1"], "layers must be a list of integers"),
        ("layers", 5, "layers must be a list of integers"),
        ("named", {"a": "b"}, "named must be a dictionary"),
        ("named", [1], "named must be a dictionary"),
        ("call", 5, "call must be a function"),
        ("pairs", [(1, 0.5, 2)], "pairs must be a list of"),
        ("mode", "c", "mode must be 'a' or 'b'"),
        ("mode", [], "mode must be 'a' or 'b'"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        verb(**{name: value})


def test_positional_arguments_are_checked_by_their_place() -> None:
    with pytest.raises(InputError, match="share must be"):
        verb(1, "x")
    with pytest.raises(TypeError, match=r"has no keyword .nonsense."):
        verb(nonsense=1)


def test_what_can_be_read_once_becomes_a_list() -> None:
    assert verb(layers=iter([2, 1]))["layers"] == [2, 1]
    assert sorted(verb(layers={2, 1})["layers"]) == [1, 2]


@typed(HookError, leave=["free"])
class Thing:
    def __init__(self, size: int) -> None:
        self.size = size

    def method(self, other: "Thing", free: int = 0) -> int:
        return other.size

    @classmethod
    def made(cls, size: int) -> "Thing":
        return cls(size)

    @staticmethod
    def loose(size: int) -> int:
        return size

    def _inner(self, size: int) -> int:
        return size


def test_a_class_is_checked_in_its_constructor_and_public_methods() -> None:
    thing = Thing(2)
    assert thing.method(Thing(3), free="anything") == 3
    for call in (Thing, Thing.made, Thing.loose):
        with pytest.raises(HookError, match="size must be an integer"):
            call("x")
    with pytest.raises(HookError, match=r"other must be a Thing, got 5 \(int\)"):
        thing.method(5)
    assert thing._inner("x") == "x"


def test_a_torch_tensor_is_a_number_where_it_is_one() -> None:
    torch = pytest.importorskip("torch")
    assert verb(count=torch.tensor(3), share=torch.tensor(0.5).bfloat16())["share"] == 0.5
    assert verb(layers=torch.tensor([1, 2]))["layers"].tolist() == [1, 2]
    with pytest.raises(InputError, match="share must be"):
        verb(share=torch.zeros(2))
