"""RWKV-7 (Goose) in torch, small and trainable on a CPU, its parameters named as flash-linear-attention names them.

Only what training needs: whole rows, no state in or out. The recurrence runs in chunks of 16 tokens as matrix
products (Peng et al. 2025, "RWKV-7 Goose"; initial values as in flash-linear-attention).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

CHUNK = 16
SLOWEST = 0.6065306597126334

CONFIG: dict[str, Any] = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "attn": None,
    "head_dim": 64,
    "hidden_act": "sqrelu",
    "hidden_ratio": 4,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "decay_low_rank_dim": 32,
    "a_low_rank_dim": 32,
    "v_low_rank_dim": 32,
    "gate_low_rank_dim": 64,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "norm_first": True,
    "tie_word_embeddings": False,
}


class LowRank(nn.Module):
    """x -> activation(x A) B + bias."""

    def __init__(self, width: int, rank: int, activation: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(width, rank, bias=False), activation, nn.Linear(rank, width, bias=bias))
        nn.init.zeros_(self.lora[0].weight)
        nn.init.orthogonal_(self.lora[2].weight, gain=0.1)

    def forward(self, value: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return self.lora(value)


def shifted(value: Tensor) -> Tensor:
    """The value at the token before, minus the value itself; [row, position, width]."""
    return functional.pad(value, (0, 0, 1, -1)) - value


class TimeMix(nn.Module):
    """RWKV-7's attention."""

    def __init__(self, config: dict[str, Any], layer: int) -> None:
        super().__init__()
        width, head, layers = config["hidden_size"], config["head_dim"], config["num_hidden_layers"]
        self.heads, self.first_layer = width // head, layer == 0
        depth, left = layer / (layers - 1), 1 - layer / layers
        channel = torch.arange(width) / width
        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            setattr(self, f"x_{name}", nn.Parameter((1 - channel ** (power * left)).reshape(1, 1, width)))
        linear = torch.arange(width) / (width - 1) - 0.5
        zigzag = ((torch.arange(width) % head) - (head - 1) / 2) / ((head - 1) / 2)
        zigzag = zigzag * zigzag.abs()
        self.k_k = nn.Parameter(0.71 - linear * 0.1)
        self.k_a = nn.Parameter(torch.full((width,), 1.02))
        self.r_k = nn.Parameter(torch.full((self.heads, head), -0.04))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        for projection, gain in ((self.r_proj, 1.0), (self.k_proj, 0.1), (self.v_proj, 1.0)):
            nn.init.orthogonal_(projection.weight, gain=gain)
        nn.init.zeros_(self.o_proj.weight)
        self.w_lora = LowRank(width, config["decay_low_rank_dim"], nn.Tanh())
        self.a_lora = LowRank(width, config["a_low_rank_dim"], nn.Identity())
        self.g_lora = LowRank(width, config["gate_low_rank_dim"], nn.Sigmoid(), bias=False)
        slow = -6 + 6 * (torch.arange(width) / (width - 1)) ** (1 + depth**0.3)
        self.w_lora.lora[2].bias.data = slow + 0.5 + zigzag * 2.5
        self.a_lora.lora[2].bias.data = -0.19 + zigzag * 0.3 + linear * 0.4
        if not self.first_layer:
            self.v_lora = LowRank(width, config["v_low_rank_dim"], nn.Identity())
            self.v_lora.lora[2].bias.data = 0.73 - linear * 0.4
        self.g_norm = nn.GroupNorm(self.heads, width, eps=head * config["norm_eps"])
        nn.init.constant_(self.g_norm.weight, ((layer + 1) / layers) ** 0.7)

    def forward(self, value: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """[row, position, width] to the same; and layer 0's values, which later layers mix in."""
        change = shifted(value)
        xr, xw, xk, xv, xa, xg = (value + change * getattr(self, f"x_{name}") for name in "rwkvag")
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        rate, gate = torch.sigmoid(self.a_lora(xa)), self.g_lora(xg)
        first = v if first is None else first
        if not self.first_layer:
            v = torch.lerp(v, first, torch.sigmoid(self.v_lora(xv)))
        log_decay = -SLOWEST * torch.sigmoid(self.w_lora(xw))
        removal = functional.normalize(self._heads(k * self.k_k), dim=-1)
        k = k + k * (rate - 1) * self.k_a
        r, k, v, rate, log_decay = map(self._heads, (r, k, v, rate, log_decay))
        y = wkv7(r, log_decay, k, v, -removal, removal * rate)
        y = self.g_norm(y.flatten(0, 1).flatten(1)).view_as(value)
        y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * v).flatten(2)
        return self.o_proj(y * gate), first

    def _heads(self, value: Tensor) -> Tensor:
        return value.unflatten(-1, (self.heads, -1))


