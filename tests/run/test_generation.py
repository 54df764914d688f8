"""Generation against transformers' `generate`, the `rwkv` package, and loops that recompute all at each step."""

import numpy as np
import pytest
import torch
from families import VOCAB, WINDOW, drawn_families
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracle import Inputs, run
from rwkv_checkpoints import blinkdl, run_package
from transformers import GenerationConfig

from mionnx import (
    HookError,
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    MIModel,
    StateKnockoutSpec,
    StateSteeringSpec,
    TokenizerError,
)
from mionnx.rewrite.plan import Outputs

TOLERANCE = 5e-5
NEW = WINDOW + 4
VERSIONS = [6, 7]
law = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def prompts(rows: int, seq: int = 7, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask; of several rows the first ones are padded on the left."""
    ids = np.random.default_rng(seed).integers(3, VOCAB, (rows, seq))
    mask = np.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : 3 - row] = 0
    return ids, mask


def theirs(reference, ids: np.ndarray, mask: np.ndarray, **options: object) -> list[list[int]]:
    """What transformers' `generate` adds to each row."""
    reference.generation_config.eos_token_id = None  # it would be used where None is asked for
    reference.config._experts_implementation = "eager"  # the oracle of another test leaves its own
    config = GenerationConfig(**{"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options})
    with torch.no_grad():
        found = reference.generate(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), generation_config=config
        )
    return found[:, ids.shape[1] :].tolist()


def lists(rows: list[np.ndarray]) -> list[list[int]]:
    return [row.tolist() for row in rows]


@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_ids_equal_transformers(family, rows, models, references):
    """Longer than the sliding window; then with an end-of-text token that comes in the middle of a row."""
    model, reference, (ids, mask) = models(family), references(family), prompts(rows)
    free = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=[])
    assert lists(free.new_ids) == theirs(reference, ids, mask, eos_token_id=None)
    assert lists(free.ids) == [
        [*row[real == 1].tolist(), *new] for row, real, new in zip(ids, mask, lists(free.new_ids), strict=True)
    ]
    end = int(free.new_ids[0][4])
    ended = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=end)
    expected = theirs(reference, ids, mask, eos_token_id=end)
    cut = [row[: row.index(end) + 1] if end in row else row for row in expected]
    assert lists(ended.new_ids) == cut
    assert len(ended.new_ids[0]) <= 5
    penalised = {"repetition_penalty": 1.7, "min_new_tokens": 7, "eos_token_id": end}
    found = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **penalised)
    cut = [row[: row.index(end) + 1] if end in row else row for row in theirs(reference, ids, mask, **penalised)]
    assert lists(found.new_ids) == cut


EDITS = {
    "add": Intervention.Add(np.linspace(-1, 1, 64)),
    "add prompt": Intervention.Add(np.linspace(-1, 1, 64), positions="prompt"),
    "add generated": Intervention.Add(np.linspace(-1, 1, 64), positions="generated"),
    "scale positions": Intervention.Scale(1.5, positions=[1, -1, 5, 7]),
    "zero last of the prompt": Intervention.Zero(positions=-1),
    "replace generated": Intervention.Replace(np.linspace(-2, 2, 64), positions="generated"),
    "replace part": Intervention.Replace(np.linspace(-2, 2, 128).reshape(2, 64), positions=[2, 7]),
    "project out": Intervention.ProjectOut(np.cos(np.arange(64))),
    "project out generated": Intervention.ProjectOut(np.sin(np.arange(64)), positions="generated"),
    "low rank generated": Intervention.LowRank(
        np.cos(np.arange(128)).reshape(2, 64) / 8,
        np.sin(np.arange(128)).reshape(2, 64),
        [0.5, -0.3],
        positions="generated",
    ),
    "rows": Intervention.Scale(0.5, rows=0, positions="generated"),
}


