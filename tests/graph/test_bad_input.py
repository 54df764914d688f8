"""What is wrong with a model, its input or a spec is an `MIError` that says so; nothing crashes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mionnx import (
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    KnockoutSpec,
    KVCache,
    MIError,
    MIModel,
    ModelError,
    RuntimeMissingError,
    TokenizerError,
    create_knockout_mask,
)

IDS = np.arange(3, 13)[None]


@pytest.fixture
def copy(hooked: Callable[[str], Path], tmp_path: Path) -> Path:
    """A hooked llama that may be damaged."""
    return Path(shutil.copytree(hooked("llama"), tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    change(proto)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())


def point_at(location: str, **entries: int) -> Callable[[onnx.ModelProto], None]:
    """A change that lets the first external weight lie elsewhere."""

    def change(proto: onnx.ModelProto) -> None:
        tensor = next(t for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
            if entry.key in entries:
                entry.value = str(entries[entry.key])

    return change


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99, 0.9999])
def test_a_truncated_graph(copy, share):
    data = (copy / "model.onnx").read_bytes()
    (copy / "model.onnx").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError):
        MIModel.from_pretrained(copy).forward(IDS)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_in_the_graph(hooked, tmp_path_factory, models, flips):
    """An `MIError`, or an answer of the right shape where the damage hit a constant or a name."""
    folder = tmp_path_factory.mktemp("flipped") / "model"
    shutil.copytree(hooked("llama"), folder, copy_function=shutil.copyfile)
    data = bytearray((folder / "model.onnx").read_bytes())
    for at, by in flips:
        data[int(at * len(data))] ^= by
    (folder / "model.onnx").write_bytes(data)
    try:
        found = MIModel.from_pretrained(folder, threads=1).forward(IDS).output()
    except MIError:
        return
    assert found.shape[:2] == IDS.shape


def test_text_that_is_no_onnx(copy):
    (copy / "model.onnx").write_text("not a graph")
    with pytest.raises(ModelError, match="corrupt or truncated"):
        MIModel.from_pretrained(copy)


def test_a_missing_weight_file(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        MIModel.from_pretrained(copy)


def test_a_short_weight_file(copy):
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ModelError, match="short"):
        MIModel.from_pretrained(copy)


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", ""])
def test_a_weight_outside_the_folder(copy, location):
    (copy.parent / "secret.bin").write_bytes(bytes(1_000_000))
    rewrite(copy, point_at(location))
    with pytest.raises(ModelError, match="outside the model's folder"):
        MIModel.from_pretrained(copy)


def test_a_weight_behind_a_link_that_leaves_the_folder(copy):
    (copy.parent / "secret.bin").write_bytes(bytes(1_000_000))
    (copy / "inside.bin").symlink_to(copy.parent / "secret.bin")
    rewrite(copy, point_at("inside.bin"))
    with pytest.raises(ModelError, match="outside the model's folder"):
        MIModel.from_pretrained(copy)


@pytest.mark.parametrize("entries", [{"offset": 10**12}, {"offset": -8}, {"length": 10**15}, {"length": -1}])
def test_a_weight_beyond_its_file(copy, entries):
    rewrite(copy, point_at("model.safetensors", **entries))
    with pytest.raises(ModelError, match="bytes"):
        MIModel.from_pretrained(copy)


def set_property(key: str, value: str | None) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        kept = [entry for entry in proto.metadata_props if entry.key != f"mionnx.{key}" and value is not None]
        kept = [(entry.key, entry.value) for entry in kept] + ([(f"mionnx.{key}", value)] if value else [])
        del proto.metadata_props[:]
        for name, text in kept:
            proto.metadata_props.add(key=name, value=text)

    return change


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", None, "not a hooked model"),
        ("format", "99", "format 99"),
        ("sizes", "{", "damaged"),
        ("sizes", '{"num_layers": 2}', "damaged"),
        ("hooks", '{"hook_nowhere": ["batch"]}', "hook_nowhere"),
        ("hooks", '{"hook_embed": ["batch"]}', "hook_embed"),
    ],
)
def test_metadata_that_do_not_fit(copy, key, value, message):
    rewrite(copy, set_property(key, value))
    with pytest.raises(ModelError, match=message):
        MIModel.from_pretrained(copy)


def test_a_folder_with_nothing_in_it(tmp_path):
    with pytest.raises(MIError, match="neither a hooked model nor a checkpoint"):
        MIModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["./no/such/folder", "/nowhere", "a/b/c"])
def test_no_such_folder(name):
    with pytest.raises(ModelError, match="no folder"):
        MIModel.from_pretrained(name)


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="Hub"):
        MIModel.from_pretrained("nobody/no-such-model")


def test_a_provider_that_is_not_there(hooked):
    with pytest.raises(RuntimeMissingError, match="CPUExecutionProvider"):
        MIModel.from_pretrained(hooked("llama"), provider="CPUExecutionProvder")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[3, 101]], "token 101 at row 0, position 1; the vocabulary is 0 to 100"),
        ([[-1, 3]], "token -1"),
        ([], "empty"),
        ([[]], "empty"),
        ([[3, 4], []], "empty"),
        ([[3.5, 4.0]], "integers"),
        (np.zeros((1, 2, 3), int), r"\[batch, seq\]"),
    ],
)
def test_tokens_that_are_none(models, tokens, message):
    with pytest.raises(InputError, match=message):
        models("llama").forward(tokens)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones((1, 9)), r"\[1, 9\]"),
        (np.ones((2, 10)), r"\[2, 10\]"),
        (np.full((1, 10), 2), "1 for tokens"),
        (np.zeros((1, 10)), "all padding"),
    ],
)
def test_masks_that_do_not_fit(models, mask, message):
    with pytest.raises(InputError, match=message):
        models("llama").forward(IDS, attention_mask=mask)


def test_padding_may_hold_any_id_and_the_callers_array_stays_as_it_is(models):
    ids = np.array([[-100, -100, 5, 6, 7]])
    mask = np.array([[0, 0, 1, 1, 1]])
    found = models("llama").forward(ids, attention_mask=mask).output()
    assert ids.tolist() == [[-100, -100, 5, 6, 7]]
    assert np.abs(found[:, 2:] - models("llama").forward([5, 6, 7]).output()).max() < 5e-5


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_more_tokens_than_learned_positions(models, family):
    models(family).forward(np.full((1, 64), 5))
    with pytest.raises(InputError, match=r"65 tokens.*64"):
        models(family).forward(np.full((1, 65), 5))


def test_text_without_a_tokenizer(models):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        models("llama").forward("The capital of France is")


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("change", ["layers", "batch", "heads", "dtype", "length"])
def test_caches_that_do_not_fit(models, family, change):
    model = models(family)
    cache = model.forward(np.full((2, 4), 5), use_cache=True).kv_cache
    layers, mask = list(cache.layers), cache.attention_mask
    if change == "layers":
        layers = layers[:1]
    elif change == "batch":
        layers, mask = [(key[:1], value[:1]) for key, value in layers], mask[:1]
    elif change == "heads":
        layers = [(key[:, :1], value[:, :1]) for key, value in layers]
    elif change == "dtype":
        layers = [(key.astype(np.float64), value) for key, value in layers]
    else:
        mask = mask[:, 1:]
    with pytest.raises(InputError, match="cache"):
        model.forward(np.full((2, 3), 5), cache=KVCache(layers, mask))


def test_positions_in_the_cached_past(models):
    cache = models("llama").forward(IDS, use_cache=True).kv_cache
    spec = HookSpec().intervene("hook_embed", Intervention.Zero(positions=3))
    with pytest.raises(InterventionError, match=r"position 3 of row 0 lies in the cached past.*10 to 12"):
        models("llama").forward(IDS[:, :3], spec, cache=cache)


def knock_out(mask: np.ndarray, **limits) -> HookSpec:
    return HookSpec().intervene(HookPoint.AttnScores(1), Intervention.Knockout(mask, **limits))


class TestKnockedOutRows:
    """A query without any key left is refused with its address: its attention would be NaN."""

    def test_a_whole_row(self, models):
        mask = np.zeros((1, 4, 10, 10))
        mask[0, 2, 5, :] = -np.inf
        with pytest.raises(InterventionError, match=r"position 5 of row 0.*head 2"):
            models("llama").forward(IDS, knock_out(mask))

    def test_only_what_can_be_seen_counts(self, models):
        mask = np.zeros((1, 1, 10, 10))
        mask[0, 0, 3, :4] = -np.inf
        with pytest.raises(InterventionError, match=r"position 3 of row 0.*every head"):
            models("llama").forward(IDS, knock_out(mask))

    def test_two_knockouts_together(self, models):
        one, two = np.zeros((2, 1, 1, 10, 10))
        one[..., 3, :2] = two[..., 3, 2:] = -np.inf
        models("llama").forward(IDS, knock_out(one))
        with pytest.raises(InterventionError, match="position 3"):
            models("llama").forward(IDS, knock_out(one).extend(knock_out(two)))

    def test_padding_is_no_key(self, models):
        ids, attention = np.full((2, 6), 5), np.ones((2, 6), int)
        attention[1, :3] = 0
        mask = np.zeros((1, 1, 6, 6))
        mask[..., 4, 3:] = -np.inf
        with pytest.raises(InterventionError, match="position 1 of row 1"):
            models("llama").forward(ids, knock_out(mask), attention_mask=attention)
        models("llama").forward(ids, knock_out(mask, rows=0), attention_mask=attention)

    def test_the_window_is_the_limit(self, models):
        mask = np.zeros((1, 1, 10, 10))
        mask[..., 9, 2:] = -np.inf
        models("llama").forward(IDS, knock_out(mask))
        with pytest.raises(InterventionError, match="position 9"):
            models("mistral").forward(IDS, knock_out(mask))

    def test_heads_and_positions_limit_it(self, models):
        mask = np.full((1, 1, 10, 10), -np.inf)
        with pytest.raises(InterventionError, match=r"position 9 of row 0.*head 3"):
            models("llama").forward(IDS, knock_out(mask, heads=3, positions=-1))

    def test_what_is_left_is_a_distribution(self, models):
        spec = KnockoutSpec().from_position(-1).to_position(2).heads([0, 1])
        hooks = knock_out(create_knockout_mask(spec, 4, 10)).capture(HookPoint.AttnPattern(1))
        pattern = models("llama").forward(IDS, hooks)["pattern", 1][0]
        assert np.abs(pattern.sum(-1) - 1).max() < 1e-6
        assert (pattern[:2, -1, :-1] == 0).all()
        assert (pattern[:2, 3:, 2] == 0).all()
        assert (pattern[2:, 3:, 2] > 0).all()


def test_values_of_the_wrong_shape(models):
    wrong = {
        "replace": Intervention.Replace(np.zeros((1, 9, 64))),
        "add": Intervention.Add(np.zeros((3, 64))),
        "project_out": Intervention.ProjectOut(np.ones(63)),
    }
    for kind, edit in wrong.items():
        with pytest.raises(InterventionError, match=rf"{kind} at hook_embed.*batch=1, seq=10, hidden=64"):
            models("llama").forward(IDS, HookSpec().intervene("hook_embed", edit))
    some = Intervention.Replace(np.zeros((3, 64)), positions=[1, 2])
    with pytest.raises(InterventionError, match=r"selected part \[1, 2, 64\]"):
        models("llama").forward(IDS, HookSpec().intervene("hook_embed", some))


def test_a_value_for_the_selected_part(models):
    """A replacement may be given for the chosen positions, heads and rows only."""
    model, part = models("llama"), np.random.default_rng(0).normal(size=(2, 1, 16)).astype(np.float32)
    point = HookPoint.AttnZ(0)
    spec = HookSpec().capture(point).capture(point, before=True)
    found = model.forward(
        np.repeat(IDS, 2, 0), spec.intervene(point, Intervention.Replace(part, positions=[2, 7], heads=3))
    )
    expected = found[f"{point}.before"].copy()
    expected[:, [2, 7], 3] = part[:, 0]
    assert np.array_equal(found[point], expected)


def test_project_out_of_keys_and_metadata_are_explained(models):
    with pytest.raises(InterventionError, match=r"not features.*blocks\.0\.attn\.hook_z"):
        models("llama").forward(
            IDS, HookSpec().intervene(HookPoint.AttnPattern(0), Intervention.ProjectOut(np.ones(10)))
        )
    props = {p.key: p.value for p in models("llama").hooked.proto.metadata_props}
    assert json.loads(props["mionnx.family"]) == "llama"
