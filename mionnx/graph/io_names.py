"""Names of the graph's outputs, and of its inputs for the past, as optimum and ONNX Runtime's tools write them."""

from dataclasses import dataclass

LOGITS = "logits"  # the main output; that of an embedding model bears this name where rooms read its graph


@dataclass(frozen=True)
class CacheNames:
    """One tensor per layer and part, an input before a pass and an output after it."""

    past: str
    present: str
    parts: tuple[str, ...]

    def layer_inputs(self, layer: int) -> tuple[str, ...]:
        """The inputs of one layer: "past_key_values.0.key", "past_key_values.0.value"."""
        return tuple(f"{self.past}.{layer}.{part}" for part in self.parts)

    def layer_outputs(self, layer: int) -> tuple[str, ...]:
        """The outputs of one layer: "present.0.key", "present.0.value"."""
        return tuple(f"{self.present}.{layer}.{part}" for part in self.parts)

    def inputs(self, num_layers: int) -> list[str]:
        return [name for layer in range(num_layers) for name in self.layer_inputs(layer)]

    def outputs(self, num_layers: int) -> list[str]:
        """The outputs of all layers, in the order of the inputs."""
        return [name for layer in range(num_layers) for name in self.layer_outputs(layer)]


KEYS_AND_VALUES = CacheNames("past_key_values", "present", ("key", "value"))
STATE = CacheNames("past_state", "present_state", ("conv", "state"))  # of a recurrence, as far as it has them
SHIFTED_STATE = CacheNames("past_state", "present_state", ("att_shift", "wkv", "ffn_shift"))  # RWKV's
PASTS = (f"{KEYS_AND_VALUES.past}.", f"{STATE.past}.")  # how the names of a past begin, whatever a layer carries
PRESENTS = (f"{KEYS_AND_VALUES.present}.", f"{STATE.present}.")


def past_of(output: str) -> str | None:
    """The input that takes an output in the next pass; None of an output that no pass takes."""
    for past, present in zip(PASTS, PRESENTS, strict=True):
        if output.startswith(present):
            return past + output.removeprefix(present)
    return None
