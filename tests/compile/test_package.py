"""Compiled intervention graphs: run without mionnx, they give what mionnx gives."""

import ast
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from command_line import mionnx
from families import VOCAB
from repository import REPOSITORY, SHARED

from mionnx import (
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    KnockoutSpec,
    MIModel,
    ModelError,
    RuntimeMissingError,
    StateKnockoutSpec,
    StateSteeringSpec,
    create_knockout_mask,
)
from mionnx.engine.session import UNSTABLE_FUSIONS
from mionnx.machine.leftovers import LOCK_FILE

NEW = 5
RUNNER = SHARED / "runner.py"
DIRECTION = np.cos(np.arange(64)).astype(np.float32)


def batch(rows: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(rows).integers(3, VOCAB, (rows, 7))
    mask = np.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : 3 - row] = 0
    return ids, mask


def feeds_of(model: MIModel, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """What the graph of a prompt is fed."""
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    for i in range(model.num_layers):
        for part in ("key", "value"):
            empty = np.zeros((len(ids), model.num_kv_heads, 0, model.head_dim), np.float32)
            feeds[f"past_key_values.{i}.{part}"] = empty
    return feeds


def run_alone(
    graph: Path,
    feeds: dict[str, np.ndarray],
    folder: Path,
    new: int = NEW,
    disabled: Sequence[str] = UNSTABLE_FUSIONS,
) -> dict[str, np.ndarray]:
    """The outputs of a process that has onnxruntime and numpy only: "{step}/{output}".

    Without the fusions that mionnx' sessions leave out by default, unless `disabled` says otherwise.
    """
    np.savez(folder / "feeds.npz", **feeds)
    files = [str(path) for path in (graph, folder / "feeds.npz", folder / "out.npz")]
    command = [sys.executable, "-I", str(RUNNER), *files, str(new), *disabled]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return dict(np.load(folder / "out.npz"))


def everything(model: MIModel) -> HookSpec:
    """Every kind, every limit that a compiled graph can have."""
    edge = create_knockout_mask(KnockoutSpec().edge(4, 2).edge(8, 5), model.num_heads, 9)
    head = np.sin(np.arange(model.head_dim))
    return (
        HookSpec()
        .intervene(HookPoint.ResidPost(0), Intervention.Add(DIRECTION, positions=[1, -1, 8]))
        .intervene(HookPoint.ResidPost(0), Intervention.Scale(1.25))
        .intervene(HookPoint.AttnZ(1), Intervention.Zero(heads=1, positions="prompt"))
        .intervene(HookPoint.AttnScores(1), Intervention.Knockout(edge))
        .intervene(HookPoint.MlpOut(0), Intervention.Scale(0.5, positions="generated"))
        .intervene(HookPoint.ResidPre(1), Intervention.ProjectOut(DIRECTION, positions=-2))
        .intervene(HookPoint.AttnV(0), Intervention.Replace(head[None, None], heads=1, positions=2))
        .intervene("hook_final_norm", Intervention.Replace(DIRECTION, positions=5))
        .capture(HookPoint.AttnPattern(1))
        .capture(HookPoint.ResidPost(0), before=True)
    )


def test_a_compiled_graph_gives_the_same_bits(family, models, tmp_path):
    """One call of a left-padded batch: logits and captures, with every intervention baked in, bit for bit."""
    model, (ids, mask) = models(family), batch(3)
    spec = everything(model)
    found = model.compile(spec, tmp_path / "out")
    plain = HookSpec()
    for point, edit in spec.interventions:  # one call has no generated tokens, and of a mask only what it covers
        if edit.positions == "generated" or edit.positions == (5,):
            continue
        if edit.kind == "knockout":
            edit = Intervention.Knockout(edit.value[..., :7, :7], rows=[1, 2])  # row 0 has none of its edges
        if edit.positions == (1, -1, 8):
            edit = Intervention.Add(DIRECTION, positions=[1, -1])
        plain.intervene(point, edit)
    plain.capture(HookPoint.AttnPattern(1)).capture(HookPoint.ResidPost(0), before=True)
    plain.intervene("hook_final_norm", Intervention.Replace(DIRECTION, positions=5, rows=2))
    expected = model.forward(ids, plain, attention_mask=mask, use_cache=True)
    alone = run_alone(found / "model.onnx", feeds_of(model, ids, mask), tmp_path, new=0)
    real = mask.astype(bool)
    assert np.array_equal(alone["0/logits"][real], expected.output()[real])
    assert np.array_equal(
        alone["0/blocks.0.hook_resid_post.before"][real], expected[f"{HookPoint.ResidPost(0)}.before"][real]
    )
    ours, theirs = (np.moveaxis(a, 2, 1)[real] for a in (alone["0/blocks.1.attn.hook_pattern"], expected["pattern", 1]))
    assert np.array_equal(ours, theirs)


OPENED = {
    "zero": ("blocks.1.attn.hook_scores", Intervention.Zero()),
    "scale": ("blocks.1.attn.hook_scores", Intervention.Scale(-0.5, heads=[0, 2], positions=-1)),
    "add": ("blocks.1.attn.hook_pattern", Intervention.Add(0.1, positions="generated")),
}


@pytest.mark.parametrize("name", OPENED)
def test_a_row_of_a_compiled_graph_gives_what_its_text_gives_alone(models, name, tmp_path):
    """Where the mask is undone, padding is not read, in the prompts' call and in those after it."""
    model, (ids, mask) = models("llama"), batch(3)
    spec = HookSpec().intervene(*OPENED[name])
    found = model.compile(spec, tmp_path / "out") / "model.onnx"
    together = run_alone(found, feeds_of(model, ids, mask), tmp_path)
    for row, real in enumerate(mask == 1):
        alone = model.generate(ids[row, real], spec, max_new_tokens=NEW + 1, eos_token_id=[], output_logits=True)
        for step, cache in enumerate(alone.steps):
            assert np.abs(together[f"{step}/logits"][row, -1] - cache.output()[0, -1]).max() < 5e-5, (row, step)


@pytest.mark.parametrize("name", ["blocks.1.hook_resid_post", "blocks.1.attn.hook_q", "blocks.2.attn.hook_pattern"])
def test_a_replacement_without_limits_has_the_shape_of_what_it_replaces(shipped, name, tmp_path):
    """In a batch of texts and in every later step, though the constant has one entry for all of them."""
    value = np.linspace(0.2, 0.7, {"hook_resid_post": 128, "hook_q": 16, "hook_pattern": 1}[name.split(".")[-1]])
    ids, rows = np.arange(3, 15).reshape(2, 6), [0, 1]
    found = shipped.compile(HookSpec().intervene(name, Intervention.Replace(value)), tmp_path / "out")
    alone = run_alone(found / "model.onnx", feeds_of(shipped, ids, np.ones_like(ids)), tmp_path, new=2)
    limited = HookSpec().intervene(name, Intervention.Replace(value, rows=rows))
    expected = shipped.generate(ids, limited, max_new_tokens=3, eos_token_id=[], output_logits=True)
    for step, cache in enumerate(expected.steps):
        assert np.array_equal(alone[f"{step}/logits"], cache.output())


@pytest.mark.parametrize("target", ["generic", "ort-cpu"])
@pytest.mark.parametrize("name", ["world-gpt2", "world-llama", pytest.param("world-rwkv7", marks=pytest.mark.slow)])
@pytest.mark.slow_beyond(2)
def test_plain_onnxruntime_gives_the_bits_that_the_card_promises(name, target, tmp_path):
    """A plain session gives the bits of `fast=True`; with the card's settings, those of `forward` by default."""
    default, fast = (MIModel.from_pretrained(REPOSITORY / "models" / name, fast=fast) for fast in (False, True))
    layer = default.num_layers - 1
    spec = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Add(np.cos(np.arange(default.hidden_size))))
    spec.intervene(HookPoint.MlpOut(layer), Intervention.Zero())
    folder = default.compile(spec, tmp_path / "out", target=target)
    card = (folder / "README.md").read_text()
    settings = ast.literal_eval(re.search(r"disabled_optimizers=(\[.*?\])", card).group(1))
    ids = np.array([default.tokenize("The capital of France is").ids])
    if "rwkv" in name:
        shapes = default.hooked.metadata.past_shapes(1, 0)
        start = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        feeds = {"input_ids": ids} | start
    else:
        feeds = feeds_of(default, ids, np.ones_like(ids))
    plain, carded = (run_alone(folder / "model.onnx", feeds, tmp_path, 0, off)["0/logits"] for off in ((), settings))
    assert np.array_equal(plain, fast.forward(ids, spec).output())
    assert np.array_equal(carded, default.forward(ids, spec).output())
    np.testing.assert_allclose(plain, carded, rtol=0, atol=5e-5)


