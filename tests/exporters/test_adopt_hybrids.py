"""Foreign ONNX files of hybrids become hooked models: states, padding and edits against transformers.

The files in `tests/shared/foreign/lfm2` and `qwen3_5` are random checkpoints as onnxruntime-genai 0.18.0 writes them.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from family_batches import KINDS, batch, difference, edits_apart, forward
from oracle import run
from renamed_files import renamed

from exporters.adopt import adopt, check
from mionnx import ExportError, HookPoint, HookSpec, Intervention, MIModel, StateKnockoutSpec

FOREIGN = Path(__file__).parents[1] / "shared" / "foreign"
FAMILIES = ("lfm2", "qwen3_5")
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def adopted(tmp_path_factory) -> Callable[[str], MIModel]:
    """Family -> the adopted model, open."""
    opened: dict[str, MIModel] = {}

    def find(family: str) -> MIModel:
        if family not in opened:
            folder = tmp_path_factory.mktemp(family)
            adopt(shutil.copytree(FOREIGN / family / "genai", folder / "source"), folder / family)
            opened[family] = MIModel.from_pretrained(folder / family, threads=1)
        return opened[family]

    return find


@pytest.fixture(scope="module")
def reference():
    """Family -> the checkpoint of its file in transformers, eager."""
    import torch
    from transformers import AutoModelForCausalLM

    def find(family: str):
        return AutoModelForCausalLM.from_pretrained(
            FOREIGN / family / "checkpoint", attn_implementation="eager", dtype=torch.float32
        ).eval()

    return find


each = pytest.mark.parametrize("family", FAMILIES)
ALL = HookSpec().capture(lambda name: not HookPoint.parse(name).derived)


def logits_of(model, ids: np.ndarray) -> np.ndarray:
    """Transformers alone, without taps and without a cache."""
    import torch

    before, model.config._attn_implementation = model.config._attn_implementation, "eager"
    try:
        with torch.no_grad():
            return model(torch.from_numpy(ids), use_cache=False).logits.numpy()
    finally:
        model.config._attn_implementation = before


def ids_of(seed: int, seq: int = 20) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 101, (2, seq))


@each
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "left past" else pytest.mark.slow) for kind in KINDS]
)
@pytest.mark.filterwarnings("ignore::mionnx.run.stock_calls.StockGraphWarning")
def test_every_hook_point_equals_the_eager_tap(family, kind, adopted, reference):
    """All points that the export of the checkpoint has, padded and after a past; the fused operators heed no mask."""
    inputs = batch(kind)
    expected, found = run(reference(family), inputs), forward(adopted(family), inputs, ALL)
    assert {*found.values} == {*expected.values}
    off = {
        name: difference(HookPoint.parse(name), value, expected.values[name], inputs)
        / max(1.0, np.abs(expected.values[name][expected.values[name] > -1e9]).max())
        for name, value in found.values.items()
    }
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


@each
@pytest.mark.slow
def test_metadata_say_what_each_layer_carries(family, adopted, models):
    """As those of an export: sizes and gates by layer, past inputs by their names, family by genai_config.json."""
    own, found = models(family), adopted(family).hooked.metadata
    assert (found.family, found.context_length) == ({"qwen3_5": "qwen3_5_text"}.get(family, family), 64)
    assert found.recurrence == own.hooked.metadata.recurrence
    assert [one is None for one in found.attention] == [True, False, True]
    assert found.ports == own.hooked.metadata.ports
    assert {*found.hooks} == {*own.hooked.metadata.hooks}
    assert found.hooks == own.hooked.metadata.hooks


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], MIModel]:
    """Family -> the export of the checkpoint."""
    from exporters.transformers import export

    opened: dict[str, MIModel] = {}

    def find(family: str) -> MIModel:
        if family not in opened:
            folder = tmp_path_factory.mktemp("exported")
            export(shutil.copytree(FOREIGN / family / "checkpoint", folder / "source"), folder / family)
            opened[family] = MIModel.from_pretrained(folder / family, threads=1)
        return opened[family]

    return find


@each
@pytest.mark.slow
def test_an_edit_at_each_point_equals_the_same_edit_in_torch(family, adopted, reference):
    apart = edits_apart(adopted(family), reference(family), batch("left"), (0, 1))
    assert {name: gap for name, gap in apart.items() if not gap < TOLERANCE} == {}


@each
@pytest.mark.filterwarnings("ignore::mionnx.run.stock_calls.StockGraphWarning")
def test_calls_of_any_widths_and_generation_are_transformers_one_pass(family, adopted, reference):
    model, torch_model, ids = adopted(family), reference(family), ids_of(1)
    mask = np.ones_like(ids)
    mask[0, 2] = mask[0, 9:11] = mask[1, 10] = 0  # padding between tokens shifts the windows of convolutions
    cache, start, calls = None, 0, []
    for width in (9, 4, 1, 1, 4, 1):
        end = start + width
        found = model.forward(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
        calls.append(found.output())
        cache, start = found.kv_cache, end
    joined = np.concatenate(calls, 1)
    for row, real in enumerate(mask.astype(bool)):
        whole = logits_of(torch_model, ids[row : row + 1, real])[0]
        assert np.abs(joined[row, real] - whole).max() < TOLERANCE * max(1.0, np.abs(whole).max())
    greedy = ids[:, :6]
    for _ in range(5):
        greedy = np.concatenate([greedy, logits_of(torch_model, greedy)[:, -1:].argmax(-1)], 1)
    assert [*map(list, model.generate(ids[:, :6], max_new_tokens=5, eos_token_id=[]).new_ids)] == greedy[:, 6:].tolist()


@each
def test_state_interventions_run_no_graph_that_does_not_know_them(family, adopted, reference):
    """The file's own graph serves plain calls alone: a spec of states and nothing else takes effect."""
    model, ids = adopted(family), ids_of(2)
    plain = model.forward(ids).output()
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().positions([0, 1]).invisible())
    alone = logits_of(reference(family), ids[:, 2:])
    assert np.abs(plain[:, 2:] - alone).max() > 1e-2
    assert np.abs(model.forward(ids, spec).output()[:, 2:] - alone).max() < TOLERANCE * max(1.0, np.abs(alone).max())
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(3).convolution())
    assert np.abs(model.forward(ids, spec).output() - plain).max() > 1e-3


