"""What foreign files lack: a cache, a mask that heeds padding, one decoder instead of two in an `If`.

Files of torch's own exporter have no cache; with the tokens alone as input they have no mask either.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import merged_decoder
import numpy as np
import onnx
import pytest
from families import VOCAB
from family_batches import batch, difference, differences, forward
from onnx import helper

from exporters.adopt import adopt
from mionnx import ExportError, HookPoint, HookSpec, InputError, Intervention, InterventionError, MIModel

FOREIGN = Path(__file__).parents[1] / "shared" / "foreign"
TOLERANCE = 5e-5
QUIET = {"progress": False}
FAMILIES = ("gpt2", "gemma2", "mistral", "gpt_neox", "mixtral")
IDS = np.random.default_rng(5).integers(3, VOCAB, (2, 12))


@pytest.fixture(scope="session")
def torch_file(checkpoint, tmp_path_factory) -> Callable[..., Path]:
    """Family, and whether the file takes a mask -> a folder with what torch's exporter writes."""
    made: dict[tuple[str, bool], Path] = {}

    def find(family: str, masked: bool = True) -> Path:
        if (family, masked) not in made:
            made[family, masked] = _export(checkpoint(family), tmp_path_factory.mktemp("torch"), masked)
        return made[family, masked]

    return find


def _export(source: Path, folder: Path, masked: bool, attention: str = "eager", rows: int = 2) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    inner = AutoModelForCausalLM.from_pretrained(source, attn_implementation=attention, dtype=torch.float32).eval()
    if hasattr(inner.config, "_experts_implementation"):
        inner.config._experts_implementation = "batched_mm"

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, attention_mask=None):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    names = ["input_ids", "attention_mask"][: 1 + masked]
    example, sizes = torch.ones(rows, 12, dtype=torch.long), {1: torch.export.Dim("seq")}
    sizes |= {0: torch.export.Dim("batch")} if rows > 1 else {}
    torch.onnx.export(
        Logits(),
        tuple(example.clone() for _ in names),
        folder / "model.onnx",
        input_names=names,
        output_names=["logits"],
        dynamic_shapes=dict.fromkeys(names, sizes),
        dynamo=True,
        verbose=False,
    )
    shutil.copyfile(source / "config.json", folder / "config.json")
    return folder


@pytest.fixture(scope="session")
def adopted(torch_file, tmp_path_factory) -> Callable[..., MIModel]:
    """As `torch_file`, adopted and open."""
    opened: dict[tuple[str, bool], MIModel] = {}

    def find(family: str, masked: bool = True) -> MIModel:
        if (family, masked) not in opened:
            folder = tmp_path_factory.mktemp("adopted") / family
            adopt(torch_file(family, masked), folder)
            opened[family, masked] = MIModel.from_pretrained(folder, threads=1)
        return opened[family, masked]

    return find


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name != "gpt2")) for name in FAMILIES]
)
@pytest.mark.slow
def test_an_added_cache_holds_what_the_checkpoints_own_would(family, adopted, references):
    """Every hook point with left padding and a past longer than the window, and keys and values."""
    from oracle import run

    inputs = batch("left past")
    expected = run(references(family), inputs)
    model = adopted(family)
    names = [str(point) for point in model.hook_points() if not point.derived]
    found = forward(model, inputs, HookSpec().capture(names))
    inner = ("hook_expert_gate", "hook_expert_up", "hook_expert_act", "hook_expert_out")  # of experts, not taken apart
    told = {name for name in expected.values if not name.endswith(inner)}
    assert set(names) == {name for name in told if not name.endswith("hook_result")}
    off = {name: difference(HookPoint.parse(name), found.values[name], expected.values[name], inputs) for name in names}
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}
    assert np.abs(found.logits - expected.logits)[inputs.real].max() < TOLERANCE
    seen = inputs.mask[:, None, :, None]
    for (keys, values), (own_keys, own_values) in zip(found.cache, expected.cache, strict=True):
        assert np.abs((keys - own_keys) * seen).max() < TOLERANCE
        assert np.abs((values - own_values) * seen).max() < TOLERANCE