def loop(reference, ids, mask, point, edit, new: int) -> tuple[list[list[int]], np.ndarray]:
    """Greedy ids and the logits of the whole text, in torch, the whole text computed anew at every step."""
    lengths, start = mask.sum(1), ids.shape[1]
    for step in range(new + 1):
        inputs = Inputs(ids, mask, prompts=lengths)
        logits = run(reference, inputs, [(point, _fitting(point, edit, ids.shape))]).logits
        if step < new:
            ids = np.concatenate([ids, logits[:, -1].argmax(-1)[:, None]], axis=1)
            mask = np.concatenate([mask, np.ones((len(ids), 1), np.int64)], axis=1)
    return ids[:, start:].tolist(), logits


def _fitting(point: HookPoint, edit: Intervention, shape: tuple[int, int]) -> Intervention:
    """The value of the selected part, or of the prompt, as one of the whole text."""
    value = edit.value
    if edit.kind == "knockout":
        value = np.pad(value, [(0, NEW), (0, NEW)])[: shape[1], : shape[1]]
    elif value is not None and value.ndim == 2 and edit.kind == "replace":
        full = np.zeros((*shape, value.shape[-1]), np.float32)
        for row in range(shape[0]):
            for part, position in zip(value, edit.positions, strict=True):
                column = position + (3 - row if row < shape[0] - 1 else 0)
                if column < shape[1]:
                    full[row, column] = part
        value = full
    return Intervention(edit.kind, value, edit.positions, edit.heads, edit.rows, several=edit.several)


@pytest.mark.parametrize("kind", EDITS)
def test_every_intervention_equals_a_torch_loop(family, kind, models, references):
    """A batch of one for the kinds that have no limits, else three rows with padding on the left."""
    rows = 1 if kind in ("add", "project out") else 3
    model, reference, (ids, mask) = models(family), references(family), prompts(rows)
    point, edit = HookPoint.ResidPost(0), EDITS[kind]
    spec = HookSpec().intervene(point, edit)
    found = model.generate(ids, spec, attention_mask=mask, max_new_tokens=5, eos_token_id=[], output_logits=True)
    new, logits = loop(reference, ids, mask, point, edit, 5)
    assert lists(found.new_ids) == new
    ours, real = np.concatenate([step.output() for step in found.steps], axis=1), mask.astype(bool)
    expected = logits[:, : ours.shape[1]]
    off = np.abs(ours - expected) / max(1.0, float(np.abs(expected).max()))
    assert off[:, ids.shape[1] :].max() < TOLERANCE
    assert off[:, : ids.shape[1]][real].max() < TOLERANCE


def test_knockouts_and_heads_equal_a_torch_loop(family, models, references):
    """A mask of the prompt's and the first new columns; a head silenced in new tokens only."""
    model, reference, (ids, mask) = models(family), references(family), prompts(3)
    blocked = np.zeros((9, 9), np.float32)
    blocked[6, 4] = blocked[7, 5] = blocked[8, 6] = -np.inf
    for point, edit in (
        (HookPoint.AttnScores(1), Intervention.Knockout(blocked, heads=[0, 2])),
        (HookPoint.AttnZ(1), Intervention.Zero(heads=1, positions="generated")),
        (HookPoint.AttnV(0), Intervention.Scale(0.5, heads=0, positions="prompt")),
        (HookPoint.AttnPattern(0), Intervention.Scale(0.0, heads=3, positions=[7, -1])),
    ):
        spec = HookSpec().intervene(point, edit)
        found = model.generate(ids, spec, attention_mask=mask, max_new_tokens=5, eos_token_id=[])
        assert lists(found.new_ids) == loop(reference, ids, mask, point, edit, 5)[0], point


@st.composite
def edits(draw: st.DrawFn, points: list[HookPoint], prompt: int, new: int) -> tuple[HookPoint, Intervention]:
    """One intervention at prompt positions, generated positions, or both."""
    point = draw(st.sampled_from(points))
    early = st.integers(-prompt, prompt - 1)
    late = st.integers(prompt, prompt + new - 2)
    positions = draw(
        st.one_of(
            st.sampled_from([None, "prompt", "generated"]),
            st.lists(early, min_size=1, max_size=3, unique=True),
            st.lists(late, min_size=1, max_size=3, unique=True),
            st.tuples(early, late).map(list),
        )
    )
    made = draw(
        st.sampled_from(
            [
                lambda **limits: Intervention.Add(0.5, **limits),
                lambda **limits: Intervention.Scale(1.5, **limits),
                lambda **limits: Intervention.Zero(**limits),
            ]
        )
    )
    return point, made(positions=positions)