def test_decoding_with_a_compiled_graph_is_generating(family, models, tmp_path):
    """Positions of the prompt, of new tokens, phases and masks hold step by step, as in `generate`."""
    model, (ids, mask) = models(family), batch(3)
    spec = everything(model)
    alone = run_alone(model.compile(spec, tmp_path / "out") / "model.onnx", feeds_of(model, ids, mask), tmp_path)
    found = model.generate(ids, spec, attention_mask=mask, max_new_tokens=NEW + 1, eos_token_id=[], output_logits=True)
    for step, cache in enumerate(found.steps):
        ours, theirs = alone[f"{step}/logits"][:, -1], cache.output()[:, -1]
        assert np.abs(ours - theirs).max() / max(1, np.abs(theirs).max()) < 5e-5


@pytest.mark.parametrize("layout", ["6-pth", "7-fla"])
def test_a_compiled_recurrent_graph(rwkv, layout, tmp_path):
    """State interventions take the place of the gates' defaults; the positions of tokens stay an input."""
    model = rwkv(layout)
    spec = (
        HookSpec()
        .set_state_steering(StateSteeringSpec(2.0).positions([1, 3]).head(1))
        .set_state_steering(StateSteeringSpec(0.5).position("generated").layer(0))
        .set_state_knockout(StateKnockoutSpec().positions([3, -1]).layer(1).decay())
        .intervene(HookPoint.ResidPost(0), Intervention.Scale(1.5, positions=[2, 7]))
        .intervene(HookPoint.RwkvK(1), Intervention.Scale(0.5, heads=0))
    )
    if layout[0] == "7":
        spec.set_state_knockout(StateKnockoutSpec(terms=["erase"]).position(2))
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 6))
    found = model.compile(spec, tmp_path / "out")
    session = onnxruntime.InferenceSession(str(found / "model.onnx"))
    feeds = {"input_ids": ids, "mionnx.token_positions": np.arange(6)[None].repeat(2, 0)}
    for entry in session.get_inputs():
        if entry.name.startswith("past_state"):
            feeds[entry.name] = np.zeros([2 if isinstance(dim, str) else dim for dim in entry.shape], np.float32)
    alone = run_alone(found / "model.onnx", feeds, tmp_path)
    steps = model.generate(ids, spec, max_new_tokens=NEW + 1, eos_token_id=[], output_logits=True).steps
    assert np.array_equal(alone["0/logits"], steps[0].output())
    for step, cache in enumerate(steps):
        theirs = cache.output()[:, -1]
        assert np.abs(alone[f"{step}/logits"][:, -1] - theirs).max() / max(1, np.abs(theirs).max()) < 5e-5
    assert "state_write" not in {entry.name for entry in session.get_overridable_initializers()}