@pytest.fixture
def grouped():
    """The name of an attention in transformers whose heads of a group are rows of one product."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def attend(module, query, key, value, attention_mask, scaling, **_):
        batch, heads, seq, width = query.shape
        groups = key.shape[1]
        assert groups < heads
        rows = query.reshape(batch, groups, heads // groups * seq, width)
        scores = torch.matmul(rows, key.transpose(2, 3)).reshape(batch, heads, seq, key.shape[2])
        pattern = torch.softmax(scores * scaling + attention_mask, dim=-1)
        z = torch.matmul(pattern.reshape(batch, groups, heads // groups * seq, key.shape[2]), value)
        return z.reshape(batch, heads, seq, width).transpose(1, 2).contiguous(), pattern

    AttentionInterface.register("grouped", attend)
    AttentionMaskInterface.register("grouped", eager_mask)
    return "grouped"


def _infer_last_axis(path: Path) -> None:
    """Let reshapes of scores and patterns infer how many keys there are: torch's exporter writes that of queries."""
    proto = onnx.load(path, load_external_data=False)
    made_by = {output: node for node in proto.graph.node for output in node.output}
    seq = next(made_by[node.input[1]].input[1] for node in proto.graph.node if node.name == "node_view")
    shapes = [made_by.get(node.input[1]) for node in proto.graph.node if node.op_type == "Reshape"]
    squares = [shape for shape in shapes if shape is not None and shape.input[-1] == seq]
    assert len({id(shape) for shape in squares}) == 2
    for shape in squares:
        shape.input[-1] = "inferred"
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "inferred"))
    onnx.save(proto, path)


@pytest.mark.slow
def test_keys_that_are_not_repeated_stay_so_behind_a_past(checkpoint, references, grouped, tmp_path):
    (tmp_path / "file").mkdir()
    _infer_last_axis(_export(checkpoint("mistral"), tmp_path / "file", True, grouped) / "model.onnx")
    adopt(tmp_path / "file", tmp_path / "adopted")
    model = MIModel.from_pretrained(tmp_path / "adopted", threads=1)
    expands = [node for node in model.hooked.proto.graph.node if node.op_type == "Expand"]
    assert not [node for node in expands if node.input[0].startswith("adopted.")]
    off = differences(model, references("mistral"), batch("left past"))
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_and_sweeps_are_those_of_the_checkpoints_export(family, adopted, models):
    model, own = adopted(family), models(family)
    mask = np.ones_like(IDS)
    mask[0, :3] = 0
    steer = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Scale(1.5, positions="generated"))
    mine, theirs = (one.generate(IDS, steer, max_new_tokens=6, attention_mask=mask) for one in (model, own))
    assert [row.tolist() for row in mine.ids] == [row.tolist() for row in theirs.ids]
    for hook in ("hook_resid_pre", "attn.hook_v"):
        mine, theirs = (one.patch_sweep(IDS[:1], IDS[1:], hook, answer=7, versus=11, **QUIET) for one in (model, own))
        assert np.abs(mine.values - theirs.values).max() < TOLERANCE


@pytest.mark.slow
def test_a_file_without_a_mask_gets_one(adopted, models):
    inputs = batch("left past")
    mine, theirs = (forward(one, inputs, HookSpec()) for one in (adopted("gemma2", masked=False), models("gemma2")))
    assert np.abs(mine.logits - theirs.logits)[inputs.real].max() < TOLERANCE


@pytest.fixture(scope="session")
def without_config(torch_file, tmp_path_factory) -> MIModel:
    """Nothing says whether its attention has a window: neither mask nor cache can be added."""
    folder = tmp_path_factory.mktemp("without") / "source"
    shutil.copytree(torch_file("gemma2", masked=False), folder)
    (folder / "config.json").unlink()
    notes = "; ".join(adopt(folder, folder.with_name("hooked")).notes)
    assert all(part in notes for part in ("no cache", "attends to padding", "no config.json"))
    return MIModel.from_pretrained(folder.with_name("hooked"), threads=1)


@pytest.mark.parametrize(
    "request_",
    [
        lambda model, _: model.generate(IDS, max_new_tokens=2),
        lambda model, _: model.forward(IDS, use_cache=True),
        lambda model, own: model.forward(IDS, cache=own.forward(IDS, use_cache=True).kv_cache),
        lambda model, _: model.patch_sweep(IDS[:1], IDS[1:], answer=7, versus=11, **QUIET),
        lambda model, _: model.estimate(HookSpec().capture("hook_embed"), 1, 2, past=3),
    ],
    ids=["generate", "use_cache", "cache", "patch_sweep", "estimate"],
)
def test_what_needs_a_cache_says_that_there_is_none(request_, without_config, models):
    with pytest.raises(InputError, match=r"needs a cache, and the graph of .* has none: it takes no past_key_values"):
        request_(without_config, models("gemma2"))


