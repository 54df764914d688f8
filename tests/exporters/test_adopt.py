"""Foreign ONNX files become hooked models: every hook point against transformers, laws, refusals.

The files in `tests/shared/foreign` are one random Llama as optimum-onnx 0.1.0 and onnxruntime-genai 0.18.0 write it.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import mionnx
from family_batches import KINDS, batch, difference, differences, forward, interventions
from onnx import TensorProto, helper, parser
from quantised_files import foreign_file
from renamed_files import renamed

from exporters.adopt import adopt, check, recognises
from mionnx import ExportError, HookPoint, HookSpec, Intervention, MIModel, ModelError
from mionnx.graph import onnx_file
from mionnx.graph.hooked_model import HookedModel

FOREIGN = Path(__file__).parents[1] / "shared" / "foreign"
EXACT = ("optimum", "genai-fp32")
TOLERANCE = 5e-5


@pytest.fixture(scope="session")
def adopted(tmp_path_factory) -> Callable[[str], MIModel]:
    """Kind of file -> the adopted model, open."""
    opened: dict[str, MIModel] = {}

    def find(kind: str) -> MIModel:
        if kind not in opened:
            folder = tmp_path_factory.mktemp("adopted")
            adopt(shutil.copytree(FOREIGN / kind, folder / "source"), folder / kind)
            opened[kind] = MIModel.from_pretrained(folder / kind, threads=1)
        return opened[kind]

    return find


@pytest.fixture(scope="session")
def reference():
    """The checkpoint of the files in transformers, eager."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        FOREIGN / "checkpoint", attn_implementation="eager", dtype=torch.float32
    ).eval()


def test_every_hook_point_of_a_llama_is_found(adopted, models):
    known = [str(point) for point in models("llama").hook_points()]
    for kind in (*EXACT, "genai-int4"):
        assert [str(point) for point in adopted(kind).hook_points()] == known


def test_heads_that_share_keys_may_be_rows_of_one_product(tmp_path, hooked, references):
    """As mionnx itself writes attention: nothing is repeated, and the pattern is reshaped for its product."""
    proto = onnx_file.read(hooked("llama") / "model.onnx")
    patterns = [node.output[0] for node in proto.graph.node if node.op_type == "Softmax"]
    readers = {name: [node.op_type for node in proto.graph.node if name in node.input] for name in patterns}
    assert {*map(tuple, readers.values())} == {("Reshape",)}
    onnx_file.embed(proto, hooked("llama"))
    del proto.metadata_props[:]
    (tmp_path / "file").mkdir()
    onnx.save(proto, tmp_path / "file" / "model.onnx")
    adopt(tmp_path / "file", tmp_path / "adopted")
    model = MIModel.from_pretrained(tmp_path / "adopted", threads=1)
    off = differences(model, references("llama"), batch("left past"))
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", EXACT)
def test_every_capture_equals_the_eager_tap(file, kind, adopted, reference):
    """With left padding and a past, which a fused GroupQueryAttention does not take together."""
    from oracle import run

    inputs = batch(kind)
    expected = run(reference, inputs)
    spec = HookSpec().capture(lambda name: not name.endswith("hook_result"))
    found = forward(adopted(file), inputs, spec)
    assert set(found.values) == set(expected.values)
    off = {
        name: difference(HookPoint.parse(name), found.values[name], expected.values[name], inputs)
        for name in found.values
    }
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}
    assert np.abs(found.logits - expected.logits)[inputs.real].max() < TOLERANCE


@pytest.mark.parametrize("file", EXACT)
@pytest.mark.slow_beyond(1)
def test_interventions_equal_the_same_edits_in_torch(file, adopted, reference):
    from oracle import run

    model, inputs, off = adopted(file), batch("past"), {}
    plain = run(reference, inputs)
    for point in [point for point in model.hook_points() if not point.derived and point.layer in (None, 1)]:
        edit = next(interventions(point, plain.values[str(point)].shape, whole=False))
        expected = run(reference, inputs, [(point, edit)])
        found = forward(model, inputs, HookSpec().intervene(point, edit).capture(point))
        off[str(point)] = float(np.abs(found.logits - expected.logits)[inputs.real].max())
        assert not np.array_equal(expected.logits, plain.logits)
    assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