PACKAGINGS = [
    {"weights": "embedded"},
    {"weights": "alongside"},
    {"weights": "referenced"},
    {"target": "ort-cpu"},
    {"target": "ort-cpu", "weights": "embedded"},
    {"target": "web"},
    {"layout": "triton"},
    {"last_logits": True},
    {"captures": False},
]


@pytest.mark.parametrize("how", PACKAGINGS, ids=lambda how: " ".join(map(str, how.values())))
def test_every_packaging_runs_and_says_what_it_is(how, models, tmp_path):
    model, (ids, mask) = models("llama"), batch(1)
    spec = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Add(DIRECTION)).capture("*.hook_pattern")
    folder = model.compile(spec, tmp_path / "steered", **how)
    at = folder / "steered" / "1" if how.get("layout") == "triton" else folder
    moved = tmp_path / "elsewhere" / "of another name"
    shutil.copytree(at, moved)
    shutil.rmtree(folder) if "layout" not in how else None
    alone = run_alone(moved / "model.onnx", feeds_of(model, ids, mask), tmp_path, new=0)
    expected = model.forward(ids, spec)
    assert np.array_equal(alone["0/logits"][:, -1], expected.output()[:, -1])
    assert alone["0/logits"].shape[1] == (1 if "last_logits" in how else ids.shape[1])
    assert ("0/blocks.1.attn.hook_pattern" in alone) == ("captures" not in how)
    proto = onnx.load(moved / "model.onnx", load_external_data=False)
    domains = {node.domain for node in proto.graph.node}
    assert (domains == {""}) == (how.get("target") != "ort-cpu")
    embedded = how.get("weights") == "embedded" or how.get("target") == "web"
    kinds = {tensor.data_location for tensor in proto.graph.initializer}
    assert (onnx.TensorProto.EXTERNAL not in kinds) == embedded
    facts = json.loads({entry.key: entry.value for entry in proto.metadata_props}["mionnx.compiled"])
    assert facts["interventions"] == ["add at blocks.0.hook_resid_post"]
    assert facts["weights_sha256"] == model.hooked.metadata.weights_sha256
    specs = [*folder.rglob("spec.safetensors")]
    assert facts["spec_sha256"] == hashlib.sha256((specs or [moved / "spec.safetensors"])[0].read_bytes()).hexdigest()
    text = (moved / "model.onnx").read_bytes()
    assert str(tmp_path).encode() not in text
    rest = folder / "steered" if "layout" in how else moved
    card = (rest / "README.md").read_text()
    assert "not the original model" in card
    assert "| add | `blocks.0.hook_resid_post` | float32 [64], norm " in card
    again = HookSpec.load(str(rest / "spec.safetensors"))
    assert np.array_equal(again.interventions[0][1].value, DIRECTION)
    if "target" not in how:
        onnx.checker.check_model(str(moved / "model.onnx"), full_check=True)


