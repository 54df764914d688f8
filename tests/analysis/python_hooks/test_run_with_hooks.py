"""Python functions as hooks: what they see, what becomes of what they do, and what is refused."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from families import VOCAB
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import Inputs, run
from repository import REPOSITORY
from transformers import AutoModelForCausalLM, AutoTokenizer

from mionnx import (
    HookError,
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    MIModel,
    Options,
    StateKnockoutSpec,
)
from mionnx.engine.engine import Program
from mionnx.graph.hooked_model import HookedModel

PROMPT = "The capital of France is"
PROMPTS = [PROMPT, "three four five", "When Mary and John went to the store ,"]
SHIPPED = ["world-llama", "world-gpt2", "world-rwkv7"]
FAMILIES = ["gpt2", "llama", "gemma2", "6-pth", "7-fla"]
few = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # each example opens sessions: shrinking would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def shipped(name: str, **options) -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / name, **options)


@pytest.fixture(scope="module")
def llama() -> MIModel:
    return shipped("world-llama")


def names_of(model: MIModel) -> list[str]:
    return [str(point) for point in model.hook_points() if not point.derived]


def same(activation, hook):
    return activation


def zero(activation, hook):
    activation[:] = 0


@few
@given(st.sampled_from(FAMILIES), st.data())
def test_a_graph_in_pieces_gives_the_bits_of_the_whole(models, rwkv, family, data):
    """Wherever it is cut, whatever is padding: functions that change nothing change no bit, and see what is there."""
    model = (rwkv if family[0].isdigit() else models)(family)
    rows, seq = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    ids = np.random.default_rng(seq).integers(3, VOCAB, (rows, seq))
    mask = np.ones_like(ids)
    mask[0, : data.draw(st.integers(0, seq - 1))] = 0
    hooks = data.draw(st.lists(st.sampled_from(names_of(model)), min_size=1, unique=True))
    seen = {}

    def store(activation, hook):
        seen[hook.name] = activation
        return activation if len(seen) % 2 else None

    logits = model.run_with_hooks(ids, [(name, store) for name in hooks], attention_mask=mask)
    plain = model.forward(ids, HookSpec().capture(lambda name: name in hooks), attention_mask=mask)
    assert np.array_equal(logits, plain.output())
    assert list(seen) == [name for name in names_of(model) if name in hooks]
    assert all(np.array_equal(value, plain[name]) for name, value in seen.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_all_hook_points_at_once(models, rwkv, family):
    model = (rwkv if family[0].isdigit() else models)(family)
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, 9))
    seen = []
    logits = model.run_with_hooks(ids, [(lambda name: True, lambda value, hook: seen.append(hook.name))])
    assert np.array_equal(logits, model.forward(ids).output())
    assert seen == names_of(model)


@few
@given(st.sampled_from(["gpt2", "llama", "gemma2"]), st.data())
def test_a_function_does_what_the_same_edit_in_torch_does(models, references, family, data):
    model = models(family)
    rows, seq = data.draw(st.integers(1, 2)), data.draw(st.integers(3, 9))
    ids, mask = np.random.default_rng(seq).integers(3, VOCAB, (rows, seq)), np.ones((rows, seq), np.int64)
    mask[-1, : data.draw(st.integers(0, 2))] = 0
    points = [point for point in model.hook_points() if not point.derived and point.variant != "AttnScores"]
    chosen = data.draw(st.lists(st.sampled_from(points), min_size=1, max_size=3, unique=True))
    expected = run(references(family), Inputs(ids, mask), [(point, Intervention.Scale(0.5)) for point in chosen])
    found = model.run_with_hooks(
        ids, [(point, lambda value, hook: value * 0.5) for point in chosen], attention_mask=mask
    )
    real = mask.astype(bool)
    assert np.abs(found - expected.logits)[real].max() / max(1, np.abs(expected.logits).max()) < 5e-5


@pytest.mark.parametrize("name", SHIPPED)
def test_writing_in_place_and_returning_are_the_same(name):
    model = shipped(name)
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Zero(positions=-1))
    expected = model.forward(PROMPT, spec).output()

    def in_place(activation, hook):
        activation[:, -1] = 0

    def both(activation, hook):
        activation[:, -1] = 0
        return activation

    def another(activation, hook):
        changed = activation.copy()
        changed[:, -1] = 0
        return changed.astype(np.float64)

    for function in (in_place, both, another):
        assert np.array_equal(model.run_with_hooks(PROMPT, [("blocks.1.hook_resid_post", function)]), expected)
    assert not np.array_equal(expected, model(PROMPT))


def test_what_is_returned_replaces_what_was_written(llama):
    def torn(activation, hook):
        kept = activation.copy()
        activation[:] = 0
        return kept

    assert np.array_equal(llama.run_with_hooks(PROMPT, [("*resid_post", torn)]), llama(PROMPT))


def test_a_function_may_return_a_view_or_a_read_only_array(llama):
    """A later function may write into it all the same."""

    def turned(activation, hook):
        return np.broadcast_to(activation[:, -1:], activation.shape)

    expected = llama.run_with_hooks(PROMPT, [("hook_embed", lambda value, hook: turned(value, hook) * 0)])
    assert np.array_equal(llama.run_with_hooks(PROMPT, [("hook_embed", turned), ("hook_embed", zero)]), expected)


def test_functions_at_one_point_run_in_the_order_of_registration(llama):
    point = HookPoint.MlpOut(2)
    seen = []

    def add(activation, hook, number):
        seen.append((number, float(activation.flat[0])))
        hook.ctx["sum"] = hook.ctx.get("sum", 0) + number
        seen.append(hook.ctx["sum"])
        return np.full_like(activation, number)

    llama.run_with_hooks(PROMPT, [(point, partial(add, number=1)), ("*mlp_out", partial(add, number=2))])
    first = llama.forward(PROMPT, HookSpec().capture(point))  # layers 0 and 1 come first
    assert [entry[0] for entry in seen[::2]] == [2, 2, 1, 2, 2]
    assert seen[4][1] != first[point].flat[0]  # what layers 0 and 1 left
    assert seen[6] == (2, 1.0)
    assert seen[1::2] == [2, 2, 1, 3, 2]  # `ctx` is a hook point's own


def test_the_hook_says_where_it_is(llama):
    found = []
    llama.run_with_hooks(
        PROMPT, [("*pattern", lambda value, hook: found.append((hook.name, hook.layer(), hook.point)))]
    )
    assert found == [(str(point), i, point) for i, point in enumerate(map(HookPoint.AttnPattern, range(4)))]
    with pytest.raises(HookError, match="hook_embed belongs to no layer"):
        llama.run_with_hooks(PROMPT, [("hook_embed", lambda value, hook: hook.layer())])


def test_shapes_are_those_of_the_hook_points(llama):
    dims = {"batch": 1, "seq": 5, "seq_q": 5, "seq_k": 5}

    def check(activation, hook):
        assert list(activation.shape) == [dims.get(axis, axis) for axis in llama.hooked.axes(hook.point)]
        assert activation.dtype == np.float32
        assert activation.flags.writeable

    llama.run_with_hooks(PROMPT, [("*", check)])


def test_functions_see_what_interventions_made(llama):
    spec = HookSpec().intervene("hook_embed", Intervention.Scale(3.0)).capture("hook_embed").capture("hook_embed", True)
    seen = {}

    def halve(activation, hook):
        seen["in"] = activation.copy()
        return activation / 2

    logits, cache = llama.run_with_cache(PROMPT, "*resid_pre", fwd_hooks=[("hook_embed", halve)], hooks=spec)
    assert np.array_equal(seen["in"], cache["hook_embed.before"] * 3)
    assert np.array_equal(cache["hook_embed"], seen["in"] / 2)
    assert np.array_equal(cache["resid_pre", 0], seen["in"] / 2)
    scaled = HookSpec().intervene("hook_embed", Intervention.Scale(1.5))
    assert np.abs(logits - llama.forward(PROMPT, scaled).output()).max() < 5e-5


def test_captures_see_what_functions_made_and_parts_of_it(llama):
    spec = HookSpec().capture("blocks.1.attn.hook_z", positions=-1, heads=3).capture("blocks.1.attn.hook_result")

    def head(activation, hook):
        activation[:, :, 3] = 7

    _, cache = llama.run_with_cache(PROMPT, "hook_final_norm", fwd_hooks=[("blocks.1.attn.hook_z", head)], hooks=spec)
    assert np.array_equal(cache["z", 1], np.full((1, 1, 1, llama.head_dim), 7))
    shares = np.full(llama.head_dim, 7) @ llama.W_O[1, 3]
    assert np.abs(cache["result", 1][0, :, 3] - shares).max() < 5e-5


def test_a_recurrent_state_can_be_changed():
    """What the recurrence reads is zeroed at one token."""
    model = shipped("world-rwkv7")
    at = model.tokenize(PROMPT).positions_of("France")

    def forget(activation, hook):
        activation[:, at] = 0

    found = model.run_with_hooks(PROMPT, [("*rwkv.hook_v", forget)])
    assert np.array_equal(found, model.forward(PROMPT, _zeroed(model, "RwkvV", at)).output())
    assert found[0, -1].argmax() != model.token_id("Paris")


def _zeroed(model: MIModel, variant: str, at: list[int]) -> HookSpec:
    spec = HookSpec()
    for layer in range(model.num_layers):
        spec.intervene(getattr(HookPoint, variant)(layer), Intervention.Zero(positions=at))
    return spec


def test_state_interventions_hold_besides_functions():
    model = shipped("world-rwkv7")
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(2))
    logits, cache = model.run_with_cache(PROMPTS, "*resid_post", fwd_hooks=[("*", same)], hooks=spec)
    plain = model.forward(PROMPTS, HookSpec().extend(spec).capture("*resid_post"))
    assert np.array_equal(logits, plain.output())
    assert np.array_equal(cache["resid_post", 3], plain["resid_post", 3])
    assert all(np.array_equal(*pair) for pair in zip(_parts(cache.state), _parts(plain.state), strict=True))
    rest = model.tokenizer.encode(" .").ids
    assert np.array_equal(
        model.run_with_hooks([rest] * 3, [("*", same)], initial_state=plain.state),
        model.forward([rest] * 3, initial_state=plain.state).output(),
    )


def _parts(state):
    return [part for layer in state.layers for part in (layer.att_shift, layer.wkv, layer.ffn_shift)]


def test_a_text_goes_on_from_a_cache(llama):
    first, rest = llama.tokenize(PROMPT).ids[:3], llama.tokenize(PROMPT).ids[3:]
    before = llama.forward(first, use_cache=True).kv_cache
    shapes = []

    def look(activation, hook):
        shapes.append(activation.shape)

    logits = llama.run_with_hooks(rest, [("blocks.2.attn.hook_pattern", look)], cache=before)
    assert shapes == [(1, 8, 2, 5)]
    assert np.array_equal(logits, llama.forward(rest, cache=before).output())


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2"])
def test_functions_leave_keys_and_values_that_a_text_goes_on_from(name):
    """Two calls with the same functions give what one call over the whole text gives."""
    model = shipped(name)
    ids = model.tokenize(PROMPT).ids[None]
    hooks = [("blocks.0.hook_resid_post", tilted), ("blocks.1.attn.hook_k", tilted)]
    whole = model.run_with_hooks(ids, hooks)
    assert abs(whole - model.forward(ids).output()).max() > 0.1
    for first in ([], ["blocks.1.hook_resid_post"]):
        logits, cache = model.run_with_cache(ids[:, :3], first, fwd_hooks=hooks, use_cache=True)
        np.testing.assert_allclose(logits, whole[:, :3], atol=1e-4)
        rest, cache = model.run_with_cache(ids[:, 3:], [], fwd_hooks=hooks, cache=cache.kv_cache, use_cache=True)
        np.testing.assert_allclose(rest, whole[:, 3:], atol=1e-4)
        assert cache.kv_cache.seq_len == ids.shape[1]
    with pytest.raises(InputError, match="no use_cache=True"):
        model.run_with_cache(ids, use_cache=True, stop_at_layer=1)


def tilted(activation, hook):
    return activation + np.linspace(-1, 1, activation.shape[-1], dtype=np.float32)


@pytest.mark.parametrize("name", SHIPPED)
def test_losses_are_those_of_torch(name):
    model = shipped(name)
    logits, loss = model(PROMPTS, "both")
    lengths = [len(model.tokenize(prompt)) for prompt in PROMPTS]
    rows = [torch.from_numpy(logits[i, -length:]) for i, length in enumerate(lengths)]
    ids = [torch.from_numpy(model.tokenize(prompt).ids) for prompt in PROMPTS]
    each = [
        torch.nn.functional.cross_entropy(row[:-1], one[1:], reduction="none")
        for row, one in zip(rows, ids, strict=True)
    ]
    assert abs(float(loss) - float(torch.cat(each).mean())) < 5e-6
    assert isinstance(loss, float)
    assert loss.shape == ()
    per_token = model.run_with_hooks(PROMPTS, return_type="loss per token")
    assert per_token.shape == (3, max(lengths) - 1)
    for row, one in zip(per_token, each, strict=True):
        assert np.abs(row[-len(one) :] - one.numpy()).max() < 5e-6
        assert np.isnan(row[: -len(one)]).all()


def test_without_a_result_the_model_runs_to_the_last_hook_only(llama):
    seen = []
    late = HookSpec().intervene("blocks.3.hook_resid_post", Intervention.Zero())
    hooks = [
        ("blocks.0.hook_resid_post", zero),
        ("blocks.1.hook_resid_pre", lambda value, hook: seen.append(value.max())),
    ]
    assert llama.run_with_hooks(PROMPT, hooks, None) is None
    assert seen == [0]
    with pytest.raises(InterventionError, match="changes nothing that is asked for"):
        llama.run_with_hooks(PROMPT, hooks, None, hooks=late)
    logits, cache = llama.run_with_cache(PROMPT, "blocks.1.hook_resid_pre", fwd_hooks=hooks, return_type=None)
    assert logits is None
    assert not cache["resid_pre", 1].any()
    chain = list(llama.variants.open.values())[-1]
    assert max(len(link.program.native.get_outputs()) for link in chain.segments) <= 6
    assert "logits" not in {name for link in chain.segments for name in link.segment.outputs}


@pytest.mark.slow
def test_what_nothing_returned_depends_on_may_be_seen_and_not_changed():
    model, state = shipped("world-rwkv7"), "blocks.1.rwkv.hook_state"
    plain = model(PROMPT)
    seen = []
    logits = model.run_with_hooks(PROMPT, [(state, lambda value, hook: seen.append(value.shape))])
    assert np.array_equal(logits, plain)
    assert len(seen) == 1
    with pytest.raises(InterventionError, match=r"changed blocks.1.rwkv.hook_state.*run_with_cache returns the state"):
        model.run_with_hooks(PROMPT, [(state, zero)])
    logits, cache = model.run_with_cache(PROMPT, "hook_embed", fwd_hooks=[(state, zero)])
    assert np.array_equal(logits, plain)
    assert not np.array_equal(
        model.forward("a", initial_state=cache.state).output(),
        model.forward("a", initial_state=model.forward(PROMPT).state).output(),
    )
    with pytest.raises(InterventionError, match=r"changed blocks\.3\.hook_mlp_out"):
        model.run_with_cache(PROMPT, "blocks.2.hook_mlp_out", fwd_hooks=[("*mlp_out", zero)], return_type=None)
    _, cache = model.run_with_cache(PROMPT, "*mlp_out", fwd_hooks=[("*mlp_out", zero)], return_type=None)
    assert not cache["blocks.3.hook_mlp_out"].any()
    model.run_with_cache(PROMPT, "*hook_effective_attn", fwd_hooks=[("*hook_r", zero)], return_type=None)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (InputError, "nothing would be computed", lambda model: model.run_with_hooks(PROMPT, [], None)),
        (
            InputError,
            "nothing would be computed",
            lambda model: model(PROMPT, None, hooks=HookSpec().intervene("hook_embet", Intervention.Zero())),
        ),
        (HookError, "keeps nothing", lambda model: model.run_with_cache(PROMPT, [])),
    ],
)
def test_nothing_to_do_is_said(llama, kind, message, call):
    with pytest.raises(kind, match=message):
        call(llama)


def test_chains_are_kept_and_share_their_graphs():
    model = MIModel(HookedModel.open(REPOSITORY / "models" / "world-llama"), Options(max_graphs=2))
    hooks = [("blocks.0.hook_resid_post", same), ("blocks.2.attn.hook_z", zero)]
    model.run_with_hooks(PROMPT, hooks)
    (chain,) = model.variants.open.values()
    model.run_with_hooks("three four five", hooks[::-1], "loss")
    assert list(model.variants.open.values()) == [chain]
    model.forward(PROMPT)
    assert next(iter(model.variants.open.values())) is chain
    assert len(model.compiled) == 1
    model.run_with_hooks(PROMPT, hooks[:1])
    assert chain not in model.variants.open.values()  # the one used longest ago is closed
    assert len(model.variants.open) == 2


def test_a_chain_opens_from_a_base_and_gives_its_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    model = shipped("world-gpt2")
    assert model.prepare()
    seen = {}
    logits = model.run_with_hooks(PROMPTS, [("*", lambda value, hook: seen.update({hook.name: value}))])
    assert [entry.kind for entry in model.variants._entries.all()] == ["bases", "graphs"]
    plain = model.forward(PROMPTS, HookSpec().capture(lambda name: name in seen))
    assert np.array_equal(logits, plain.output())
    assert all(np.array_equal(value, plain[name]) for name, value in seen.items())
    assert np.array_equal(logits, shipped("world-gpt2", base=False).forward(PROMPTS).output())


class Elsewhere:
    """A program whose values stay where it computes them, as those of a GPU do."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def compute(self, outputs, feeds):
        return self.program.run_on_device(outputs, feeds)