@pytest.mark.parametrize("file", [*EXACT, "genai-int4"])
def test_what_works_on_a_hooked_model_works_on_an_adopted_one(file, adopted, tmp_path):
    model, ids = adopted(file), [5, 7, 11, 13]
    texts = model.generate(ids, max_new_tokens=4, eos_token_id=[])
    whole = model.forward(texts.ids[0][:-1]).output()[0, len(ids) - 1 :].argmax(-1)
    assert whole.tolist() == list(texts.new_ids[0])
    sweep = model.patch_sweep(ids, [5, 8, 11, 13], "resid_mid", answer=3, versus=4, over=("layer", "position"))
    patch = model.forward(ids, HookSpec().capture("blocks.1.hook_resid_mid"))["resid_mid", 1]
    edit = Intervention.Replace(patch[:, 1:2], positions=1)
    one = model.forward([5, 8, 11, 13], HookSpec().intervene("blocks.1.hook_resid_mid", edit)).output()[0, -1]
    rounding = 1e-4 if file in EXACT else 5e-2  # int4 files of genai round activations to 8 bits
    assert sweep.values[1, 1] == pytest.approx(one[3] - one[4], abs=rounding)
    folder = model.compile(HookSpec().intervene("blocks.0.hook_mlp_out", Intervention.Scale(0.5)), tmp_path / "out")
    assert (folder / "model.onnx").is_file()


def test_weights_stay_in_their_files(tmp_path):
    for kind, weights in (("optimum", "model.onnx"), ("genai-fp32", "model.onnx.data")):
        before = (FOREIGN / kind / weights).stat()
        source = Path(shutil.copytree(FOREIGN / kind, tmp_path / f"{kind}-source"))
        adopt(source, tmp_path / kind)
        held = [path for path in (tmp_path / kind).iterdir() if path.stat().st_ino == (source / weights).stat().st_ino]
        assert len(held) == 1
        assert (FOREIGN / kind / weights).stat().st_mtime_ns == before.st_mtime_ns
        added = [path for path in (tmp_path / kind).iterdir() if path.stat().st_nlink == 1]
        assert sum(path.stat().st_size for path in added) < before.st_size


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("file", EXACT)
@pytest.mark.slow_beyond(2)
def test_no_name_is_read(file, seed, adopted, tmp_path):
    """Every value and node renamed, the nodes shuffled: the same hook points with the same values."""
    renamed(FOREIGN / file, tmp_path / "source", seed)
    adopt(tmp_path / "source", tmp_path / "hooked")
    model, inputs, spec = MIModel.from_pretrained(tmp_path / "hooked", threads=1), batch("plain"), HookSpec()
    spec.capture(lambda name: not name.endswith("hook_result"))
    found, expected = forward(model, inputs, spec), forward(adopted(file), inputs, spec)
    assert [*found.values] == [*expected.values]
    assert max(float(np.abs(found.values[name] - expected.values[name]).max()) for name in found.values) < 1e-5


