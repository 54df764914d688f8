"""Blocks are packed once for passes and generations."""

import numpy as np
import pytest

from mionnx import HookPoint, HookSpec, InputError, Intervention, Logits, MIModel, Options
from mionnx.cli.injection import Opening
from mionnx.inputs.token_batch import make_token_batch
from mionnx.rewrite.plan import Outputs
from mionnx.run import call_graph

IDS = np.array([[5, 9, 13, 2, 7], [3, 3, 8, 1, 4]])
MASK = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
STEERED = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Scale(0.5))


@pytest.fixture(scope="module")
def blocks(shipped, tmp_path_factory):
    """The shipped Llama in 4 bits."""
    return MIModel.from_pretrained(shipped.quantise(tmp_path_factory.mktemp("memory") / "int4"), threads=1).hooked


def every_call(model: MIModel) -> list[np.ndarray]:
    """Logits of passes of many kinds and of generations, plain and steered."""
    found = []
    for spec in (HookSpec(), STEERED):
        first = model.forward(IDS[:, :3], spec, use_cache=True)
        rest = model.forward(IDS[:, 3:], spec, cache=first.kv_cache)
        padded = model.forward(IDS, spec, attention_mask=MASK)
        last = model.forward(IDS, spec, logits=Logits(positions=-1))
        made = model.generate(IDS, spec, attention_mask=MASK, max_new_tokens=4, eos_token_id=[], output_logits=True)
        model.generate(IDS, spec, max_new_tokens=2, eos_token_id=[])
        model.warm(spec)
        found += [one.output() for one in (first, rest, padded, last, *made.steps)]
        found += [np.array(model.generate(IDS, spec, max_new_tokens=4, eos_token_id=[]).new_ids)]
    return found


@pytest.mark.parametrize("level", [0, 4])
def test_passes_and_generations_share_a_graph_and_every_bit_stays(blocks, level, monkeypatch):
    shared, apart = (MIModel(blocks, Options(threads=1, base=False, accuracy_level=level)) for _ in range(2))
    found = every_call(shared)
    monkeypatch.setattr(call_graph, "SHARED", ())
    expected = every_call(apart)
    assert (len(shared.compiled), len(apart.compiled)) == (2, 4), "one session for each structure, not two"
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_changes_the_logits_or_has_floats_keeps_its_own_graph(blocks, shipped):
    model = MIModel(blocks, Options(threads=1, base=False, accuracy_level=0))
    tripled = HookSpec().intervene(HookPoint.Logits, Intervention.Scale(3.0))
    plain = model.forward(IDS).output()
    np.testing.assert_allclose(model.forward(IDS, tripled).output(), 3 * plain, rtol=1e-6)
    assert [plan.outputs.begins for plan in model.compiled] == [True, False]
    floats = MIModel(shipped.hooked, Options(threads=1, base=False))
    floats.forward(IDS)
    assert [plan.empty for plan in floats.compiled] == [True]


def test_a_compiled_graph_is_the_one_of_passes_and_runs_by_itself(blocks):
    """It was a second graph, with packed weights of its own."""
    model = MIModel(blocks, Options(threads=1))
    for spec in (HookSpec(), STEERED):
        graph, made = model.compile_graph(spec), model.forward(IDS, spec)
        assert len(model.report(spec).inputs) == len(graph.report.inputs)
        bound = model.binder.bind(spec)
        feeds = bound.inputs(make_token_batch(IDS, None, None, blocks))
        np.testing.assert_array_equal(graph.run(["logits"], feeds)["logits"], made.output())
    assert len(model.compiled) == 2
    last = model.compile_graph(outputs=Outputs(last=True))
    feeds = model.binder.bind(HookSpec()).inputs(make_token_batch(IDS, None, None, blocks))
    np.testing.assert_array_equal(last.run(["logits"], feeds)["logits"], model.forward(IDS).output()[:, -1:])
    assert len(model.compiled) == 2


def test_blocks_are_packed_however_long_the_first_text_is(blocks):
    """Unpacked ones are made floats at every step, whatever the level."""
    expected = MIModel(blocks, Options(threads=1, base=False, accuracy_level=4)).forward(IDS).output()
    model = MIModel(blocks, Options(threads=1, base=False, accuracy_level=4))
    model.forward(np.full((8, 64), 7))
    np.testing.assert_array_equal(model.forward(IDS).output(), expected)


def test_unpacked_blocks_are_refused_and_commands_pack_them(blocks, shipped):
    with pytest.raises(InputError, match=r"prepack=False has no effect on .*leave it out"):
        MIModel(blocks, Options(prepack=False))
    assert Opening(str(blocks.folder), {}).once().variants.options.prepack
    assert Opening(str(shipped.hooked.folder), {}).once().variants.options.prepack is False


def test_unpacked_blocks_are_refused_before_they_are_made(shipped, monkeypatch, tmp_path):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    with pytest.raises(InputError, match=r"prepack=False has no effect on .*world-llama.*leave it out"):
        MIModel.from_pretrained(shipped.hooked.folder, dtype="int4", prepack=False)
    assert not (tmp_path / "store").exists()
