"""TransformerLens' own programs on this engine: `bridge(model)` is one of its bridges, of which no pass runs in torch.

The only room that imports transformer_lens, torch and transformers; nothing in mionnx imports it.
"""

from mionnx.errors import RuntimeMissingError, install

try:
    from mionnx.transformer_lens.bridge import OnnxBridge, bridge
except ModuleNotFoundError as missing:
    raise RuntimeMissingError(
        f"mionnx.transformer_lens needs transformer-lens 4.3, and {missing.name} is not installed: {install('tl')}"
    ) from missing

__all__ = ["OnnxBridge", "bridge"]