def test_triton_reads_the_layout(models, tmp_path):
    """`config.pbtxt` in Triton's own schema: names, types and dimensions of all inputs and outputs."""
    spec = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Add(DIRECTION))
    folder = models("llama").compile(spec, tmp_path / "steered", layout="triton", knobs={"strength": None})
    text = (folder / "steered" / "config.pbtxt").read_text()
    session = onnxruntime.InferenceSession(str(folder / "steered" / "1" / "model.onnx"))
    assert 'name: "steered"\nbackend: "onnxruntime"\nmax_batch_size: 0\n' in text
    for entry in session.get_inputs():
        dims = ", ".join("-1" if isinstance(dim, str) else str(dim) for dim in entry.shape)
        kind = {"tensor(int64)": "INT64", "tensor(float)": "FP32"}[entry.type]
        assert f'input [ {{ name: "{entry.name}" data_type: TYPE_{kind} dims: [ {dims} ]' in text
    assert 'name: "strength" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } optional: true' in text
    assert text.count("output [") == len(session.get_outputs())


@pytest.mark.parametrize(
    ("spec", "at"),
    [
        (
            lambda s: (
                HookSpec()
                .intervene(HookPoint.ResidPost(0), Intervention.Add(s * DIRECTION, positions=[0, -1]))
                .intervene(HookPoint.ResidPost(1), Intervention.Add(s * DIRECTION[::-1].copy()))
            ),
            1.0,
        ),
        (lambda s: HookSpec().intervene(HookPoint.MlpOut(0), Intervention.Scale(s, positions=2)), 0.25),
    ],
    ids=["add", "scale"],
)
def test_a_knob_turns_its_interventions(spec, at, models, tmp_path):
    """At its default the compiled graph is the spec bit for bit; turned, it is the spec of that strength."""
    model, (ids, mask) = models("llama"), batch(1)
    folder = model.compile(spec(at), tmp_path / "out", knobs={"strength": None})
    feeds = feeds_of(model, ids, mask)
    for strength in (None, 0.0, 0.5, -2.0):
        given = {} if strength is None else {"strength": np.array(strength, np.float32)}
        found = run_alone(folder / "model.onnx", {**feeds, **given}, tmp_path, new=0)["0/logits"]
        expected = model.forward(ids, spec(at if strength is None else strength)).output()
        assert np.array_equal(found, expected), strength
    assert "strength" in (folder / "README.md").read_text()


