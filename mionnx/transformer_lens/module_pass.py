"""`serve_module`: the pass of transformers' own module, `bridge.original_model(input_ids)`, runs on the engine too."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutput

from mionnx.errors import InputError

# Arguments of transformers that say how, and not what: without a cache or lists of states they change nothing here.
MANNER = ("use_cache", "return_dict")


def serve_module(bridge: Any) -> None:
    """Give the module of a bridge a forward that runs the bridge: logits, and the loss where it is given labels."""
    module = bridge.original_model

    def forward(
        input_ids: Any = None, attention_mask: Any = None, labels: Any = None, position_ids: Any = None, **options: Any
    ) -> CausalLMOutput:
        """Run the engine.

        Raises:
            InputError: arguments that ask for more than logits and a loss.
        """
        asked = [name for name, value in options.items() if value not in (None, False) and name not in MANNER]
        if asked or input_ids is None:
            raise InputError(
                f"{', '.join(asked) or 'no input_ids'}: the module's pass runs on the engine, which takes input_ids, "
                "attention_mask, position_ids and labels; hidden states and patterns are values of hook points"
            )
        logits = bridge.forward(input_ids, attention_mask=attention_mask, position_ids=position_ids)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    module.forward = forward
