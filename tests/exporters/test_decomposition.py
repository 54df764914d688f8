"""A program that is decomposed without a trace becomes the graph that torch's own decomposition gives."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from encoders import encoder_config
from families import CONFIGS, single_threaded
from same_graph import described
from torch import Tensor, nn
from transformers import AutoConfig

from exporters.transformers import decomposition
from exporters.transformers.hooked_graph import make_graph
from exporters.transformers.trace import to_onnx

DECOMPOSED_BY_TORCH = ("mixtral",)  # families of which torch decomposes some operators
IDS = np.array([[3, 1, 4, 1, 5], [2, 6, 5, 3, 0]], np.int64)


class Operators(nn.Module):
    """Every operator that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids.to(torch.int32)).to(torch.float32)
        heads = x.unflatten(-1, (3, 4)).transpose(1, 2).contiguous()
        first, second = heads.transpose(1, 2).flatten(-2).chunk(2, dim=-1)
        inner = ((ids > 1) & (ids < 5)).to(x.dtype)
        least = torch.min(first, second).reshape(ids.shape[0], 3, -1).square()
        return least.mean((1, 2))[:, None] + inner + x.to("cpu").flatten(2).sum(-1)


class InPlace(Operators):
    """A value that is written into, which takes a trace."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x /= x.sum(-1, keepdim=True) + 3
        return x.sum(-1)


class InPart(Operators):
    """A part of a value that is written over; nothing reads what the operator gives."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x[..., :4] = x[..., 4:8] * 2
        return x.sum(-1)


class AsItCame(Operators):
    """A result that is a cast to the type that it has: its name is that of an output."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).sum(-1).to(torch.float32)


@pytest.fixture
def by_hand(monkeypatch):
    """Whether each program was decomposed without a trace."""
    seen, decompose = list[bool](), decomposition._decompose
    monkeypatch.setattr(decomposition, "_decompose", lambda *given: seen.append(decompose(*given)) or seen[-1])
    return seen


@pytest.mark.parametrize(
    ("module", "expected"), [(Operators, True), (InPlace, False), (InPart, False), (AsItCame, False)]
)
def test_a_graph_computes_what_its_module_does(module, expected, by_hand):
    single_threaded()
    torch.manual_seed(0)
    made = module()
    model = to_onnx(made, (torch.from_numpy(IDS[:, :4]),), ())
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    for ids in (IDS, IDS[:1, :2]):
        (y,) = session.run(None, {"input_ids": ids})
        assert np.allclose(y, made(torch.from_numpy(ids)).detach().numpy(), rtol=1e-6)
    assert by_hand == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*CONFIGS, "bert"])
def test_a_family_has_the_graph_of_torchs_decomposition(family, by_hand, monkeypatch):
    single_threaded()
    config = encoder_config(family) if family == "bert" else AutoConfig.for_model(family, **CONFIGS[family])
    ours = make_graph(config, torch.float32, lambda stage: None)
    assert by_hand == [family not in DECOMPOSED_BY_TORCH]
    monkeypatch.setattr(decomposition, "_decompose", lambda *given: False)
    torchs = make_graph(config, torch.float32, lambda stage: None)
    assert described(ours.model, ours.parameters) == described(torchs.model, torchs.parameters)