@each
@pytest.mark.slow
def test_state_interventions_are_those_of_an_export(family, adopted, models):
    model, ids = adopted(family), ids_of(2)
    plain = model.forward(ids).output()
    terms = [StateKnockoutSpec().position(3).convolution()]
    terms += [StateKnockoutSpec().position(3).erase(), StateKnockoutSpec().position(3).decay()] * (family != "lfm2")
    for knockout in terms:
        spec = HookSpec().set_state_knockout(knockout)
        found, expected = model.forward(ids, spec).output(), models(family).forward(ids, spec).output()
        assert np.abs(found - plain).max() > 1e-3
        assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max())


def test_a_compiled_spec_of_states_keeps_to_operators_that_heed_holes(adopted, tmp_path):
    model, ids = adopted("lfm2"), ids_of(3)
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(4).invisible())
    expected = model.forward(ids, spec).output()
    folder = model.compile(spec, tmp_path / "out", fused="all")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    feeds = {name: np.zeros(shape, np.float32) for name, shape in model.hooked.metadata.past_shapes(2, 0).items()}
    feeds |= {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.tile(np.arange(20), (2, 1))}
    (found,) = session.run(["logits"], {one.name: feeds[one.name] for one in session.get_inputs()})
    assert np.abs(np.delete(found - expected, 4, 1)).max() < TOLERANCE * np.abs(expected).max()