@pytest.mark.parametrize("name", SHIPPED)
def test_values_that_stay_with_a_provider_give_the_same_bits(name):
    model = shipped(name)
    hooks = [("*", same), ("blocks.1.hook_resid_post", zero), ("blocks.2.hook_mlp_out", lambda value, hook: value + 1)]
    expected, cache = model.run_with_cache(PROMPTS, "*resid_post", fwd_hooks=hooks)
    ((key, chain),) = model.variants.open.items()
    links = tuple(link._replace(program=Elsewhere(link.program)) for link in chain.segments)
    model.variants.open[key] = replace(chain, segments=links)
    logits, found = model.run_with_cache(PROMPTS, "*resid_post", fwd_hooks=hooks)
    assert np.array_equal(logits, expected)
    assert all(np.array_equal(found[name], value) for name, value in cache.items())


def test_run_with_cache_keeps_what_the_filter_names(llama):
    logits, cache = llama.run_with_cache(PROMPT)
    assert np.array_equal(logits, llama(PROMPT))
    assert list(cache) == names_of(llama)
    for given_filter, expected in (
        ("blocks.1.hook_resid_post", ["blocks.1.hook_resid_post"]),
        (HookPoint.AttnZ(2), ["blocks.2.attn.hook_z"]),
        (["*hook_z", HookPoint.Embed], ["hook_embed", *(f"blocks.{i}.attn.hook_z" for i in range(4))]),
        (lambda name: name.endswith("hook_result"), [f"blocks.{i}.attn.hook_result" for i in range(4)]),
    ):
        loss, found = llama.run_with_cache(PROMPT, given_filter, return_type="loss")
        assert list(found) == expected
        assert loss == llama(PROMPT, "loss")


