"""End of a generated text: by number of tokens, by an end-of-text token, by a string."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mionnx.errors import InputError, InterventionError
from mionnx.graph.hooked_model import DTYPES
from mionnx.graph.metadata import Metadata
from mionnx.inputs.token_batch import TokenBatch
from mionnx.inputs.tokens import Decoder, decode
from mionnx.machine import memory
from mionnx.spec.hook_spec import HookSpec


@dataclass(frozen=True)
class Stopping:
    """Conditions that end a row of a generation.

    Attributes:
        max_new_tokens: a row ends at the latest after so many tokens.
        min_new_tokens: an end-of-text token cannot be chosen before so many.
        eos_token_ids: a row ends after one of these tokens, which is kept.
        strings: a row ends when its new text contains one of these; the token that completes it is kept.
    """

    max_new_tokens: int
    min_new_tokens: int
    eos_token_ids: tuple[int, ...]
    strings: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, value, least in (("max", self.max_new_tokens, 1), ("min", self.min_new_tokens, 0)):
            if not isinstance(value, int | np.integer) or value < least:
                raise InputError(f"{name}_new_tokens must be an integer of {least} or above, got {value!r}")
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError(f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}")

    def ends(self, new: Sequence[int], tokenizer: Decoder | None) -> bool:
        """Whether a row with these new tokens has ended."""
        if len(new) >= self.max_new_tokens or new[-1] in self.eos_token_ids:
            return True
        if not self.strings or tokenizer is None:
            return False
        text = decode(tokenizer, new, skip_special_tokens=False)
        return any(string in text for string in self.strings)

    def refuse_unreached(self, spec: HookSpec) -> None:
        """Refuse interventions in the phase "generated" where no generated token is read."""
        phases: list[Any] = [edit.positions for _, edit in spec.interventions]
        for state in (*spec.state_knockouts, *spec.state_steerings):
            phases += state.positions_
        if any(isinstance(phase, str) and phase == "generated" for phase in phases) and self.max_new_tokens == 1:
            raise InterventionError(
                "an intervention in the phase 'generated' would do nothing: with max_new_tokens=1 no new token is read"
            )


def refuse_too_long(name: str, new: int, batch: TokenBatch, metadata: Metadata) -> None:
    """Refuse a generation beyond the positions of the model or the memory of the machine.

    Args:
        name: of the parameter that asks for it.
    """
    sizes, length = metadata.sizes, int(batch.lengths.max())
    longest = length + int(new) - 1  # the last token is never read
    if sizes.max_positions is not None and longest > sizes.max_positions:
        raise InputError(
            f"{name}={new} after {length} tokens, but the model has positions for {sizes.max_positions} only"
        )
    heads = 0 if metadata.recurrent else 2 * sizes.num_layers * (sizes.num_kv_heads or 0) * (sizes.head_dim or 0)
    token = batch.batch * (heads * np.dtype(DTYPES[metadata.dtype]).itemsize + np.dtype(np.int64).itemsize)
    if longest * token > memory.total():
        raise InputError(
            f"{name}={new} after {length} tokens: their ids, keys and values would take "
            f"{memory.format_bytes(longest * token)}, and this machine has {memory.format_bytes(memory.total())}; "
            f"at most {max(memory.total() // token - length + 1, 0)} tokens fit"
        )


def stop_texts(stops: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    strings = (stops,) if isinstance(stops, str) else tuple(stops or ())
    if not all(isinstance(string, str) and string for string in strings):
        raise InputError(f"stop_strings must be texts of at least one character, got {stops!r}")
    return strings
