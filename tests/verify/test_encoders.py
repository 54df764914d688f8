"""`verify` and `bisect` of encoders: heads and pairs beside transformers and OpenVINO, planted faults, refusals."""

import numpy as np
import onnx
import pytest

from mionnx import HookSpec, InputError, Intervention, MIModel
from mionnx.graph import onnx_file
from mionnx.machine.softmax import log_softmax

TEXT, PAIR = "the man plays the guitar on stage.", ("where does ann live?", "ann lives in rome now")
EDIT = HookSpec().intervene("blocks.0.hook_resid_mid", Intervention.Scale(0.5, positions=[2]))


def checkpoint_of(model: MIModel) -> str:
    return str(model.hooked.folder.parent / "checkpoint")


@pytest.mark.parametrize("head", ["classes", "embedding"])
def test_texts_and_pairs_agree_with_transformers_with_and_without_an_edit(head, text_encoder):
    model, _ = text_encoder(head)
    prompts = [TEXT, model.tokenize(*PAIR)]
    for hooks in (None, EDIT):
        result = model.verify(
            prompts, ["ort-cpu", "torch"], points="*", hooks=hooks, checkpoint=checkpoint_of(model), local=False
        )
        assert not result.skipped
        assert result.agrees, result.summary()
        assert {"blocks.1.hook_resid_post_sum", model.hooked.metadata.main_point} <= {
            one.name for one in result.besides[0].rows
        }
    assert np.isnan(result.besides[0].logits["top_1"]) == (head == "embedding")


@pytest.mark.slow
@pytest.mark.parametrize("head", ["masked_lm", "token_classes", "span"])
def test_the_other_heads_agree_with_transformers(head, text_encoder):
    model, _ = text_encoder(head)
    result = model.verify([TEXT], ["ort-cpu", "torch"], points="*", checkpoint=checkpoint_of(model))
    assert result.agrees, result.summary()


@pytest.mark.parametrize("runtime", ["reference", pytest.param("openvino", marks=pytest.mark.slow)])
def test_other_runtimes_agree(runtime, text_encoder):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    model, _ = text_encoder("masked_lm")
    result = model.verify([TEXT, "it rains"], ["ort-cpu", runtime], points="*", hooks=EDIT)
    assert result.agrees, result.summary()
    assert result.besides[0].greedy is None  # it continues no text
    with pytest.raises(InputError, match=r"greedy=3: .* is an encoder, and nothing follows"):
        model.verify(TEXT, ["ort-cpu", "ort-cpu:none"], greedy=3)
    with pytest.raises(InputError, match="no layers were compared"):
        result.model_losses(result.besides[0].title)


def test_a_text_of_full_length_is_compared(text_encoder):
    model, _ = text_encoder("masked_lm")
    longest = model.hooked.metadata.sizes.max_positions
    assert model.verify([[5] * longest], ["ort-cpu", "ort-cpu:none"], local=False).agrees


@pytest.fixture(scope="module")
def faulty(text_encoder, tmp_path_factory):
    """A tagger of spans whose second layer's first product is off."""
    model, _ = text_encoder("span")
    folder = tmp_path_factory.mktemp("faulty") / "model"
    folder.mkdir()
    proto = onnx.ModelProto.FromString(model.hooked.proto.SerializeToString())
    onnx_file.rename(proto, "logits", model.hooked.metadata.output)
    node = next(node for node in proto.graph.node if "blocks.1.hook_resid_mid_sum" in node.output)
    node.op_type = "Sub"
    for path in model.hooked.folder.iterdir():
        if path.name != "model.onnx":
            (folder / path.name).hardlink_to(path)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return MIModel.from_pretrained(folder, check="none", threads=1)


@pytest.mark.slow
def test_a_planted_fault_and_its_kl_over_the_tokens_of_a_text(faulty, text_encoder):
    model, _ = text_encoder("span")
    beside = faulty.verify(TEXT, ["ort-cpu"], other=model).besides[0]
    one, other = (log_softmax(each.forward(TEXT).output()[0].astype(np.float64).T, axis=-1) for each in (faulty, model))
    assert beside.logits["positions"] == 2  # a start and an end
    assert beside.logits["kl_mean"] == pytest.approx((np.exp(one) * (one - other)).sum(-1).mean(), rel=1e-4)
    found = faulty.bisect(TEXT, ["ort-cpu"], other=model)
    assert found.hook == found.value == "blocks.1.hook_resid_mid_sum"


def test_a_pair_is_recorded_with_its_token_types(text_encoder, tmp_path):
    model, _ = text_encoder("classes")
    pair, flat = model.tokenize(*PAIR), np.asarray(model.tokenize(*PAIR).ids)
    model.verify([pair], ["ort-cpu"], record=tmp_path / "run.safetensors")
    assert model.verify([], ["ort-cpu"], against=tmp_path / "run.safetensors").agrees
    assert model.verify([pair], ["ort-cpu"], against=tmp_path / "run.safetensors").agrees
    with pytest.raises(InputError, match="not those of"):
        model.verify([flat], ["ort-cpu"], against=tmp_path / "run.safetensors")