@drawn_families
@law
@given(prompt=st.integers(3, 8), new=st.integers(3, 8), rows=st.integers(1, 3), data=st.data())
def test_cache_law(models, families, prompt, new, rows, data):
    """Decoding from the cache gives what one pass over the whole text gives, wherever the interventions fall."""
    model = models(data.draw(st.sampled_from(families)))
    points = [p for p in model.hook_points() if not p.derived and p.short not in ("scores", "pattern", "logits")]
    spec, watched = HookSpec(), data.draw(st.sampled_from(points))
    for _ in range(data.draw(st.integers(1, 2))):
        spec.intervene(*data.draw(edits(points, prompt, new)))
    assume(not hides_another(spec, model))
    spec.capture(watched)
    texts = [row[: prompt + data.draw(st.integers(0, 2))] for row in prompts(rows, 10, prompt)[0]]
    found = model.generate(texts, spec, max_new_tokens=new, eos_token_id=[], output_logits=True)
    check_cache_law(model, spec, found, [len(text) for text in texts], watched)


def hides_another(spec: HookSpec, model: MIModel) -> bool:
    """Whether zeros may leave nothing of another intervention: they stand there too, or everywhere behind it."""
    places = [model.hooked.order[point.name] for point, _ in spec.interventions]
    return len({*places}) < len(places) or any(
        edit.kind == "zero" and edit.positions is None and place > min(places)
        for place, (_, edit) in zip(places, spec.interventions, strict=True)
    )


def check_cache_law(model: MIModel, spec: HookSpec, found, lengths: list[int], watched: HookPoint) -> None:
    whole = model.forward([ids[:-1] for ids in found.ids], spec, prompt_length=lengths)
    logits = np.concatenate([step.output() for step in found.steps], axis=1)
    for row, ids in enumerate(found.ids):
        real = len(ids) - 1
        axis = watched.axes.index("seq") - 1

        def along(value: np.ndarray, row: int = row, real: int = real, axis: int = axis) -> np.ndarray:
            """The row's own tokens."""
            return np.moveaxis(value[row], axis if value.ndim == 4 else 0, 0)[-real:]

        for ours, expected in ((logits, whole.output()), (found.captured(watched), whole[watched])):
            expected = along(expected, row, real)
            off = np.abs(along(ours, row, real) - expected).max() / max(1.0, float(np.abs(expected).max()))
            assert off < TOLERANCE
        assert whole.output()[row, -real:][lengths[row] - 1 :].argmax(-1).tolist() == found.new_ids[row].tolist()


@settings(law, max_examples=16)
@given(st.sampled_from(VERSIONS), st.integers(3, 20), st.integers(3, 6), st.data())
def test_cache_law_of_recurrent_models(rwkv, version, prompt, new, data):
    model = rwkv(f"{version}-pth")
    points = [p for p in model.hook_points() if not p.derived and p.short not in ("state", "logits", "decay")]
    spec, watched = HookSpec().intervene(*data.draw(edits(points, prompt, new))), data.draw(st.sampled_from(points))
    place = data.draw(st.sampled_from([prompt - 2, prompt, -1]))
    spec.set_state_knockout(StateKnockoutSpec().position(place).layer(1)).capture(watched)
    spec.set_state_steering(StateSteeringSpec(1.5).positions([1, prompt + 1]))
    texts = [np.random.default_rng(prompt + row).integers(0, VOCAB, prompt + row) for row in range(2)]
    found = model.generate(texts, spec, max_new_tokens=new, eos_token_id=[], output_logits=True)
    check_cache_law(model, spec, found, [len(text) for text in texts], watched)


