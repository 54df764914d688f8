"""Control vectors as llama.cpp writes and reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mionnx import Directions, HookPoint, HookSpec, Intervention, InterventionError, MIModel, SpecFileError
from mionnx.analysis.steering.control_vector import LayerLeftOutWarning

gguf = pytest.importorskip("gguf")

PROMPT = "The capital of France is"
WIDTH, LAYERS = 128, 4
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained("models/world-llama", threads=1)


def vectors() -> dict[int, np.ndarray]:
    """A vector for every block but the first, each of another length, so that no two can be taken for each other."""
    random = np.random.default_rng(0)
    return {layer: (random.normal(size=WIDTH) * 0.3 * layer).astype(np.float32) for layer in range(1, LAYERS)}


def generator_file(
    path: Path, tensors, count: int | None = None, architecture: str = "controlvector", checksum: str = ""
) -> Path:
    """What llama.cpp's cvector-generator writes (`export_gguf`): the same keys, types and names, in its order."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_int32("controlvector.layer_count", len(tensors) if count is None else count)
    writer.add_string("mionnx.sha256", checksum)  # ours only: gguf writes no empty text
    for name, tensor in tensors.items():
        writer.add_tensor(name if isinstance(name, str) else f"direction.{name}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_llama_cpp_applies_it(
    model: MIModel, given: dict[int, np.ndarray], strength: float, shift: int = 0
) -> np.ndarray:
    """The last logits of the torch model: `direction.N` added to what block N gives, counted from 0, at every token."""
    reference = AutoModelForCausalLM.from_pretrained("models/world-llama", attn_implementation="eager").eval()
    for layer, vector in given.items():

        def add(_module, _inputs, out, vector=vector):
            value = out[0] if isinstance(out, tuple) else out
            value += torch.from_numpy(vector) * strength

        if 0 <= layer + shift < LAYERS:
            reference.model.layers[layer + shift].register_forward_hook(add)
    with torch.no_grad():
        return reference(torch.from_numpy(model.tokenize(PROMPT).ids[None])).logits[0, -1].numpy()


def test_a_generated_file_is_applied_at_the_right_layer(model, tmp_path):
    found = Directions.from_gguf(generator_file(tmp_path / "a.gguf", vectors()))
    assert found.layers == (1, 2, 3)
    assert [str(point) for point, _ in found.spec().interventions] == [f"blocks.{i}.hook_resid_post" for i in (1, 2, 3)]
    for layer, vector in vectors().items():
        assert (found[layer].vector == vector).all()
    logits = model.forward(PROMPT, found.spec(strength=0.8)).output()[0, -1]
    assert np.abs(logits - as_llama_cpp_applies_it(model, vectors(), 0.8)).max() < TOLERANCE
    for shift in (-1, 1):  # where three public projects have put it
        assert np.abs(logits - as_llama_cpp_applies_it(model, vectors(), 0.8, shift)).max() > 100 * TOLERANCE


def test_what_is_written_is_what_the_generator_writes(model, tmp_path):
    written = Directions(np.stack([*vectors().values()]), [1, 2, 3]).to_gguf(tmp_path / "b.gguf", model_hint="llama")
    reader = gguf.GGUFReader(written)
    checksum = reader.get_field("mionnx.sha256").contents()
    assert written.read_bytes() == generator_file(tmp_path / "a.gguf", vectors(), checksum=checksum).read_bytes()
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert reader.get_field("controlvector.layer_count").contents() == 3
    assert reader.get_field("controlvector.layer_count").types == [gguf.GGUFValueType.INT32]
    assert [(tensor.name, list(tensor.shape)) for tensor in reader.tensors] == [
        (f"direction.{i}", [WIDTH]) for i in (1, 2, 3)
    ]


