"""RWKV checkpoints on their way in: recognised by content, read in place, refused when they are not what they seem."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from rwkv_checkpoints import HIDDEN, LAYOUTS, VOCAB, blinkdl, to_fla7, to_hf6, write
from rwkv_loop import Loop
from safetensors.torch import save_file

from exporters import rwkv, transformers
from mionnx import ExportError, HookPoint, HookSpec, MIModel
from mionnx.graph import onnx_file
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.weight_record import describe
from mionnx.run.exporting import exporter_for

IDS = np.random.default_rng(3).integers(0, VOCAB, 21)


def export(folder: Path, dtype: str = "float32") -> MIModel:
    rwkv.export(folder, folder.parent / "hooked", dtype)
    return MIModel.from_pretrained(folder.parent / "hooked")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recognised_by_its_tensors(tmp_path, layout):
    folder = tmp_path / "checkpoint"
    write(layout, folder)
    assert exporter_for(folder).__name__ == "exporters.rwkv"
    assert not transformers.recognises(folder)
    (folder / "config.json").unlink(missing_ok=True)
    assert exporter_for(folder).__name__ == "exporters.rwkv"


def test_other_checkpoints_are_not_taken_for_rwkv(tmp_path, checkpoint):
    assert not rwkv.recognises(checkpoint("llama"))
    five = {name: value for name, value in blinkdl(6).items() if "_w1" not in name and "_w2" not in name}
    write("6-pth", tmp_path, five)
    assert not rwkv.recognises(tmp_path)
    with pytest.raises(ExportError, match="none of RWKV-4, RWKV-6 and RWKV-7"):
        rwkv.export(tmp_path, tmp_path / "hooked")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_stay_where_they_are(tmp_path, layout):
    """Every weight of the graph lies in the checkpoint's own file, of which the folder holds another name."""
    folder = tmp_path / "checkpoint"
    write(layout, folder)
    model = export(folder)
    file = next(path for path in folder.iterdir() if path.suffix in (".pth", ".safetensors"))
    assert (model.hooked.folder / file.name).stat().st_ino == file.stat().st_ino
    external = [t for t in model.hooked.proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert {entry.value for t in external for entry in t.external_data if entry.key == "location"} == {file.name}
    assert (model.hooked.folder / "model.onnx").stat().st_size < 200_000


@pytest.mark.parametrize("layout", ["4-hf", "6-pth", "6-hf", "7-fla-fused"])
def test_the_graph_is_valid_in_the_standard_domain(tmp_path, layout):
    write(layout, tmp_path / "checkpoint")
    folder = export(tmp_path / "checkpoint").hooked.folder
    for path in folder.glob("model.*"):  # onnx's checker refuses files with a second name
        shutil.copy(path, tmp_path / path.name)
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    proto = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert {entry.domain for entry in proto.opset_import} == {""}
    assert not any(node.metadata_props or node.doc_string for node in proto.graph.node)
    known = HookedModel.open(folder, check="full").metadata.weight_files
    assert known == describe(folder, onnx_file.locations(proto))
    assert known


def test_low_rank_sizes_come_from_the_weights(tmp_path):
    """As in the 7B model, whose ranks are twice those of the smaller ones."""
    tensors = blinkdl(6)
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        name = f"blocks.{layer}.att"
        tensors[f"{name}.time_maa_w1"] = torch.randn(HIDDEN, 5 * 64, generator=generator) * 0.1
        tensors[f"{name}.time_maa_w2"] = torch.randn(5, 64, HIDDEN, generator=generator) * 0.1
        tensors[f"{name}.time_decay_w1"] = torch.randn(HIDDEN, 128, generator=generator) * 0.1
        tensors[f"{name}.time_decay_w2"] = torch.randn(128, HIDDEN, generator=generator) * 0.1
    write("6-hf", tmp_path / "checkpoint", tensors)
    logits = Loop({name: value.double().numpy() for name, value in tensors.items()}, 6).run(IDS.tolist())
    assert np.abs(export(tmp_path / "checkpoint").forward(IDS).output()[0] - logits).max() < 5e-5


@pytest.mark.parametrize(("rescale", "divisor"), [(1, 8), (2, 4), (0, 16)])
def test_rescaling_and_group_norm_eps_of_the_config(tmp_path, rescale, divisor):
    tensors = write("6-hf", tmp_path / "checkpoint", rescale_every=rescale, head_size_divisor=divisor)
    oracle = Loop({name: value.double().numpy() for name, value in tensors.items()}, 6, 1e-5 * divisor**2, rescale)
    logits = oracle.run(IDS.tolist())
    found = export(tmp_path / "checkpoint").forward(IDS, HookSpec().capture("*.hook_resid_post"))
    assert np.abs(found.output()[0] - logits).max() < 5e-5
    for layer in range(2):
        expected = np.stack(oracle.values[f"blocks.{layer}.hook_resid_post"])
        assert np.abs(found["resid_post", layer][0] - expected).max() < 5e-5


def test_group_norm_eps_of_fla(tmp_path):
    tensors = write("7-fla", tmp_path / "checkpoint", norm_eps=1e-5 * 4)
    oracle = Loop({name: value.double().numpy() for name, value in tensors.items()}, 7, 64 * 4e-5)
    logits = oracle.run(IDS.tolist())  # the loop's layer norms keep 1e-5: their inputs are large
    assert np.abs(export(tmp_path / "checkpoint").forward(IDS).output()[0] - logits).max() < 2e-4


def test_a_tied_head(tmp_path):
    tensors = blinkdl(7)
    tensors["head.weight"] = tensors["emb.weight"] * 1.0
    stored = to_fla7(tensors)
    del stored["lm_head.weight"]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "rwkv7", "tie_word_embeddings": True}))
    logits = Loop({name: value.double().numpy() for name, value in tensors.items()}, 7).run(IDS.tolist())
    found = export(folder).forward(IDS).output()[0]
    assert np.abs(found - logits).max() / np.abs(logits).max() < 1e-5