@pytest.mark.parametrize("version", VERSIONS)
def test_greedy_ids_equal_the_rwkv_package(rwkv, version, tmp_path):
    """Rows of unequal length in one batch, and each alone; the package continues each text by itself."""
    texts = {str(n): np.random.default_rng(n).integers(0, VOCAB, n) for n in (3, 16, 21)}
    expected = run_package(version, blinkdl(version), texts, tmp_path, new=NEW)
    greedy = [expected[f"{name}.greedy"].tolist() for name in texts]
    for layout in [f"{version}-pth", "6-hf" if version == 6 else "7-fla"]:
        model = rwkv(layout)
        together = model.generate(list(texts.values()), max_new_tokens=NEW, eos_token_id=[])
        assert lists(together.new_ids) == greedy
        for ids, wanted in zip(texts.values(), greedy, strict=True):
            assert model.generate(ids, max_new_tokens=NEW, eos_token_id=[]).new_ids[0].tolist() == wanted


def test_captures_come_from_the_same_pass(models):
    """One step a token: the prompt's first; joined they are those of one pass; and the text is as without them."""
    model, (ids, _) = models("llama"), prompts(2)
    spec = HookSpec().capture("*.hook_resid_post").capture("blocks.0.attn.hook_pattern")
    found = model.generate(ids, spec, max_new_tokens=4, eos_token_id=[])
    assert lists(found.new_ids) == lists(model.generate(ids, max_new_tokens=4, eos_token_id=[]).new_ids)
    assert [step["resid_post", 1].shape for step in found.steps] == [(2, 7, 64), *[(2, 1, 64)] * 3]
    assert [step["pattern", 0].shape[-2:] for step in found.steps] == [(7, 7), (1, 8), (1, 9), (1, 10)]
    assert found.captured(HookPoint.ResidPost(1)).shape == (2, 10, 64)
    with pytest.raises(HookError, match="see `steps`"):
        found.captured("blocks.0.attn.hook_pattern")
    with pytest.raises(HookError, match=r"blocks.1.hook_mlp_out was not captured|not captured"):
        found.captured("blocks.1.hook_mlp_out")
    assert model.generate(ids, max_new_tokens=2).steps == []


def test_only_the_last_logits_are_computed(family, models):
    """Unless they are asked for, or hooked: then all."""
    model, (ids, mask) = models(family), prompts(3)
    restricted = model.compile_graph(outputs=Outputs(last=True)).session
    whole = model.forward(ids, attention_mask=mask).output()
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    for i in range(model.num_layers):
        for part in ("key", "value"):
            empty = np.zeros((3, model.num_kv_heads, 0, model.head_dim), np.float32)
            feeds[f"past_key_values.{i}.{part}"] = empty
    last = restricted.run(["logits"], feeds)[0]
    assert last.shape == (3, 1, VOCAB)
    assert np.abs(last[:, 0] - whole[:, -1]).max() < 1e-6
    spec = HookSpec().intervene("hook_logits", Intervention.Add(np.arange(VOCAB) * 100.0))
    assert lists(model.generate(ids, spec, max_new_tokens=2).new_ids) == [[VOCAB - 1] * 2] * 3


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "7-fla"])
def test_a_prefix_is_computed_once(name, models, rwkv):
    """Continuing from a cache equals continuing the whole text; one row of prefix serves several prompts."""
    model = rwkv(name) if name == "7-fla" else models(name)
    prefix, rests = np.arange(10, 16), [np.array([20, 21]), np.array([30, 31, 32]), np.array([40])]
    before = model.forward(prefix, use_cache=True)
    cache = before.state or before.kv_cache
    whole = model.generate([[*prefix, *rest] for rest in rests], max_new_tokens=6, eos_token_id=[])
    kept = cache.seq_len
    found = model.generate(rests, cache=cache, max_new_tokens=6, eos_token_id=[])
    assert lists(found.new_ids) == lists(whole.new_ids)
    assert (cache.seq_len, cache.batch) == (kept, 1)
    alone = model.generate(rests[1], cache=cache, max_new_tokens=3, eos_token_id=[])
    again = model.generate(alone.new_ids[0][-1:], cache=alone.cache, max_new_tokens=3, eos_token_id=[])
    assert [*alone.new_ids[0], *again.new_ids[0]] == whole.new_ids[1].tolist()


