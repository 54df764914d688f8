"""Families with other modules than Llama's: every hook point and every intervention against eager transformers.

Each is exported by the table of module paths, and some of them by structure too, as if no table knew them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from families import single_threaded
from family_batches import KINDS, batch, difference, forward, interventions
from filelock import FileLock
from oracle import Inputs
from transformers import PreTrainedModel
from unlisted_families import FAMILIES, make, run

from exporters.transformers import assemble, by_structure, export
from mionnx import ExportError, HookPoint, HookSpec, InputError, Intervention, MIModel

TOLERANCE = 5e-5
TABLE, STRUCTURE = "table", "structure"
# ALiBi, positions that the graph makes itself; a stream normed after sums, an added cache
FAST = [("bloom", STRUCTURE), ("openai-gpt", STRUCTURE), ("openai-gpt", TABLE)]
BY_STRUCTURE = ("falcon, new decoder", "mpt", "codegen", "gpt_neo", "xglm")
ALL = [*((name, STRUCTURE) for name in BY_STRUCTURE), *((name, TABLE) for name in FAMILIES)]
Opened = tuple[MIModel, PreTrainedModel]


def families(*fast: tuple[str, str]) -> pytest.MarkDecorator:
    """A test of every family and way, slow but for some."""
    others = [pytest.param(*one, marks=pytest.mark.slow) for one in {*ALL, *FAST} - {*fast}]
    return pytest.mark.parametrize(("name", "way"), [*fast, *sorted(others, key=lambda one: one.values)])


@contextmanager
def as_unknown() -> Iterator[None]:
    """Export as if no table knew the family, and no taps fitted it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "FAMILIES", {})
        patch.setattr(assemble, "missing_taps", lambda *_: "unknown")
        yield


@pytest.fixture(scope="session")
def opened(shared: Path) -> Callable[..., Opened]:
    """Name of a family, and way -> its hooked model and the same in torch; exported once a run."""
    found: dict[tuple[str, str], Opened] = {}

    def find(name: str, way: str = STRUCTURE) -> Opened:
        if (name, way) not in found:
            single_threaded()
            folder, reference = shared / way / name, make(name)
            folder.parent.mkdir(exist_ok=True)
            with FileLock(f"{folder}.lock"), as_unknown() if way == STRUCTURE else nullcontext():
                if not folder.exists():
                    reference.save_pretrained(folder / "checkpoint")
                    export(folder / "checkpoint", folder / "hooked")
            found[name, way] = MIModel.from_pretrained(folder / "hooked", threads=1), reference
        return found[name, way]

    return find


def masked(name: str, way: str, point: str, value: np.ndarray) -> np.ndarray:
    """Scores of OpenAI's GPT: its mask is -10,000, that of a cache added by structure the lowest number."""
    other = (name, way) == ("openai-gpt", STRUCTURE) and point.endswith("scores")
    return np.maximum(value, -9000) if other else value


@pytest.mark.slow
@families(*FAST)
def test_every_capture_equals_eager_torch(name, way, opened):
    model, reference = opened(name, way)
    for kind in KINDS:
        inputs = batch(kind)
        expected = run(name, reference, inputs).values
        found = forward(model, inputs, HookSpec().capture(lambda point: not point.endswith("hook_result"))).values
        seen = found.keys() & expected.keys()
        off = {
            one: difference(
                HookPoint.parse(one), *(masked(name, way, one, side[one]) for side in (found, expected)), inputs
            )
            for one in seen
        }
        assert {one: d for one, d in off.items() if not d < TOLERANCE} == {}
        rotary = {"hook_rot_q"} if FAMILIES[name].rotary else set()  # read by the product alone, as scores show
        unseen = {one.rpartition(".")[2] for one in found.keys() - seen} - rotary
        assert unseen <= {"hook_embed", "hook_pos_embed"}
        assert expected.keys() <= found.keys()


@pytest.mark.slow
@families(("openai-gpt", TABLE))
def test_every_intervention_equals_the_same_edit_in_torch(name, way, opened):
    """At the last layer, whose keys and values at padding differ if an earlier layer's mask does."""
    model, reference = opened(name, way)
    # Edits of scores can read padding: with OpenAI's mask it attends to later tokens, those of a later call too, and
    # with the mask of a cache that is added by structure to others.
    kinds = {("openai-gpt", TABLE): "left", ("openai-gpt", STRUCTURE): "past"}
    inputs = batch(kinds.get((name, way), "left past"))
    plain, off = run(name, reference, inputs), dict[str, float]()
    points = [point for point in map(HookPoint.parse, plain.values) if point.layer in (None, model.num_layers - 1)]
    for point in points:
        if any(point.name.endswith(short) for short in FAMILIES[name].unseen):
            continue
        for number, edit in enumerate(interventions(point, plain.values[point.name].shape, whole=False)):
            expected = run(name, reference, inputs, [(point, edit)]).logits
            found = forward(model, inputs, HookSpec().intervene(point, edit)).logits
            scale = max(1.0, float(np.abs(expected[inputs.real]).max()))
            off[f"{point} {edit.kind} {number}"] = float(np.abs(found - expected)[inputs.real].max()) / scale
            assert np.abs(expected - plain.logits)[inputs.real].max() > 0
    assert {one: d for one, d in off.items() if not d < TOLERANCE} == {}


