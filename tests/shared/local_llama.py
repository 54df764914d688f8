"""world-llama in float64 by transformers, with parts of it held as they are in a clean run: an oracle of tracing.

Held can be the patterns, the scales of norms, and the outputs of MLPs, beside which a skip connection is live.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

Layers = list[dict[str, np.ndarray]]
WIDE = torch.float64


class LocalLlama:
    """One prompt; `layers` are those of `transcoder_files.random_layers`, which read at `hook`."""

    def __init__(self, path: str, layers: Layers, hook: str, ids: np.ndarray, skipped: int = 1) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=WIDE, attn_implementation="eager").eval()
        self.layers = [{name: torch.tensor(array, dtype=WIDE) for name, array in one.items()} for one in layers]
        self.at_mid, self.ids, self.skipped = hook.endswith("hook_resid_mid"), torch.tensor(ids[None]), skipped
        self.patterns: list[Any] = []
        self.scales: list[Any] = []
        self._softmax = torch.nn.functional.softmax
        for module in self.model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = self._norm(module)
        self.model.model.embed_tokens.register_forward_hook(lambda module, args, out: out + self.leaves[-1])
        for i, layer in enumerate(self.model.model.layers):
            layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: self.mid.append(args[0][0]))
            layer.mlp.register_forward_hook(self._mlp(i))
        self.model.model.norm.register_forward_hook(lambda module, args, out: setattr(self, "final", out[0]))
        self.hold: set[str] = set()
        self.setting: dict[int, list[tuple[int, int, float]]] = {}
        self.added = [torch.zeros(len(ids), self.model.config.hidden_size, dtype=WIDE) for _ in layers]
        self.clean = self.run()
        self.active = self._active()

    def _norm(self, module: Any) -> Any:
        def forward(x: Any) -> Any:
            if "norms" in self.hold:
                scale = self.scales[self.count % len(self.scales)]
                self.count += 1
            else:
                scale = torch.rsqrt((x**2).mean(-1, keepdim=True) + module.variance_epsilon)
                if not hasattr(self, "clean"):
                    self.scales.append(scale.detach())
            return module.weight * x * scale

        return forward

    def _mlp(self, i: int) -> Any:
        def hook(module: Any, args: Any, out: Any) -> Any:
            x, one = (self.mid[i] if self.at_mid else args[0][0]), self.layers[i]
            self.reads.append(x)
            own = out[0]
            if "mlps" in self.hold:
                own = self.clean["out"][i]
                if "skip" in one:
                    own = own + (x - self.clean["reads"][i]) @ one["skip"]
            for position, feature, goal in self.setting.get(i, []):
                now = self.acts(i, x)[position, feature]
                for ahead in range(one["W_dec"].shape[1]):
                    self.moved[i + ahead] = (
                        self.moved.get(i + ahead, 0)
                        + torch.nn.functional.one_hot(torch.tensor(position), len(x))[:, None]
                        * (goal - now)
                        * one["W_dec"][feature, ahead]
                    )
            self.outs.append(own)
            return (own + self.leaves[i] + self.added[i] + self.moved.get(i, 0))[None]

        return hook

    @contextmanager
    def _patterns(self) -> Iterator[None]:
        def softmax(x: Any, dim: Any = None, dtype: Any = None, **_: Any) -> Any:
            if "patterns" in self.hold:
                self.heads += 1
                return self.patterns[self.heads - 1]
            pattern = self._softmax(x, dim=dim)
            if not hasattr(self, "clean"):
                self.patterns.append(pattern.detach())
            return pattern

        torch.nn.functional.softmax = softmax
        try:
            yield
        finally:
            torch.nn.functional.softmax = self._softmax

    def run(self, *hold: str) -> dict[str, Any]:
        """One pass with some of "patterns", "norms" and "mlps" as they were."""
        self.hold, self.count, self.heads = {*hold}, 0, 0
        self.mid, self.reads, self.outs, self.moved = [], [], [], {}
        self.leaves = [torch.zeros_like(one, requires_grad=True) for one in [*self.added, self.added[0]]]
        with self._patterns():
            logits = self.model(self.ids, use_cache=False).logits[0]
        values = {"reads": self.reads, "out": self.outs, "final": [self.final], "logits": [logits]}
        return values if hold else {name: [one.detach() for one in list_] for name, list_ in values.items()}

    def acts(self, i: int, x: Any) -> Any:
        """Activations [seq, features]."""
        one = self.layers[i]
        pre = x @ one["W_enc"].T + one["b_enc"]
        return torch.where(pre > one.get("threshold", torch.zeros(())), pre, torch.zeros(())).clamp(min=0)

    def _active(self) -> list[tuple[int, int, int, float]]:
        found = []
        for i, x in enumerate(self.clean["reads"]):
            acts = self.acts(i, x)
            acts[: self.skipped] = 0
            found += [(i, int(p), int(f), float(acts[p, f])) for p, f in acts.nonzero().tolist()]
        return found

    def sources(self) -> torch.Tensor:
        """What each source writes: [features + errors + tokens, layers + 1, seq, hidden], the embedding last."""
        seq, width, layers = *self.added[0].shape, len(self.layers)
        count = len(self.active)
        table = torch.zeros(count + (layers + 1) * seq, layers + 1, seq, width, dtype=WIDE)
        for n, (i, position, feature, value) in enumerate(self.active):
            decoder = self.layers[i]["W_dec"][feature]
            for ahead in range(len(decoder)):
                table[n, i + ahead, position] = value * decoder[ahead]
        for i, one in enumerate(self.layers):
            rest = self.clean["out"][i] - one["b_dec"] - table[:count, i].sum(0)
            rest = rest - self.clean["reads"][i] @ one["skip"] if "skip" in one else rest
            for position in range(self.skipped, seq):
                table[count + i * seq + position, i, position] = rest[position]
        embed = self.model.model.embed_tokens.weight[self.ids[0]].detach()
        for position in range(seq):
            table[count + layers * seq + position, layers, position] = embed[position]
        return table

    def numbers(self, values: dict[str, Any], tokens: list[int]) -> list[Any]:
        """What targets are: pre-activations of the active features without biases, then logits less their mean."""
        own = [values["reads"][i][p] @ self.layers[i]["W_enc"][f] for i, p, f, _ in self.active]
        weight = self.model.lm_head.weight
        return own + [values["final"][0][-1] @ (weight[token] - weight.mean(0)) for token in tokens]

    def rows(
        self, targets: list[int], tokens: list[int], hold: tuple[str, ...] = ("patterns", "norms", "mlps")
    ) -> np.ndarray:
        """Direct effects on some targets, by autograd through what is not held: [targets, sources]."""
        numbers = self.numbers(self.run(*hold), tokens)
        return self.effects([numbers[target] for target in targets])

    def effects(self, numbers: list[Any]) -> np.ndarray:
        """Effects of all sources on numbers of the last run, by autograd: [numbers, sources]."""
        sources, rows = self.sources(), []
        for number in numbers:
            grads = torch.autograd.grad(number, self.leaves, retain_graph=True, allow_unused=True)
            whole = torch.stack([torch.zeros_like(self.added[0]) if one is None else one for one in grads])
            rows.append((sources * whole).sum((1, 2, 3)))
        return torch.stack(rows).numpy()
