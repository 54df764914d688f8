"""Hybrids' files of onnxruntime-genai with weights of 4 bits and in half precision: opened, read and edited.

`tests/shared/foreign/{lfm2,qwen3_5}/genai-{int4,fp16}` are what the builder of onnxruntime-genai 0.18.0 makes of the
checkpoints beside them (`-p int4 -e cpu`, `-p fp16 -e webgpu`; Qwen3.5 as the text part of a model with a vision part).
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from family_batches import batch, difference, edits_apart, forward
from oracle import run
from transformers import AutoModelForCausalLM, PreTrainedModel

from exporters.adopt import adopt, check
from exporters.transformers import export
from mionnx import HookPoint, HookSpec, MIModel, StateKnockoutSpec, StateSteeringSpec

FOREIGN = Path(__file__).parents[1] / "shared" / "foreign"
ALL = HookSpec().capture(lambda name: not HookPoint.parse(name).derived)
TOLERANCE = 5e-5
HALF, MASKED = 2e-2, -1e4
KINDS = [("lfm2", "int4"), ("lfm2", "fp16"), ("qwen3_5", "int4"), ("qwen3_5", "fp16")]
each = pytest.mark.parametrize(
    ("family", "kind"), [pytest.param(*one, marks=() if one[0] == "lfm2" else pytest.mark.slow) for one in KINDS]
)
Opened = Callable[[str, str], MIModel]
pytestmark = pytest.mark.filterwarnings("ignore::mionnx.run.stock_calls.StockGraphWarning")


@pytest.fixture(scope="module")
def adopted(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Family and kind -> the adopted model, whose products of 4 bits read whole numbers, not ones of 8 bits."""
    opened: dict[tuple[str, str], MIModel] = {}

    def find(family: str, kind: str) -> MIModel:
        if (family, kind) not in opened:
            folder = tmp_path_factory.mktemp(f"{family}-{kind}")
            adopt(_reading_floats(FOREIGN / family / f"genai-{kind}", folder / "source"), folder / "hooked")
            opened[family, kind] = MIModel.from_pretrained(folder / "hooked", threads=1)
        return opened[family, kind]

    return find


def _reading_floats(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for node in proto.graph.node:
        for entry in node.attribute:
            if entry.name == "accuracy_level":
                entry.i = 1
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder


NAMES = {  # of the builder -> of the checkpoint, in which queries, keys and values are apart
    "lfm2": {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
    | {"attn.o_proj": "self_attn.out_proj"},
    "qwen3_5": {"attn.o_proj": "self_attn.o_proj", "linear_attn.qkv_proj": "linear_attn.in_proj_qkv"}
    | {"linear_attn.z_proj": "linear_attn.in_proj_z"},
}


def numbers_of_blocks(family: str) -> dict[str, np.ndarray]:
    """Name of a checkpoint's matrix -> what the file of 4 bits has in its place, (q - 8) scale in blocks of 32."""
    proto = onnx.load(FOREIGN / family / "genai-int4" / "model.onnx")
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in proto.graph.initializer}
    found: dict[str, np.ndarray] = {}
    for node in proto.graph.node:
        if node.op_type != "MatMulNBits":
            continue
        assert len(node.input) == 3
        packed, scales = stored[node.input[1]], stored[node.input[2]]
        numbers = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1).astype(np.float32)
        width = next(one.i for one in node.attribute if one.name == "K")
        whole = ((numbers - 8) * scales.reshape(*packed.shape[:2], 1)).reshape(len(packed), -1)[:, :width]
        layer, _, name = node.input[1].removesuffix(".MatMul.weight_Q4").removeprefix("model.layers.").partition(".")
        if layer == "lm_head":
            found["model.embed_tokens.weight"] = whole
        elif name == "attn.qkv_proj":
            parts = np.split(whole, [len(whole) - 32, len(whole) - 16])
            found |= {
                f"model.layers.{layer}.self_attn.{q}_proj.weight": one for q, one in zip("qkv", parts, strict=True)
            }
        else:
            found[f"model.layers.{layer}.{NAMES[family].get(name, name)}.weight"] = whole
    return found


@pytest.fixture(scope="module")
def reference() -> Callable[[str, str], PreTrainedModel]:
    """Family and kind -> the checkpoint in transformers, with the numbers that the file's weights stand for."""

    def find(family: str, kind: str) -> PreTrainedModel:
        model: Any = AutoModelForCausalLM.from_pretrained(
            FOREIGN / family / "checkpoint", attn_implementation="eager", dtype=torch.float32
        ).eval()
        parameters = dict(model.named_parameters())
        for name, value in numbers_of_blocks(family).items() if kind == "int4" else ():
            weight, value = parameters[name], torch.from_numpy(value)
            assert (weight - value).abs().max() < weight.abs().max() / 6, name  # rounded: 15 steps for all
            weight.data = value
        for weight in parameters.values() if kind == "fp16" else ():
            weight.data = weight.data.half().float()
        return model

    return find


