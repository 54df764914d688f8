"""A saved spec is the same spec; a file that is none is refused, whatever is wrong with it."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mionnx import HookPoint, HookSpec, Intervention, InterventionError, MIError, SpecFileError
from mionnx.machine.tensor_file import write_tensors

quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
HOOKS = st.sampled_from(["hook_embed", "blocks.0.attn.hook_z", "blocks.*.hook_resid_post", "my.own"])


@st.composite
def edits(draw: st.DrawFn) -> Intervention:
    kind = draw(st.sampled_from(["Replace", "Add", "Scale", "Zero", "ProjectOut", "LowRank", "Knockout"]))
    limits = {
        "positions": draw(st.none() | st.lists(st.integers(-9, 9), min_size=1, max_size=3) | st.just([[0, 1], [-1]])),
        "heads": draw(st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        "rows": draw(st.none() | st.just([0, 2])),
    }
    if kind == "Zero":
        return Intervention.Zero(**limits)
    dtype = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    value = np.random.default_rng(draw(st.integers(0, 99))).normal(
        size=draw(st.sampled_from([(4,), (1, 3), (2, 1, 5)]))
    )
    if kind == "ProjectOut":
        return Intervention.ProjectOut(value.reshape(-1)[:4], **limits)
    if kind == "LowRank":
        one = value.reshape(-1)[:4]
        return Intervention.LowRank(one.astype(dtype), -one, value[..., :1], **limits)
    if kind == "Knockout":
        value = np.where(value > 0, 0, -np.inf)
    return getattr(Intervention, kind)(value.astype(dtype), **limits)


specs = st.builds(
    lambda captures, pairs: _spec(captures, pairs),
    st.lists(st.tuples(st.sampled_from(["hook_embed", "blocks.*.hook_resid_post"]), st.booleans()), max_size=3),
    st.lists(st.tuples(HOOKS, edits()), max_size=4),
)


def _spec(captures, pairs) -> HookSpec:
    spec = HookSpec()
    for hook, before in captures:
        spec.capture(hook, before=before)
    for hook, edit in pairs:
        spec.intervene(hook, edit)
    return spec


def same(one: HookSpec, other: HookSpec) -> bool:
    if one.captures != other.captures or len(one.interventions) != len(other.interventions):
        return False
    return all(
        (p, a.kind, a.positions, a.heads, a.rows) == (q, b.kind, b.positions, b.heads, b.rows)
        and (a.value is b.value is None or (a.value.dtype == b.value.dtype and np.array_equal(a.value, b.value)))
        for (p, a), (q, b) in zip(one.interventions, other.interventions, strict=True)
    )


@quick
@given(specs)
def test_round_trip(tmp_path, spec):
    spec.save(tmp_path / "spec.safetensors")
    assert same(HookSpec.load(tmp_path / "spec.safetensors"), spec)
    assert [path.name for path in tmp_path.iterdir()] == ["spec.safetensors"]


EXAMPLE = (
    HookSpec().capture("blocks.*.attn.hook_z").intervene("hook_embed", Intervention.Add(np.arange(128.0), positions=-1))
)


def test_a_loaded_spec_does_the_same(shipped, tmp_path):
    EXAMPLE.save(tmp_path / "spec.safetensors")
    ids = np.arange(3, 9)
    one, other = (shipped.forward(ids, spec) for spec in (EXAMPLE, HookSpec.load(tmp_path / "spec.safetensors")))
    assert np.array_equal(one.output(), other.output())


@quick
@given(st.floats(0, 1), st.integers(0, 255), st.booleans())
def test_damage_is_found_or_harmless(tmp_path, at, by, cut):
    """A cut or flipped file is an `MIError`, or (a flipped bit in a number or a name) still a spec."""
    path = tmp_path / "spec.safetensors"
    EXAMPLE.save(path)
    data = bytearray(path.read_bytes())
    where = int(at * (len(data) - 1))
    if cut:
        del data[where:]
    else:
        data[where] ^= by
    path.write_bytes(data)
    try:
        found = HookSpec.load(path)
    except MIError:
        return
    assert not cut
    assert len(found.interventions) <= 1


def write(path: Path, declaration: object, tensors: dict, version: str = "1") -> Path:
    write_tensors(path, tensors, {"mionnx_spec": version, "declaration": json.dumps(declaration)})
    return path


ADD = {"hook": "hook_embed", "kind": "add", "positions": None, "heads": None, "rows": None}
VALUE = {"interventions.0.value": np.ones(3, np.float32)}


@pytest.mark.parametrize(
    ("declaration", "tensors", "error", "message"),
    [
        ({"captures": [], "interventions": [ADD]}, {}, SpecFileError, "damaged"),
        ({"captures": [], "interventions": []}, VALUE, SpecFileError, "no intervention uses"),
        ({"captures": []}, {}, SpecFileError, "damaged"),
        ([], {}, SpecFileError, "damaged"),
        ({"captures": [], "interventions": [{**ADD, "kind": "explode"}]}, {}, InterventionError, "explode"),
        (
            {"captures": [], "interventions": [ADD]},
            {"interventions.0.value": np.array([1, np.nan], np.float32)},
            InterventionError,
            "NaN",
        ),
    ],
)
def test_files_that_are_no_spec(tmp_path, declaration, tensors, error, message):
    path = write(tmp_path / "spec.safetensors", declaration, tensors)
    with pytest.raises(error, match=message) as caught:
        HookSpec.load(path)
    assert "spec.safetensors" in str(caught.value)


def test_other_versions_and_missing_files(tmp_path):
    path = write(tmp_path / "spec.safetensors", {}, {}, version="2")
    with pytest.raises(SpecFileError, match="version 1"):
        HookSpec.load(path)
    with pytest.raises(SpecFileError, match="no saved spec"):
        HookSpec.load(tmp_path / "none.safetensors")
    save_file(VALUE, tmp_path / "plain.safetensors")
    with pytest.raises(SpecFileError, match="no saved spec: it is not of a kind that mionnx writes"):
        HookSpec.load(tmp_path / "plain.safetensors")


def test_a_predicate_cannot_be_saved(tmp_path):
    with pytest.raises(SpecFileError, match="predicate"):
        HookSpec().capture(lambda name: True).save(tmp_path / "spec.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(SpecFileError, match="cannot write"):
        EXAMPLE.save(tmp_path / "none" / "spec.safetensors")


SAVE = """
import sys, numpy as np
from mionnx import HookSpec, Intervention
spec = HookSpec().intervene("hook_embed", Intervention.Replace(np.full((1, 1000, 2000), float(sys.argv[2]))))
{body}
"""


def child(body: str, *arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", SAVE.format(body=body), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def test_a_full_disk(tmp_path):
    """A limit on the size of files stands for the disk: the write fails half-way, and nothing of it is left."""
    path = tmp_path / "spec.safetensors"
    EXAMPLE.save(path)
    before = path.read_bytes()

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    output, _ = child("spec.save(sys.argv[1])", str(path), "1", preexec_fn=limit).communicate()
    assert "SpecFileError: cannot write" in output
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.safetensors"]


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_file(tmp_path):
    path = tmp_path / "spec.safetensors"
    for seconds in (0.05, 0.11, 0.17, 0.23):
        process = child("print('go', flush=True)\nwhile True:\n    spec.save(sys.argv[1])", str(path), "2")
        assert process.stdout.readline() == "go\n"
        while not path.exists():
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert HookSpec.load(path).has_intervention_at(HookPoint.Embed)