def stop(activation, hook):
    raise KeyError("mine")


def test_an_error_in_a_function_is_the_callers(llama):
    with pytest.raises(KeyError, match="mine"):
        llama.run_with_hooks(PROMPT, [("*mlp_out", stop)])
    assert np.array_equal(llama.run_with_hooks(PROMPT, [("*mlp_out", same)]), llama(PROMPT))


@pytest.mark.parametrize(
    ("fwd_hooks", "message"),
    [
        ([("blocks.0.hook_resid_pots", same)], r"no hook point 'blocks.0.hook_resid_pots'; did you mean"),
        ([("blocks.4.hook_resid_post", same)], "layers are 0 to 3"),
        ([(lambda name: "nothing" in name, same)], "selects none of the model's 79 hook points"),
        ([("*.nothing", same)], "no hook point"),
        ([("blocks.0.attn.hook_result", same)], "no function can act there"),
        ([("*hook_result", same)], "no function can act there"),
        ([(3, same)], "not by 3"),
        ([("hook_embed", None)], "pairs"),
        (["hook_embed"], "pairs"),
    ],
)
def test_hooks_that_mean_nothing(llama, fwd_hooks, message):
    with pytest.raises(HookError, match=message):
        llama.run_with_hooks(PROMPT, fwd_hooks)