@pytest.mark.slow
def test_positions_count_from_the_start_of_the_prefix(models):
    """An absolute position and the phase `prompt` mean the same with a cached prefix as without one."""
    model, ids = models("qwen3"), np.arange(10, 18)
    prefix = model.forward(ids[:4], use_cache=True).kv_cache
    for positions in (5, 9, -1, "generated"):
        spec = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Scale(-2.0, positions=positions))
        whole = model.generate(ids, spec, max_new_tokens=5, eos_token_id=[])
        assert lists(model.generate(ids[4:], spec, cache=prefix, max_new_tokens=5, eos_token_id=[]).new_ids) == lists(
            whole.new_ids
        )


@pytest.mark.slow
@law
@given(past=st.integers(1, 4), rows=st.integers(1, 2), data=st.data())
def test_positions_in_the_cached_past_are_refused_as_in_one_pass(shipped, world_rwkv, past, rows, data):
    """Absolute, negative and per-row positions, of interventions and of state interventions, in prompt and past."""
    prompt, new = past + 2, 4
    model = data.draw(st.sampled_from([shipped, world_rwkv]))
    ids = np.random.default_rng(past).integers(3, 400, (rows, prompt))
    lengths = [prompt - (row and data.draw(st.integers(0, past - 1))) for row in range(rows)]
    mask = np.stack([np.arange(prompt) >= prompt - length for length in lengths]).astype(int)
    before = model.forward(ids[:, :past], attention_mask=mask[:, :past], use_cache=True)
    cache = before.kv_cache or before.state
    position = st.integers(-min(lengths), min(lengths) - 1)
    spec = data.draw(specs_at(position, rows, model.hooked.metadata.carries_state))
    refused = cached_position(lambda: model.forward(ids[:, past:], spec, attention_mask=mask, cache=cache))
    found = cached_position(
        lambda: model.generate(
            ids[:, past:], spec, attention_mask=mask, cache=cache, max_new_tokens=new, eos_token_id=[]
        )
    )
    assert refused == found


@st.composite
def specs_at(draw: st.DrawFn, position: st.SearchStrategy[int], rows: int, recurrent: bool) -> HookSpec:
    """A spec that changes something at one or two positions."""
    chosen = draw(st.lists(position, min_size=1, max_size=2))
    if recurrent and draw(st.booleans()):
        if draw(st.booleans()):
            return HookSpec().set_state_knockout(StateKnockoutSpec().positions(chosen))
        return HookSpec().set_state_steering(StateSteeringSpec(0.5).positions(chosen))
    by_row = draw(st.lists(st.lists(position, min_size=1, max_size=2), min_size=rows, max_size=rows))
    limits = {"positions": draw(st.sampled_from([chosen, by_row]))}
    if draw(st.booleans()):
        limits["rows"] = draw(st.integers(0, rows - 1))
    return HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Scale(0.5, **limits))


def cached_position(run) -> str | None:
    """The position that is refused since it lies in the cached past; None if the spec runs."""
    try:
        run()
    except InterventionError as error:
        position, found, _ = str(error).partition(" lies in the cached past")
        return position if found else f"for another reason: {error}"
    return None