def test_analyses_run_on_an_adopted_hybrid(adopted):
    model, (clean, corrupted) = adopted("lfm2"), ids_of(4, 10)
    swept = model.patch_sweep(clean, corrupted, "resid_pre", answer=5, versus=6)
    stream = model.forward(clean, HookSpec().capture("blocks.1.hook_resid_pre"))["blocks.1.hook_resid_pre"]
    edit = Intervention.Replace(stream[:, 4:5], positions=4)
    one = model.forward(corrupted, HookSpec().intervene("blocks.1.hook_resid_pre", edit)).output()[0, -1]
    assert swept.values[1, 4] == pytest.approx(one[5] - one[6], abs=1e-4)
    ranking = model.edge_attribution(clean, corrupted, answer=5, versus=9)
    assert {"r0", "a1.h0", "m1"} <= {*ranking.senders}
    assert model.gradients(clean, "blocks.*.hook_resid_post", answer=5).grad


@each
@pytest.mark.slow
def test_no_name_is_read(family, adopted, tmp_path):
    renamed(FOREIGN / family / "genai", tmp_path / "source", 0)
    shutil.copyfile(FOREIGN / family / "genai" / "model.onnx.data", tmp_path / "source" / "model.onnx.data")
    adopt(tmp_path / "source", tmp_path / "hooked")
    inputs = batch("plain")
    found = forward(MIModel.from_pretrained(tmp_path / "hooked", threads=1), inputs, ALL)
    expected = forward(adopted(family), inputs, ALL)
    assert [*found.values] == [*expected.values]
    assert max(float(np.abs(found.values[name] - expected.values[name]).max()) for name in found.values) < 1e-4


@each
def test_the_laws_of_a_recurrence_are_checked(family, adopted, tmp_path):
    folder = Path(shutil.copytree(adopted(family).hooked.folder, tmp_path / "model"))
    laws = check(folder)
    assert all(law.holds for law in laws)
    if family == "lfm2":
        return
    assert {"y = q state", "state = the sum of what is written"} <= {law.law for law in laws}
    proto, swap = onnx.load(folder / "model.onnx", load_external_data=False), {}
    one, other = "blocks.2.ssm.hook_v", "blocks.2.ssm.hook_y"
    swap |= {one: other, other: one}
    for node in proto.graph.node:
        node.input[:] = [swap.get(name, name) for name in node.input]
        node.output[:] = [swap.get(name, name) for name in node.output]
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    assert "y = q state" in {law.law for law in check(folder) if not law.holds}


def test_an_operator_of_states_that_is_not_known_is_refused_by_name(tmp_path):
    proto = onnx.load(FOREIGN / "qwen3_5" / "genai" / "model.onnx", load_external_data=False)
    for node in proto.graph.node:
        if node.op_type == "LinearAttention":
            node.op_type = "GatedDeltaNet"
    source = Path(shutil.copytree(FOREIGN / "qwen3_5" / "genai", tmp_path / "source"))
    (source / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ExportError, match="GatedDeltaNet"):
        adopt(source, tmp_path / "hooked")


def in_standard_operators(source: Path, folder: Path, carried: int, last: int | None = None) -> Path:
    """LFM2's files for transformers.js: a convolution is three nodes, or four where more columns are carried.

    Args:
        carried: columns of the past; the kernel reads two of them.
        last: where the columns that are carried on begin, instead of at the last `carried`.
    """
    proto = onnx.load(source / "model.onnx", load_external_data=False)
    half = proto.graph.input[-1].type.tensor_type.elem_type
    names = {f"{when}.{i}.conv": f"{when}_conv.{i}" for when in ("past", "present") for i in (0, 2)}
    numbers = {"behind": [-carried if last is None else last], "end": [2**63 - 1], "along": [2], "minus": [-1]}
    nodes = []
    for node in proto.graph.node:
        if node.op_type != "CausalConvWithState":
            nodes.append(node)
            continue
        (x, weight, _, past), (y, present) = node.input, node.output

        def add(kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
            nodes.append(onnx.helper.make_node(kind, inputs, [output], **attributes))

        add("Concat", [names[past], x], f"{y}.joined", axis=-1)
        add("Slice", [f"{y}.joined", "behind", "end", "along"], names[present])
        add("Conv", [f"{y}.joined", weight], f"{y}.all" if carried > 2 else y, group=32, kernel_shape=[3], pads=[0, 0])
        if carried > 2:
            add("Shape", [x], f"{y}.shape")
            add("Gather", [f"{y}.shape", "two"], f"{y}.length")
            add("Unsqueeze", [f"{y}.length", "zeros"], f"{y}.lengths")
            add("Mul", [f"{y}.lengths", "minus"], f"{y}.start")
            add("Slice", [f"{y}.all", f"{y}.start", "end", "along"], y)
    for name, number in {**numbers, "two": 2, "zeros": [0]}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(number), name))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name in names:
            shape = ["batch_size", 32, carried]
            value.CopyFrom(onnx.helper.make_tensor_value_info(names[value.name], half, shape))
    (folder / "onnx").mkdir(parents=True)
    (folder / "onnx" / "model.onnx").write_bytes(proto.SerializeToString())
    shutil.copyfile(source / "model.onnx.data", folder / "onnx" / "model.onnx.data")
    shutil.copyfile(FOREIGN / "lfm2" / "checkpoint" / "config.json", folder / "config.json")
    return folder