@pytest.mark.parametrize("layout", ["4-hf", "6-pth", "7-fla"])
def test_float16_weights_with_the_recurrence_in_float32(tmp_path, layout):
    tensors = {name: value.half().float() for name, value in blinkdl(int(layout[0])).items()}
    write(layout, tmp_path / "checkpoint", {name: value.half() for name, value in tensors.items()})
    logits = Loop({name: value.double().numpy() for name, value in tensors.items()}, int(layout[0])).run(IDS.tolist())
    model = export(tmp_path / "checkpoint", "auto")
    assert model.hooked.metadata.dtype == "float16"
    cache = model.forward(IDS, HookSpec().capture(HookPoint.RwkvDecay(1)).capture(HookPoint.ResidPost(1)))
    assert cache["decay", 1].dtype == np.float32
    assert cache["resid_post", 1].dtype == np.float16
    assert np.abs(cache.output()[0] - logits).max() < 0.05
    wider = tmp_path / "wider" / "checkpoint"
    shutil.copytree(tmp_path / "checkpoint", wider)
    assert np.abs(export(wider).forward(IDS).output()[0] - logits).max() < 5e-5


def test_damaged_and_hostile_checkpoints(tmp_path):
    def fresh(name: str, layout: str = "7-pth", tensors: dict | None = None, **config: object) -> Path:
        write(layout, tmp_path / name, tensors, **config)
        return tmp_path / name

    def refused(folder: Path, message: str) -> None:
        with pytest.raises(ExportError, match=message):
            rwkv.export(folder, tmp_path / f"{folder.name}-hooked")

    short = fresh("short")
    data = (short / "model.pth").read_bytes()
    (short / "model.pth").write_bytes(data[: len(data) // 2])
    refused(short, "intact .pth")
    two = fresh("two")
    shutil.copy(two / "model.pth", two / "other.pth")
    refused(two, "2 .pth files")
    refused(
        fresh("missing", tensors={k: v for k, v in blinkdl(7).items() if k != "blocks.1.att.k_a"}), "blocks.1.att.k_a"
    )
    refused(fresh("surplus", tensors={**blinkdl(7), "blocks.1.att.extra": torch.zeros(3)}), "blocks.1.att.extra")
    refused(fresh("size", "6-hf", hidden_size=96), "hidden_size=96")
    refused(fresh("hybrid", "7-fla", attn={"layers": [1]}), "softmax attention")
    refused(fresh("activation", "7-fla", hidden_act="gelu"), "gelu")
    config = fresh("config", "6-hf")
    (config / "config.json").write_text("{")
    refused(config, "config.json is damaged")

    class Hostile:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "executed",))

    hostile = tmp_path / "hostile"
    hostile.mkdir()
    torch.save({**blinkdl(7), "trap": Hostile()}, hostile / "model.pth", pickle_module=pickle)
    assert rwkv.recognises(hostile)
    refused(hostile, "intact .pth")
    assert not (tmp_path / "executed").exists()


def test_hf6_names_are_those_of_the_checkpoints():
    assert {"rwkv.embeddings.weight", "rwkv.blocks.0.pre_ln.weight", "rwkv.blocks.1.attention.time_maa_w1"} <= {
        *to_hf6(blinkdl(6))
    }