def test_padding_is_refused_where_no_mask_heeds_it(without_config):
    mask = np.ones_like(IDS)
    mask[0, :2] = 0
    with pytest.raises(InputError, match="attends to padding"):
        without_config.forward(IDS, attention_mask=mask)


def test_single_passes_work_without_a_cache(without_config, models):
    spec = HookSpec().capture("blocks.1.attn.hook_pattern")
    spec = spec.intervene(HookPoint.ResidPre(1), Intervention.Scale(0.5, positions=[-1]))
    mine, theirs = (model.forward(IDS, spec) for model in (without_config, models("gemma2")))
    for one, other in ((mine.output(), theirs.output()), *zip(mine.values(), theirs.values(), strict=True)):
        assert np.abs(one - other).max() < TOLERANCE


@pytest.mark.slow
def test_a_batch_that_is_fixed_is_refused_with_what_to_do(checkpoint, tmp_path):
    """FINDINGS, part 2, 12: torch fixes the batch of an example of one row."""
    (tmp_path / "file").mkdir()
    _export(checkpoint("gpt2"), tmp_path / "file", True, rows=1)
    with pytest.raises(
        ExportError, match=r"input_ids has a batch of 1; export with a dynamic batch \(an example of two"
    ):
        adopt(tmp_path / "file", tmp_path / "hooked")


def test_an_edit_without_a_cache_reaches_later_positions(without_config, references):
    """FINDINGS, part 2: an edit at position 1 was refused as idle where position 4 was captured."""
    import torch

    def add(module, arguments):
        (hidden, *others) = arguments
        hidden = hidden.clone()
        hidden[:, 1] += 0.5
        return (hidden, *others)

    torch_model, seen = references("gemma2"), []
    layers = torch_model.model.layers
    handles = [layers[0].register_forward_pre_hook(add)]
    handles += [layers[1].register_forward_hook(lambda module, arguments, output: seen.append(output))]
    with torch.no_grad():
        torch_model(torch.tensor(IDS))
    for handle in handles:
        handle.remove()
    expected = (seen[0][0] if isinstance(seen[0], tuple) else seen[0])[:, 4].numpy()
    spec = HookSpec().intervene(HookPoint.ResidPre(0), Intervention.Add(0.5, positions=[1]))
    found = without_config.forward(IDS, spec.capture(HookPoint.ResidPost(1), positions=[4]), logits=False)
    assert np.abs(found[HookPoint.ResidPost(1)][:, 0] - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    ("hook", "at"), [("blocks.1.hook_mlp_out", 4), ("blocks.0.hook_resid_pre", 0), ("blocks.1.attn.hook_z", 4)]
)
def test_an_edit_without_a_cache_that_cannot_reach_is_refused_all_the_same(hook, at, without_config):
    """Behind the last keys and values an edit stays at its position; none reaches an earlier one."""
    spec = HookSpec().intervene(hook, Intervention.Add(0.5, positions=[1]))
    with pytest.raises(InterventionError, match="at position 1 changes nothing that is asked for"):
        without_config.forward(IDS, spec.capture("blocks.1.hook_resid_post", positions=[at]), logits=False)


@pytest.mark.slow
def test_a_window_that_the_mask_has_not_is_not_guessed(torch_file, tmp_path):
    shutil.copytree(torch_file("gemma2"), tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "sliding_window": 5}))
    notes = "; ".join(adopt(tmp_path / "source", tmp_path / "hooked").notes)
    assert all(part in notes for part in ("no window of 5", "no cache"))
    assert not MIModel.from_pretrained(tmp_path / "hooked", threads=1).hooked.has_cache


@pytest.mark.slow
def test_a_window_is_that_of_the_mask_where_it_has_none(torch_file, tmp_path):
    """As onnxruntime-genai's builder writes Mistral: the config has a window, the graph none."""
    shutil.copytree(torch_file("gpt2"), tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "sliding_window": 5}))
    notes = adopt(tmp_path / "source", tmp_path / "hooked").notes
    assert "layers [0, 1]: the file's own mask has no window, though config.json says one" in notes
    attention = MIModel.from_pretrained(tmp_path / "hooked", threads=1).hooked.metadata.attention
    assert [layer.sliding_window for layer in attention] == [None, None]


