"""One format of numbers: zero has no sign."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mionnx
from mionnx.machine.decimals import decimal

FORMATTED = re.compile(r"\{([^{}]*:[+ ]?\.\d+f)\}")
ROOMS = [Path(mionnx.__file__).parent / room for room in ("analysis", "cli", "verify", "view")]


@given(st.floats(allow_nan=False, width=32), st.integers(0, 6), st.booleans())
def test_zero_has_no_sign_and_all_else_is_as_python_writes_it(number, places, sign):
    text = decimal(number, places, sign)
    assert re.fullmatch(r"-0(\.0*)?", text) is None
    if float(text):
        assert text == f"{number:{'+' if sign else ''}.{places}f}"


def test_examples():
    assert decimal(-0.001) == decimal(-0.0) == "0.00"
    assert (decimal(-0.006), decimal(0.5, 1, sign=True), decimal(0, 1, sign=True)) == ("-0.01", "+0.5", "0.0")
    assert decimal(float("nan")) == "nan"


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_results_have_no_other_format(room):
    """A fraction in a table, picture or line of text goes through `decimal`; sizes and seconds are never negative."""
    for file in room.rglob("*.py"):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            odd = [found for found in FORMATTED.findall(line) if not re.search(r"seconds|size|begin|cost", found)]
            assert odd == [], f"{file.name}:{number}: {odd}"