def test_a_glob_is_baked_at_each_hook_point_and_a_knob_takes_one(shipped, tmp_path, capfd):
    """The compiled graph of a glob and of a predicate is that of the loop, and so are its spec and its card."""
    loop = HookSpec()
    for layer in range(shipped.num_layers):
        loop.intervene(HookPoint.MlpOut(layer), Intervention.Scale(0.5))
    glob = HookSpec().intervene("blocks.*.hook_mlp_out", Intervention.Scale(0.5))
    predicate = HookSpec().intervene(lambda name: name.endswith("hook_mlp_out"), Intervention.Scale(0.5))
    knobs = {"first": "blocks.[01].*", "last": ["blocks.2.hook_mlp_out", "blocks.3.*"]}
    folders = [
        shipped.compile(spec, tmp_path / str(n), knobs=knobs, weights="referenced")
        for n, spec in enumerate((loop, glob, predicate))
    ]
    for file in ("model.onnx", "spec.safetensors", "README.md"):
        assert len({(folder / file).read_bytes() for folder in folders}) == 1, file
    assert sum("| scale |" in line for line in (folders[1] / "README.md").read_text().splitlines()) == 4
    assert capfd.readouterr().out == ""
    with pytest.raises(InterventionError, match=r"nothing that it could turn at blocks.\*.hook_attn_out"):
        shipped.compile(glob, tmp_path / "none", knobs={"first": "blocks.*.hook_attn_out"})


def test_the_warnings_of_a_knob_are_silenced_as_the_card_says(shipped, tmp_path):
    spec = HookSpec().intervene("blocks.2.hook_mlp_out", Intervention.Scale(0.5))
    folder = shipped.compile(spec, tmp_path / "out", knobs={"strength": None}, weights="referenced")
    *_, quiet = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    plain = quiet.replace(", options)", ")")
    assert plain != quiet
    errors = [
        subprocess.run(
            [sys.executable, "-c", f"import onnxruntime\n{code}"], cwd=folder, capture_output=True, text=True
        )
        for code in (plain, quiet)
    ]
    assert [run.returncode for run in errors] == [0, 0]
    assert "Initializer strength appears in graph inputs" in errors[0].stderr
    assert "Initializer" not in errors[1].stderr
    bare = shipped.compile(spec, tmp_path / "bare", weights="referenced")
    assert "log_severity_level" not in (bare / "README.md").read_text()


