"""Capture requests: what a spec file says of them."""

import pytest

from mionnx.errors import SpecFileError
from mionnx.spec.capture import Capture


def test_entries():
    assert Capture("*.hook_z", heads=(0,)).to_entry() == {"hook": "*.hook_z", "before": False, "heads": (0,)}
    with pytest.raises(SpecFileError, match="a capture by predicate"):
        Capture(lambda name: True).to_entry()