def test_a_cached_prefix_refuses_what_it_would_hide(shipped, world_rwkv):
    """Every way to name a position of the past; what takes effect in the new tokens alone stays allowed."""
    ids, point = np.arange(10, 18), HookPoint.ResidPost(0)
    cache = shipped.forward(ids[:5], use_cache=True).kv_cache
    for positions in (0, [6, 4], -4, [[1]], [7, -8]):
        spec = HookSpec().intervene(point, Intervention.Zero(positions=positions))
        with pytest.raises(InterventionError, match=r"lies in the cached past.*computes 5 to 9"):
            shipped.generate(ids[5:], spec, cache=cache, max_new_tokens=3)
    state = world_rwkv.forward(ids[:5]).state
    for one in (
        HookSpec().set_state_knockout(StateKnockoutSpec().positions([6, 4])),
        HookSpec().set_state_steering(StateSteeringSpec(2.0).position(-5)),
    ):
        with pytest.raises(InterventionError, match=r"state .* lies in the cached past"):
            world_rwkv.generate(ids[5:], one, cache=state, max_new_tokens=3)
    plain = shipped.generate(ids[5:], cache=cache, max_new_tokens=3, eos_token_id=[], output_logits=True)
    for positions in (5, 9, -1, "prompt", "generated", None):
        spec = HookSpec().intervene(point, Intervention.Scale(-2.0, positions=positions))
        found = shipped.generate(ids[5:], spec, cache=cache, max_new_tokens=3, eos_token_id=[], output_logits=True)
        pairs = zip(plain.steps, found.steps, strict=True)
        assert any(not np.array_equal(one.output(), other.output()) for one, other in pairs), positions


@pytest.mark.parametrize("point", [HookPoint.ResidPost(0), HookPoint.AttnQ(1), HookPoint.AttnPattern(1)])
def test_one_value_replaces_every_token_of_every_step(shipped, point):
    """A replacement without limits is the activation itself: it has its shape, whatever shape was given."""
    width = 1 if point.variant == "AttnPattern" else shipped.hidden_size if point.variant == "ResidPost" else 16
    value, ids = np.linspace(0.2, 0.7, width), np.arange(3, 15).reshape(2, 6)
    spec = HookSpec().intervene(point, Intervention.Replace(value)).capture(point)
    found = shipped.generate(ids, spec, max_new_tokens=4, eos_token_id=[], output_logits=True)
    limited = HookSpec().intervene(point, Intervention.Replace(value, rows=[0, 1])).capture(point)
    expected = shipped.generate(ids, limited, max_new_tokens=4, eos_token_id=[], output_logits=True)
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert np.array_equal(ours[point], theirs[point])
        assert np.array_equal(ours.output(), theirs.output())
    assert np.array_equal(found.cache.layers[3][0], expected.cache.layers[3][0])


def test_sampling_is_repeatable_row_by_row(models):
    """The same seed gives the same row, whatever other rows do; another seed another text."""
    model, (ids, _) = models("llama"), prompts(3, 7, 5)
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 12, "eos_token_id": []}
    one = model.generate(ids, seed=3, **options)
    assert lists(one.new_ids) == lists(model.generate(ids, seed=3, **options).new_ids)
    assert lists(one.new_ids) != lists(model.generate(ids, seed=4, **options).new_ids)
    assert lists(one.new_ids)[0] == lists(model.generate(ids[:1], seed=3, **options).new_ids)[0]
    same = model.generate(np.repeat(ids[:1], 3, axis=0), seed=3, **options)
    assert len({tuple(row) for row in lists(same.new_ids)}) == 3
    greedy = model.generate(ids, max_new_tokens=12, eos_token_id=[])
    narrow = model.generate(ids, seed=9, **{**options, "top_k": 1})
    assert lists(narrow.new_ids) == lists(greedy.new_ids)


@pytest.fixture(scope="module")
def world() -> MIModel:
    from repository import REPOSITORY

    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")


@pytest.fixture(scope="module")
def world_rwkv() -> MIModel:
    from repository import REPOSITORY

    return MIModel.from_pretrained(REPOSITORY / "models" / "world-rwkv7")


def test_texts_stop_at_strings_and_ends(world, world_rwkv):
    for model in (world, world_rwkv):
        free = model.generate("one two three", max_new_tokens=6, eos_token_id=[])
        assert free.new_texts[0].split()[:3] == ["four", "five", "six"]
        assert free.texts[0].split()[:4] == ["one", "two", "three", "four"]
        stopped = model.generate("one two three", max_new_tokens=6, stop_strings="five")
        assert stopped.new_texts[0].split() == ["four", "five"]
        stopped = model.generate("one two three", max_new_tokens=6, stop_strings=["nine", "four"])
        assert stopped.new_texts[0].split() == ["four"]
        ended = model.generate("one two three", max_new_tokens=6, eos_token_id=int(free.new_ids[0][1]))
        assert ended.new_texts[0].split()[:2] == ["four", "five"]
        assert len(ended.new_ids[0]) == 2