def test_a_knob_of_a_projection(models, tmp_path):
    """x - s (x D^T) D: at 1 the direction is gone, at 0 nothing happens."""
    model, (ids, mask) = models("llama"), batch(1)
    last = HookPoint.ResidPost(1)
    spec = HookSpec().intervene(last, Intervention.ProjectOut(DIRECTION)).capture(last).capture(last, before=True)
    folder = model.compile(spec, tmp_path / "out", knobs={"removal": [last]})
    unit = DIRECTION / np.linalg.norm(DIRECTION)
    for strength in (None, 0.0, 0.5):
        given = {} if strength is None else {"removal": np.array(strength, np.float32)}
        found = run_alone(folder / "model.onnx", {**feeds_of(model, ids, mask), **given}, tmp_path, new=0)
        before, after = found[f"0/{last}.before"], found[f"0/{last}"]
        left = 1 - (1.0 if strength is None else strength)
        assert np.abs(after @ unit - left * (before @ unit)).max() < 1e-5
        if strength == 0:
            assert np.array_equal(after, before)


REFUSED = {
    "rows": (Intervention.Zero(rows=0), {}, InterventionError, "any batch"),
    "positions a row": (Intervention.Zero(positions=[[0], [1]]), {}, InterventionError, "any batch"),
    "a value a token": (Intervention.Replace(np.zeros((1, 7, 64))), {}, InterventionError, "texts of any length"),
    "a part": (Intervention.Add(np.zeros((2, 64)), positions=[0, 1]), {}, InterventionError, "of its own"),
    "width": (Intervention.Add(np.zeros(7)), {}, InterventionError, "hidden=64"),
    "no strength": (Intervention.Zero(), {"knobs": {"s": None}}, InterventionError, "zero at blocks.0.hook_resid_post"),
    "zero's knob": (
        Intervention.Zero(),
        {"knobs": {"s": "blocks.0.hook_resid_post"}},
        InterventionError,
        "has no strength",
    ),
    "nothing there": (
        Intervention.Scale(2.0),
        {"knobs": {"s": "blocks.1.hook_resid_post"}},
        InterventionError,
        "scale at blocks.0.hook_resid_post",
    ),
    "taken": (Intervention.Scale(2.0), {"knobs": {"logits": None}}, InterventionError, "another name"),
    "two knobs": (Intervention.Scale(2.0), {"knobs": {"a": None, "b": None}}, InterventionError, "one knob"),
    "weights": (Intervention.Zero(), {"weights": "inside"}, InputError, "embedded"),
    "target": (Intervention.Zero(), {"target": "ort-cpi"}, InputError, "did you mean 'ort-cpu'"),
    "layout": (Intervention.Zero(), {"layout": "flat"}, InputError, "optimum"),
    "links": (Intervention.Zero(), {"target": "ort-cpu", "weights": "referenced"}, InputError, "anew"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_only_one_call_can_have_is_refused(what, models, tmp_path):
    edit, how, kind, named = REFUSED[what]
    with pytest.raises(kind) as caught:
        models("llama").compile(HookSpec().intervene(HookPoint.ResidPost(0), edit), tmp_path / "out", **how)
    assert named in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", ["6-pth", "7-fla"])
def test_invisible_tokens_and_padding_in_a_compiled_recurrent_graph(rwkv, layout, tmp_path):
    """What later tokens are mixed with is worked out in the graph, layer by layer, over calls, and around padding."""
    model = rwkv(layout)
    spec = (
        HookSpec()
        .set_state_knockout(StateKnockoutSpec().positions([0, 2, 3]).invisible())
        .set_state_knockout(StateKnockoutSpec().positions([-1, 1]).token_shift().layer(1))
        .set_state_steering(StateSteeringSpec(0.5).position("generated"))
    )
    ids = np.random.default_rng(0).integers(0, VOCAB, (3, 6))
    mask = np.array([[1] * 6, [0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    found = model.compile(spec, tmp_path / "out")
    feeds = {"input_ids": ids, "mionnx.token_positions": np.where(mask, mask.cumsum(1) - 1, -1)}
    session = onnxruntime.InferenceSession(str(found / "model.onnx"))
    for entry in session.get_inputs():
        if entry.name.startswith("past_state"):
            feeds[entry.name] = np.zeros([3 if isinstance(dim, str) else dim for dim in entry.shape], np.float32)
    alone = run_alone(found / "model.onnx", feeds, tmp_path)
    found = model.generate(ids, spec, attention_mask=mask, max_new_tokens=NEW + 1, eos_token_id=[], output_logits=True)
    real = mask.astype(bool)
    assert np.array_equal(alone["0/logits"][real], found.steps[0].output()[real])
    for step, cache in enumerate(found.steps):
        theirs = cache.output()[:, -1]
        assert np.abs(alone[f"{step}/logits"][:, -1] - theirs).max() / max(1, np.abs(theirs).max()) < 5e-5
    assert not session.get_overridable_initializers()


def test_nothing_is_overwritten_and_nothing_half_written(models, tmp_path, monkeypatch):
    model, spec = models("llama"), HookSpec().intervene("hook_embed", Intervention.Scale(2.0))
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        model.compile(spec, tmp_path / "out")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ModelError, match=r"No space left .*; its weights are .* KiB; --weights referenced .* none"):
        model.compile(spec, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="CUDA is installed here")
def test_a_target_whose_provider_is_missing_is_refused(models, tmp_path):
    with pytest.raises(RuntimeMissingError, match="CUDAExecutionProvider"):
        models("llama").compile(HookSpec(), tmp_path / "out", target="ort-cuda", plain=True)


def test_the_command_line_compiles_what_python_compiles(tmp_path):
    """The same graph, and a knob by name."""
    source = REPOSITORY / "models" / "world-llama"
    command = ["compile", source, "-o", tmp_path / "cli"]
    options = ["--scale", "blocks.2.hook_attn_out=0.5", "--capture", "*.hook_pattern", "--knobs", "strength"]
    ran = mionnx(*command, *options)
    assert ran.returncode == 0, ran.stderr
    assert "1 intervention baked in" in ran.stdout
    spec = HookSpec().intervene(HookPoint.AttnOut(2), Intervention.Scale(0.5)).capture("*.hook_pattern")
    model = MIModel.from_pretrained(source)
    folder = model.compile(spec, tmp_path / "python", knobs={"strength": ["blocks.2.hook_attn_out"]})
    graphs = [onnx.load(path / "model.onnx", load_external_data=False).graph for path in (folder, tmp_path / "cli")]
    assert graphs[0] == graphs[1]
    again = mionnx(*command, *options)
    assert again.returncode == 1
    assert "exists already" in again.stderr.replace("\n", " ")


def test_what_a_killed_compile_left_is_removed_by_the_next(shipped, tmp_path):
    left = tmp_path / ".steered.abcdef.4194303.partial"  # no process has this number
    left.mkdir()
    (left / LOCK_FILE).touch()
    (left / "model.onnx").write_bytes(b"half")
    mine = tmp_path / "model.onnx.partial"
    mine.touch()
    shipped.compile(HookSpec().intervene("hook_embed", Intervention.Scale(2.0)), tmp_path / "steered")
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, "steered"]
    assert LOCK_FILE not in {path.name for path in (tmp_path / "steered").iterdir()}


def test_the_tokenizers_config_names_what_the_graph_reads(copy, tmp_path):
    """Part 3, 10: before transformers 5 its own class gives token_type_ids besides, which no decoder reads."""
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name != "model_input_names"})
    )
    spec = HookSpec().intervene("hook_embed", Intervention.Scale(2.0))
    folder = MIModel.from_pretrained(copy).compile(spec, tmp_path / "out")
    assert json.loads((folder / "tokenizer_config.json").read_text()) == config
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
