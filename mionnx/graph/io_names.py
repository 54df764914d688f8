"""Names of the graph's outputs, and of its inputs for the past, as optimum and ONNX Runtime's tools write them."""

from dataclasses import dataclass
from functools import cache

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
        return list(_of_layers(self.past, self.parts, num_layers))

    def outputs(self, num_layers: int) -> list[str]:
        """The outputs of all layers, in the order of the inputs."""
        return list(_of_layers(self.present, self.parts, num_layers))


@cache
def _of_layers(prefix: str, parts: tuple[str, ...], num_layers: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{layer}.{part}" for layer in range(num_layers) for part in parts)


KEYS_AND_VALUES = CacheNames("past_key_values", "present", ("key", "value"))
STATE = CacheNames("past_state", "present_state", ("att_shift", "wkv", "ffn_shift"))


def cache_names(recurrent: bool) -> CacheNames:
    """The names of a recurrent model's state, or of a transformer's keys and values."""
    return STATE if recurrent else KEYS_AND_VALUES