def wkv7(r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """S_t = diag(d_t) S_{t-1} + b_t (x) (a_t S_{t-1}) + k_t (x) v_t, y_t = r_t S_t; all [row, position, head, width].

    A chunk's decays multiply to no less than exp(-0.61 x 16), so dividing by them is safe in float32.
    """
    length = r.shape[1]

    def chunks(value: Tensor) -> Tensor:
        padded = functional.pad(value, (0, 0, 0, 0, 0, -length % CHUNK))
        return padded.unflatten(1, (-1, CHUNK)).transpose(2, 3)  # [row, chunk, head, 16, width]

    r, log_decay, k, v, a, b = map(chunks, (r, log_decay, k, v, a, b))
    total = log_decay.cumsum(-2)
    from_start, from_before, back = total.exp(), (total - log_decay).exp(), (-total).exp()
    to_end = (total[..., -1:, :] - total).exp()
    a_now, r_now, b_then, k_then = a * from_before, r * from_start, (b * back).mT, (k * back).mT
    ab, ak = (a_now @ b_then).tril(-1), (a_now @ k_then).tril(-1)
    rb, rk = (r_now @ b_then).tril(), (r_now @ k_then).tril()
    known = torch.cat([a_now, ak @ v], -1)
    solved = torch.linalg.solve_triangular(torch.eye(CHUNK) - ab, known, upper=False, unitriangular=True)
    of_state, alone = solved.chunk(2, -1)
    write, kept = torch.cat([b * to_end, k * to_end], -2).mT, total[..., -1, :, None].exp()
    state, out = torch.zeros_like(kept[:, 0] @ v[:, 0, :, :1]), []
    for c in range(r.shape[1]):
        u = of_state[:, c] @ state + alone[:, c]
        out.append(r_now[:, c] @ state + rb[:, c] @ u + rk[:, c] @ v[:, c])
        state = kept[:, c] * state + write[:, c] @ torch.cat([u, v[:, c]], -2)
    return torch.stack(out, 1).transpose(2, 3).flatten(1, 2)[:, :length]


class ChannelMix(nn.Module):
    """RWKV-7's feed-forward part: relu(x K)^2 V."""

    def __init__(self, config: dict[str, Any], layer: int) -> None:
        super().__init__()
        width, wide = config["hidden_size"], config["hidden_size"] * config["hidden_ratio"]
        left = 1 - layer / config["num_hidden_layers"]
        self.x_k = nn.Parameter(1 - (torch.arange(width) / width) ** (left**4))
        self.key, self.value = nn.Linear(width, wide, bias=False), nn.Linear(wide, width, bias=False)
        nn.init.orthogonal_(self.key.weight)
        nn.init.zeros_(self.value.weight)

    def forward(self, value: Tensor) -> Tensor:
        """[row, position, width] to the same."""
        return self.value(torch.relu(self.key(value + shifted(value) * self.x_k)) ** 2)


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: dict[str, Any], layer: int) -> None:
        super().__init__()

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(config["hidden_size"], eps=config["norm_eps"])

        if layer == 0:
            self.pre_norm = norm()
        self.attn_norm, self.ffn_norm = norm(), norm()
        self.attn, self.ffn = TimeMix(config, layer), ChannelMix(config, layer)

    def forward(self, stream: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream after the layer, and layer 0's values."""
        stream = self.pre_norm(stream) if hasattr(self, "pre_norm") else stream
        mixed, first = self.attn(self.attn_norm(stream), first)
        stream = stream + mixed
        return stream + self.ffn(self.ffn_norm(stream)), first


class RWKV7(nn.Module):
    """The language model: `model(input_ids).logits`, [row, position, vocabulary]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        width = config["hidden_size"]
        self.model = nn.ModuleDict(
            {
                "embeddings": nn.Embedding(config["vocab_size"], width),
                "layers": nn.ModuleList(Block(config, layer) for layer in range(config["num_hidden_layers"])),
                "norm": nn.LayerNorm(width, eps=config["norm_eps"]),
            }
        )
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)
        nn.init.uniform_(self.model["embeddings"].weight, -1e-2, 1e-2)
        nn.init.orthogonal_(self.lm_head.weight, gain=0.5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        """Logits of whole rows. Padding, if any, is on the right, where a causal model's logits do not look."""
        stream, first = self.model["embeddings"](input_ids), None
        for block in self.model["layers"]:
            stream, first = block(stream, first)
        return SimpleNamespace(logits=self.lm_head(self.model["norm"](stream)))

    def save_pretrained(self, folder: str) -> None:
        """Write `config.json` and `model.safetensors`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        tensors = {name: value.contiguous() for name, value in self.state_dict().items()}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder: Path) -> RWKV7:
        """Read what `save_pretrained` wrote."""
        model = cls(json.loads((folder / "config.json").read_text()))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model


def is_rwkv7(folder: Path) -> bool:
    """Whether a checkpoint folder is one of these."""
    return json.loads((folder / "config.json").read_text())["model_type"] == "rwkv7"
