"""Capture requests: what a spec file says of them."""

import pytest

from mionnx.errors import InterventionError, SpecFileError
from mionnx.spec.hook_choice import Capture
from mionnx.spec.hook_spec import HookSpec


def test_entries():
    assert Capture("*.hook_z", heads=(0,)).to_entry() == {"hook": "*.hook_z", "before": False, "heads": (0,)}
    assert Capture("*.hook_z", dtype="float16").to_entry() == {"hook": "*.hook_z", "before": False, "dtype": "float16"}
    with pytest.raises(SpecFileError, match="a capture by predicate"):
        Capture(lambda name: True).to_entry()


def test_a_dtype_is_saved_and_an_unknown_one_refused(tmp_path):
    spec = HookSpec().capture("*.hook_z", dtype="bfloat16")
    spec.save(tmp_path / "spec.safetensors")
    assert HookSpec.load(tmp_path / "spec.safetensors").captures == spec.captures
    assert "capture *.hook_z as bfloat16" in str(spec)
    with pytest.raises(InterventionError, match="one of float32, float16, bfloat16; did you mean 'float16'"):
        HookSpec().capture("*.hook_z", dtype="float15")
