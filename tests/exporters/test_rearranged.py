"""Models that are rearranged before they are tapped, or whose attention is, compute what they did."""

import pytest
import torch
from encoders import PADDINGS, encoder_batch, make_encoder, plain_outputs, run_encoder
from transformers.cache_utils import EncoderDecoderCache

from exporters.transformers.rearranged import ChannelProduct, rearrange, rearranged_name


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("xlm", {}),
        ("flaubert", {}),
        ("flaubert", {"pre_norm": True}),
        ("squeezebert", {"output_groups": 1}),
        ("convbert", {"conv_kernel_size": 9}),
        ("mobilebert", {"normalization_type": "layer_norm", "use_bottleneck_attention": True}),
    ],
)
def test_a_rearranged_model_computes_the_same(family, changes, tmp_path, monkeypatch):
    # transformers asks its new cache for a layer where norms stand before, which it cannot give, and nothing reads
    monkeypatch.setattr(EncoderDecoderCache, "__getitem__", lambda cache, _: cache, raising=False)
    model = make_encoder(family, tmp_path, **changes)
    plain = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    stored = {*plain.state_dict()}
    for padding in PADDINGS:
        inputs = encoder_batch(padding)
        real = torch.from_numpy(inputs["attention_mask"]).bool()
        expected = plain_outputs(plain, inputs, 0, attentions=not changes.get("pre_norm", False)).logits[real]
        assert torch.allclose(torch.from_numpy(run_encoder(model, inputs).logits)[real], expected, atol=5e-6)
    rearrange(model)  # once more changes nothing
    assert {rearranged_name(name, model) for name in stored} == {*model.state_dict()}


def test_a_convolution_over_one_column_is_a_product():
    convolution = torch.nn.Conv1d(6, 9, 1, groups=3)
    x = torch.randn(2, 5, 6)
    product = ChannelProduct(convolution)
    assert product.weight.shape == (9, 2)
    assert torch.allclose(product(x), convolution(x.transpose(1, 2)).transpose(1, 2), atol=1e-6)