@pytest.mark.parametrize(
    ("hook", "function", "message"),
    [
        ("hook_embed", lambda value, hook: value[:, :1], r"\[1, 1, 128\]; the value is \[batch=1, seq=5, hidden=128\]"),
        ("*hook_z", lambda value, hook: value.argmax(-1), r"blocks.0.attn.hook_z returned int64 of shape \[1, 5, 8\]"),
        ("hook_embed", lambda value, hook: "text", "returned <U4"),
        ("hook_embed", lambda value, hook: value * 1j, "returned complex"),
        ("hook_embed", lambda value, hook: [[1.0], [1.0, 2.0]], "returned no array"),
        ("hook_embed", lambda value, hook: value * np.nan, r"is nan at \[0, 0, 0\]"),
        ("hook_embed", lambda value, hook: value.fill(np.inf), r"is inf at \[0, 0, 0\]"),
        ("hook_embed", lambda value, hook: np.full(value.shape, 1e300), "beyond the range"),
        ("*hook_scores", lambda value, hook: value.fill(-np.inf), "row 0, head 0 has no key left for query 0"),
        ("*hook_scores", lambda value, hook: value.fill(np.inf), "scores may be -inf"),
    ],
)  # fmt: skip
def test_what_cannot_take_the_place_of_a_value(llama, hook, function, message):
    with pytest.raises(InterventionError, match=message):
        llama.run_with_hooks(PROMPT, [(hook, function)])