@pytest.fixture(scope="module")
def exported(reference, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Family and kind -> the export of the same numbers in float32."""
    opened: dict[tuple[str, str], MIModel] = {}

    def find(family: str, kind: str) -> MIModel:
        if (family, kind) not in opened:
            folder = tmp_path_factory.mktemp(f"{family}-{kind}-exported")
            reference(family, kind).save_pretrained(folder / "checkpoint")
            export(folder / "checkpoint", folder / "hooked")
            opened[family, kind] = MIModel.from_pretrained(folder / "hooked", threads=1)
        return opened[family, kind]

    return find


def bound(kind: str) -> float:
    return TOLERANCE if kind == "int4" else HALF


def ids_of(seed: int, seq: int = 20) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 101, (2, seq))


@each
def test_every_hook_point_equals_the_eager_tap(family, kind, adopted, reference):
    model, inputs = adopted(family, kind), batch("left past")
    expected, found = run(reference(family, kind), inputs), forward(model, inputs, ALL)
    assert {*found.values} == {*expected.values}
    off = {}
    for name, value in found.values.items():
        # a masked score is the lowest number, which depends on the dtype
        one, other = (np.asarray(each, np.float32).clip(MASKED) for each in (value, expected.values[name]))
        largest = max(1.0, np.abs(other[other > MASKED]).max())
        off[name] = difference(HookPoint.parse(name), one, other, inputs) / largest
    assert {name: d for name, d in off.items() if not d < bound(kind)} == {}
    assert model.hooked.metadata.dtype == {"int4": "float32", "fp16": "float16"}[kind]
    products = [node.op_type for node in model.hooked.proto.graph.node if "MatMul" in node.op_type]
    assert ("MatMulNBits" in products) == (kind == "int4")
    assert all(law.holds for law in check(model.hooked.folder))


@each
@pytest.mark.slow
def test_an_edit_at_each_point_equals_the_same_edit_in_torch(family, kind, adopted, reference):
    apart = edits_apart(adopted(family, kind), reference(family, kind), batch("left"), (0, 1))
    assert {name: gap for name, gap in apart.items() if not gap < bound(kind)} == {}


@each
@pytest.mark.slow
def test_states_are_knocked_out_and_steered_as_in_an_export(family, kind, adopted, exported):
    """Of calls of several widths, padded, the state that an earlier one left among them."""
    model, other, ids = adopted(family, kind), exported(family, kind), ids_of(2)
    mask = np.ones_like(ids)
    mask[0, :3] = mask[1, 8:10] = 0
    edits = [StateKnockoutSpec().position(3).convolution(), StateKnockoutSpec().positions([0, 4]).invisible()]
    if family != "lfm2":
        edits += [StateKnockoutSpec().position(3), StateKnockoutSpec().position(3).erase().decay()]
        edits += [StateSteeringSpec(2.0).position(3).head(1)]
    plain = model.forward(ids, attention_mask=mask).output()
    for edit in edits:
        setter = "set_state_steering" if isinstance(edit, StateSteeringSpec) else "set_state_knockout"
        spec = getattr(HookSpec(), setter)(edit)
        logits = []
        for one in (model, other):
            first = one.forward(ids[:, :12], spec, attention_mask=mask[:, :12], use_cache=True)
            rest = one.forward(ids[:, 12:], attention_mask=mask, cache=first.kv_cache or first.state)
            logits.append(np.concatenate([first.output(), rest.output()], 1))
        hidden = {0, 4} if "token_shift" in edit.terms else set()
        seen = [(mask[row] == 1) & ~np.isin(mask[row].cumsum() - 1, [*hidden]) for row in range(2)]
        if hidden:  # a later call without the spec reads their keys
            seen = [row & (np.arange(20) < 12) for row in seen]
        found, expected = (np.concatenate([one[row, at] for row, at in enumerate(seen)]) for one in logits)
        before = np.concatenate([plain[row, at] for row, at in enumerate(seen)])
        assert np.abs(found - before).max() > 1e-1
        assert np.abs(found - expected).max() < bound(kind) * max(1.0, np.abs(expected).max()), edit


@each
@pytest.mark.slow
def test_the_file_itself_generates(family, kind, adopted, exported, tmp_path):
    """As it came: products of 4 bits read activations of 8 bits, and the file's own graph runs plain calls."""
    adopt(shutil.copytree(FOREIGN / family / f"genai-{kind}", tmp_path / "source"), tmp_path / "hooked")
    model, ids = MIModel.from_pretrained(tmp_path / "hooked", threads=1), ids_of(1, 9)
    made = model.generate(ids, max_new_tokens=6, eos_token_id=[], output_logits=True)
    other = exported(family, kind)
    for row, text in enumerate(made.ids):
        whole = other.forward(text[None, :-1]).output()[0, 8:]
        found = np.stack([step.output()[row, -1] for step in made.steps]).astype(np.float32)
        # Qwen3.5's norm behind the recurrence magnifies what 8 bits round
        assert np.abs(found - whole).max() < {"int4": 0.2, "fp16": 5e-2}[kind] * np.abs(whole).max()
        assert (found.argmax(-1) == text[9:]).all()
    edited = HookSpec().set_state_knockout(StateKnockoutSpec(terms=["convolution"]).position(3))
    again = model.generate(ids, edited, max_new_tokens=6, eos_token_id=[], output_logits=True)
    assert np.abs(again.steps[0].output() - made.steps[0].output()).max() > 1e-2
