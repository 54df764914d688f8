"""The same work in transformers with torch's forward hooks: captures, steering, generation, patching."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from models import blocks

CASES = ("plain", "streams", "every", "steered")


@contextmanager
def hooks(model: PreTrainedModel, case: str, direction: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Forward hooks of one case, for as long as they are needed; gives the list that captures go to.

    Args:
        model: in transformers.
        case: "plain"; "streams", every block's output; "every", the output of every module; "steered", a direction
            added to the middle block's output.
        direction: [hidden].
    """
    kept: list[torch.Tensor] = []
    layers = blocks(model)

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        kept.extend(one for one in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(one))

    def steer(_module: Any, _inputs: Any, output: Any) -> Any:
        return (output[0] + direction, *output[1:]) if isinstance(output, tuple) else output + direction

    every = [module for module in model.modules() if module is not model]
    wanted: dict[str, list[Any]] = {
        "plain": [],
        "streams": [(one, keep) for one in layers],
        "every": [(one, keep) for one in every],
        "steered": [(layers[len(layers) // 2], steer)],
    }
    handles = [module.register_forward_hook(hook) for module, hook in wanted[case]]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def forward(model: PreTrainedModel, ids: torch.Tensor, case: str, direction: torch.Tensor) -> torch.Tensor:
    """Logits, with the hooks of a case."""
    with hooks(model, case, direction):
        eager = model.config._attn_implementation == "eager"
        return model(ids, use_cache=False, output_attentions=case == "every" and eager).logits


def generate(model: PreTrainedModel, ids: torch.Tensor, case: str, direction: torch.Tensor, new: int) -> torch.Tensor:
    """New ids, with the hooks of a case."""
    with hooks(model, case, direction):
        mask = torch.ones_like(ids)
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]


class Patching:
    """A patching sweep as peers run it: one forward pass a cell, one value of another run patched in by a hook."""

    def __init__(
        self, model: PreTrainedModel, clean: np.ndarray, corrupted: np.ndarray, tokens: tuple[int, int]
    ) -> None:
        self.model, self.tokens = model, tokens
        self.clean, self.corrupted = (torch.from_numpy(ids[None]).to(model.device) for ids in (clean, corrupted))
        self.heads = model.config.num_attention_heads
        self.at = {"z": [self._projection(block) for block in blocks(model)], "resid_pre": list(blocks(model))}

    @staticmethod
    def _projection(block: torch.nn.Module) -> torch.nn.Module:
        """The module that reads the heads' outputs."""
        return block.attn.c_proj if hasattr(block, "attn") else block.self_attn.o_proj

    def values(self, what: str, over: tuple[str, ...], cells: np.ndarray) -> np.ndarray:
        """The difference of two logits in each cell; the clean run's values are patched into the corrupted run."""
        found: list[torch.Tensor] = []
        clean = self._clean(what)
        for cell in cells:
            where = dict(zip(over, cell.tolist(), strict=True))
            patch = self._patch(clean[where["layer"]], where)
            handle = self.at[what][where["layer"]].register_forward_pre_hook(patch, with_kwargs=True)
            try:
                logits = self.model(self.corrupted, use_cache=False).logits[0, -1]
            finally:
                handle.remove()
            found.append(logits[self.tokens[0]] - logits[self.tokens[1]])
        return torch.stack(found).float().cpu().numpy()

    def _clean(self, what: str) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        handles = [
            module.register_forward_pre_hook(lambda _module, inputs: values.append(inputs[0]))
            for module in self.at[what]
        ]
        try:
            self.model(self.clean, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return values

    def _patch(self, clean: torch.Tensor, where: dict[str, int]) -> Any:
        width = clean.shape[-1] // self.heads
        columns = slice(where["head"] * width, (where["head"] + 1) * width) if "head" in where else slice(None)
        position = where.get("position", slice(None))

        def hook(_module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            value = inputs[0].clone()
            value[:, position, columns] = clean[:, position, columns]
            return (value, *inputs[1:]), named

        return hook