def test_a_window_that_no_probe_can_show_is_said(torch_file, tmp_path):
    shutil.copytree(torch_file("gpt2"), tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "sliding_window": 5000}))
    notes = adopt(tmp_path / "source", tmp_path / "hooked").notes
    assert any("layers [0, 1]: a window of 5000 is what config.json says" in note for note in notes)


def test_more_than_a_mask_is_left_alone(torch_file, models, tmp_path):
    """A bias is added with the mask, as ALiBi's is; this one is the same for all keys: no pattern changes."""
    shutil.copytree(torch_file("gpt2"), tmp_path / "source")
    model = onnx.load(tmp_path / "source" / "model.onnx")
    graph = model.graph
    softmax = next(node for node in graph.node if node.op_type == "Softmax")
    masked = next(node for node in graph.node if softmax.input[0] in node.output)
    assert masked.op_type == "Add"
    graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.25), "quarter"))
    graph.node.insert([*graph.node].index(masked), helper.make_node("Add", [masked.input[1], "quarter"], ["bias"]))
    masked.input[1] = "bias"
    for path in (tmp_path / "source").glob("model.onnx*"):
        path.unlink()
    onnx.save(model, tmp_path / "source" / "model.onnx")
    notes = "; ".join(adopt(tmp_path / "source", tmp_path / "hooked").notes)
    assert "no cache" in notes
    assert "layer 0: what is added to the scores is more than a mask: bias" in notes
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    spec = HookSpec().capture("blocks.0.attn.hook_scores")
    mine, theirs = (one.forward(IDS, spec) for one in (model, models("gpt2")))
    assert np.abs(mine.output() - theirs.output()).max() < TOLERANCE
    seen = np.tri(IDS.shape[1], dtype=bool)
    scores = [found["blocks.0.attn.hook_scores"][..., seen] for found in (mine, theirs)]
    assert np.abs(scores[0] - scores[1] - 0.25).max() < TOLERANCE


@pytest.mark.slow
def test_a_merged_decoder_is_its_branch_with_a_past(tmp_path):
    merged_decoder.write(tmp_path / "source")
    adopt(tmp_path / "source", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    adopt(FOREIGN / "optimum", tmp_path / "single")
    single = MIModel.from_pretrained(tmp_path / "single", threads=1)
    assert [str(point) for point in model.hook_points()] == [str(point) for point in single.hook_points()]
    inputs = batch("left past")
    spec = HookSpec().capture("blocks.1.*").intervene(HookPoint.ResidPre(1), Intervention.Scale(0.5))
    mine, theirs = (forward(one, inputs, spec) for one in (model, single))
    assert np.array_equal(mine.logits, theirs.logits)
    assert all(np.array_equal(mine.values[name], theirs.values[name], equal_nan=True) for name in theirs.values)


def test_branches_that_differ_are_refused(tmp_path):
    merged_decoder.write(tmp_path / "source", changed=True)
    with pytest.raises(ExportError, match="adopted logits = the file's own"):
        adopt(tmp_path / "source", tmp_path / "hooked")


@pytest.mark.parametrize(("key", "value"), [("offset", "-1"), ("length", "x"), ("offset", "")])
def test_weights_at_no_place_are_one_sentence(key, value, tmp_path):
    """FINDINGS, part 4, 10."""
    shutil.copytree(FOREIGN / "optimum", tmp_path / "file")
    proto = onnx.load(tmp_path / "file" / "model.onnx")
    onnx.save(proto, tmp_path / "file" / "model.onnx", save_as_external_data=True, location="data", size_threshold=64)
    proto = onnx.load(tmp_path / "file" / "model.onnx", load_external_data=False)
    held = next(tensor for tensor in proto.graph.initializer if tensor.external_data)
    kept = [(entry.key, entry.value) for entry in held.external_data if entry.key != key]
    del held.external_data[:]
    for name, text in [*kept, (key, value)]:
        held.external_data.add(key=name, value=text)
    (tmp_path / "file" / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ExportError):
        adopt(tmp_path / "file", tmp_path / "hooked")


def test_a_cycle_is_one_sentence(tmp_path):
    shutil.copytree(FOREIGN / "optimum", tmp_path / "file")
    proto = onnx.load(tmp_path / "file" / "model.onnx")
    node = next(node for node in proto.graph.node if node.op_type == "Add")
    node.input[0] = node.output[0]
    onnx.save(proto, tmp_path / "file" / "model.onnx")
    with pytest.raises(ExportError, match=r"model\.onnx"):
        adopt(tmp_path / "file", tmp_path / "hooked")