def test_scores_may_be_knocked_out_where_a_key_is_left(llama):
    def cut(scores, hook):
        scores[:, :, -1, 3] = -np.inf

    mask = np.zeros((5, 5))
    mask[-1, 3] = -np.inf
    spec = HookSpec().intervene("blocks.2.attn.hook_scores", Intervention.Knockout(mask))
    found = llama.run_with_hooks(PROMPT, [("blocks.2.attn.hook_scores", cut)])
    assert np.array_equal(found, llama.forward(PROMPT, spec).output())


def test_other_wrong_arguments(llama):
    with pytest.raises(InputError, match=r"return_type='los'.*did you mean 'loss'"):
        llama(PROMPT, "los")
    with pytest.raises(InputError, match="two tokens"):
        llama([3], "loss")
    with pytest.raises(InputError, match="vocabulary"):
        llama.run_with_hooks([9999], [("hook_embed", same)])
    with pytest.raises(HookError, match="no hook point 'hook_embedding'"):
        llama.run_with_cache(PROMPT, ["hook_embed", "hook_embedding"])


def test_the_same_functions_in_transformer_lens(llama):
    """One function, in place and without a `return`, on tensors there and on arrays here; and the loss."""
    bridges = pytest.importorskip("transformer_lens.model_bridge", reason="transformer_lens is not installed")
    folder = REPOSITORY / "models" / "world-llama"
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    bridge = bridges.TransformerBridge.boot_transformers(
        str(folder), hf_model=reference, tokenizer=AutoTokenizer.from_pretrained(folder)
    )
    ids = llama.to_tokens(PROMPT)

    def halve(activation, hook):
        activation[:, 2:] *= 0.5

    with torch.no_grad():
        hooks = [(f"blocks.{layer}.hook_out", halve) for layer in (0, 2)]
        logits, loss = bridge.run_with_hooks(torch.from_numpy(ids), fwd_hooks=hooks, return_type="both")
    here = [(f"blocks.{layer}.hook_resid_post", halve) for layer in (0, 2)]
    found, own_loss = llama.run_with_hooks(ids, here, "both")
    assert np.abs(found - logits.numpy()).max() / np.abs(found).max() < 5e-5
    assert abs(own_loss - float(loss)) < 5e-5