@pytest.mark.slow
@families(*FAST)
def test_decoding_with_a_cache_equals_one_pass(name, way, opened):
    model, reference = opened(name, way)
    prompt = batch("left")
    found = model.generate(prompt.ids, attention_mask=prompt.mask, max_new_tokens=4, eos_token_id=[])
    ids, mask = prompt.ids, prompt.mask
    for _ in range(4):
        logits = run(name, reference, Inputs(ids, mask)).logits[:, -1]
        ids = np.concatenate([ids, logits.argmax(-1)[:, None]], axis=1)
        mask = np.concatenate([mask, np.ones_like(mask[:, :1])], axis=1)
    assert np.array_equal(np.stack(found.new_ids), ids[:, -4:])


@families(("bloom", STRUCTURE))
@pytest.mark.slow
def test_a_sweep_equals_one_pass_a_cell(name, way, opened):
    model, _ = opened(name, way)
    clean, corrupt = batch("plain").ids[:1], batch("past").ids[:1]
    found = model.patch_sweep(clean, corrupt, "hook_resid_pre", metric=lambda logits: logits[:, 5])
    kept = model.forward(clean, HookSpec().capture("*.hook_resid_pre"))
    for layer, position in ((0, 2), (1, clean.shape[1] - 1)):
        point = HookPoint.ResidPre(layer)
        edit = Intervention.Replace(kept[point], positions=[position])
        expected = model.forward(corrupt, HookSpec().intervene(point, edit)).output()[0, -1, 5]
        assert abs(np.asarray(found.values)[layer, position] - expected) < TOLERANCE


def scaled(model: PreTrainedModel) -> None:
    """Other scores in layer 1."""
    model.transformer.h[1].self_attention.inv_norm_factor *= 1.01


def projected(model: PreTrainedModel) -> None:
    """Another z, as layer 1's output projection reads it."""
    model.transformer.h[1].self_attention.dense.register_forward_pre_hook(lambda _, given: (given[0] * 1.01,))


@pytest.mark.slow
@pytest.mark.parametrize(("change", "said"), [(scaled, "pattern"), (projected, "z")])
def test_what_eager_says_otherwise_is_refused(change, said, opened, shared, tmp_path, monkeypatch):
    """A graph that keeps every law of a decoder, and computes something else than transformers does."""
    opened("bloom")
    loaded = by_structure.check_eagerly.__globals__["_loaded"]

    def another(*given):
        model = loaded(*given)
        change(model)
        return model

    monkeypatch.setitem(by_structure.check_eagerly.__globals__, "_loaded", another)
    with (
        as_unknown(),
        pytest.raises(ExportError, match=rf"not found by structure either.* {said} = eager transformers' \(layer 1\)"),
    ):
        export(shared / STRUCTURE / "bloom" / "checkpoint", tmp_path / "hooked")


def test_bfloat16_is_refused(opened, shared, tmp_path):
    opened("bloom")
    with as_unknown(), pytest.raises(ExportError, match="bfloat16 does not run"):
        export(shared / STRUCTURE / "bloom" / "checkpoint", tmp_path / "hooked", "bfloat16")


def test_a_stream_that_is_no_sum_is_not_taken_for_one(opened):
    model, _ = opened("openai-gpt")
    ids = batch("plain").ids
    for request in (
        lambda: model.attribute(ids[0], 5, 11),
        lambda: model.edge_attribution(ids[:1], ids[1:2], answer=5, versus=9),
        lambda: model.decompose_resid(model.forward(ids, HookSpec().capture("*"))),
    ):
        with pytest.raises(InputError, match="norms it between additions"):
            request()
    assert model.logit_lens(ids[0], k=3).top_ids.shape[-1] == 3
    given = {"sender": "z", "answer": 5, "versus": 9}
    swept = model.patch_sweep(ids[:1], ids[1:2], "z", ("layer", "head"), answer=5, versus=9)
    path = model.path_patch(ids[:1], ids[1:2], "all", **given)  # a change goes through the norms
    assert np.abs(path.values - swept.values).max() < 1e-5 * np.abs(swept.values).max()
    assert np.abs(path.effect).max() > 1e-3


def test_verify_says_that_torch_has_no_taps(opened):
    model, _ = opened("bloom")
    found = model.verify(batch("plain").ids, runtimes=["ort-cpu", "torch", "reference"])
    assert "found by structure" in found.skipped["torch"]
    assert [beside.title for beside in found.besides] == ["reference"]