def test_steering_moves_the_text(world):
    """A direction from one country to another changes the capital that is written, at every strength above some."""
    ends = {}
    for name in ("France", "Germany"):
        tokens = world.tokenize(f"The capital of {name} is")
        point = HookPoint.ResidPost(0)
        ends[name] = world.forward(tokens, HookSpec().capture(point))[point][0, tokens.positions_of(name)[0]]
    at = world.tokenize("The capital of France is").positions_of("France")
    steer = Intervention.Add(ends["Germany"] - ends["France"], positions=at)
    found = world.generate("The capital of France is", HookSpec().intervene(HookPoint.ResidPost(0), steer))
    assert world.generate("The capital of France is").new_texts[0].split()[0] == "Paris"
    assert found.new_texts[0].split()[0] == "Berlin"


WRONG = {
    "no tokens": ({"max_new_tokens": 0}, InputError, "max_new_tokens"),
    "a fraction": ({"max_new_tokens": 1.5}, InputError, "max_new_tokens"),
    "cold": ({"temperature": 0.0, "do_sample": True}, InputError, "temperature"),
    "all and more": ({"top_p": 1.5}, InputError, "top_p"),
    "minus": ({"top_k": -1}, InputError, "top_k"),
    "penalty": ({"repetition_penalty": 0.0}, InputError, "repetition_penalty"),
    "idle temperature": ({"temperature": 2.0}, InputError, "do_sample=True"),
    "idle seed": ({"seed": 1}, InputError, "do_sample=True"),
    "too few": ({"min_new_tokens": 9, "max_new_tokens": 3}, InputError, "min_new_tokens=9"),
    "end": ({"eos_token_id": VOCAB}, InputError, f"0 to {VOCAB - 1}"),
    "pad": ({"pad_token_id": -1}, InputError, f"0 to {VOCAB - 1}"),
    "no tokenizer": ({"stop_strings": "end"}, TokenizerError, "tokenizer"),
    "an empty stop": ({"stop_strings": ""}, InputError, "stop_strings"),
    "too long": ({"max_new_tokens": 100}, InputError, "64"),
    "another cache": ({"cache": 3}, InputError, "KVCache"),
    "right padding": ({"attention_mask": [[1, 1, 1, 1, 0]]}, InputError, "left"),
    "beyond": (
        {"hooks": HookSpec().intervene("hook_embed", Intervention.Zero(positions=9)), "max_new_tokens": 5},
        InterventionError,
        "position 9",
    ),
    "never read": (
        {"hooks": HookSpec().intervene("hook_embed", Intervention.Zero(positions="generated")), "max_new_tokens": 1},
        InterventionError,
        "generated",
    ),
    "a phase": (
        {"hooks": HookSpec().intervene("hook_embed", Intervention.Scale(np.ones(3), positions="generated"))},
        InterventionError,
        "hidden=64",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_generated_is_refused(what, models):
    given, kind, named = WRONG[what]
    with pytest.raises(kind) as caught:
        models("gpt2").generate([[5, 6, 7, 8, 9]], **given)
    assert named in str(caught.value)


def test_an_unknown_phase_is_refused():
    with pytest.raises(InterventionError, match="generated"):
        Intervention.Zero(positions="generate")


def test_a_phase_that_a_call_has_not_is_refused(models):
    spec = HookSpec().intervene("hook_embed", Intervention.Zero(positions="generated"))
    with pytest.raises(InterventionError, match="prompt_length"):
        models("llama").forward([[3, 4, 5]], spec)
    model = models("llama")
    zero = HookSpec().intervene("hook_embed", Intervention.Zero(positions=[1, 2]))
    assert np.array_equal(
        model.forward([[3, 4, 5]], spec, prompt_length=1).output(), model.forward([[3, 4, 5]], zero).output()
    )


# -- surgery