def _broken(proto: onnx.ModelProto, rng: random.Random) -> str:
    """Rewire one input of one node to another value of the text that is made before it."""
    nodes = proto.graph.node
    while True:
        place = rng.randrange(len(nodes) // 4, len(nodes))
        node = nodes[place]
        made = [name for other in nodes[:place] for name in other.output]
        if node.op_type in ("Add", "Mul", "MatMul") and node.input[0] in made:
            node.input[0] = rng.choice(made)
            return node.name


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow_beyond(5)
def test_a_broken_graph_is_refused_or_named_rightly(seed, tmp_path):
    """Whatever a rewired graph computes: it is refused, or its hook points keep to every law."""
    proto = onnx.load(FOREIGN / "optimum" / "model.onnx")
    _broken(proto, random.Random(seed))
    (tmp_path / "source").mkdir()
    onnx.save(proto, tmp_path / "source" / "model.onnx")
    try:
        adopt(tmp_path / "source", tmp_path / "hooked")
    except ExportError:
        return
    assert all(law.holds for law in check(tmp_path / "hooked"))


def test_a_wrongly_named_hook_breaks_a_law(adopted, tmp_path):
    """Keys under the name of values, a branch without its name: the self-check sees it."""
    folder = Path(shutil.copytree(adopted("optimum").hooked.folder, tmp_path / "model"))
    assert all(law.holds for law in check(folder))
    proto, swap = onnx.load(folder / "model.onnx", load_external_data=False), {}
    for one, other in (("attn.hook_k", "attn.hook_v"), ("hook_resid_mid", "mlp.hook_pre")):
        swap |= {f"blocks.1.{one}": f"blocks.1.{other}", f"blocks.1.{other}": f"blocks.1.{one}"}
    for node in proto.graph.node:
        node.input[:] = [swap.get(name, name) for name in node.input]
        node.output[:] = [swap.get(name, name) for name in node.output]
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    broken = {law.law for law in check(folder) if not law.holds}
    assert {"z = pattern v", "mid = pre + attn_out"} <= broken


def test_the_command_line(tmp_path):
    source = shutil.copytree(FOREIGN / "genai-int4", tmp_path / "source")
    ran = mionnx("adopt", source, "-o", tmp_path / "int4")
    assert ran.returncode == 0, ran.stderr
    assert "39 hook points" in ran.stdout
    assert "2 GroupQueryAttention" in ran.stdout
    assert "z = pattern v" in ran.stdout
    ran = mionnx("adopt", tmp_path / "int4", "--check", "--json")
    assert ran.returncode == 0, ran.stderr
    assert all(law["holds"] for law in json.loads(ran.stdout)["laws"])
    assert mionnx("adopt", source, "-o", tmp_path / "int4").returncode  # it exists


@pytest.mark.slow
def test_a_folder_as_the_hub_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    folder = tmp_path / "model"
    shutil.copytree(FOREIGN / "optimum", folder / "onnx")
    shutil.move(folder / "onnx" / "config.json", folder / "config.json")
    (folder / "onnx" / "model.onnx").rename(folder / "onnx" / "model_fp32.onnx")
    shutil.copyfile(folder / "onnx" / "model_fp32.onnx", folder / "onnx" / "decoder_model.onnx")
    model = MIModel.from_pretrained(folder, threads=1)
    assert model.hooked.metadata.exporter["adopted"] == "decoder_model.onnx"
    assert model.hooked.metadata.family == "llama"
    assert MIModel.from_pretrained(folder, threads=1).hooked.folder == model.hooked.folder
    assert MIModel.from_pretrained(folder / "onnx" / "model_fp32.onnx", threads=1).num_layers == 2
    ran = mionnx("adopt", folder, "--file", "model_fp32", "-o", tmp_path / "chosen")
    assert "model_fp32.onnx" in ran.stdout
    with pytest.raises(ExportError, match=r"no ONNX file 'other'; it has .*model_fp32\.onnx"):
        adopt(folder, tmp_path / "none", "other")


def test_a_checkpoint_is_exported_although_onnx_files_lie_beside_it(tmp_path):
    folder = Path(shutil.copytree(FOREIGN / "checkpoint", tmp_path / "model"))
    shutil.copytree(FOREIGN / "optimum", folder / "onnx")
    assert not recognises(folder)
    assert recognises(folder / "onnx")


def _model(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')


NO_DECODERS = {
    "no embedding": ("g (float[b, 8] x) => (float[b, 8] y) { y = Relu(x) }", "no token embedding"),
    "no logits": (
        "g (int64[b, s] ids) => (float[b, 8] y) <float[20, 8] table> "
        "{ e = Gather(table, ids)\n y = ReduceMean<keepdims=0>(e) }",
        "no logits|residual stream",
    ),
    "no stream": (
        "g (int64[b, s] ids) => (float[b, s, 8] y) <float[20, 8] table> { e = Gather(table, ids)\n y = Relu(e) }",
        "no residual stream",
    ),
    "no attention": (
        "g (int64[b, s] ids) => (float[b, s, 8] y) <float[20, 8] table, float[8, 8] w> "
        "{ e = Gather(table, ids)\n a = MatMul(e, w)\n y = Add(e, a) }",
        "no attention",
    ),
    "two streams": (
        "g (int64[b, s] ids, int64[b, s] other) => (float[b, s, 8] y) <float[20, 8] table, float[20, 8] second> "
        "{ e = Gather(table, ids)\n f = Gather(second, other)\n y = Add(e, f) }",
        "none is known to be the tokens",
    ),
}


@pytest.mark.parametrize("name", NO_DECODERS)
def test_what_is_no_decoder_is_refused_with_what_was_found(name, tmp_path):
    text, message = NO_DECODERS[name]
    proto = _model(text)
    for value in list(proto.graph.initializer):
        value.raw_data = np.ones(tuple(value.dims), np.float32).tobytes()
    held = {tensor.name for tensor in proto.graph.initializer}
    for name_, dims in (("table", (20, 8)), ("second", (20, 8)), ("w", (8, 8))):
        if name_ in text and name_ not in held:
            proto.graph.initializer.append(
                helper.make_tensor(name_, TensorProto.FLOAT, dims, np.ones(dims, np.float32).tobytes(), raw=True)
            )
    (tmp_path / "source").mkdir()
    onnx.save(proto, tmp_path / "source" / "model.onnx")
    with pytest.raises(ExportError, match=message):
        adopt(tmp_path / "source", tmp_path / "hooked")


def test_files_that_are_no_onnx(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises((ExportError, ModelError)):
        MIModel.from_pretrained(tmp_path)
    junk = tmp_path / "junk"
    junk.mkdir()
    (junk / "decoder_model.onnx").write_bytes(b"\x08\x07 no protobuf at all" * 9)
    with pytest.raises(ExportError, match=r"decoder_model\.onnx"):
        MIModel.from_pretrained(junk)
    with pytest.raises(ExportError, match="no ONNX file"):
        adopt(tmp_path / "junk" / "nothing", tmp_path / "hooked")


def test_weights_outside_the_folder_are_refused(tmp_path):
    shutil.copytree(FOREIGN / "genai-fp32", tmp_path / "model")
    (tmp_path / "model" / "model.onnx.data").rename(tmp_path / "secret")
    (tmp_path / "model" / "model.onnx.data").symlink_to(tmp_path / "secret")
    with pytest.raises(ExportError, match="outside"):
        adopt(tmp_path / "model", tmp_path / "hooked")


QUANTISED = ("int8", "q4")


def _quantised(kind: str, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    target.mkdir()
    source = FOREIGN / "optimum" / "model.onnx"
    if kind == "int8":
        quantize_dynamic(source, target / "model.onnx", weight_type=QuantType.QInt8)
        return
    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target / "model.onnx"))


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_files_keep_every_hook_point(kind, adopted, tmp_path):
    """The identities of a decoder hold in what is computed, however coarse the weights are."""
    _quantised(kind, tmp_path / "source")
    found = adopt(tmp_path / "source", tmp_path / "hooked")
    assert found.hooks == [str(point) for point in adopted("optimum").hook_points() if not point.derived]
    assert all(law.holds for law in found.laws)
    ids = np.arange(4, 12)[None]
    one = MIModel.from_pretrained(tmp_path / "hooked", threads=1).forward(ids).output()
    exact = adopted("optimum").forward(ids).output()
    assert 0 < np.abs(one - exact).max() < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_files_of_torch_s_exporter(family, checkpoint, references, tmp_path):
    """No cache, no positions: those are an input all the same."""
    import torch
    from oracle import run
    from transformers import AutoModelForCausalLM

    inner = AutoModelForCausalLM.from_pretrained(checkpoint(family), attn_implementation="eager").eval()

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, attention_mask):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    (tmp_path / "source").mkdir()
    example, sizes = torch.ones(2, 12, dtype=torch.long), {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    names = ["input_ids", "attention_mask"]
    torch.onnx.export(
        Logits(),
        (example, example.clone()),
        tmp_path / "source" / "model.onnx",
        input_names=names,
        output_names=["logits"],
        dynamic_shapes=dict.fromkeys(names, sizes),
        dynamo=True,
    )
    shutil.copyfile(checkpoint(family) / "config.json", tmp_path / "source" / "config.json")
    adopt(tmp_path / "source", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    for kind in ("plain", "left"):
        inputs = batch(kind)
        expected = run(references(family), inputs)
        names = [str(point) for point in model.hook_points() if not point.derived]
        assert set(names) == set(expected.values)
        found = model.forward(inputs.ids, HookSpec().capture(names), attention_mask=inputs.mask)
        off = {name: difference(HookPoint.parse(name), found[name], expected.values[name], inputs) for name in names}
        assert {name: d for name, d in off.items() if not d < TOLERANCE} == {}


def test_a_file_whose_nodes_stand_in_no_order_is_sorted(tmp_path):
    """Converters to float16 put casts behind the nodes that read them; runtimes sort nodes themselves."""
    folder = foreign_file(tmp_path / "reversed", "plain", "world-gpt2")
    proto = onnx.load(folder / "model.onnx")
    nodes = [*proto.graph.node][::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    onnx.save(proto, folder / "model.onnx")
    logits = MIModel.from_pretrained(folder).forward("The capital of France is").output()
    own = MIModel.from_pretrained("world-gpt2").forward("The capital of France is").output()
    assert np.abs(logits - own).max() < 1e-4


def test_queries_and_keys_are_normed_inside_a_group_query_attention(adopted, tmp_path):
    """As builders for CUDA write Qwen 3; ONNX Runtime on the CPU has no such inputs, so the file itself fails."""
    source = Path(shutil.copytree(FOREIGN / "genai-fp32", tmp_path / "source"))
    proto, rng = onnx.load(source / "model.onnx"), np.random.default_rng(0)
    weights = {name: rng.uniform(0.5, 2, 8).astype(np.float32) for name in ("q", "k")}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(weight, name) for name, weight in weights.items())
    for node in [node for node in proto.graph.node if node.op_type == "GroupQueryAttention"]:
        node.input.extend([""] * (14 - len(node.input)) + [*weights])
        node.attribute.append(helper.make_attribute("qk_norm_epsilon", 1e-3))
    onnx.save(proto, source / "model.onnx")
    adopt(source, tmp_path / "hooked")
    points = {name: f"blocks.0.attn.hook_{name}" for name in weights}
    found, plain = (
        model.forward(np.arange(4, 12)[None], HookSpec().capture([*points.values()]))
        for model in (MIModel.from_pretrained(tmp_path / "hooked", threads=1), adopted("genai-fp32"))
    )
    for name, point in points.items():
        before = plain[point]
        expected = before / np.sqrt((before**2).mean(-1, keepdims=True) + 1e-3) * weights[name]
        assert np.abs(found[point] - expected).max() < 1e-5
    for node in [node for node in proto.graph.node if node.op_type == "GroupQueryAttention"]:
        node.input.append("q")
    onnx.save(proto, source / "model.onnx")
    with pytest.raises(ExportError, match="an input 16 that is not known"):
        adopt(source, tmp_path / "refused")


@pytest.mark.slow
def test_export_keeps_the_dtype_and_the_file_of_another_tool(tmp_path):
    source = Path(shutil.copytree(FOREIGN / "optimum", tmp_path / "source"))
    before = (source / "model.onnx").read_bytes()
    refused = mionnx("export", source, "-o", tmp_path / "half", "--dtype", "float16")
    assert refused.returncode
    assert "is not converted to float16" in " ".join(refused.stderr.split())
    assert not (tmp_path / "half").exists()
    assert mionnx("export", source, "--in-place").returncode
    assert (source / "model.onnx").read_bytes() == before
    assert mionnx("export", source, "-o", tmp_path / "own", "--copy").returncode == 0
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "own").iterdir())


@pytest.mark.parametrize("own", [5000, -1])
def test_a_window_longer_than_any_probe_is_that_of_the_mask(tmp_path, own):
    source = Path(shutil.copytree(FOREIGN / "genai-fp32", tmp_path / "source"))
    proto = onnx.load(source / "model.onnx", load_external_data=False)
    for node in proto.graph.node:
        for entry in node.attribute:
            if entry.name == "local_window_size":
                entry.i = own
    (source / "model.onnx").write_bytes(proto.SerializeToString())
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "sliding_window": 5000}))
    notes = adopt(source, tmp_path / "hooked").notes
    attention = HookedModel.open(tmp_path / "hooked").metadata.attention
    assert {layer.sliding_window for layer in attention} == {None if own == -1 else own}
    assert any("the file's own mask has no window" in note for note in notes) == (own == -1)
    assert not any("what config.json says" in note for note in notes), "a past shows it"