FORMS = [
    (2, "genai"),
    (3, "genai"),
    *(pytest.param(3, f"genai-{one}", marks=pytest.mark.slow) for one in ("int4", "fp16")),
]


@pytest.mark.parametrize(("carried", "file"), FORMS)
@pytest.mark.filterwarnings("ignore::mionnx.run.stock_calls.StockGraphWarning")
def test_a_convolution_of_standard_operators_is_that_of_one_node(carried, file, adopted, tmp_path):
    """As LFM2 stands in folders for transformers.js; the file's own graph runs plain calls with its own columns."""
    adopt(in_standard_operators(FOREIGN / "lfm2" / file, tmp_path / "source", carried), tmp_path / "hooked")
    if file == "genai":
        whole = adopted("lfm2")
    else:
        adopt(shutil.copytree(FOREIGN / "lfm2" / file, tmp_path / "whole"), tmp_path / "whole-hooked")
        whole = MIModel.from_pretrained(tmp_path / "whole-hooked", threads=1)
    model, ids = MIModel.from_pretrained(tmp_path / "hooked", threads=1), ids_of(6)
    assert [one and one.kernel for one in model.hooked.metadata.recurrence] == [carried + 1, None, carried + 1]
    assert all(law.holds for law in check(tmp_path / "hooked"))
    bound = {"genai": 1e-5, "genai-int4": 5e-2, "genai-fp16": 5e-2}[file]  # int4 rounds activations to 8 bits
    mask = np.ones_like(ids)
    mask[0, :3] = mask[1, 5:7] = 0
    for spec in (HookSpec(), ALL, HookSpec().set_state_knockout(StateKnockoutSpec().position(4).convolution())):
        for real in (np.ones_like(ids), mask):
            calls = []
            for one in (model, whole):
                cache, start, parts = None, 0, []
                for end in (9, 10, 20):
                    how = {"attention_mask": real[:, :end], "cache": cache, "use_cache": True}
                    part = one.forward(ids[:, start:end], HookSpec() if start else spec, **how)
                    parts.append(part.output())
                    cache, start = part.kv_cache, end
                calls.append(np.concatenate(parts, 1)[real == 1].astype(np.float64))
            assert np.abs(calls[0] - calls[1]).max() < bound * np.abs(calls[1]).max()
    found, expected = (one.forward(ids, ALL) for one in (model, whole))
    for name in [point.name for point in whole.hook_points() if not point.derived]:
        one, other = (np.asarray(each[name], np.float64).clip(-1e4) for each in (found, expected))
        assert np.abs(one - other).max() < bound * max(1.0, np.abs(other).max()), name


def test_columns_that_are_not_the_last_are_refused_with_the_operators_that_are_known(tmp_path):
    source = in_standard_operators(FOREIGN / "lfm2" / "genai", tmp_path / "source", 3, last=-4)
    with pytest.raises(ExportError, match=r"go through CausalConvWithState and LinearAttention.*, not past_conv\.0"):
        adopt(source, tmp_path / "hooked")
