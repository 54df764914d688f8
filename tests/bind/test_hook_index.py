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


class TestInterventionsByGlobAndPredicate:
    def test_each_hook_point_in_execution_order_and_each_request_in_registration_order(self):
        zero, scale = Intervention.Zero(), Intervention.Scale(2.0)
        spec = HookSpec().intervene(lambda name: name in (RESID, "hook_embed"), zero).intervene(Z, zero)
        spec.intervene(["blocks.0.hook_*", Z], scale)
        hooks = index_hooks(spec, toy())
        places = [("hook_embed", zero), (RESID, zero), (Z, zero), (ATTN_OUT, scale), (RESID, scale), (Z, scale)]
        assert [(str(point), one) for point, one in hooks.interventions] == places
        assert [str(hooks.chosen.get(n)) for n in range(6)] == ["<lambda>"] * 2 + ["None"] + ["blocks.0.hook_*"] * 2 + [
            "None"
        ]

    def test_a_splice_at_each_brings_the_hook_points_that_others_mean(self, fragment):
        splice = Intervention.Splice(fragment(FRAGMENT))
        spec = HookSpec().intervene("*.hook_acts", Intervention.Zero()).intervene("blocks.0.hook_*", splice)
        hooks = index_hooks(spec, toy())
        inner = [f"{ATTN_OUT}.hook_acts", f"{RESID}.hook_acts"]
        assert [str(point) for point, _ in hooks.interventions] == [*inner, ATTN_OUT, RESID]
        assert hooks.fits.keys() == {2, 3}
        with pytest.raises(
            InterventionError, match=r"splice at .*hook_z: .*\('blocks.0.\*_z' means that hook point too"
        ):
            index_hooks(HookSpec().intervene("blocks.0.*_z", Intervention.Splice(fragment(FRAGMENT))), toy())

    def test_what_selects_nothing_names_the_nearest(self):
        with pytest.raises(HookError, match=r"'blocks.\*.hook_resid_pots'; did you mean 'blocks.0.hook_resid_post'"):
            index_hooks(HookSpec().intervene("blocks.*.hook_resid_pots", Intervention.Zero()), toy())
        with pytest.raises(HookError, match="the predicate <lambda> selects none"):
            index_hooks(HookSpec().intervene(lambda name: False, Intervention.Zero()), toy())
