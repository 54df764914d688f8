"""Results as text: few lines, arrays by their shapes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mionnx.machine.brief import LINES, WIDTH, Brief, count, spelled

plain = st.none() | st.integers() | st.floats() | st.text() | st.booleans()
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=60)


@dataclass(repr=False)
class Result(Brief):
    """A result of whatever there can be."""

    array: Any
    facts: Any

    def _lines(self) -> list[str]:
        return [str(self.facts)] * (len(str(self.facts)) % 20)


@given(values, st.sampled_from([(), (3,), (200, 300)]))
def test_a_result_is_few_lines_of_bounded_length(facts, shape):
    result = Result(np.ones(shape, np.float32), facts)
    assert len(repr(result).splitlines()) <= 1
    assert len(repr(result)) <= WIDTH
    assert len(str(result).split("\n")) <= LINES
    assert max(map(len, str(result).split("\n"))) <= WIDTH


def test_arrays_are_told_by_shape_and_long_lists_by_their_number():
    assert repr(Result(np.zeros((4, 5), np.float16), None)) == "Result(array=float16 [4, 5])"
    assert spelled(np.float32(0.5)) == spelled(np.array(0.5)) == spelled(0.5) == "0.5"
    assert spelled(list(range(9))) == "[0, 1, 2, 3, 4, 5, … 9 in all]"
    assert spelled({"a": (1,)}) == "{'a': [1]}"
    assert count(1, "layer") + count(2, "layer") == "1 layer2 layers"


def test_what_does_not_fit_is_counted():
    @dataclass(repr=False)
    class Long(Brief):
        def _lines(self):
            return map(str, range(30))

    assert str(Long()).splitlines()[-1] == "  … and 24 more"
    assert str(Long()).splitlines()[-2] == "  5"


@pytest.mark.parametrize("text", ["a\nb", "x" * 500])
def test_text_stays_in_its_line(text):
    assert "\n" not in spelled(text)
    assert len(spelled(text)) < 60