def test_contrastive_directions_go_out_and_come_back(model, tmp_path):
    made = model.contrast("The capital of Germany is", PROMPT)
    with pytest.warns(LayerLeftOutWarning, match=r"c\.gguf holds layers 1 to 3: .* no direction for layer 0"):
        made.save(tmp_path / "c.gguf")
    again = Directions.from_gguf(tmp_path / "c.gguf")
    assert again.layers == (1, 2, 3)
    assert (again.vectors == made.vectors[1:]).all()
    direct = HookSpec().intervene(HookPoint.ResidPost(2), Intervention.Add(made[2].vector))
    assert (model.forward(PROMPT, again.spec(2)).output() == model.forward(PROMPT, direct).output()).all()
    assert model.tokenizer.decode([int(model.forward(PROMPT, again.spec(2)).output()[0, -1].argmax())]) == "Berlin"


def test_some_layers_and_zeros(model, tmp_path):
    some = {1: vectors()[1], 3: vectors()[3], 2: np.zeros(WIDTH, np.float32)}
    found = Directions.from_gguf(generator_file(tmp_path / "a.gguf", some))
    assert found.layers == (1, 3)  # a direction of zeros does nothing in llama.cpp either
    assert (found.vectors == np.stack([some[1], some[3]])).all()


BAD = {
    "direction.0": ({0: np.ones(WIDTH, np.float32), 1: np.ones(WIDTH, np.float32)}, None, "direction.0"),
    "no number": ({"direction.x": np.ones(WIDTH, np.float32)}, None, "number from 1 on"),
    "no directions": ({"other": np.ones(WIDTH, np.float32)}, 0, "no tensor"),
    "fewer": ({1: np.ones(WIDTH, np.float32)}, 3, "has 3 directions, and has 1"),
    "two axes": ({1: np.ones((2, WIDTH), np.float32)}, None, r"float32 \[width\]"),
    "half": ({1: np.ones(WIDTH, np.float16)}, None, r"float32 \[width\].*F16"),
    "widths": ({1: np.ones(WIDTH, np.float32), 2: np.ones(64, np.float32)}, None, "different widths"),
    "NaN": ({1: np.full(WIDTH, np.nan, np.float32)}, None, "NaN"),
    "zeros": ({1: np.zeros(WIDTH, np.float32)}, None, "every direction is zero"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_llama_cpp_would_not_take_are_refused(tmp_path, name):
    tensors, count, message = BAD[name]
    with pytest.raises(SpecFileError, match=message):
        Directions.from_gguf(generator_file(tmp_path / "bad.gguf", tensors, count))


def test_other_and_damaged_files_are_refused(tmp_path):
    whole = generator_file(tmp_path / "a.gguf", vectors()).read_bytes()
    for name, content in (("cut", whole[:-200]), ("short", whole[:20]), ("other", b"GGML" + whole[4:]), ("empty", b"")):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(SpecFileError, match=f"{name}.gguf"):
            Directions.from_gguf(tmp_path / f"{name}.gguf")
    with pytest.raises(SpecFileError, match="cannot read"):
        Directions.from_gguf(tmp_path / "missing.gguf")
    with pytest.raises(SpecFileError, match="no control vector but a 'llama'"):
        Directions.from_gguf(generator_file(tmp_path / "m.gguf", vectors(), architecture="llama"))


def test_what_the_format_has_no_place_for_is_refused(model, tmp_path):
    random = np.random.default_rng(1)
    with pytest.raises(SpecFileError, match=r"after the first block.*steer at a later layer"):
        Directions(random.normal(size=(1, 8)), [0]).to_gguf(tmp_path / "a.gguf")
    with pytest.raises(SpecFileError, match="mlp_out"):
        Directions(random.normal(size=(3, 8)), [1, 2, 3], "mlp_out").to_gguf(tmp_path / "a.gguf")
    with pytest.raises(SpecFileError, match="cannot write"):
        Directions(random.normal(size=(1, 8)), [1]).to_gguf(tmp_path / "missing" / "a.gguf")
    narrow = Directions.from_gguf(generator_file(tmp_path / "n.gguf", {1: np.ones(64, np.float32)}))
    with pytest.raises(InterventionError, match="64"):
        model.forward(PROMPT, narrow.spec())
    with pytest.raises(InterventionError, match=r"width 64.*128"):
        model.dose_response(PROMPT, narrow[1], [1.0])
    assert not (tmp_path / "a.gguf").exists()
