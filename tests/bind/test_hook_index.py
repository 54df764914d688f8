"""The hook points that a spec can name: the model's, and those that its splices bring, in execution order."""

import numpy as np
import pytest
from toy import ATTN_OUT, HIDDEN, HOOKS, RESID, Z, toy

from mionnx import HookError, HookPoint, HookSpec, Intervention, InterventionError
from mionnx.bind.hook_index import index_hooks

FRAGMENT = """<ir_version: 10, opset_import: ["": 21]>
f (float[batch, seq, 4] x) => (float[batch, seq, 4] y) {
  hook_acts = Relu(x)
  y = Neg(hook_acts)
}"""
READS = FRAGMENT.replace("float[batch, seq, 4] x)", "float[batch, seq, 4] x, float[batch, seq, 4] other)").replace(
    "Relu(x)", "Add(x, other)"
)


@pytest.fixture
def fragment(tmp_path):
    """ONNX text -> a file with it."""
    import onnx

    def write(text: str):
        onnx.save(onnx.parser.parse_model(text), tmp_path / "fragment.onnx")
        return tmp_path / "fragment.onnx"

    return write


def test_without_splices_it_is_the_models_own():
    hooks = index_hooks(HookSpec().intervene(RESID, Intervention.Zero()), toy())
    assert [name for name in hooks.names if "hook_result" not in name] == [*HOOKS]
    assert hooks.dims(HookPoint.parse(Z)) == HOOKS[Z]
    assert hooks.axes(HookPoint.parse(Z)) == ("batch", "seq", "n_heads", "head_dim")
    assert hooks.dtype(HookPoint.parse(Z)) == np.float32
    with pytest.raises(HookError, match="did you mean"):
        hooks.dims(HookPoint.parse("blocks.0.hook_resid_pots"))


def test_a_splice_brings_hook_points_behind_its_own(fragment):
    hooks = index_hooks(HookSpec().intervene(ATTN_OUT, Intervention.Splice(fragment(FRAGMENT))), toy())
    inner = f"{ATTN_OUT}.hook_acts"
    assert hooks.names[-1] == inner
    assert hooks.dims(HookPoint.parse(inner)) == ["batch", "seq", HIDDEN]
    assert sorted([RESID, inner, ATTN_OUT, Z], key=hooks.place) == [Z, ATTN_OUT, inner, RESID]
    with pytest.raises(HookError, match="hook_acts"):
        hooks.dims(HookPoint.parse(f"{ATTN_OUT}.hook_act"))


def test_a_splice_reads_what_comes_before_it_only(fragment):
    file = fragment(READS)
    assert index_hooks(
        HookSpec().intervene(RESID, Intervention.Splice(file, reads="hook_embed")), toy()
    ).fits.keys() == {0}
    with pytest.raises(InterventionError, match="it can read what comes before it"):
        index_hooks(HookSpec().intervene(ATTN_OUT, Intervention.Splice(file, reads=RESID)), toy())


def test_two_splices_with_one_name_are_refused(fragment):
    splice = Intervention.Splice(fragment(FRAGMENT))
    index_hooks(HookSpec().intervene(ATTN_OUT, splice).intervene(RESID, splice), toy())
    with pytest.raises(InterventionError, match="another splice there"):
        index_hooks(HookSpec().intervene(RESID, splice).intervene(RESID, splice), toy())
